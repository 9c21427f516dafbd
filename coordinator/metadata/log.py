"""The metadata log of this node, with the records of the node's own controller.

The partition ``__cluster_metadata-0`` holds Apache Kafka's records in Apache Kafka's framing. When
the node starts, it begins an epoch with a LeaderChange, registers the broker and begins a new
leader epoch of every partition. A change is one batch, or a metadata transaction if it does not fit
into one batch. Each change is forced to disk before the response, as by Kafka's controllers:
changes are rare, and a topic must not vanish in a power failure.

A partition's directory is created when the partition is first opened, after the topic's record is
appended. It is deleted after the record that removes the topic is appended. A kill in between may
leave a directory without a topic, which the broker finds when it starts again
(:meth:`MetadataLog.was_deleted`). Or it may leave a topic without directories; these are created on
demand.

The log makes no decisions: all of its records come from the rules of
``cluster/controller``.

Source: ``QuorumController.appendWriteEvent``, ``KafkaMetadataLog``, ``SnapshotGenerator``.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, repeat
from typing import TYPE_CHECKING

import structlog

from fencepost.cluster.controller import activation
from fencepost.cluster.controller.activation import ELR_VERSION, MIN_INSYNC_REPLICAS
from fencepost.cluster.image import (
    UNASSIGNED,
    MetadataImage,
)
from fencepost.cluster.image_loader import ImageLoader
from fencepost.cluster.image_records import count_of
from fencepost.cluster.record_codec import encode
from fencepost.cluster.records import (
    AbortTransactionRecord,
    BeginTransactionRecord,
    BrokerEndpoint,
    EndTransactionRecord,
    MetadataRecord,
)
from fencepost.cluster.topic_records import TopicRecords, encode_all, without_partition_records
from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.metadata.control_records import leader_change
from fencepost.coordinator.metadata.epoch_checks import check_epochs
from fencepost.coordinator.metadata.errors import MetadataError
from fencepost.coordinator.metadata.framing import data_batch, in_chunks, values_of
from fencepost.coordinator.metadata.metadata import (
    FEATURES,
    Metadata,
)
from fencepost.coordinator.metadata.names import METADATA_TOPIC
from fencepost.coordinator.metadata.quorum_state import write_if_missing
from fencepost.coordinator.metadata.server_secret import write_secret
from fencepost.coordinator.metadata.snapshots import (
    SnapshotId,
    load_snapshot,
    snapshots,
    write_snapshot,
)
from fencepost.logcore.batch import NO_TIMESTAMP, decode_records
from fencepost.logcore.clock import Clock
from fencepost.logcore.config import LogConfig
from fencepost.logcore.errors import CorruptRecordError, LogError, NoSpaceError
from fencepost.logcore.fs import FileSystem
from fencepost.logcore.machine import Record
from fencepost.logcore.partition import Partition

if TYPE_CHECKING:
    from fencepost.coordinator.metadata.conversion import OldMetadata

_log = structlog.get_logger(__name__)


METADATA_LOG_CONFIG = LogConfig(
    segment_bytes=16 << 20,
    index_interval_bytes=64 << 10,
    retention_ms=-1,
    cleanup_policy=frozenset(),
)
"""The log is not deleted by time or size; :meth:`MetadataLog.compact` truncates it. Its index has
few entries, so that a change rarely opens another file."""

COMPACT_SLACK_RECORDS = 2_000
COMPACT_FACTOR = 4
"""A starting node writes a snapshot if the log holds more than COMPACT_SLACK_RECORDS plus
COMPACT_FACTOR times the records of a snapshot, so that replay takes milliseconds. A stopping node,
for which no client waits, writes a snapshot if the log holds more than COMPACT_SLACK_RECORDS."""


Forced = Callable[[Partition], "asyncio.Future[None] | None"]
"""Starts a flush of a partition; returns None if all of it is on disk."""


class MetadataLog(Metadata):
    """The metadata cache of a node with a metadata log of its own.

    ``partition`` is the open ``__cluster_metadata-0``; ``forced`` starts to force it to disk.
    ``directory`` is the data directory with the id ``directory_id``. Raises :class:`MetadataError`
    for a log that it cannot interpret. If an append raises
    :class:`fencepost.logcore.errors.LogError`, the metadata is unchanged.
    """

    def __init__(
        self,
        partition: Partition,
        config: BrokerConfig,
        clock: Clock,
        fs: FileSystem,
        directory: str,
        *,
        node_id: int,
        forced: Forced,
        directory_id: uuid.UUID = UNASSIGNED,
    ) -> None:
        super().__init__(config, node_id=node_id)
        self.partition = partition
        self._clock = clock
        self._forced = forced
        self._fs = fs
        self._directory = directory
        self._directory_id = directory_id
        self._records = 0
        """The number of records in the log after the snapshot."""
        self._last_timestamp_ms = NO_TIMESTAMP
        self._forces = True
        self._loader = ImageLoader()
        self._is_cut_short = False
        """Whether the log ends within a metadata transaction."""
        self.has_own_broker = False
        """Whether this broker is the only one, and registers itself."""
        write_if_missing(fs, partition.log.directory)
        try:
            self._load()
        except CorruptRecordError as error:
            raise MetadataError(f"{METADATA_TOPIC} cannot be parsed: {error}") from error

    # --- the log ---------------------------------------------------------------------------------

    def _load(self) -> None:
        at, loader = self.partition.log.directory, self._loader
        ids = snapshots(self._fs, at)
        if ids:
            load_snapshot(self._fs, at, ids[-1], loader)
        old: OldMetadata | None = None
        is_new: bool | None = True if ids else None
        begin = ids[-1].end_offset if ids else 0
        for header, batch in self.partition.reader.read_all():
            if header.next_offset <= begin:
                continue
            if header.is_control:
                loader.skip_control_batch(header.last_offset, header.leader_epoch)
                continue
            if is_new is None:
                is_new = decode_records(batch, 0, header)[0].key is None
            if not is_new:
                old = _old_metadata() if old is None else old
                for record in decode_records(batch, 0, header):
                    old.apply(Record(record.key or b"", record.value))
                continue
            values = values_of(header, batch)
            loader.replay(values, header.last_offset, header.leader_epoch)
            self._records += header.record_count
            self._last_timestamp_ms = header.max_timestamp
        start = self.partition.log_start_offset
        if old is not None:
            self._convert(old)
        elif start > begin:
            raise MetadataError(
                f"{METADATA_TOPIC} begins at offset {start}, and there is no snapshot of the"
                " records before it"
            )
        self._is_cut_short = loader.in_transaction
        image = loader.publish()
        check_epochs(image)
        if self._is_cut_short:
            loader.forget(image)
        self.install(image)

    def _convert(self, old: OldMetadata) -> None:
        """Convert a log of an older format: write its state as a snapshot, and continue there."""
        if old.secret is not None:
            write_secret(self._fs, self._directory, old.secret)
        loader, levels = self._loader, {name: level for name, (_, _, level) in FEATURES.items()}
        loader.begin_snapshot()
        loader.replay(old.values(levels, self._node_id, self._directory_id), 0, 0)
        loader.end_snapshot(self.partition.log_end_offset, old.starts)
        loader.removed |= old.deleted
        self.write_snapshot(loader.publish())

    def append(self, records: Sequence[MetadataRecord]) -> None:
        """Append the records of a change, force them to disk, and install the next image.

        Raises CorruptRecordError for records that do not fit the image, and LogError. After an
        error the metadata is unchanged, except after NoSpaceError: if the disk has no space for the
        flush, the change has been made, and a later flush makes it durable.
        """
        if isinstance(records, TopicRecords) and records.is_prepared:
            self._append_prepared(records)
        else:
            self._append(encode_all(records), without_partition_records(records))

    def _append_prepared(self, records: TopicRecords) -> None:
        """Append the already encoded records of many new partitions."""
        values, loader = encode_all(records.head), self._loader
        try:
            loader.replay(values, self.image.offset, self.epoch, records.head)
            loader.add_partitions(records.topic_id, records.first, records.registrations)
        except LogError:
            loader.forget(self.image)
            raise
        self._append([], (), [*values, *records.values])

    def _append(
        self,
        values: list[bytes],
        decoded: Iterable[MetadataRecord],
        taken: Sequence[bytes] = (),
    ) -> None:
        """Append ``values``, then ``taken``, whose records the loader has replayed already.

        ``decoded`` contains the decoded records of ``values``, in order; it may end before them.
        """
        partition, loader = self.partition, self._loader
        batches = self._batches([*values, *taken])
        last, epoch = partition.log_end_offset + sum(map(len, batches)) - 1, self.epoch
        try:
            loader.replay(values, last, epoch, chain(decoded, repeat(None)))
            image = loader.publish()
            for number, batch in enumerate(batches, 1):
                now_ms = self._clock.now_ms()
                partition.append_batch(data_batch(batch, now_ms), now_ms)
                self._is_cut_short = number < len(batches)
                self._records += len(batch)
                self._last_timestamp_ms = now_ms
            if self._forces:
                self._flush()
        except LogError:
            loader.forget(self.image)
            raise
        self.install(image)
        if self._forces:
            # A refused flush leaves the records in the log, so the image must have them as well.
            self._check_forced()

    def _batches(self, values: list[bytes]) -> list[Sequence[bytes]]:
        """Return the values of a change in batches; several batches form a metadata transaction."""
        batches = list(in_chunks(values))
        if len(batches) > 1:
            batches[0] = [encode(BeginTransactionRecord()), *batches[0]]
            batches[-1] = [*batches[-1], encode(EndTransactionRecord())]
        if self._is_cut_short and batches:
            batches[0] = [encode(AbortTransactionRecord("it was cut short")), *batches[0]]
        return batches

    @contextmanager
    def unforced(self) -> Iterator[None]:
        """Do not wait for the disk after each change in the block. Call :meth:`force` afterwards.

        This is for requests with many changes. The block must not yield to other tasks.
        """
        forces, self._forces = self._forces, False
        try:
            yield
        finally:
            self._forces = forces

    def durable(self) -> asyncio.Future[None] | None:
        """Return a future that is done once all current changes are on disk; None if they are.

        The future raises StorageError.
        """
        return self._forced(self.partition)

    def force(self) -> None:
        """Force all changes to disk. After a ``LogError`` no change may be acknowledged."""
        self._flush()
        self._check_forced()

    def _flush(self) -> None:
        if self.partition.recovery_point < self.partition.log_end_offset:
            self.partition.flushes.run(self._clock.now_ms())

    def _check_forced(self) -> None:
        if self.partition.recovery_point < self.partition.log_end_offset:
            raise NoSpaceError(f"{self.partition.name} is not on disk: the flush was refused")

    def compact(self, factor: int | None = None) -> None:
        """Write a snapshot if the log has outgrown the last one, and delete the records before it.

        The log may hold ``factor`` times as many records as a snapshot, by default COMPACT_FACTOR,
        plus COMPACT_SLACK_RECORDS. If the log cannot be flushed or the snapshot cannot be written,
        nothing changes.
        """
        if not self.has_grown(factor):
            return
        try:
            self.write_snapshot()
        except (OSError, NoSpaceError) as error:
            _log.warning("snapshot of the metadata not written", cause=str(error))
        else:
            self._loader.removed.clear()

    def has_grown(self, factor: int | None = None) -> bool:
        """Return whether the log has grown so far beyond its snapshot that a new one is due."""
        factor = COMPACT_FACTOR if factor is None else factor
        return self._records > factor * count_of(self.image) + COMPACT_SLACK_RECORDS

    def plan_snapshot(self) -> Callable[[], SnapshotId]:
        """Return a function that writes a snapshot of the current image, in any thread.

        All records must be on disk before the function runs, and :meth:`begin_behind` must be
        called afterwards. The function raises OSError.
        """
        self._records = 0  # records from here on come after the snapshot
        return partial(
            write_snapshot,
            self._fs,
            self.partition.log.directory,
            self.image,
            self._clock.now_ms(),
            self._last_timestamp_ms,
        )

    def begin_behind(self, snapshot: SnapshotId) -> None:
        """Advance the log start offset to the end of a snapshot on disk. Raises LogError."""
        if self.partition.log.active.size:
            self.partition.flushes.roll(self._clock.now_ms())
        self.partition.cleanup.delete_records_before(snapshot.end_offset)

    def write_snapshot(self, image: MetadataImage | None = None) -> None:
        """Write a snapshot of the whole log, and delete the records before its end.

        ``image`` is the image to write, if it is not installed yet. Raises LogError, OSError.
        """
        image = self.image if image is None else image
        self.force()
        now_ms, last_ms = self._clock.now_ms(), self._last_timestamp_ms
        at = self.partition.log.directory
        self.begin_behind(write_snapshot(self._fs, at, image, now_ms, last_ms))
        self._records = 0

    # --- startup ---------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch of the log's leader, this node. It is 1 at first, and grows at each startup."""
        return self.partition.marks.leader_epoch

    @property
    def next_offset(self) -> int:
        """The offset of the next record."""
        return self.partition.log_end_offset

    @property
    def broker_epoch(self) -> int:
        """The offset of this broker's registration record; -1 if it has not registered."""
        registration = self.image.brokers.get(self._node_id)
        return -1 if registration is None else registration.epoch

    def begin_epoch(
        self, end_points: Sequence[BrokerEndpoint] = (), *, is_broker: bool = True
    ) -> None:
        """Begin an epoch of the log and, for a broker, register it and begin leader epochs.

        A node that is only a controller begins just the log's epoch. Raises MetadataError if other
        brokers are registered but this node has no listener by which they could reach it.
        """
        self.has_own_broker = is_broker
        others = sorted(self.image.brokers.keys() - {self._node_id})
        if is_broker and others:
            raise MetadataError(
                f"this node is the controller of other brokers {others}: configure its"
                " listener in controller.listener.names, or unregister them first"
            )
        partition, now_ms = self.partition, self._clock.now_ms()
        partition.marks.leader_epoch = max(self.image.epoch, self.epoch) + 1
        levels = {name: level for name, (_, _, level) in sorted(FEATURES.items())}
        if not is_broker:
            levels[ELR_VERSION] = FEATURES[ELR_VERSION][1]
        min_insync_replicas = str(self._config.int(MIN_INSYNC_REPLICAS))
        head = list(activation.bootstrap(self.image, levels, min_insync_replicas))
        partition.append_batch(leader_change(self._node_id, now_ms), now_ms)
        if not is_broker:
            self.append(head)
            return
        broker = activation.LocalBroker(
            self._node_id,
            uuid.uuid4(),
            tuple(end_points),
            {name: (low, high) for name, (low, high, _) in sorted(FEATURES.items())},
            self._config.text("broker.rack"),
            self._directory_id,
        )
        offset = partition.log_end_offset + self._is_cut_short + len(head)
        head.append(activation.registration(broker, offset))
        again = self._loader.change_all(
            activation.new_leader_epoch(self._node_id), (self._node_id,)
        )
        self._append([encode(record) for record in head], head, again)

    # --- topics ----------------------------------------------------------------------------------

    def was_deleted(self, topic_id: uuid.UUID) -> bool:
        """Return whether a topic with this id is known to have been deleted."""
        return topic_id in self._loader.removed


def _old_metadata() -> OldMetadata:
    from fencepost.coordinator.metadata.conversion import OldMetadata  # noqa: PLC0415 - needed once in a directory's life

    return OldMetadata()


def new_topic_id() -> uuid.UUID:
    """Return a random topic id that does not look like an option of Kafka's tools in base64.

    Source: ``Uuid.randomUuid``, which avoids the reserved ids and a leading dash.
    """
    topic_id = uuid.uuid4()
    while topic_id.bytes[0] >> 2 == _BASE64_DASH:
        topic_id = uuid.uuid4()
    return topic_id


_BASE64_DASH = 62
