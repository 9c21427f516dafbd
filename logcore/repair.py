"""Repairs of a partition directory that no broker has open: rebuilt indexes, a truncated log.

Source: the same code as a recovery's (:mod:`fencepost.logcore.recovery`), run on demand.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import field
from pathlib import Path
from typing import Final

from fencepost.logcore.batch import MAGIC, verify_crc
from fencepost.logcore.checkpoints import (
    CLEANER_CHECKPOINT,
    HIGH_WATERMARK_CHECKPOINT,
    LEADER_EPOCH_CHECKPOINT,
    LOG_START_CHECKPOINT,
    RECOVERY_POINT_CHECKPOINT,
    CheckpointError,
    has_copy,
    read_epochs,
    read_offsets,
    read_partition_metadata,
    write_offsets,
)
from fencepost.logcore.clock import Clock
from fencepost.logcore.config import LogConfig
from fencepost.logcore.dump import is_problem, read_batches
from fencepost.logcore.errors import CorruptRecordError, OffsetOutOfRangeError
from fencepost.logcore.fs import FileSystem, opened
from fencepost.logcore.log import SNAPSHOT_SUFFIX
from fencepost.logcore.partition import Partition
from fencepost.logcore.segment import LOG_SUFFIX, SEGMENT_SUFFIXES, file_stem
from fencepost.logcore.values import dataclass
from fencepost.logcore.verify import bases_of, verify_partition

COPY_BYTES: Final = 1 << 20
"""The number of bytes that each read of a copy requests."""


@dataclass(slots=True)
class TruncationPlan:
    """The batches that a truncation removes, from ``first_offset`` on. ``files`` are copied."""

    first_offset: int
    log_end_offset: int
    batches: int = 0
    records: int = 0
    log_bytes: int = 0
    files: list[str] = field(default_factory=list)


def copy_file(fs: FileSystem, source: str, target: str) -> None:
    """Copy a file and make its bytes survive power loss. Raises OSError."""
    with (
        opened(fs, fs.open_for_reading(source)) as reading,
        opened(fs, fs.open(target, create=True)) as writing,
    ):
        position = 0
        while data := fs.read(reading, COPY_BYTES, position):
            if fs.write(writing, (data,), position) != len(data):
                raise OSError(f"short write to {target}")
            position += len(data)
        fs.sync(writing)


def stale_indexes(fs: FileSystem, directory: str) -> list[dict[str, object]]:
    """Return the problems of the files that :func:`rebuild_indexes` rebuilds.

    Raises CorruptRecordError if a log itself is damaged, because the log is the reference.
    """
    rows = list(verify_partition(fs, directory))
    damaged = [row for row in rows if str(row["file"]).endswith(LOG_SUFFIX)]
    if damaged:
        raise CorruptRecordError(
            f"{damaged[0]['file']}: {damaged[0]['problem']}; truncate the log there first"
        )
    rebuilt = (*SEGMENT_SUFFIXES, SNAPSHOT_SUFFIX, LEADER_EPOCH_CHECKPOINT)
    return [row for row in rows if is_problem(row) and str(row["file"]).endswith(rebuilt)]


def rebuild_indexes(fs: FileSystem, directory: str, config: LogConfig, clock: Clock) -> None:
    """Build offset, time and transaction indexes, snapshots and epochs from the log.

    Raises CorruptRecordError as :func:`stale_indexes` does, StorageError, OSError.
    """
    stale_indexes(fs, directory)
    _open(fs, directory, config, clock).close()


def _open(fs: FileSystem, directory: str, config: LogConfig, clock: Clock) -> Partition:
    path = Path(directory)
    topic, _, index = path.name.rpartition("-")
    starts = read_offsets(fs, str(path.parent), LOG_START_CHECKPOINT)
    epochs: list[int] = []
    with suppress(CheckpointError):  # rebuild_indexes replaces this file too
        epochs = [epoch for epoch, _ in read_epochs(fs, directory) or ()]
    return Partition.open(
        fs,
        directory,
        topic=topic,
        index=int(index),
        topic_id=read_partition_metadata(fs, directory) or uuid.UUID(int=0),
        config=config,
        clock=clock,
        clean=False,
        log_start_offset=starts.get((topic, int(index)), 0),
        leader_epoch=max(epochs, default=0),
        is_replica=True,
        keeps_removed=False,
    )


def plan_truncation(fs: FileSystem, directory: str, offset: int) -> TruncationPlan:
    """Return the batches and files that a truncation to ``offset`` would remove.

    Raises OffsetOutOfRangeError unless the log holds the offset, and CorruptRecordError for damage
    before it: the log must then be truncated at the damage.
    """
    cut: TruncationPlan | None = None
    bases = bases_of(fs.list_directory(directory) or [])
    end = bases[0] if bases else 0
    for base in bases:
        name = file_stem(base) + LOG_SUFFIX
        before = cut is not None
        for _, header, batch in read_batches(fs, f"{directory}/{name}", payload=True):
            if isinstance(header, str):
                break
            end = header.next_offset
            if header.last_offset < offset:
                if header.magic == MAGIC:
                    verify_crc(batch, 0, header)
                continue
            if cut is None:
                cut = TruncationPlan(header.base_offset, end)
            cut.batches += 1
            cut.records += header.record_count
            cut.log_bytes += header.size
            cut.log_end_offset = end
        if cut is not None and (before or cut.batches):
            cut.files += list(_files_of(fs, directory, base))
    if cut is None or offset < bases[0]:
        raise OffsetOutOfRangeError(
            f"the log holds the offsets from {bases[0] if bases else 0} to {end - 1}"
        )
    names = set(fs.list_directory(directory) or ())
    first = min(cut.files)
    snapshots = {name for name in names if name.endswith(SNAPSHOT_SUFFIX) and name >= first}
    cut.files = sorted({*cut.files, *snapshots, *(names & {LEADER_EPOCH_CHECKPOINT})})
    return cut


def _files_of(fs: FileSystem, directory: str, base: int) -> Iterator[str]:
    names = set(fs.list_directory(directory) or ())
    for suffix in SEGMENT_SUFFIXES:
        if file_stem(base) + suffix in names:
            yield file_stem(base) + suffix


def truncate(
    fs: FileSystem, directory: str, offset: int, undo: str, config: LogConfig, clock: Clock
) -> TruncationPlan:
    """Remove the batch that holds ``offset`` and all later ones, after copying files to ``undo``.

    To undo the truncation, remove the partition's files from the first copied segment on, and move
    the copies back. Raises OffsetOutOfRangeError, StorageError, OSError.
    """
    cut = plan_truncation(fs, directory, offset)
    fs.make_directory(undo)
    for name in cut.files:
        copy_file(fs, f"{directory}/{name}", f"{undo}/{name}")
    fs.sync_directory(undo)
    fs.sync_directory(str(Path(undo).parent))
    partition = _open(fs, directory, config, clock)
    try:
        if cut.first_offset < partition.log_end_offset:
            partition.truncate_to(cut.first_offset)
    finally:
        partition.close()
    _lower_checkpoints(fs, Path(directory), cut.first_offset)
    return cut


def _lower_checkpoints(fs: FileSystem, path: Path, end: int) -> None:
    topic, _, index = path.name.rpartition("-")
    key = topic, int(index)
    for name in (RECOVERY_POINT_CHECKPOINT, HIGH_WATERMARK_CHECKPOINT, CLEANER_CHECKPOINT):
        offsets = read_offsets(fs, str(path.parent), name)
        if offsets.get(key, 0) > end:
            copied = has_copy(fs, str(path.parent), name)
            write_offsets(fs, str(path.parent), name, offsets | {key: end}, copied=copied)
