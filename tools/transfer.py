"""Moves partition directories between this broker and Apache Kafka, while both are stopped.

The files have the same format on both sides; topic records and ids, leader epochs, producer ids and
checkpoints differ. An import copies directories, checks every batch, and creates the topic; an
export copies them over the empty directories of a topic that Kafka has created.

An interrupted import creates no topic: until all partitions are checked, their copies have names
that a start ignores, and the topic's record is written last.

Source: ``LogManager.loadLog``, ``UnifiedLog.parseTopicPartitionName`` for names of directories.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from fencepost.cluster.controller.adoption import AdoptedTopic, local_partition
from fencepost.cluster.controller.topics import check_partition_limit
from fencepost.cluster.image import UNASSIGNED, TopicImage
from fencepost.coordinator.config.broker_config import check_topic_configs, log_config
from fencepost.coordinator.config.key import nearest
from fencepost.coordinator.metadata.names import INTERNAL_TOPICS, METADATA_TOPIC
from fencepost.coordinator.metadata.state_topics import safe_log_config
from fencepost.coordinator.storage.storage import Storage
from fencepost.logcore.batch import MAGIC, parse_header
from fencepost.logcore.bounds import MAX_PRODUCER_ID, BoundError, bounded
from fencepost.logcore.checkpoints import (
    CLEAN_SHUTDOWN,
    CLEANER_CHECKPOINT,
    HIGH_WATERMARK_CHECKPOINT,
    LEADER_EPOCH_CHECKPOINT,
    LOCK,
    LOG_START_CHECKPOINT,
    RECOVERY_POINT_CHECKPOINT,
    CheckpointError,
    read_epochs,
    read_offsets,
    read_partition_metadata,
    write_epochs,
    write_offsets,
    write_partition_metadata,
)
from fencepost.logcore.errors import CorruptRecordError, InvalidRecordError, LogError
from fencepost.logcore.fs import FileSystem, opened
from fencepost.logcore.log import CLEANED_SUFFIX, SNAPSHOT_SUFFIX, SWAP_SUFFIX
from fencepost.logcore.partition import DELETE_SUFFIX, Partition
from fencepost.logcore.repair import copy_file
from fencepost.logcore.segment import LOG_SUFFIX, SEGMENT_SUFFIXES
from fencepost.logcore.values import dataclass
from fencepost.tools.decisions import controller_of, decide
from fencepost.tools.figures import check_files, check_state

IMPORT_SUFFIX: Final = ".import"
EPOCH_POSITION: Final = 12
"""The position of the leader epoch in a batch; the CRC does not cover the leader epoch."""

_NAME = re.compile(r"(?P<topic>[a-zA-Z0-9._-]{1,249})-(?P<index>[0-9]+)")
_SEGMENT_FILE = re.compile(
    r"[0-9]{20}("
    + "|".join(re.escape(suffix) for suffix in (*SEGMENT_SUFFIXES, SNAPSHOT_SUFFIX))
    + r")("
    + "|".join(re.escape(suffix) for suffix in (CLEANED_SUFFIX, SWAP_SUFFIX))
    + r")?"
)


class TransferError(Exception):
    """Directories cannot be moved; the message says which and why. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class CopiedPartition:
    """One partition that was copied, without ``cut_bytes`` of torn data at its end.

    ``highest_producer_id`` is the highest of all its batches, −1 without one.
    """

    topic: str
    partition: int
    topic_id: uuid.UUID
    log_start_offset: int
    log_end_offset: int
    last_stable_offset: int
    leader_epoch: int
    cut_bytes: int
    highest_producer_id: int


@dataclass(frozen=True, slots=True)
class _SourceLog:
    path: Path
    index: int
    topic_id: uuid.UUID | None
    log_start_offset: int
    compacted_below: int


@dataclass(frozen=True, slots=True)
class _StagedPartition:
    """A checked copy that does not have its final name yet."""

    moved: CopiedPartition
    path: str


def import_directories(
    storage: Storage,
    directories: Sequence[Path],
    configs: Mapping[str, str],
    *,
    topics: Sequence[str] = (),
    partitions: int | None = None,
    accept_damage: bool = False,
) -> list[CopiedPartition]:
    """Copy partition directories ``…/TOPIC-INDEX`` into opened ``storage`` as new topics.

    If ``topics`` are named, other topics are skipped. All partition directories of a topic must be
    given together, numbered from 0 without gaps. If ``partitions`` is given, each topic gets that
    many partitions, and the ones without a directory are empty. Topic ids are kept if they are
    unused. ``configs`` become the settings of every topic that is not a coordinator's.
    Producer ids and leader epochs continue above those found. Raises TransferError, LogError,
    OSError; topics that were completed before the error stay.
    """
    for name in storage.fs.list_directory(storage.directory) or ():
        if name.endswith(IMPORT_SUFFIX):
            storage.fs.remove_tree(f"{storage.directory}/{name}")
    check_topic_configs(storage.config, configs)
    by_topic = _sources(storage, _select_directories(directories, topics), partitions)
    moved: list[CopiedPartition] = []
    for topic, sources in by_topic.items():
        count = len(sources) if partitions is None else partitions
        moved += _import_topic(storage, topic, sources, count, configs, accept_damage=accept_damage)
    return moved


def _select_directories(directories: Sequence[Path], topics: Sequence[str]) -> list[Path]:
    """Return the directories of ``topics``, or all if none is named and the names are unambiguous.

    A shell expands ``orders-*`` to the directories of ``orders-eu`` as well.
    """
    matches = ((path, _NAME.fullmatch(path.absolute().name)) for path in directories)
    names = {path: match["topic"] for path, match in matches if match is not None}
    given = set(names.values())
    for topic in topics:
        if topic not in given:
            raise TransferError(f"none of the directories is of {topic}")
    if topics:
        return [path for path in directories if names.get(path) in topics]
    for name in sorted(given):
        begins = next((path for path in sorted(given) if name.startswith(f"{path}-")), None)
        if begins is not None:
            raise TransferError(
                f"{begins}-* names directories of {begins} and of {name}: say which topics are"
                " meant with --topic, which may be repeated"
            )
    return list(directories)


def _left_out(sources: Sequence[_SourceLog], topic: str) -> list[str]:
    """Return the directories of ``topic`` that are not in ``sources``, but beside them on disk."""
    given = {source.path for source in sources}
    beside = (
        sibling for path in given for sibling in path.parent.iterdir() if sibling not in given
    )
    return sorted(
        sibling.name
        for sibling in set(beside)
        if (match := _NAME.fullmatch(sibling.name)) and match["topic"] == topic and sibling.is_dir()
    )


def _sources(
    storage: Storage, directories: Sequence[Path], partitions: int | None
) -> dict[str, list[_SourceLog]]:
    by_topic: dict[str, list[_SourceLog]] = {}
    for parent in {path.absolute().parent for path in directories}:
        if parent.resolve() == Path(storage.directory).resolve():
            raise TransferError(f"{parent} is the data directory itself")
        refuse_if_in_use(storage.fs, parent)
    for path in (directory.absolute() for directory in directories):
        match = _NAME.fullmatch(path.name)
        if match is None:
            raise TransferError(f"{path} is not named like a partition, TOPIC-INDEX")
        topic, index = match["topic"], int(match["index"])
        if topic == METADATA_TOPIC:
            raise TransferError(f"{path}: each broker keeps its own {METADATA_TOPIC}")
        try:
            topic_id = read_partition_metadata(storage.fs, str(path))
            starts, flushed, cleaned = (
                read_offsets(storage.fs, str(path.parent), name)
                for name in (LOG_START_CHECKPOINT, RECOVERY_POINT_CHECKPOINT, CLEANER_CHECKPOINT)
            )
        except CheckpointError as error:
            raise TransferError(f"{path}: {error}") from error
        key = topic, index
        # Below the recovery point and the cleaner's checkpoint, gaps are due to compaction.
        compacted_below = max(flushed.get(key, 0), cleaned.get(key, 0))
        source = _SourceLog(path, index, topic_id, starts.get(key, 0), compacted_below)
        try:
            check_files(storage.fs, path)
        except BoundError as error:
            raise TransferError(f"{path}: {error}") from error
        by_topic.setdefault(topic, []).append(source)
    for topic, sources in by_topic.items():
        sources.sort(key=lambda source: source.index)
        indexes = [source.index for source in sources]
        wanted = range(len(sources) if partitions is None else partitions)
        if len(set(indexes)) < len(indexes) or not set(indexes) <= set(wanted):
            raise TransferError(
                f"the partitions of {topic} must be given together, from 0 on, each once;"
                " --partitions says how many there are if some have no directory"
            )
        if partitions is None and (beside := _left_out(sources, topic)):
            raise TransferError(
                f"{', '.join(beside)} of {topic} was not given: give all of its partitions,"
                " or their number with --partitions"
            )
        if len({source.topic_id for source in sources} - {None}) > 1:
            raise TransferError(f"the directories of {topic} belong to several topics of that name")
        if storage.metadata.topic(topic) is not None:
            raise TransferError(f"there is a topic {topic} already")
        if topic not in INTERNAL_TOPICS and storage.metadata.colliding(topic) is not None:
            raise TransferError(f"{topic} collides with {storage.metadata.colliding(topic)}")
        check_partition_limit(controller_of(storage).view, 1, len(wanted))
    return by_topic


def refuse_if_in_use(fs: FileSystem, directory: Path) -> None:
    """Raise TransferError if a broker of Apache Kafka or Fencepost uses the data directory."""
    path = directory / LOCK
    if not path.exists():
        return
    try:
        fs.close(fs.lock(str(path)))
    except BlockingIOError as error:
        raise TransferError(f"{directory} is in use by a running broker: stop it first") from error


def _import_topic(
    storage: Storage,
    name: str,
    sources: Sequence[_SourceLog],
    partitions: int,
    configs: Mapping[str, str],
    *,
    accept_damage: bool,
) -> list[CopiedPartition]:
    fs, metadata = storage.fs, storage.metadata_log
    topic_id = next((source.topic_id for source in sources if source.topic_id is not None), None)
    if (
        topic_id is None
        or metadata.topic_by_id(topic_id) is not None
        or metadata.was_deleted(topic_id)
    ):
        topic_id = uuid.uuid4()
    topic_configs = metadata.internal_configs(name) if name in INTERNAL_TOPICS else configs
    try:
        staged = [
            _stage(storage, name, source, topic_id, topic_configs, accept_damage=accept_damage)
            for source in sources
        ]
    except (TransferError, LogError, OSError):
        for source in sources:
            fs.remove_tree(_staging_path(storage, name, source.index))
        raise
    highest_id = max(partition.moved.highest_producer_id for partition in staged)
    decide(storage, lambda controller: controller.reserve_producer_ids(highest_id + 1))
    # All partitions get one leader epoch, above all epochs found.
    epoch = 1 + max(partition.moved.leader_epoch for partition in staged)
    registration = local_partition(storage.node_id, UNASSIGNED, epoch)
    topic = TopicImage(name, topic_id, (registration,) * partitions)
    for partition in staged:
        fs.rename(partition.path, f"{storage.directory}/{name}-{partition.moved.partition}")
    fs.sync_directory(storage.directory)
    extents = {
        partition.moved.partition: (
            partition.moved.log_start_offset,
            partition.moved.log_end_offset,
        )
        for partition in staged
    }
    storage.logs.adopt(topic, topic_configs, extents)
    adopted = AdoptedTopic(name, topic_id, partitions, topic_configs, epoch)
    decide(storage, lambda controller: controller.adopt_topic(adopted))
    return [partition.moved for partition in staged]


def _staging_path(storage: Storage, topic: str, index: int) -> str:
    return f"{storage.directory}/{topic}-{index}{IMPORT_SUFFIX}"


def _stage(
    storage: Storage,
    topic: str,
    source: _SourceLog,
    topic_id: uuid.UUID,
    configs: Mapping[str, str],
    *,
    accept_damage: bool,
) -> _StagedPartition:
    """Copy a directory, and recover the copy as after a crash; the recovery checks every batch.

    A half-written batch at the end is left out, as in any recovery.
    """
    fs, path = storage.fs, _staging_path(storage, topic, source.index)
    _copy_directory(fs, str(source.path), path)
    write_partition_metadata(fs, path, topic_id)
    try:
        last_epoch = max((epoch for epoch, _ in read_epochs(fs, path) or ()), default=0)
    except CheckpointError:
        last_epoch = 0
    partition = Partition.open(
        fs,
        path,
        topic=topic,
        index=source.index,
        topic_id=topic_id,
        config=safe_log_config(topic, log_config(storage.config, configs)),
        clock=storage.clock,
        clean=False,
        log_start_offset=source.log_start_offset,
        leader_epoch=last_epoch,
        compacted_below=source.compacted_below,
        is_replica=True,
        keeps_removed=False,
    )
    report = partition.recovery
    if report is not None and report.valid_data_removed and not accept_damage:
        partition.close()
        raise TransferError(
            f"{source.path}: {report.reason}; {report.truncated_bytes} bytes from there on would be"
            " left out, good batches among them (--accept-damage does so)"
        )
    highest_id, highest_epoch = (
        max((producer.producer_id for producer in partition.producers.view()), default=-1),
        last_epoch,
    )
    try:
        bounded("the producer id of a snapshot", highest_id, -1, MAX_PRODUCER_ID)
        for header, batch in partition.reader.read_all():
            highest_epoch = max(highest_epoch, header.leader_epoch)
            highest_id = max(highest_id, header.producer_id, check_state(topic, header, batch))
    except (BoundError, CorruptRecordError, InvalidRecordError) as error:
        partition.close()
        raise TransferError(f"{source.path}: {error}") from error
    moved = CopiedPartition(
        topic,
        source.index,
        topic_id,
        partition.log_start_offset,
        partition.log_end_offset,
        partition.last_stable_offset,
        highest_epoch,
        0 if report is None else report.truncated_bytes,
        highest_id,
    )
    partition.close()
    return _StagedPartition(moved, path)


# --- to Apache Kafka ---


def export_topic(
    storage: Storage, name: str, target: Path, *, replace: bool = False
) -> list[CopiedPartition]:
    """Copy a topic over the directories that a stopped Apache Kafka has created for it.

    ``target`` is Kafka's log directory; it must have the topic with the same number of partitions,
    and these must be empty unless ``replace``. All batches of the copy get leader epoch 0: if they
    had a higher epoch than Kafka's partition, clients would see the epoch go back, as after data
    loss. The partitions of ``name`` in ``storage`` are closed. Raises TransferError, LogError,
    OSError.
    """
    fs = storage.fs
    topic = storage.metadata.topic(name)
    if topic is None:
        raise TransferError(f"there is no topic {name}{nearest(name, storage.metadata.topics)}")
    if name in INTERNAL_TOPICS:
        raise TransferError(
            f"{name} is a coordinator's: groups move by their offsets, transactions by ending"
        )
    refuse_if_in_use(fs, target)
    ids = _ids_in(fs, target, topic, replace=replace)
    moved: list[CopiedPartition] = []
    replaced: list[tuple[str, str]] = []
    for index, topic_id in enumerate(ids):
        partition = storage.logs.partition(name, index)
        stable = partition.last_stable_offset
        partition.close()
        staging = str(target / _replaced_name(name, index))
        _copy_directory(fs, partition.log.directory, staging)
        highest_id = _restart_epochs(fs, staging, partition.log_start_offset)
        start, end = partition.log_start_offset, partition.log_end_offset
        moved.append(CopiedPartition(name, index, topic_id, start, end, stable, 0, 0, highest_id))
        write_partition_metadata(fs, staging, topic_id)
        replaced.append((staging, str(target / f"{name}-{index}")))
    _forget_checkpoints(fs, str(target), moved)
    for staging, place in replaced:
        # Staged and replaced directories end in -delete, so Kafka deletes them when it starts: the
        # replaced ones, and the staged ones if the export was interrupted.
        fs.rename(place, str(target / _replaced_name(name, int(place.rpartition("-")[2]))))
        fs.rename(staging, place)
    fs.sync_directory(str(target))
    return moved


def replaced_by(storage: Storage, name: str, target: Path) -> list[tuple[Path, int]]:
    """Return the directories in ``target`` that an export would replace, and their logs' bytes.

    Raises TransferError if an export with ``replace`` would raise it.
    """
    topic = storage.metadata.topic(name)
    if topic is None:
        raise TransferError(f"there is no topic {name}{nearest(name, storage.metadata.topics)}")
    _ids_in(storage.fs, target, topic, replace=True)
    places = (target / f"{name}-{index}" for index in range(len(topic.partitions)))
    held = (
        (path, sum(file.stat().st_size for file in path.glob(f"*{LOG_SUFFIX}"))) for path in places
    )
    return [(path, size) for path, size in held if size]


def _ids_in(fs: FileSystem, target: Path, topic: TopicImage, *, replace: bool) -> list[uuid.UUID]:
    ids: list[uuid.UUID] = []
    for index in range(len(topic.partitions)):
        path = target / f"{topic.name}-{index}"
        try:
            topic_id = read_partition_metadata(fs, str(path))
        except CheckpointError as error:
            raise TransferError(f"{path}: {error}") from error
        if topic_id is None:
            raise TransferError(
                f"{path} is not a partition of Kafka: create {topic.name} there with"
                f" {len(topic.partitions)} partitions, then stop Kafka"
            )
        logs = [file for file in path.iterdir() if file.suffix == LOG_SUFFIX]
        if not replace and any(log.stat().st_size for log in logs):
            raise TransferError(f"{path} has records; --replace deletes them")
        ids.append(topic_id)
    if (target / f"{topic.name}-{len(topic.partitions)}").exists():
        raise TransferError(
            f"{topic.name} has more than {len(topic.partitions)} partitions in {target}"
        )
    return ids


def _replaced_name(topic: str, index: int) -> str:
    return f"{topic}-{index}.{uuid.uuid4().hex}{DELETE_SUFFIX}"


def _restart_epochs(fs: FileSystem, directory: str, log_start_offset: int) -> int:
    """Set the leader epoch of every batch in a copy to 0; return the highest producer id, or −1."""
    empty, highest_id = True, -1
    for name in fs.list_directory(directory) or ():
        if not name.endswith(LOG_SUFFIX):
            continue
        with opened(fs, fs.open(f"{directory}/{name}")) as handle:
            position, size = 0, fs.size(handle)
            empty = empty and not size
            while position < size:
                header = parse_header(fs.read(handle, 61, position))
                if header.magic == MAGIC:
                    highest_id = max(highest_id, header.producer_id)
                if header.magic == MAGIC and header.leader_epoch:
                    fs.write(handle, (bytes(4),), position + EPOCH_POSITION)
                position += header.size
            fs.sync(handle)
    write_epochs(fs, directory, [] if empty else [(0, log_start_offset)])
    return highest_id


def _forget_checkpoints(fs: FileSystem, target: str, moved: Sequence[CopiedPartition]) -> None:
    """Make Kafka recover the new files, with their own log start offsets and high watermarks."""
    with suppress(OSError):
        fs.remove(f"{target}/{CLEAN_SHUTDOWN}")
    starts = {
        (partition.topic, partition.partition): partition.log_start_offset for partition in moved
    }
    ends = {(partition.topic, partition.partition): partition.log_end_offset for partition in moved}
    for name, lines in (
        (RECOVERY_POINT_CHECKPOINT, dict.fromkeys(starts, 0)),
        (LOG_START_CHECKPOINT, starts),
        (HIGH_WATERMARK_CHECKPOINT, ends),
        (CLEANER_CHECKPOINT, {}),
    ):
        try:
            offsets = read_offsets(fs, target, name)
        except CheckpointError as error:
            raise TransferError(f"{target}/{name}: {error}") from error
        kept = {key: value for key, value in offsets.items() if key not in starts}
        write_offsets(fs, target, name, kept | lines)


# --- files ---


def _copy_directory(fs: FileSystem, source: str, target: str) -> None:
    """Copy segments, snapshots and epochs; leave out files that were being deleted."""
    names = fs.list_directory(source)
    if names is None:
        raise TransferError(f"{source} does not exist")
    fs.remove_tree(target)
    fs.make_directory(target)
    for name in sorted(names):
        if name == LEADER_EPOCH_CHECKPOINT or _SEGMENT_FILE.fullmatch(name):
            copy_file(fs, f"{source}/{name}", f"{target}/{name}")
    fs.sync_directory(target)
