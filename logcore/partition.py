"""One partition's log with its high watermark, producer state and leader epochs: the daemon's API.

All methods are synchronous and belong to one thread. An append writes the log file with one system
call; the state in memory changes only after that call has succeeded.

Source: ``UnifiedLog``, ``Partition``.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from fencepost.logcore.batch import (
    LOG_OVERHEAD,
    BatchHeader,
    Buffer,
    end_marker,
    parse_header,
)
from fencepost.logcore.checkpoints import (
    CheckpointError,
    read_partition_metadata,
    write_partition_metadata,
)
from fencepost.logcore.cleanup import Cleanup
from fencepost.logcore.clock import Clock
from fencepost.logcore.config import LOG_APPEND_TIME, MAX_INT64, LogConfig
from fencepost.logcore.durable import FlushScheduler, FlushState
from fencepost.logcore.epochs import LeaderEpochs
from fencepost.logcore.errors import (
    CorruptRecordError,
    LogError,
    StorageError,
)
from fencepost.logcore.flush import Flush
from fencepost.logcore.fs import FileSystem
from fencepost.logcore.index import AbortedTxn, CorruptIndexError
from fencepost.logcore.machine import EndMarker, ProducerStamp, Record
from fencepost.logcore.marks import STORAGE_FAILURES, Marks
from fencepost.logcore.own_batch import own_batch
from fencepost.logcore.producer_limit import ProducerLimit
from fencepost.logcore.producers import (
    PRODUCER_ID_EXPIRATION_MS,
    ProducerStateManager,
)
from fencepost.logcore.reading import LogReader
from fencepost.logcore.recovery import LoadedLog, OpenOptions, load_log
from fencepost.logcore.segment import Segment
from fencepost.logcore.traffic import Traffic
from fencepost.logcore.validation import ValidatedBatch

if TYPE_CHECKING:
    from fencepost.logcore.replica import FollowerAppend, ReplicaLog

__all__ = ["Appended", "Partition"]

NO_TIMESTAMP: Final = -1
DELETE_SUFFIX: Final = "-delete"
"""Suffix of the name of a directory that is being deleted."""

MAX_NAME_BYTES: Final = 255
"""Longest name of a directory on common file systems."""

_PLACE: Final = struct.Struct(">qii")
"""Base offset, length, leader epoch: the first 16 bytes of a batch, outside of its CRC."""


class Appended(NamedTuple):
    """Offsets of an appended batch. ``log_append_time_ms`` is −1 if producers set the timestamps.

    ``duplicate``: nothing was written. The offsets belong to the batch in the log, and
    ``log_append_time_ms`` is its largest timestamp.
    """

    base_offset: int
    last_offset: int
    log_append_time_ms: int
    log_start_offset: int
    duplicate: bool


class Partition:
    """One partition's log and its parts. Created by :meth:`open`; ended by :meth:`close`.

    This class appends records; :attr:`reader` reads them, :attr:`flushes` flushes them, and
    :attr:`cleanup` removes them. :attr:`replica` applies the leader's records and truncations.
    """

    def __init__(
        self,
        fs: FileSystem,
        topic: str,
        index: int,
        topic_id: uuid.UUID,
        loaded: LoadedLog,
        producers: ProducerStateManager,
        epochs: LeaderEpochs,
        flushes: FlushState,
        clock: Clock,
    ) -> None:
        self.topic = topic
        self.index = index
        self.topic_id = topic_id
        self.log = loaded.log
        self.producers = producers
        self.flushes = flushes
        self.marks = flushes.marks
        self.reader = LogReader(self.log, epochs, self.marks)
        self.cleanup = Cleanup(fs, self.log, producers, epochs, flushes, clock)
        self.traffic = Traffic()
        """Counts of appended and fetched records since the open."""
        self.recovery = loaded.report
        """The report of the recovery at open, None if nothing was scanned."""
        self._fs = fs
        self._epochs = epochs
        self._clock = clock
        self._metadata_pending = False
        self._replica: ReplicaLog | None = None

    @classmethod
    def open(
        cls,
        fs: FileSystem,
        directory: str | Path,
        *,
        topic: str,
        index: int,
        topic_id: uuid.UUID,
        config: LogConfig,
        clock: Clock,
        clean: bool,
        recovery_point: int = 0,
        log_start_offset: int = 0,
        high_watermark: int = 0,
        leader_epoch: int = 0,
        compacted_below: int = 0,
        is_replica: bool = False,
        is_replicated: bool = False,
        keeps_removed: bool = True,
        producer_id_expiration_ms: int = PRODUCER_ID_EXPIRATION_MS,
        producer_limit: ProducerLimit | None = None,
        flusher: FlushScheduler | None = None,
        remove_later: Callable[[str], None] | None = None,
    ) -> Partition:
        """Open the partition in ``directory`` (``…/<topic>-<index>``), created if missing.

        ``clean``: the last shutdown closed every log. A recovery point or high watermark beyond the
        log end appears in :attr:`recovery` as lost offsets. ``is_replicated``: other brokers have
        replicas, so the high watermark begins at ``high_watermark`` instead of the log end.
        :class:`OpenOptions` describes the other arguments.
        Without a ``flusher``, flushes that are due run inside the append. Raises StorageError if
        the directory cannot be read or belongs to another topic id.
        """
        path, name = str(directory), f"{topic}-{index}"
        producers = ProducerStateManager(fs, path, producer_id_expiration_ms, producer_limit)
        epochs = LeaderEpochs(fs, path)
        options = OpenOptions(
            name=name,
            config=config,
            now_ms=clock.now_ms(),
            clean=clean,
            recovery_point=recovery_point,
            high_watermark=high_watermark,
            log_start_offset=log_start_offset,
            leader_epoch=leader_epoch,
            compacted_below=compacted_below,
            remove_later=remove_later,
            is_replica=is_replica,
            is_replicated=is_replicated,
            keeps_removed=keeps_removed,
        )
        try:
            is_known = _has_topic_id(fs, path, topic_id)
            loaded = load_log(fs, path, options, producers, epochs)
        except (OSError, CorruptIndexError, CorruptRecordError) as error:
            raise StorageError(f"{name} can't be opened: {error}") from error
        # No batch in a leader's log has a higher epoch than the leader.
        marks = Marks(
            name,
            loaded,
            producers,
            leader_epoch=max(leader_epoch, epochs.latest),
            high_watermark=high_watermark if is_replicated else None,
        )
        flushes = FlushState(loaded.log, producers, epochs, marks, flusher, clock.now_ms())
        flushes.is_new = not clean
        flushes.recovered(clock.now_ms())
        partition = cls(fs, topic, index, topic_id, loaded, producers, epochs, flushes, clock)
        partition._metadata_pending = not is_known
        return partition

    @property
    def name(self) -> str:
        """See :class:`Marks`."""
        return self.marks.name

    @property
    def log_start_offset(self) -> int:
        """See :class:`Marks`."""
        return self.marks.log_start_offset

    @property
    def log_end_offset(self) -> int:
        """The offset of the next record."""
        return self.log.log_end_offset

    @property
    def high_watermark(self) -> int:
        """See :class:`Marks`."""
        return self.marks.high_watermark

    @property
    def last_stable_offset(self) -> int:
        """See :class:`Marks`."""
        return self.marks.last_stable_offset

    @property
    def recovery_point(self) -> int:
        """See :class:`Marks`."""
        return self.marks.recovery_point

    @property
    def offline(self) -> StorageError | None:
        """See :class:`Marks`."""
        return self.marks.offline

    # --- appending ---

    def append_validated(
        self,
        batch: ValidatedBatch,
        *,
        transaction_verified: bool = False,
        transaction_version: int = 0,
    ) -> Appended:
        """Append a client's batch that :func:`fencepost.logcore.validation.validate` has accepted.

        ``transaction_verified``: in this turn of the event loop the transaction coordinator has
        confirmed that this partition belongs to the producer's transaction, or has added it.
        Otherwise the batch may continue a transaction here, but not begin one. With
        ``transaction_version`` 2 the Produce request itself has added the partition to the
        transaction, and a producer without state here must begin with sequence 0.

        Raises the errors of ``ProducerStateManager.check_batch``; StorageError.
        """
        self.marks.raise_if_stopped()
        header, data, now_ms = batch
        if header.producer_id >= 0:
            duplicate = self.producers.find_duplicate(header)
            if duplicate is not None:
                return Appended(
                    duplicate.first_offset,
                    duplicate.last_offset,
                    duplicate.timestamp,
                    self.marks.log_start_offset,
                    duplicate=True,
                )
            try:
                self.producers.check_batch(
                    header,
                    verified=transaction_verified,
                    transaction_version=transaction_version,
                )
                return self._append_data(header, data, now_ms)
            except LogError:
                self.producers.note_refused(header)
                raise
        return self._append_data(header, data, now_ms)

    def append_records(
        self, records: Sequence[Record], *, now_ms: int, producer: ProducerStamp | None = None
    ) -> Appended:
        """Append a coordinator's records as one batch, transactional if ``producer`` is given.

        The producer's epoch is checked, its sequence is not. Raises InvalidProducerEpochError,
        StorageError; ValueError without records.
        """
        self.marks.raise_if_stopped()
        if producer is not None:
            self.producers.check_epoch(producer.producer_id, producer.producer_epoch)
        is_stamped = self.log.config.message_timestamp_type == LOG_APPEND_TIME
        header, data = own_batch(records, now_ms, producer, log_append_time=is_stamped)
        return self._append_data(header, data, now_ms)

    def append_batch(self, data: bytes, now_ms: int) -> Appended:
        """Append a batch of records or control records that this broker has encoded.

        The batch has no producer id, so no producer state is checked. Raises StorageError.
        """
        self.marks.raise_if_stopped()
        return self._append_data(parse_header(data), data, now_ms)

    def append_marker(self, marker: EndMarker, now_ms: int) -> Appended:
        """Append the marker that ends a producer's transaction here, even if none is open.

        Raises TransactionCoordinatorFencedError, InvalidProducerEpochError, StorageError.
        """
        self.marks.raise_if_stopped()
        producer_id, epoch = marker.stamp.producer_id, marker.stamp.producer_epoch
        commit, coordinator_epoch = marker.commit, marker.coordinator_epoch
        version = marker.transaction_version
        self.producers.check_marker(producer_id, epoch, coordinator_epoch, version)
        data = end_marker(
            commit=commit,
            producer_id=producer_id,
            producer_epoch=epoch,
            coordinator_epoch=coordinator_epoch,
            timestamp_ms=now_ms,
            log_append_time=self.log.config.message_timestamp_type == LOG_APPEND_TIME,
        )
        offset = self.log.log_end_offset
        aborted = None if commit else self.producers.would_abort(producer_id, offset)
        self._write(parse_header(data), data, now_ms, aborted)
        self.traffic.markers += 1
        self.producers.apply_marker(
            producer_id, epoch, coordinator_epoch, offset, now_ms, commit=commit
        )
        return self._appended(offset, offset, now_ms)

    def _append_data(self, header: BatchHeader, data: Buffer, now_ms: int) -> Appended:
        offset = self.log.log_end_offset
        self._write(header, data, now_ms)
        if header.producer_id >= 0:
            self.producers.apply_batch(header, offset)
        return self._appended(offset, offset + header.last_offset_delta, now_ms)

    def _write(
        self, header: BatchHeader, data: Buffer, now_ms: int, aborted: AbortedTxn | None = None
    ) -> None:
        """Write one batch at the log end; an abort marker's index entry is written before it.

        Raises StorageError. If the disk is full, nothing has changed, except that the log may have
        rolled.
        """
        log = self.log
        offset = log.log_end_offset
        try:
            segment = self._segment_for(header, offset, now_ms)
            prefix = _PLACE.pack(offset, header.size - LOG_OVERHEAD, self.marks.leader_epoch)
            buffers = prefix, memoryview(data)[16:]
            last_offset = offset + header.last_offset_delta
            if aborted is None:
                log.append(buffers, header.size, last_offset, header.max_timestamp, segment)
            else:
                if not segment.txn_index.is_on_disk:
                    log.directory_changed = True
                with segment.txn_index.adding(aborted):
                    log.append(buffers, header.size, last_offset, header.max_timestamp, segment)
        except STORAGE_FAILURES as error:
            raise self.marks.refuse(error) from error
        traffic = self.traffic
        traffic.bytes_in += header.size
        traffic.records_in += header.last_offset_delta + 1

    def _segment_for(self, header: BatchHeader, offset: int, now_ms: int) -> Segment:
        """Write the topic id, begin the leader epoch and roll if necessary; return the segment."""
        self._prepare()
        if self._epochs.latest != self.marks.leader_epoch:
            self._epochs.assign(self.marks.leader_epoch, offset)
        last_offset = offset + header.last_offset_delta
        if self.log.must_roll(header.size, last_offset, header.max_timestamp, now_ms):
            return self.flushes.roll(now_ms)
        return self.log.active

    def _prepare(self) -> None:
        if self._metadata_pending:
            write_partition_metadata(self._fs, self.log.directory, self.topic_id, sync=False)
            self._metadata_pending = False
            self.flushes.is_new = True
        if not self._epochs.is_checked:
            self.reader.check_epochs()

    def _appended(self, offset: int, last_offset: int, now_ms: int) -> Appended:
        """Move the marks past the appended batch, flush if that is due, notify the readers."""
        self.producers.map_end_offset = last_offset + 1
        self.flushes.appended(offset, now_ms)
        is_stamped = self.log.config.message_timestamp_type == LOG_APPEND_TIME
        append_time = now_ms if is_stamped else NO_TIMESTAMP
        return Appended(
            offset, last_offset, append_time, self.marks.log_start_offset, duplicate=False
        )

    # --- replication ---

    @property
    def replica(self) -> ReplicaLog:
        """The follower's operations on the log, created on first use."""
        if self._replica is None:
            from fencepost.logcore.replica import ReplicaLog  # noqa: PLC0415 - for clusters only

            self._replica = ReplicaLog(
                self.log,
                self.producers,
                self._epochs,
                self.flushes,
                self.reader,
                self._clock,
                self.traffic,
                self._prepare,
            )
        return self._replica

    def append_as_follower(
        self, records: Buffer, leader_epoch_limit: int, *, start: int = 0, most: int = MAX_INT64
    ) -> FollowerAppend:
        """Append the records of a leader's response: see :meth:`ReplicaLog.append`."""
        return self.replica.append(records, leader_epoch_limit, start=start, most=most)

    def truncate_to(self, offset: int) -> None:
        """Truncate to the leader's log: see :meth:`ReplicaLog.truncate_to`."""
        self.replica.truncate_to(offset)

    # --- the end ---

    def close(self) -> None:
        """Close as in a clean shutdown: flush, trim the indexes, write a producer snapshot."""
        flush = self.plan_close()
        self.finish_close(flush, None if flush is None else flush.run())

    def plan_close(self) -> Flush | None:
        """Do the steps of :meth:`close` before its flush; return the planned flush, or None.

        :meth:`finish_close` must follow. After a StorageError the partition is closed.
        """
        if self.marks.stopped is not None:
            return None
        try:
            self.log.active.seal()
            self.producers.take_snapshot()
            self.log.remove_deleted_files(None)
            return self.flushes.plan(self._clock.now_ms())
        except STORAGE_FAILURES as error:
            failure = self.marks.fail(error)
            self._stop("is closed")
            raise failure from error

    def finish_close(self, flush: Flush | None, failure: Exception | None) -> None:
        """Apply the result of the flush, and close all files.

        Raises StorageError if the flush failed.
        """
        try:
            if flush is not None:
                self.flushes.finish(flush, failure)
            if failure is not None:
                raise self.marks.fail(failure) from failure
        finally:
            if self.marks.stopped is None:
                self._stop("is closed")
            elif not self.log.is_empty:
                self.log.close()

    def _stop(self, why: str) -> None:
        self.log.close()
        self.producers.release()
        if self.marks.stopped is None:
            self.marks.stopped = StorageError(f"{self.topic}-{self.index} {why}")

    def mark_deleted(self) -> None:
        """Refuse all further calls: the topic is deleted. :meth:`rename_deleted` must follow."""
        if self.marks.stopped is None:
            self.marks.stopped = StorageError(f"{self.name} is deleted")
        self.marks.notify()

    def rename_deleted(self) -> str:
        """Close all files and rename the directory; return its path, for the owner to remove.

        The owner must sync the parent directory before the removal. Raises StorageError.
        """
        self._stop("is deleted")
        path = Path(self.log.directory)
        suffix = f".{uuid.uuid4().hex}{DELETE_SUFFIX}"
        room = MAX_NAME_BYTES - len(suffix) - len(f"-{self.index}")
        deleted = str(path.with_name(f"{self.topic[:room]}-{self.index}{suffix}"))
        try:
            self._fs.rename(self.log.directory, deleted)
        except OSError as error:
            raise StorageError(f"{self.name} can't be removed: {error}") from error
        return deleted


def _has_topic_id(fs: FileSystem, directory: str, topic_id: uuid.UUID) -> bool:
    """Return whether ``partition.metadata`` has this topic id; StorageError if it has another."""
    try:
        stored = read_partition_metadata(fs, directory)
    except CheckpointError:
        return False
    if stored is not None and stored != topic_id:
        raise StorageError(f"{directory} belongs to the topic id {stored}, not {topic_id}")
    return stored is not None
