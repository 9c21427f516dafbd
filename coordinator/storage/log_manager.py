"""The partitions of this broker: opened, recovered, checkpointed, deleted and closed.

When the broker starts (kafka: ``LogManager.loadLogs``), it reads and removes the clean-shutdown
file *before* it opens any log. It then reads the checkpoints, renames directories without a topic,
and opens every partition that has a directory. After a clean shutdown no log is recovered. A
partition that was never used has no directory and takes no resources until its first use.

Checkpoints may be lost or stale at any time, because they only make the broker start faster.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

import structlog

from fencepost.cluster.image import (
    TOPIC_RESOURCE,
    MetadataImage,
    TopicImage,
    changed_configs,
)
from fencepost.coordinator.config.broker_config import BrokerConfig, log_config
from fencepost.coordinator.errors import UnknownTopicOrPartitionError
from fencepost.coordinator.metadata.log import METADATA_LOG_CONFIG
from fencepost.coordinator.metadata.metadata import Metadata
from fencepost.coordinator.metadata.names import HISTORY_TOPIC, METADATA_TOPIC, METADATA_TOPIC_ID
from fencepost.coordinator.metadata.publication import Subscriber
from fencepost.coordinator.metadata.snapshots import snapshots
from fencepost.coordinator.metadata.state_topics import (
    safe_configs,
    safe_log_config,
    unsafe_configs,
)
from fencepost.coordinator.runtime.background import SLICE_MS, Pace, spawn
from fencepost.coordinator.storage.checkpoint_files import CheckpointFiles, Offsets
from fencepost.coordinator.storage.removals import Removals
from fencepost.logcore.checkpoints import (
    CLEANER_CHECKPOINT,
    HIGH_WATERMARK_CHECKPOINT,
    LOG_START_CHECKPOINT,
    RECOVERY_POINT_CHECKPOINT,
    CheckpointError,
    clean_shutdown_epoch,
    read_partition_metadata,
    take_clean_shutdown,
    write_clean_shutdown,
)
from fencepost.logcore.clock import Clock, monotonic_s
from fencepost.logcore.config import LogConfig
from fencepost.logcore.durable import FlushScheduler
from fencepost.logcore.errors import LogError, StorageError
from fencepost.logcore.flush import Flush
from fencepost.logcore.fs import FileSystem
from fencepost.logcore.partition import DELETE_SUFFIX, MAX_NAME_BYTES, Partition
from fencepost.logcore.producer_limit import ProducerLimit
from fencepost.logcore.recovery import RecoveryReport
from fencepost.logcore.traffic import Traffic

STRAY_SUFFIX: Final = "-stray"

CLOSE_THREADS: Final = 32
"""How many logs are flushed concurrently at shutdown. A journaling file system completes
overlapping fsyncs with one commit of its journal."""

CHECKPOINTS: Final = (
    RECOVERY_POINT_CHECKPOINT,
    LOG_START_CHECKPOINT,
    HIGH_WATERMARK_CHECKPOINT,
    CLEANER_CHECKPOINT,
)
CUT: Final = (RECOVERY_POINT_CHECKPOINT, CLEANER_CHECKPOINT)
"""The checkpoints that must not exceed the end of a truncated log."""

LOG_CUT: Final = "log cut"
LOG_SHORTER: Final = "log shorter than it was"
DAMAGE_LEFT: Final = "damage left in the log"
WHAT_A_START_DID: Final = frozenset({LOG_CUT, LOG_SHORTER, DAMAGE_LEFT})
"""The log messages about records that were removed, or found damaged, when a log was opened."""

_DIRECTORY = re.compile(r"(?P<topic>[a-zA-Z0-9._-]+)-(?P<index>[0-9]+)")

TopicPartition = tuple[str, int]

_log = structlog.get_logger(__name__)


class LogManager:
    """All partitions of a node (``services.logs``).

    ``directory`` exists and is locked by this process. ``read_metadata`` returns the metadata. It
    is called before any topic's log is opened, with a function that opens this node's metadata log.
    ``force_metadata`` makes the latest image durable, or raises LogError. Without ``loads``, the
    logs of topics are opened only by :meth:`load`.

    Raises the errors of ``read_metadata``, and StorageError; after an error no log stays open.
    """

    def __init__(
        self,
        fs: FileSystem,
        directory: str,
        config: BrokerConfig,
        clock: Clock,
        flusher: FlushScheduler,
        read_metadata: Callable[[Callable[[], Partition]], Metadata],
        *,
        force_metadata: Callable[[], None],
        loads: bool = True,
    ) -> None:
        self._fs = fs
        self._directory = directory
        self._config = config
        self._clock = clock
        self._flusher = flusher
        self.producer_limit = ProducerLimit(config.int("max.producer.ids"))
        """The limit on the number of producers that all partitions together remember."""
        self._metadata_partition: Partition | None = None
        self._ignored: set[tuple[str, str, str | None]] = set()
        """Topic, key and value of ignored settings that have already been logged."""
        self.opened: dict[TopicPartition, Partition] = {}
        """The open partitions of topics, for access by requests. The metadata log is not among
        them."""
        self._complete = False
        self._clean = True
        self._stale = False
        self._unconfigured: list[str] = []
        """Topics whose open logs have not applied a change of the broker's settings yet."""
        self._reconfiguring: asyncio.Task[None] | None = None
        self._deleted = 0
        """The number of partitions deleted so far."""
        self._cut = False
        self.removals = Removals(fs, directory, force_metadata)
        self.past_traffic = Traffic()
        """The traffic of topics that have been deleted since the broker started."""
        self._on_delete: list[Callable[[str, int], None]] = []
        self._last_broker_epoch = clean_shutdown_epoch(fs, directory)
        self.was_clean = take_clean_shutdown(fs, directory)
        """Whether the last shutdown closed every log."""
        self.broker_epoch = -1
        """The broker epoch for this run's clean-shutdown file; -1 outside of a cluster."""
        self._files = CheckpointFiles(fs, directory)
        self._checkpointed = [self._files.read(name) for name in CHECKPOINTS]
        self._recovery_points, self._log_starts, self._high_watermarks, cleaned = self._checkpointed
        self.cleaned = cleaned
        """By partition, the offset at which the last compaction round ended."""
        try:
            self.metadata = read_metadata(self._open_metadata)
            """The topics and their settings."""
            if loads:
                self.load(self.metadata)
        except BaseException:
            self.close()
            raise

    # --- start -----------------------------------------------------------------------------------

    def _open_metadata(self) -> Partition:
        """Open this node's metadata log, which begins after its snapshot."""
        key = METADATA_TOPIC, 0
        for snapshot in snapshots(self._fs, f"{self._directory}/{METADATA_TOPIC}-0"):
            self._log_starts[key] = max(self._log_starts.get(key, 0), snapshot.end_offset)
        self._metadata_partition = self._open_partition(
            *key, METADATA_TOPIC_ID, METADATA_LOG_CONFIG, 0
        )
        return self._metadata_partition

    def load(self, metadata: Metadata) -> None:
        """Rename directories without a topic in ``metadata``, and open the others."""
        self.metadata = metadata
        metadata.subscribe(Subscriber.TOPIC_CONFIGS, self._published)
        self._config.listen(self._reconfigure_all)
        self.producer_limit.maximum = self._config.int("max.producer.ids")
        for name in sorted(self._fs.list_directory(self._directory) or ()):
            if not self._fs.is_directory(f"{self._directory}/{name}"):
                continue
            if name.endswith(DELETE_SUFFIX):
                self.removals.add_directory(f"{self._directory}/{name}")
                continue
            match = _DIRECTORY.fullmatch(name)
            if match is not None and match["topic"] != METADATA_TOPIC:
                self._load_directory(name, match["topic"], int(match["index"]))
        self._complete = True
        self._forget_gone()
        if self._cut:
            self._cut = False
            self.checkpoint(*CUT)

    def _load_directory(self, name: str, topic_name: str, index: int) -> None:
        path = f"{self._directory}/{name}"
        topic = self.metadata.topic(topic_name)
        try:
            topic_id = read_partition_metadata(self._fs, path)
        except CheckpointError as error:
            _log.warning("partition.metadata is damaged", directory=name, cause=str(error))
            topic_id = None
        if topic_id is not None and self.metadata.was_deleted(topic_id):
            _log.info("directory of a deleted topic", directory=name)
            self.removals.add_directory(self._rename(name, DELETE_SUFFIX))
        elif (
            topic is None
            or index >= len(topic.partitions)
            or (topic_id is not None and topic_id != topic.topic_id)
            or not self.metadata.hosts(topic, index)
        ):
            # Not deleted: the directory may contain data that is still needed.
            stray = self._rename(name, STRAY_SUFFIX)
            _log.warning("directory belongs to no topic", directory=name, renamed_to=stray)
        else:
            self._open_topic_partition(topic, index)

    def _forget_gone(self) -> None:
        """Drop checkpointed offsets of partitions that do not exist.

        Such offsets must not be applied to a new partition of the same name: a log start offset
        that is too high would empty its log, and records below a stale cleaner offset would outlive
        a later tombstone. The checkpoints are rewritten before the first new partition is created.
        """
        for offsets in self._checkpointed:
            for key in offsets.keys() - self.opened.keys() - {(METADATA_TOPIC, 0)}:
                del offsets[key]
                self._stale = True

    def _rename(self, name: str, suffix: str) -> str:
        """Rename a directory with a ``suffix``; return its new path."""
        suffix = f".{uuid.uuid4().hex}{suffix}"
        renamed = f"{self._directory}/{name[: MAX_NAME_BYTES - len(suffix)]}{suffix}"
        self._fs.rename(f"{self._directory}/{name}", renamed)
        return renamed

    # --- partitions ------------------------------------------------------------------------------

    def partition(self, topic: str, index: int) -> Partition:
        """Return the open partition; open it, and create it on disk, on first use.

        Raises UnknownTopicOrPartitionError, and StorageError if it cannot be opened.
        """
        opened = self.opened.get((topic, index))
        if opened is not None:
            return opened
        return self._open_topic_partition(self.metadata.having(topic, index), index)

    def find(self, topic: str, index: int) -> Partition | None:
        """Return the partition, opened if necessary; None if it does not exist."""
        try:
            return self.partition(topic, index)
        except UnknownTopicOrPartitionError:
            return None

    def find_open(self, key: TopicPartition) -> Partition | None:
        """Return the partition if it is already open."""
        return self.opened.get(key)

    @property
    def tables(self) -> Sequence[Mapping[TopicPartition, object]]:
        """Return the mappings by partition: the open logs and the checkpointed offsets."""
        return self.opened, *self._checkpointed

    def __iter__(self) -> Iterator[Partition]:
        """Iterate over all open partitions, including the metadata log, in no order."""
        metadata_partitions = [] if self._metadata_partition is None else [self._metadata_partition]
        return iter([*metadata_partitions, *self.opened.values()])

    def is_offline(self, topic: str, index: int) -> bool:
        """Return whether the file system has failed for an open partition."""
        partition = self.opened.get((topic, index))
        return partition is not None and partition.offline is not None

    def _open_topic_partition(
        self, topic: TopicImage, index: int, configs: Mapping[str, str] | None = None
    ) -> Partition:
        """Open a partition; ``configs`` are the settings of a topic that is not known yet."""
        overrides = self.metadata.topic_configs(topic.name) if configs is None else configs
        config, epoch = (
            self._log_config(topic.name, overrides),
            topic.partitions[index].leader_epoch,
        )
        partition = self._open_partition(
            topic.name,
            index,
            topic.topic_id,
            config,
            epoch,
            # Records not committed before the start must not be returned to clients yet.
            is_replicated=len(topic.partitions[index].replicas) > 1,
            # A replicated log may have offset gaps, even if it is the only replica by now.
            is_replica=len(self.metadata.image.brokers) > 1,
        )
        self.opened[topic.name, index] = partition
        if self._cut and self._complete:
            self._cut = False
            self.checkpoint(*CUT)
        return partition

    def _log_config(self, topic: str, overrides: Mapping[str, str]) -> LogConfig:
        """Return the configuration of a topic's logs; ignore settings that would lose state."""
        if topic == HISTORY_TOPIC:
            overrides = {**overrides, **self.metadata.history_configs()}
        for key, why in unsafe_configs(topic, overrides).items():
            if (ignored := (topic, key, overrides.get(key))) not in self._ignored:
                self._ignored.add(ignored)
                _log.warning(
                    "setting ignored", topic=topic, key=key, value=overrides.get(key), reason=why
                )
        return safe_log_config(topic, log_config(self._config, safe_configs(topic, overrides)))

    def _open_partition(
        self,
        topic: str,
        index: int,
        topic_id: uuid.UUID,
        config: LogConfig,
        leader_epoch: int,
        *,
        is_replicated: bool = False,
        is_replica: bool = False,
    ) -> Partition:
        key = topic, index
        path = f"{self._directory}/{topic}-{index}"
        try:
            self.removals.free_name(key)
        except LogError as error:
            why = f"that the former topic was deleted is not on disk: {error}"
            raise StorageError(f"{path} cannot be made: {why}") from error
        if self._stale and self._complete:
            # The checkpoints still have offsets of deleted partitions, perhaps of one with this
            # name.
            if not self.checkpoint():
                raise StorageError(f"{path} cannot be made: the checkpoints cannot be written")
            self._stale = bool(self._deleted_log_starts())
        try:
            partition = Partition.open(
                self._fs,
                path,
                topic=topic,
                index=index,
                topic_id=topic_id,
                config=config,
                clock=self._clock,
                clean=self.was_clean,
                recovery_point=self._recovery_points.get(key, 0),
                log_start_offset=self._log_starts.get(key, 0),
                # Without other replicas, this offset only serves to count lost records.
                high_watermark=self._high_watermarks.get(key, 0),
                is_replicated=is_replicated,
                is_replica=is_replica or is_replicated,
                leader_epoch=leader_epoch,
                compacted_below=self.cleaned.get(key, 0),
                producer_id_expiration_ms=self._config.int("producer.id.expiration.ms"),
                producer_limit=self.producer_limit,
                flusher=self._flusher,
                remove_later=self.removals.add_file,
            )
        except OSError as error:
            raise StorageError(f"{path} cannot be opened: {error}") from error
        partition.marks.on_offline = partial(_report_offline, partition.name, path)
        if partition.recovery is not None:
            _report_recovery(partition, partition.recovery)
        if partition.recovery_point < self._recovery_points.get(key, 0):
            # Recovery has truncated the log: later records are not on disk, contrary to the
            # checkpoint.
            self._cut = True
        if partition.log_end_offset < self.cleaned.get(key, 0):
            # The cleaner's checkpoint, too, is beyond the end of the log.
            self.cleaned[key] = partition.log_end_offset
            self._cut = True
        return partition

    def adopt(
        self,
        topic: TopicImage,
        configs: Mapping[str, str],
        extents: Mapping[int, tuple[int, int]],
    ) -> None:
        """Open directories that were moved into place for a topic not yet in the metadata.

        ``extents`` maps the index of each partition with a directory to its log start and end
        offset; the records are on disk. The checkpoints are written at once: without them a
        restarted broker would not know the log start offsets, and would report the gaps below the
        end offsets as lost records. Raises StorageError.
        """
        for index, (log_start_offset, log_end_offset) in extents.items():
            self._log_starts[topic.name, index] = log_start_offset
            self._recovery_points[topic.name, index] = log_end_offset
            self._open_topic_partition(topic, index, configs)
        self.checkpoint()

    def _published(self, old: MetadataImage, new: MetadataImage) -> None:
        """Apply changed topic settings to open logs."""
        for kind, name in changed_configs(old, new):
            topic = new.topics.get(name)
            if kind == TOPIC_RESOURCE and topic is not None:
                self._reconfigure(topic)

    def _reconfigure(self, topic: TopicImage) -> None:
        config = self._log_config(topic.name, self.metadata.topic_configs(topic.name))
        for index in range(len(topic.partitions)):
            partition = self.opened.get((topic.name, index))
            if partition is not None:
                partition.log.config = config

    def _reconfigure_all(self) -> None:
        """Apply the broker's settings to every open log, in the background if there are many."""
        self.producer_limit.maximum = self._config.int("max.producer.ids")
        self._unconfigured = list(self.metadata.topics)
        if self._reconfiguring is None:
            until = monotonic_s() + SLICE_MS / 1000
            while self._unconfigured and monotonic_s() < until:
                self._reconfigure_next()
            if self._unconfigured:
                self._reconfiguring = spawn(self._reconfigure_rest(), "settings of open logs")

    def _reconfigure_next(self) -> None:
        topic = self.metadata.topic(self._unconfigured.pop())
        if topic is not None:
            self._reconfigure(topic)

    async def _reconfigure_rest(self) -> None:
        pace = Pace()
        try:
            while self._unconfigured:
                await pace()
                self._reconfigure_next()
        finally:
            self._reconfiguring = None

    def on_delete(self, listener: Callable[[str, int], None]) -> None:
        """Register ``listener(topic, index)``, which is called for each partition deletion."""
        self._on_delete.append(listener)

    def mark_partition_deleted(self, key: TopicPartition) -> None:
        """Drop a deleted replica. Call :meth:`remove_deleted` afterwards.

        A partition of the same name that is opened later is a new partition.
        """
        for offsets in self._checkpointed:
            offsets.pop(key, None)
        for listener in self._on_delete:
            listener(*key)
        partition = self.opened.pop(key, None)
        if partition is not None:
            self.past_traffic.add(partition.traffic)
            self.removals.mark_deleted(partition)
        self._deleted += 1
        self._stale = True

    async def remove_deleted(self, partitions: Sequence[Partition]) -> None:
        """Rename the directories of deleted partitions, and drop their checkpointed offsets.

        The caller has made the records of their deletions durable. Once this returns, a new topic
        of the same name can be created without a wait.
        """
        await self.removals.rename_all(partitions)
        deleted, starts = self._deleted, self._deleted_log_starts()
        written = [await self.save(name) for name in CHECKPOINTS]
        if all(written) and deleted == self._deleted and not starts:
            self._stale = False

    def _deleted_log_starts(self) -> Offsets:
        """Return the log start offsets of deleted partitions that a power failure may restore.

        Records below these offsets were deleted earlier, and must stay deleted.
        """
        marks = ((log, log.log_start_offset) for log in self.removals.deleted)
        return {(log.topic, log.index): start for log, start in marks if start}

    def plan_truncation(self, partition: Partition, offset: int) -> set[str]:
        """Lower a log's offsets before its truncation; return the names of affected checkpoints."""
        key = partition.topic, partition.index
        before = self._marks_of(partition)
        partition.replica.plan_truncation(offset)
        names = {name for name, at in self._marks_of(partition).items() if at < before[name]}
        if self.cleaned.get(key, 0) > offset:
            self.cleaned[key] = offset
            names.add(CLEANER_CHECKPOINT)
        return names

    async def save_all(self, names: Collection[str]) -> bool:
        """Write these checkpoints; return whether all are on disk."""
        return all([await self.save(name) for name in CHECKPOINTS if name in names])

    @staticmethod
    def _marks_of(partition: Partition) -> dict[str, int]:
        """Return an open log's offsets for three of the checkpoints, by checkpoint."""
        return {
            RECOVERY_POINT_CHECKPOINT: partition.recovery_point,
            LOG_START_CHECKPOINT: partition.log_start_offset,
            HIGH_WATERMARK_CHECKPOINT: partition.high_watermark,
        }

    # --- checkpoints and stop --------------------------------------------------------------------

    def checkpoint(self, *names: str) -> bool:
        """Write these checkpoints, by default all, synchronously; return whether that succeeded."""
        chosen = names or CHECKPOINTS
        written = [self._files.write(name, self._content(name)) for name in chosen]
        return all(written)

    async def save(self, name: str) -> bool:
        """Write a checkpoint without blocking; return whether it is on disk."""
        return await self._files.save(name, self._content(name))

    def _content(self, name: str) -> Offsets:
        if name == CLEANER_CHECKPOINT:
            return dict(self.cleaned)
        marks = ((log, (log.topic, log.index)) for log in self)
        if name == RECOVERY_POINT_CHECKPOINT:
            return {key: log.recovery_point for log, key in marks}
        if name == LOG_START_CHECKPOINT:
            # A missing entry means that the log starts with its first file.
            starts = {key: log.log_start_offset for log, key in marks if log.log_start_offset}
            return self._deleted_log_starts() | starts
        return {key: log.high_watermark for log, key in marks}

    def close(self) -> None:
        """Flush and close every log, write the checkpoints and the clean-shutdown file.

        If a log is offline or could not be closed, the clean-shutdown file is not written, and the
        logs that may be damaged are recovered when the broker starts again.
        """
        self._unconfigured.clear()
        self._files.close()
        planned: list[tuple[Partition, Flush]] = []
        for partition in self:
            flush = self._closed(partition, partition.plan_close)
            if flush is None:
                self._closed(partition, partial(partition.finish_close, None, None))
            else:
                planned.append((partition, flush))
        with ThreadPoolExecutor(CLOSE_THREADS, thread_name_prefix="close") as threads:
            for (partition, flush), failure in zip(
                planned, threads.map(Flush.run, (flush for _, flush in planned)), strict=True
            ):
                self._closed(partition, partial(partition.finish_close, flush, failure))
        clean = self._clean and all(partition.offline is None for partition in self)
        if not self._complete:
            # The broker has failed to start: the checkpoints on disk have more entries.
            if (
                clean
                and self.was_clean
                and not self.opened
                and self._metadata_partition is not None
            ):
                write_clean_shutdown(self._fs, self._directory, self._last_broker_epoch)
            return
        self.checkpoint()
        if clean:
            write_clean_shutdown(self._fs, self._directory, self.broker_epoch)

    def _closed(self, partition: Partition, step: Callable[[], Flush | None]) -> Flush | None:
        """Run a step of a close; after an error no clean-shutdown file is written."""
        try:
            return step()
        except Exception as error:  # noqa: BLE001 - the other logs must be closed
            self._clean = False
            _log.error(
                "log not closed cleanly",
                partition=partition.name,
                cause=str(error),
                exc_info=None if isinstance(error, (LogError, OSError)) else error,
            )
            return None


def _report_recovery(partition: Partition, report: RecoveryReport) -> None:
    """Log which records the recovery of a log has removed, and which damage remains."""
    for damage in report.damaged:
        _log.error(
            DAMAGE_LEFT,
            partition=partition.name,
            offset=damage.offset,
            next_offset=damage.next_offset,
            cause=damage.reason,
        )
    if not report.reason and not report.lost_offsets:
        return
    tell = _log.error if report.is_loss else _log.warning
    tell(
        LOG_CUT if report.reason else LOG_SHORTER,
        partition=partition.name,
        log_end_offset=partition.log_end_offset,
        records=report.removed_records,
        bytes=report.truncated_bytes,
        cause=report.reason or "the files end before what was on disk or acknowledged",
        acknowledged_offsets_lost=report.lost_offsets,
        kept=[f"{partition.log.directory}/{name}" for name in report.kept],
    )


def _report_offline(name: str, directory: str, cause: StorageError) -> None:
    _log.error("partition off line", partition=name, directory=directory, cause=str(cause))
