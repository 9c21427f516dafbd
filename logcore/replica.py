"""A follower's log: appending the leader's batches unchanged, truncation, restart at an offset.

This module decides nothing and decodes no record: offsets, epochs and timestamps stay as the leader
assigned them. A fetched log may have gaps anywhere, because the leader's log may be compacted.

Before a truncation the log's checkpoints must be lowered (:meth:`ReplicaLog.plan_truncation`). If
the recovery point stayed above the new log end, recovery would treat an append torn by a kill as
damage to flushed data: it would skip the append instead of truncating the log there.

Source: ``UnifiedLog.appendAsFollower``, ``truncateTo``, ``truncateFullyAndStartAt``,
``Partition.makeLeader``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from fencepost.logcore.batch import (
    LOG_OVERHEAD,
    MAGIC,
    NO_LEADER_EPOCH,
    BatchHeader,
    Buffer,
    ControlType,
    first_control,
    parse_header,
    verify_crc,
)
from fencepost.logcore.clock import Clock
from fencepost.logcore.config import MAX_INT64
from fencepost.logcore.durable import FlushState
from fencepost.logcore.epochs import LeaderEpochs
from fencepost.logcore.errors import CorruptRecordError, UnexpectedAppendOffsetError
from fencepost.logcore.legacy import (
    MAGIC_POS,
    MIN_MESSAGE_SIZE,
    as_batch_header,
    magic_at,
    parse_message,
    verify_message_crc,
)
from fencepost.logcore.log import Log
from fencepost.logcore.marks import STORAGE_FAILURES
from fencepost.logcore.producers import ProducerStateManager
from fencepost.logcore.reading import LogReader
from fencepost.logcore.recovery import replay_producers
from fencepost.logcore.segment import Segment
from fencepost.logcore.traffic import Traffic

NO_OFFSET: Final = -1


class FollowerAppend(NamedTuple):
    """The result of appending a leader's bytes."""

    first_offset: int
    """The base offset of the first appended batch, −1 if none was appended."""
    last_offset: int
    last_epoch: int
    """The leader epoch of the last appended batch; −1 without any, and for formats v0 and v1."""
    taken: int
    """The position in ``records`` at which the next call must continue; the length at the end."""
    warnings: tuple[str, ...] = ()
    """Events that Kafka logs as a warning before it continues."""


class _Batch(NamedTuple):
    header: BatchHeader
    position: int
    aborts: bool
    """Whether the batch is the marker of an aborted transaction."""


class ReplicaLog:
    """The operations of replication on a partition's log. Methods raise StorageError."""

    __slots__ = (
        "_clock",
        "_epochs",
        "_flushes",
        "_has_skipped",
        "_log",
        "_marks",
        "_prepare",
        "_producers",
        "_reader",
        "_traffic",
    )

    def __init__(
        self,
        log: Log,
        producers: ProducerStateManager,
        epochs: LeaderEpochs,
        flushes: FlushState,
        reader: LogReader,
        clock: Clock,
        traffic: Traffic,
        prepare: Callable[[], None],
    ) -> None:
        """``prepare`` makes the directory ready for its first batch."""
        self._log = log
        self._producers = producers
        self._epochs = epochs
        self._flushes = flushes
        self._marks = flushes.marks
        self._reader = reader
        self._clock = clock
        self._traffic = traffic
        self._prepare = prepare
        self._has_skipped = False

    # --- terms ---

    def lead(self, leader_epoch: int) -> None:
        """Begin a leader epoch at the log end.

        The epoch is cached before its first record, because replicas ask where the previous epoch
        ended.
        """
        self._marks.raise_if_stopped()
        try:
            self._reader.check_epochs()
        except STORAGE_FAILURES as error:
            raise self._marks.refuse(error) from error
        self.follow(leader_epoch)
        self._epochs.assign(leader_epoch, self._log.log_end_offset)

    def follow(self, leader_epoch: int) -> None:
        """Set the leader's epoch, against which requests are checked."""
        self._marks.leader_epoch = leader_epoch
        self._marks.recovery_limit = MAX_INT64

    def move_high_watermark(self, offset: int) -> bool:
        """Set the high watermark to the leader's, at most the log end; return whether it fell.

        Listeners are notified if it changed.
        """
        marks = self._marks
        offset = max(marks.log_start_offset, min(offset, self._log.log_end_offset))
        before = marks.high_watermark
        if offset != before:
            marks.move_high_watermark(offset)
            marks.notify()
        return offset < before

    # --- appending ---

    def append(
        self, records: Buffer, leader_epoch_limit: int, *, start: int = 0, most: int = MAX_INT64
    ) -> FollowerAppend:
        """Append the whole batches of ``records`` from ``start`` on, at most ``most`` of them.

        Later batches and an incomplete batch at the end are ignored. The first batch whose leader
        epoch is above the limit is skipped, with all that follow it (KAFKA-18723). If the log is
        empty, and its end lies inside of the first batch, the log restarts at that batch.

        Raises CorruptRecordError for a wrong CRC, UnexpectedAppendOffsetError; then nothing has
        changed. After a NoSpaceError some batches may be in the log.
        """
        marks, log = self._marks, self._log
        marks.raise_if_stopped()
        warnings: list[str] = []
        batches, consumed = self._checked(records, leader_epoch_limit, start, most, warnings)
        if not batches:
            return FollowerAppend(NO_OFFSET, NO_OFFSET, NO_LEADER_EPOCH, consumed, tuple(warnings))
        first = batches[0].header
        if first.base_offset < log.log_end_offset:
            self.restart_at(first.base_offset)
        began, now_ms = log.log_end_offset, self._clock.now_ms()
        last = first
        try:
            self._prepare()
            for segment, run in self._split_into_runs(batches, now_ms):
                self._write(segment, memoryview(records), run, warnings)
                last = run[-1].header
        except STORAGE_FAILURES as error:
            raise marks.refuse(error) from error
        finally:
            if log.log_end_offset > began and marks.stopped is None:
                self._producers.map_end_offset = log.log_end_offset
                self._flushes.appended(began, now_ms)
        if self._has_skipped:
            # Recovery takes a gap between segments for a loss, unless later data was flushed.
            self._has_skipped = False
            self._flushes.begin(now_ms)
        return FollowerAppend(
            first.base_offset, last.last_offset, last.leader_epoch, consumed, tuple(warnings)
        )

    def _checked(
        self, records: Buffer, limit: int, start: int, most: int, warnings: list[str]
    ) -> tuple[list[_Batch], int]:
        """Check the batches to append; return them, and the position of the rest."""
        position, end = start, len(records)
        expected = self._log.log_end_offset
        batches: list[_Batch] = []
        while end - position > MAGIC_POS and len(batches) < most:
            if magic_at(records, position) < MAGIC:
                if end - position < MIN_MESSAGE_SIZE:
                    break
                message = parse_message(records, position)
                if message.size > end - position:
                    break
                verify_message_crc(records, position, message)
                header, aborts = as_batch_header(message), False
            else:
                size = LOG_OVERHEAD + int.from_bytes(records[position + 8 : position + 12], "big")
                if size > end - position:
                    break
                header = parse_header(records, position)
                if header.leader_epoch > limit:
                    warnings.append(
                        f"batches from offset {header.base_offset} on are skipped: their leader"
                        f" epoch {header.leader_epoch} is above {limit}"
                    )
                    return batches, end
                verify_crc(records, position, header)
                if header.last_offset_delta < 0:
                    raise CorruptRecordError(
                        f"the batch at offset {header.base_offset} ends before it begins"
                    )
                aborts = header.is_control and _is_abort(records, position, header)
            if header.base_offset < expected and (batches or not self._holds_end(header)):
                raise UnexpectedAppendOffsetError(
                    f"offset {header.base_offset} where {expected} is the first that may come"
                )
            batches.append(_Batch(header, position, aborts))
            expected = header.next_offset
            position += header.size
        return batches, position if len(batches) == most else end

    def _holds_end(self, header: BatchHeader) -> bool:
        """Return whether the log is empty and ends inside of this batch."""
        end = self._log.log_end_offset
        return (
            end == self._marks.log_start_offset and header.base_offset < end <= header.last_offset
        )

    def _split_into_runs(
        self, batches: list[_Batch], now_ms: int
    ) -> Iterator[tuple[Segment, list[_Batch]]]:
        """Split batches into runs, each for one write into one segment.

        An abort marker is written alone. So is the first batch of a segment, whose timestamp
        ``must_roll`` needs for the next batches (``segment.ms``).
        """
        log, run, size = self._log, list[_Batch](), 0
        segment = log.active
        for batch in batches:
            header = batch.header
            if run and (
                batch.aborts
                or segment.size == 0
                or log.must_roll(
                    size + header.size, header.last_offset, header.max_timestamp, now_ms
                )
            ):
                yield segment, run
                run, size = [], 0
            if not run:
                segment = log.active
                is_older = header.magic < MAGIC and self._epochs.latest != NO_LEADER_EPOCH
                if (is_older and segment.size) or log.must_roll(
                    header.size, header.last_offset, header.max_timestamp, now_ms
                ):
                    self._producers.map_end_offset = log.log_end_offset
                    segment = self._flushes.roll(now_ms)
                if not segment.can_hold(header.last_offset):
                    segment = log.skip_to(header.base_offset, now_ms)
                    self._has_skipped = True
            run.append(batch)
            size += header.size
            if batch.aborts:
                yield segment, run
                run, size = [], 0
        if run:
            yield segment, run

    def _write(
        self, segment: Segment, records: memoryview, run: list[_Batch], warnings: list[str]
    ) -> None:
        """Write a run at the log end, and update epochs and producers from its batches."""
        log, producers, epochs = self._log, self._producers, self._epochs
        headers = [batch.header for batch in run]
        start, end = run[0].position, run[-1].position + run[-1].header.size
        data = records[start:end]
        aborted = None
        if run[0].aborts:
            aborted = producers.would_abort(headers[0].producer_id, headers[0].base_offset)
        if aborted is None:
            log.append_run(data, headers, segment)
        else:
            if not segment.txn_index.is_on_disk:
                log.directory_changed = True
            with segment.txn_index.adding(aborted):
                log.append_run(data, headers, segment)
        for batch in run:
            header = batch.header
            if header.magic < MAGIC:
                if epochs.latest != NO_LEADER_EPOCH:
                    warnings.append(f"leader epochs forgotten: a message of format {header.magic}")
                    epochs.clear()
            elif header.leader_epoch != epochs.latest:
                epochs.assign(header.leader_epoch, header.base_offset)
            if header.has_producer:
                warning = producers.apply_follower_batch(header, records, batch.position)
                if warning:
                    warnings.append(warning)
        self._traffic.replicated_in += end - start

    # --- truncation ---

    def plan_truncation(self, offset: int) -> None:
        """Lower the marks before the log is truncated to ``offset`` or restarted there.

        The caller writes recovery point, log start and high watermark to the checkpoints, and then
        must call :meth:`truncate_to` or :meth:`restart_at`, unless :meth:`lead` was called since.
        """
        marks = self._marks
        marks.raise_if_stopped()
        log = self._log
        if log.first_offset <= offset <= log.log_end_offset:
            try:
                marks.recovery_limit = offset = log.end_before(offset)
            except STORAGE_FAILURES as error:
                raise marks.refuse(error) from error
        else:
            # The log will restart at the offset: none of its data counts as flushed.
            marks.recovery_limit = log.first_offset
        marks.recovery_point = min(marks.recovery_point, marks.recovery_limit)
        marks.log_start_offset = min(marks.log_start_offset, offset)
        if offset < marks.high_watermark:
            marks.move_high_watermark(offset)

    def truncate_to(self, offset: int) -> None:
        """Remove the batch that holds ``offset`` and all later ones (``UnifiedLog.truncateTo``).

        The log then ends at that batch's base offset or, if there is a gap before it, at the end of
        the previous batch. The truncation may go below the high watermark: the current leader was
        elected without those records. An epoch that begins at the log end, without records, is
        always dropped.
        """
        log, marks, now_ms = self._log, self._marks, self._clock.now_ms()
        marks.raise_if_stopped()
        marks.recovery_limit = MAX_INT64
        if offset >= log.log_end_offset:
            self._epochs.truncate_from_end(log.log_end_offset)
            return
        try:
            if offset < log.first_offset:
                log.restart_at(offset, now_ms)
                self._producers.remove_snapshots_above(-1)
            else:
                log.truncate_to(offset)
                if log.config.is_compacted:
                    # Recovery expects no holes in the last segment, and compaction may have made
                    # some. No later flush syncs that segment.
                    log.active.file.sync()
                    self._flushes.roll(now_ms)
            end = log.log_end_offset
            self._epochs.truncate_from_end(end)
            marks.log_start_offset = min(marks.log_start_offset, end)
            marks.recovery_point = min(marks.recovery_point, end)
            self._reload_producers(end, now_ms)
            marks.flushed_end = min(marks.flushed_end, end)
            marks.move_high_watermark(min(marks.high_watermark, end))
        except STORAGE_FAILURES as error:
            raise marks.fail(error) from error
        marks.notify()

    def _reload_producers(self, end: int, now_ms: int) -> None:
        """Rebuild the producer state from the log up to ``end``."""
        producers = self._producers
        producers.remove_snapshots_above(end)
        unreplicated = producers.unreplicated_below(end)
        uncommitted = producers.uncommitted(self._marks.high_watermark)
        start = producers.load_snapshot(end, self._log.first_offset, now_ms)
        replay_producers(self._log, producers, start, end)
        producers.hold_unreplicated(unreplicated)
        producers.require_sequence(uncommitted)

    def restart_at(self, offset: int) -> None:
        """Remove all records, and set log start, high watermark and log end to ``offset``.

        A follower's log must restart if it ends before the leader's log starts
        (``UnifiedLog.truncateFullyAndStartAt``, KAFKA-9491).
        """
        log, marks, now_ms = self._log, self._marks, self._clock.now_ms()
        marks.raise_if_stopped()
        marks.recovery_limit = MAX_INT64
        try:
            log.restart_at(offset, now_ms)
            self._producers.remove_snapshots_above(-1)
            self._producers.clear(offset)
            self._epochs.clear()
        except STORAGE_FAILURES as error:
            raise marks.fail(error) from error
        marks.log_start_offset = offset
        marks.recovery_point = min(marks.recovery_point, offset)
        marks.move_flushed_end(offset)
        marks.move_high_watermark(offset)
        marks.notify()


def _is_abort(records: Buffer, position: int, header: BatchHeader) -> bool:
    """Return whether a control batch is an abort marker; compaction may have emptied it."""
    control = first_control(records, position, header)
    return control is not None and control.type is ControlType.ABORT
