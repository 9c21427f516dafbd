"""All partitions of this broker: found, opened, recovered, checkpointed, deleted, closed.

Order of a start (kafka: ``LogManager.loadLogs``): the clean-shutdown mark is read and removed
*before* anything is opened, the checkpoints are read, directories that belong to no topic are put
aside, and every partition that has a directory is opened; after a clean shutdown nothing is checked
again. A partition that was never used has no directory and costs nothing until it is asked for.

Checkpoints may be lost or stale at any time: they only say how little work the next start has.
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
from fencepost.coordinator.data.checkpoint_files import CheckpointFiles, Offsets
from fencepost.coordinator.data.removals import Removals
from fencepost.coordinator.errors import UnknownTopicOrPartitionError
from fencepost.coordinator.metadata.log import METADATA_LOG_CONFIG
from fencepost.coordinator.metadata.metadata import Metadata
from fencepost.coordinator.metadata.names import HISTORY_TOPIC, METADATA_TOPIC, METADATA_TOPIC_ID
from fencepost.coordinator.metadata.publication import Subscriber
from fencepost.coordinator.metadata.snapshots import snapshots
from fencepost.coordinator.metadata.state_topics import harm, safe_configs, safe_log_config
from fencepost.coordinator.runtime.background import SLICE_MS, Pace, spawn
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
"""Logs that are forced to disk at the same time when the broker stops: a journaling file system
settles the fsyncs that overlap with one commit of its journal."""

CHECKPOINTS: Final = (
    RECOVERY_POINT_CHECKPOINT,
    LOG_START_CHECKPOINT,
    HIGH_WATERMARK_CHECKPOINT,
    CLEANER_CHECKPOINT,
)
CUT: Final = (RECOVERY_POINT_CHECKPOINT, CLEANER_CHECKPOINT)
"""Those that must not point beyond the end of a log that has become shorter."""

LOG_CUT: Final = "log cut"
LOG_SHORTER: Final = "log shorter than it was"
DAMAGE_LEFT: Final = "damage left in the log"
WHAT_A_START_DID: Final = frozenset({LOG_CUT, LOG_SHORTER, DAMAGE_LEFT})
"""Events of this module's log lines about what an open has removed of a log, or found in it."""

_DIRECTORY = re.compile(r"(?P<topic>[a-zA-Z0-9._-]+)-(?P<index>[0-9]+)")

TopicPartition = tuple[str, int]

_log = structlog.get_logger(__name__)


class LogManager:
    """``broker.logs``. ``directory`` exists and is locked by this process.

    ``read_metadata`` gives what is known of topics before any of their logs is opened. Where that
    is in a log of this broker's own, it is given what opens it; no request finds that log here,
    whatever the API. Raises what that does, and StorageError; nothing stays open then.
    ``force_metadata`` makes the latest image durable, or raises LogError.

    Without ``loads`` that log is all that is opened: which others there are is not known before
    :meth:`load`.
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
        """The producers that all partitions together remember."""
        self._metadata_partition: Partition | None = None
        self._ignored: set[tuple[str, str, str | None]] = set()
        """Topic, key and value of settings whose being ignored has been logged."""
        self.opened: dict[TopicPartition, Partition] = {}
        """The partitions of topics: what requests may name. The metadata log is none of them."""
        self._complete = False
        self._clean = True
        self._stale = False
        self._unconfigured: list[str] = []
        """Topics whose open logs have yet to follow a change of the broker's settings."""
        self._reconfiguring: asyncio.Task[None] | None = None
        self._doomed = 0
        """Partitions that were deleted so far."""
        self._cut = False
        self.removals = Removals(fs, directory, force_metadata)
        self.past_traffic = Traffic()
        """That of topics which were deleted since the start."""
        self._on_delete: list[Callable[[str, int], None]] = []
        self._last_broker_epoch = clean_shutdown_epoch(fs, directory)
        self.was_clean = take_clean_shutdown(fs, directory)
        """Whether the last shutdown closed every log."""
        self.broker_epoch = -1
        """What the mark of this run's clean shutdown says; -1 outside of a cluster."""
        self._files = CheckpointFiles(fs, directory)
        self._checkpointed = [self._files.read(name) for name in CHECKPOINTS]
        self._recovery_points, self._log_starts, self._high_watermarks, cleaned = self._checkpointed
        self.cleaned = cleaned
        """Where the last round of compaction on a partition ended."""
        try:
            self.metadata = read_metadata(self._open_metadata)
            """Which topics there are."""
            if loads:
                self.load(self.metadata)
        except BaseException:
            self.close()
            raise

    # --- start -----------------------------------------------------------------------------------

    def _open_metadata(self) -> Partition:
        """Open the log of this broker's own metadata, which begins behind its snapshot."""
        key = METADATA_TOPIC, 0
        for snapshot in snapshots(self._fs, f"{self._directory}/{METADATA_TOPIC}-0"):
            self._log_starts[key] = max(self._log_starts.get(key, 0), snapshot.end_offset)
        self._metadata_partition = self._open_partition(
            *key, METADATA_TOPIC_ID, METADATA_LOG_CONFIG, 0
        )
        return self._metadata_partition

    def load(self, metadata: Metadata) -> None:
        """Put directories without a topic of ``metadata`` aside, open those with one."""
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
            # It may be somebody's data.
            stray = self._rename(name, STRAY_SUFFIX)
            _log.warning("directory belongs to no topic", directory=name, renamed_to=stray)
        else:
            self._open_topic_partition(topic, index)

    def _forget_gone(self) -> None:
        """Drop checkpointed offsets of partitions that are not there.

        They must not be taken for those of a new partition of the same name: a log start offset
        that is too high would empty it, and a record that the cleaner takes for cleaned outlives
        the tombstone behind it. The files follow before the first new partition is made.
        """
        for offsets in self._checkpointed:
            for key in offsets.keys() - self.opened.keys() - {(METADATA_TOPIC, 0)}:
                del offsets[key]
                self._stale = True

    def _rename(self, name: str, suffix: str) -> str:
        """Let a directory have another name with ``suffix``; returns its new path."""
        suffix = f".{uuid.uuid4().hex}{suffix}"
        renamed = f"{self._directory}/{name[: MAX_NAME_BYTES - len(suffix)]}{suffix}"
        self._fs.rename(f"{self._directory}/{name}", renamed)
        return renamed

    # --- partitions ------------------------------------------------------------------------------

    def partition(self, topic: str, index: int) -> Partition:
        """The open partition; opened, and created on disk, if it was not used yet.

        Raises UnknownTopicOrPartitionError, and StorageError if it can't be opened.
        """
        found = self.opened.get((topic, index))
        if found is not None:
            return found
        return self._open_topic_partition(self.metadata.having(topic, index), index)

    def find(self, topic: str, index: int) -> Partition | None:
        """The open partition, or None if it does not exist."""
        try:
            return self.partition(topic, index)
        except UnknownTopicOrPartitionError:
            return None

    def find_open(self, key: TopicPartition) -> Partition | None:
        """The partition if it is open already."""
        return self.opened.get(key)

    @property
    def tables(self) -> Sequence[Mapping[TopicPartition, object]]:
        """What is known here of partitions: the open logs and the checkpointed offsets."""
        return self.opened, *self._checkpointed

    def __iter__(self) -> Iterator[Partition]:
        """All partitions that are open, the metadata log among them, in no order."""
        own = [] if self._metadata_partition is None else [self._metadata_partition]
        return iter([*own, *self.opened.values()])

    def is_offline(self, topic: str, index: int) -> bool:
        """Whether the file system has failed under an open partition."""
        partition = self.opened.get((topic, index))
        return partition is not None and partition.offline is not None

    def _open_topic_partition(
        self, topic: TopicImage, index: int, configs: Mapping[str, str] | None = None
    ) -> Partition:
        """``configs``: those of a topic that is not known yet."""
        own = self.metadata.topic_configs(topic.name) if configs is None else configs
        config, epoch = self._log_config(topic.name, own), topic.partitions[index].leader_epoch
        partition = self._open_partition(
            topic.name,
            index,
            topic.topic_id,
            config,
            epoch,
            # What was not committed before the start may not be told to anybody yet.
            is_replicated=len(topic.partitions[index].replicas) > 1,
            # What was fetched has holes, also where it is the only replica by now.
            is_replica=len(self.metadata.image.brokers) > 1,
        )
        self.opened[topic.name, index] = partition
        if self._cut and self._complete:
            self._cut = False
            self.checkpoint(*CUT)
        return partition

    def _log_config(self, topic: str, own: Mapping[str, str]) -> LogConfig:
        """Return the configuration of a topic's logs; settings that lose state are not heard."""
        if topic == HISTORY_TOPIC:
            own = {**own, **self.metadata.history_configs()}
        for key, why in harm(topic, own).items():
            if (ignored := (topic, key, own.get(key))) not in self._ignored:
                self._ignored.add(ignored)
                _log.warning(
                    "setting ignored", topic=topic, key=key, value=own.get(key), reason=why
                )
        return safe_log_config(topic, log_config(self._config, safe_configs(topic, own)))

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
            self.removals.make_way(key)
        except LogError as error:
            why = f"that the former topic was deleted is not on disk: {error}"
            raise StorageError(f"{path} cannot be made: {why}") from error
        if self._stale and self._complete:
            # The files still tell of partitions that are gone; this may be one of the same name.
            if not self.checkpoint():
                raise StorageError(f"{path} can not be made: the checkpoints can not be written")
            self._stale = bool(self._doomed_log_starts())
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
                # Of the only replica it tells no more than what is missing.
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
            raise StorageError(f"{path} can not be opened: {error}") from error
        partition.marks.on_offline = partial(_report_offline, partition.name, path)
        if partition.recovery is not None:
            _report_recovery(partition, partition.recovery)
        if partition.recovery_point < self._recovery_points.get(key, 0):
            # Recovery has cut the log: what comes now is not on disk because the file says so.
            self._cut = True
        if partition.log_end_offset < self.cleaned.get(key, 0):
            # Nor is it compacted because the file says so.
            self.cleaned[key] = partition.log_end_offset
            self._cut = True
        return partition

    def adopt(
        self,
        topic: TopicImage,
        configs: Mapping[str, str],
        extents: Mapping[int, tuple[int, int]],
    ) -> None:
        """Open directories that were put in place for a topic not yet known.

        ``extents``: log start and log end, all of it on disk, by the index of the partition, for
        each that has a directory. The checkpoints are written here: without them the next start
        would know neither the log starts nor that gaps below the ends are no loss.
        Raises StorageError.
        """
        for index, (log_start_offset, log_end_offset) in extents.items():
            self._log_starts[topic.name, index] = log_start_offset
            self._recovery_points[topic.name, index] = log_end_offset
            self._open_topic_partition(topic, index, configs)
        self.checkpoint()

    def _published(self, old: MetadataImage, new: MetadataImage) -> None:
        """Let open logs follow the settings of their topics."""
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
        """Let every open log follow the broker's settings; where there are many, soon."""
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
        """Call ``listener(topic, index)`` for each partition that is deleted from now on."""
        self._on_delete.append(listener)

    def doom_partition(self, key: TopicPartition) -> None:
        """Know nothing more of a deleted replica; :meth:`forget_doomed` has to follow.

        From now on a partition of the same name is another one.
        """
        for offsets in self._checkpointed:
            offsets.pop(key, None)
        for listener in self._on_delete:
            listener(*key)
        partition = self.opened.pop(key, None)
        if partition is not None:
            self.past_traffic.add(partition.traffic)
            self.removals.doom(partition)
        self._doomed += 1
        self._stale = True

    async def forget_doomed(self, partitions: Sequence[Partition]) -> None:
        """Rename the directories of deleted partitions, and forget their checkpointed offsets.

        The records of their deletions are durable. A new topic of the same name then has nothing to
        wait for.
        """
        await self.removals.rename_all(partitions)
        doomed, kept = self._doomed, self._doomed_log_starts()
        written = [await self.save(name) for name in CHECKPOINTS]
        if all(written) and doomed == self._doomed and not kept:
            self._stale = False

    def _doomed_log_starts(self) -> Offsets:
        """Log starts of deleted partitions that power loss may bring back.

        Their records before that were deleted, and must not come back with them.
        """
        marks = ((one, one.log_start_offset) for one in self.removals.doomed)
        return {(one.topic, one.index): start for one, start in marks if start}

    def plan_cut(self, partition: Partition, offset: int) -> set[str]:
        """Say no more of a log than is there once it is cut, and have the checkpoints say so too.

        ``offset`` is where it is to end, or to begin anew. Returns the names of the checkpoints
        that :meth:`save_all` has to write before the cut, which has to follow. StorageError.
        """
        key = partition.topic, partition.index
        before = self._marks_of(partition)
        partition.replica.plan_cut(offset)
        names = {name for name, at in self._marks_of(partition).items() if at < before[name]}
        if self.cleaned.get(key, 0) > offset:
            self.cleaned[key] = offset
            names.add(CLEANER_CHECKPOINT)
        return names

    async def save_all(self, names: Collection[str]) -> bool:
        """Write these checkpoints; whether all are on disk."""
        return all([await self.save(name) for name in CHECKPOINTS if name in names])

    @staticmethod
    def _marks_of(partition: Partition) -> dict[str, int]:
        """What three of the checkpoints say of an open log."""
        return {
            RECOVERY_POINT_CHECKPOINT: partition.recovery_point,
            LOG_START_CHECKPOINT: partition.log_start_offset,
            HIGH_WATERMARK_CHECKPOINT: partition.high_watermark,
        }

    # --- checkpoints and stop --------------------------------------------------------------------

    def checkpoint(self, *names: str) -> bool:
        """Write these checkpoints, or all, before anything else happens; whether it is done."""
        chosen = names or CHECKPOINTS
        written = [self._files.write(name, self._content(name)) for name in chosen]
        return all(written)

    async def save(self, name: str) -> bool:
        """Write a checkpoint while others have their turn; whether it is on disk."""
        return await self._files.save(name, self._content(name))

    def _content(self, name: str) -> Offsets:
        if name == CLEANER_CHECKPOINT:
            return dict(self.cleaned)
        marks = ((one, (one.topic, one.index)) for one in self)
        if name == RECOVERY_POINT_CHECKPOINT:
            return {key: one.recovery_point for one, key in marks}
        if name == LOG_START_CHECKPOINT:
            # The first file says the rest.
            starts = {key: one.log_start_offset for one, key in marks if one.log_start_offset}
            return self._doomed_log_starts() | starts
        return {key: one.high_watermark for one, key in marks}

    def close(self) -> None:
        """Flush and close every log, write the checkpoints, leave the clean-shutdown mark.

        Without the mark, because a log is off line or could not be closed, the next start checks
        what may be damaged.
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
            # The start failed half-way: what is on disk says more than we know.
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
        """Take a step of a close; what goes wrong costs the clean-shutdown mark."""
        try:
            return step()
        except Exception as error:  # noqa: BLE001 - the other logs have to be closed as well
            self._clean = False
            _log.error(
                "log not closed cleanly",
                partition=partition.name,
                cause=str(error),
                exc_info=None if isinstance(error, (LogError, OSError)) else error,
            )
            return None


def _report_recovery(partition: Partition, report: RecoveryReport) -> None:
    """Say what a start has removed of a log, and what it has found and left."""
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
