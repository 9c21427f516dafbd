"""The metadata log of this node: where the records of its own controller are kept.

The partition ``__cluster_metadata-0`` holds Apache Kafka's records in Apache Kafka's framing: each
start begins an epoch with a LeaderChange, registers the broker and begins a new leader epoch of
every partition. A change is one batch, or a metadata transaction where it is larger than a batch;
it is forced to disk before it is answered, as Kafka's controllers do: changes are rare, and a topic
must not vanish with the power.

A topic's directories follow its record: created when a partition is first opened, removed after
the record that it is gone. A kill in between leaves a directory without a topic, which the next
start finds (:meth:`MetadataLog.was_deleted`), or a topic without directories, which are created on
demand.

It decides nothing: records are made by the rules of ``cluster/controller``, those of a start too.

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
from fencepost.cluster.topic_records import apart_from_partitions, encode_all
from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.metadata.control_records import leader_change
from fencepost.coordinator.metadata.errors import MetadataError
from fencepost.coordinator.metadata.figures import check_figures
from fencepost.coordinator.metadata.framing import data_batch, in_chunks, values_of
from fencepost.coordinator.metadata.metadata import (
    FEATURES,
    Metadata,
)
from fencepost.coordinator.metadata.names import METADATA_TOPIC
from fencepost.coordinator.metadata.quorum_state import keep_others_out
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
from fencepost.logcore.errors import CorruptRecordError, LogError
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
"""The log of changes is never cleaned by time or size; :meth:`MetadataLog.compact` cuts it. Its
index has few entries: a change should not need one more open file."""

COMPACT_SLACK_RECORDS = 2_000
COMPACT_FACTOR = 4
"""A start writes a snapshot when the log holds more records than this many times those of a
snapshot, plus the slack. So it replays in milliseconds. A stop, which nobody waits for, writes one
for the slack alone."""


Forced = Callable[[Partition], "asyncio.Future[None] | None"]
"""Begins to force a partition to disk; None if all of it is there."""


class MetadataLog(Metadata):
    """The image, and the log behind it.

    ``partition`` is the open ``__cluster_metadata-0``; ``forced`` begins to force it to disk.
    ``directory`` is the data directory, known by ``directory_id``. Raises :class:`MetadataError`
    for a log it does not understand. A failed append raises
    :class:`fencepost.logcore.errors.LogError`, and nothing has changed.
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
        """Those in the log, behind the snapshot."""
        self._last_timestamp_ms = NO_TIMESTAMP
        self._forces = True
        self._loader = ImageLoader()
        self._is_cut_short = False
        """Whether the log ends inside of a metadata transaction."""
        self.has_own_broker = False
        """Whether this broker is the only one, and registers itself."""
        keep_others_out(fs, partition.log.directory)
        try:
            self._load()
        except CorruptRecordError as error:
            raise MetadataError(f"{METADATA_TOPIC} is not understood: {error}") from error

    # --- the log ---------------------------------------------------------------------------------

    def _load(self) -> None:
        at, loader = self.partition.log.directory, self._loader
        found = snapshots(self._fs, at)
        if found:
            load_snapshot(self._fs, at, found[-1], loader)
        old: OldMetadata | None = None
        is_new: bool | None = True if found else None
        begin = found[-1].end_offset if found else 0
        for header, batch in self.partition.reader.read_all():
            if header.next_offset <= begin:
                continue
            if header.is_control:
                loader.passed(header.last_offset, header.leader_epoch)
                continue
            if is_new is None:
                is_new = decode_records(batch, 0, header)[0].key is None
            if not is_new:
                old = _old_metadata() if old is None else old
                for one in decode_records(batch, 0, header):
                    old.apply(Record(one.key or b"", one.value))
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
                f"{METADATA_TOPIC} begins at {start}, and the snapshot before that is not there"
            )
        self._is_cut_short = loader.in_transaction
        image = loader.publish()
        check_figures(image)
        if self._is_cut_short:
            loader.forget(image)
        self.install(image)

    def _convert(self, old: OldMetadata) -> None:
        """Let the log go on in another form, behind a snapshot of what it held."""
        if old.secret is not None:
            write_secret(self._fs, self._directory, old.secret)
        loader, levels = self._loader, {name: level for name, (_, _, level) in FEATURES.items()}
        loader.begin_snapshot()
        loader.replay(old.values(levels, self._node_id, self._directory_id), 0, 0)
        loader.end_snapshot(self.partition.log_end_offset, old.starts)
        loader.removed |= old.deleted
        self.write_snapshot(loader.publish())

    def append(self, records: Sequence[MetadataRecord]) -> None:
        """Make a change: append its records, force them to disk, and install the next image.

        Raises CorruptRecordError for records that do not fit what is there, and LogError; nothing
        has changed then.
        """
        self._append(encode_all(records), apart_from_partitions(records))

    def _append(
        self,
        values: list[bytes],
        decoded: Iterable[MetadataRecord],
        taken: Sequence[bytes] = (),
    ) -> None:
        """Append values, the first of them those of ``decoded``.

        ``taken`` are values behind these that the loader has taken already.
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
                self.force()
        except LogError:
            loader.forget(self.image)
            raise
        self.install(image)

    def _batches(self, values: list[bytes]) -> list[Sequence[bytes]]:
        """The values of a change as batches: if there are several, they are a transaction."""
        batches = list(in_chunks(values))
        if len(batches) > 1:
            batches[0] = [encode(BeginTransactionRecord()), *batches[0]]
            batches[-1] = [*batches[-1], encode(EndTransactionRecord())]
        if self._is_cut_short and batches:
            batches[0] = [encode(AbortTransactionRecord("it was cut short")), *batches[0]]
        return batches

    @contextmanager
    def unforced(self) -> Iterator[None]:
        """Do not wait for the disk with each change made inside; :meth:`force` must follow.

        For one answer on many changes. Nothing may give way to others inside.
        """
        forces, self._forces = self._forces, False
        try:
            yield
        finally:
            self._forces = forces

    def durable(self) -> asyncio.Future[None] | None:
        """Done once all changes made by now are on disk; None if they are.

        The future raises StorageError.
        """
        return self._forced(self.partition)

    def force(self) -> None:
        """Have all changes on disk. Raises ``LogError``: answer none then."""
        if self.partition.recovery_point < self.partition.log_end_offset:
            self.partition.flushes.run(self._clock.now_ms())

    def compact(self, factor: int | None = None) -> None:
        """Write a snapshot if the log has grown far beyond it, and let the log begin behind that.

        Far is ``factor``, or else COMPACT_FACTOR, times what a snapshot has, and the slack. Where
        it can not be written the log stays as it is.
        """
        if not self.has_grown(factor):
            return
        try:
            self.write_snapshot()
        except OSError as error:
            _log.warning("snapshot of the metadata not written", cause=str(error))
        else:
            self._loader.removed.clear()

    def has_grown(self, factor: int | None = None) -> bool:
        """Whether the log is so far beyond its snapshot that another one should be written."""
        factor = COMPACT_FACTOR if factor is None else factor
        return self._records > factor * count_of(self.image) + COMPACT_SLACK_RECORDS

    def plan_snapshot(self) -> Callable[[], SnapshotId]:
        """What writes a snapshot of all that the log holds now, in any thread.

        All of that has to be on disk before. :meth:`begin_behind` has to follow. Raises OSError.
        """
        self._records = 0  # from here on they are those behind it
        return partial(
            write_snapshot,
            self._fs,
            self.partition.log.directory,
            self.image,
            self._clock.now_ms(),
            self._last_timestamp_ms,
        )

    def begin_behind(self, snapshot: SnapshotId) -> None:
        """Let the log begin behind a snapshot that is on disk. Raises LogError."""
        if self.partition.log.active.size:
            self.partition.flushes.roll(self._clock.now_ms())
        self.partition.cleanup.delete_records_before(snapshot.end_offset)

    def write_snapshot(self, image: MetadataImage | None = None) -> None:
        """Write the snapshot of all that the log holds, which begins behind it then.

        ``image`` is what it adds up to, if that is not installed. Raises LogError, OSError.
        """
        image = self.image if image is None else image
        self.force()
        now_ms, last_ms = self._clock.now_ms(), self._last_timestamp_ms
        at = self.partition.log.directory
        self.begin_behind(write_snapshot(self._fs, at, image, now_ms, last_ms))
        self._records = 0

    # --- the start -------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """That of the log's leader, which is this broker: it grows with every start, from 1."""
        return self.partition.marks.leader_epoch

    @property
    def next_offset(self) -> int:
        """The offset of the next record."""
        return self.partition.log_end_offset

    @property
    def broker_epoch(self) -> int:
        """The offset of the record by which this broker has registered; -1 if it has not."""
        own = self.image.brokers.get(self._node_id)
        return -1 if own is None else own.epoch

    def begin_epoch(
        self, end_points: Sequence[BrokerEndpoint] = (), *, is_broker: bool = True
    ) -> None:
        """Begin an epoch of the log and of all partitions: the broker starts, and is registered.

        A node that is no broker but the controller of others begins no more than the log's. Raises
        MetadataError where there are others, and none of them could come.
        """
        self.has_own_broker = is_broker
        others = sorted(self.image.brokers.keys() - {self._node_id})
        if is_broker and others:
            raise MetadataError(
                f"this node is the controller of other brokers {others}: it needs its listener of"
                " controller.listener.names, or they have to be unregistered first"
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
        again = self._loader.change_all(activation.leads_again(self._node_id), (self._node_id,))
        self._append([encode(one) for one in head], head, again)

    # --- topics ----------------------------------------------------------------------------------

    def was_deleted(self, topic_id: uuid.UUID) -> bool:
        """Whether a topic of this id was deleted, as far as the log remembers."""
        return topic_id in self._loader.removed


def _old_metadata() -> OldMetadata:
    from fencepost.coordinator.metadata.conversion import OldMetadata  # noqa: PLC0415 - needed once in a directory's life

    return OldMetadata()


def new_topic_id() -> uuid.UUID:
    """A random id that does not look like an option of Kafka's tools when written in base64.

    Source: ``Uuid.randomUuid``, which avoids the reserved ids and a leading dash.
    """
    topic_id = uuid.uuid4()
    while topic_id.bytes[0] >> 2 == _BASE64_DASH:
        topic_id = uuid.uuid4()
    return topic_id


_BASE64_DASH = 62
