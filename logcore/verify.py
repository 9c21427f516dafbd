"""Consistency checks of a whole partition directory, or a data directory; no file is changed.

Each file is checked as :mod:`fencepost.logcore.dump` does. Further checks: no segment overlaps the
one before, no offset index is missing, transaction indexes and snapshots agree with a replay of the
log, leader epochs in the cache agree with the batches, and no checkpoint lies beyond its log's end.

Every row reports a problem, in the form of ``dump``'s rows, and names the ``file``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from fencepost.logcore.batch import MAGIC, BatchHeader
from fencepost.logcore.bounds import check_offsets
from fencepost.logcore.checkpoints import (
    CLEAN_SHUTDOWN,
    COPIED_CHECKPOINTS,
    COPY_SUFFIX,
    LEADER_EPOCH_CHECKPOINT,
    LOG_START_CHECKPOINT,
    META_PROPERTIES,
    RECOVERY_POINT_CHECKPOINT,
    CheckpointError,
    read_epochs,
    read_offsets,
)
from fencepost.logcore.config import MAX_INT64
from fencepost.logcore.dump import (
    OFFSET_CHECKPOINTS,
    SNAPSHOT_OF_METADATA_SUFFIX,
    Decoder,
    Row,
    dump_file,
    is_problem,
    read_batches,
)
from fencepost.logcore.errors import LogError
from fencepost.logcore.fs import FileSystem
from fencepost.logcore.index import AbortedTxn, CorruptIndexError, TransactionIndex
from fencepost.logcore.leftovers import OFFSET_DIGITS, REMOVED_SUFFIXES, offset_of
from fencepost.logcore.log import SNAPSHOT_SUFFIX
from fencepost.logcore.producer_snapshot import CorruptSnapshotError, ProducerEntry, decode_snapshot
from fencepost.logcore.producers import ProducerStateManager
from fencepost.logcore.segment import INDEX_SUFFIX, LOG_SUFFIX, TXN_INDEX_SUFFIX, file_stem
from fencepost.logcore.strays import is_stray

SMALL_FILES: Final = (
    *OFFSET_CHECKPOINTS,
    *(name + COPY_SUFFIX for name in COPIED_CHECKPOINTS),
    META_PROPERTIES,
)
_DIRECTORY = re.compile(r"(?P<topic>[a-zA-Z0-9._-]+)-(?P<index>[0-9]+)")


def _problem(file: str, text: object, **position: object) -> Row:
    return {"kind": "problem", "file": file, "problem": str(text), **position}


def verify_data_directory(fs: FileSystem, directory: str) -> Iterator[Row]:
    """Check the small files of a data directory, and compare the checkpoints with the partitions.

    :func:`verify_partition` checks the partitions themselves. Raises OSError.
    """
    names = fs.list_directory(directory) or []
    for name in sorted(set(SMALL_FILES) & set(names)):
        yield from _dumped(fs, directory, name, None)
    ends: dict[tuple[str, int], tuple[int, int]] = {}
    for name in names:
        match = _DIRECTORY.fullmatch(name)
        if match is not None and fs.is_directory(f"{directory}/{name}"):
            ends[match["topic"], int(match["index"])] = _bounds(fs, f"{directory}/{name}")
    for name in OFFSET_CHECKPOINTS:
        try:
            offsets = read_offsets(fs, directory, name)
        except CheckpointError:
            continue  # reported above
        for (topic, index), offset in offsets.items():
            bounds = ends.get((topic, index))
            if bounds is not None and offset > bounds[1]:
                yield _problem(
                    f"{directory}/{name}",
                    f"{topic}-{index} at offset {offset}, its log ends at {bounds[1]}",
                )


def _bounds(fs: FileSystem, directory: str) -> tuple[int, int]:
    """Return the first offset of the first segment, and the offset after the last batch."""
    bases = bases_of(fs.list_directory(directory) or [])
    if not bases:
        return 0, 0
    end = bases[-1]
    path = f"{directory}/{file_stem(bases[-1])}{LOG_SUFFIX}"
    for _, header, _ in read_batches(fs, path, payload=False):
        if not isinstance(header, str):
            end = header.next_offset
    return bases[0], end


def _flushed_below(fs: FileSystem, directory: str) -> int:
    """Return the recovery point of the partition in ``directory``, from the files beside it.

    After a clean stop, or if the partition is not in a data directory, return MAX_INT64.
    """
    names = fs.list_directory(str(Path(directory).parent)) or ()
    if CLEAN_SHUTDOWN in names or META_PROPERTIES not in names:
        return MAX_INT64
    return _checkpointed(fs, directory, RECOVERY_POINT_CHECKPOINT, MAX_INT64)


def _checkpointed(fs: FileSystem, directory: str, name: str, default: int) -> int:
    """Return the checkpointed offset of the partition in ``directory``, 0 if there is none.

    If the directory's name is not a partition's, return ``default``.
    """
    path = Path(directory)
    match = _DIRECTORY.fullmatch(path.name)
    if match is None:
        return default
    try:
        offsets = read_offsets(fs, str(path.parent), name)
    except CheckpointError:
        return 0  # the check of the file reports it
    return offsets.get((match["topic"], int(match["index"])), 0)


def bases_of(names: list[str]) -> list[int]:
    """Return the base offsets of the segments among ``names``, in order."""
    return sorted(_offsets_of(names, LOG_SUFFIX))


def _offsets_of(names: Iterable[str], suffix: str) -> set[int]:
    files = ((offset_of(name), name) for name in names)
    return {
        offset for offset, name in files if offset is not None and name[OFFSET_DIGITS:] == suffix
    }


def _offsets_of_metadata_snapshots(names: Iterable[str]) -> list[int]:
    """Return the end offsets of metadata snapshots, at which the metadata log may start."""
    digits_of_files = (
        name[:OFFSET_DIGITS] for name in names if name.endswith(SNAPSHOT_OF_METADATA_SUFFIX)
    )
    return [int(digits) for digits in digits_of_files if digits.isdecimal()]


def verify_partition(
    fs: FileSystem, directory: str, *, decoder: Decoder | None = None
) -> Iterator[Row]:
    """Yield the problems of a partition's files. Raises OSError.

    Files that the next start removes unread are not checked.
    """
    names = sorted(
        name
        for name in fs.list_directory(directory) or []
        if not is_stray(name) and not name.endswith(REMOVED_SUFFIXES)
    )
    bases = bases_of(names)
    for name in names:
        try:
            yield from _dumped(fs, directory, name, decoder)
        except ValueError:
            yield _problem(f"{directory}/{name}", "not a log file")
    if not bases:
        return
    yield from _Replay(fs, directory, names, bases).check()


def _dumped(fs: FileSystem, directory: str, name: str, decoder: Decoder | None) -> Iterator[Row]:
    for row in dump_file(fs, directory, name, verify=True, decoder=decoder):
        if is_problem(row):
            yield {"file": f"{directory}/{name}", **row}


class _Replay:
    """Replays the log once and compares the result with the files beside it."""

    def __init__(self, fs: FileSystem, directory: str, names: list[str], bases: list[int]) -> None:
        self._fs = fs
        self._directory = directory
        self._names = set(names)
        self._bases = bases
        self._producers = ProducerStateManager(fs, directory)
        self._snapshots = _offsets_of(names, SNAPSHOT_SUFFIX)
        self._epochs: list[tuple[int, int]] = []

    def check(self) -> Iterator[Row]:
        """Yield the problems; stop at the first one that makes the log unreadable."""
        first = self._bases[0]
        if first in self._snapshots and self._read_snapshot(first) is not None:
            self._producers.snapshot_offsets = {first}
            self._producers.load_snapshot(first, first, 0)
        end = first
        for base in self._bases:
            file = f"{self._directory}/{file_stem(base)}{LOG_SUFFIX}"
            if base < end:
                yield _problem(file, f"the segment before it ends at offset {end}")
                return
            yield from self._check_snapshots(end, base)
            end = base
            aborted: list[AbortedTxn] = []
            size = 0
            for _, header, batch in read_batches(self._fs, file, payload=True):
                if isinstance(header, str):
                    return  # the check of the file reports it
                yield from self._check_snapshots(end, header.base_offset)
                size += header.size
                end = header.next_offset
                try:
                    self._replay_batch(header, batch, aborted)
                except LogError:
                    return  # the check of the file reports it
            yield from self._check_indexes(base, size, aborted)
        yield from self._check_snapshots(end, end)
        for offset in sorted(snapshot for snapshot in self._snapshots if snapshot > end):
            yield _problem(self._snapshot(offset), f"the log ends at offset {end}")
        yield from self._check_epochs()

    def _replay_batch(self, header: BatchHeader, batch: bytes, aborted: list[AbortedTxn]) -> None:
        check_offsets(header)
        latest = self._epochs[-1][0] if self._epochs else -1
        if header.leader_epoch > latest:
            self._epochs.append((header.leader_epoch, header.base_offset))
        if header.magic < MAGIC:
            return
        completed = self._producers.replay(header, memoryview(batch))
        if completed is not None and not completed.commit:
            aborted.append(self._producers.aborted_txn(completed))

    def _check_indexes(self, base: int, size: int, aborted: list[AbortedTxn]) -> Iterator[Row]:
        stem = file_stem(base)
        if size and stem + INDEX_SUFFIX not in self._names:
            yield _problem(f"{self._directory}/{stem}{INDEX_SUFFIX}", "the index is missing")
        exists = stem + TXN_INDEX_SUFFIX in self._names
        path = f"{self._directory}/{stem}{TXN_INDEX_SUFFIX}"
        try:
            entries = TransactionIndex(self._fs, path, exists=exists).entries
        except CorruptIndexError:
            return  # the check of the file reports it
        indexed = {(txn.producer_id, txn.last_offset) for txn in entries}
        for txn in aborted:
            if (txn.producer_id, txn.last_offset) not in indexed:
                yield _problem(
                    path,
                    f"the aborted transaction of producer {txn.producer_id} that ends at offset"
                    f" {txn.last_offset} is missing",
                    offset=txn.last_offset,
                )

    # --- snapshots ---

    def _snapshot(self, offset: int) -> str:
        return f"{self._directory}/{file_stem(offset)}{SNAPSHOT_SUFFIX}"

    def _read_snapshot(self, offset: int) -> list[ProducerEntry] | None:
        try:
            return decode_snapshot(self._fs.read_file(self._snapshot(offset)) or b"")
        except CorruptSnapshotError:
            return None

    def _check_snapshots(self, low: int, high: int) -> Iterator[Row]:
        """Compare the snapshots between two batches, which end at ``low`` and begin at ``high``."""
        for offset in sorted(snapshot for snapshot in self._snapshots if low <= snapshot <= high):
            self._snapshots.discard(offset)
            for entry in self._read_snapshot(offset) or ():
                wrong = self._difference(entry)
                if wrong:
                    yield _problem(self._snapshot(offset), wrong)
            yield from self._missing_producers(offset)

    def _difference(self, entry: ProducerEntry) -> str:
        """Return how a producer's entry differs from the log, empty if it does not."""
        replayed = self._producers.get(entry.producer_id)
        if replayed is None:
            return ""
        producer = f"producer {entry.producer_id}"
        if replayed.epoch != entry.epoch:
            return f"{producer} has epoch {entry.epoch}, the log says {replayed.epoch}"
        if replayed.batches and (replayed.last_sequence, replayed.last_offset) != (
            entry.last_sequence,
            entry.last_offset,
        ):
            return (
                f"{producer} is at sequence {entry.last_sequence}, offset {entry.last_offset};"
                f" the log says {replayed.last_sequence}, {replayed.last_offset}"
            )
        first = entry.current_txn_first_offset
        if replayed.current_txn_first_offset != first and (
            first is None or first >= self._bases[0]
        ):
            return (
                f"{producer} has a transaction from offset {first},"
                f" the log says {replayed.current_txn_first_offset}"
            )
        return ""

    def _missing_producers(self, offset: int) -> Iterator[Row]:
        """Yield missing producers with an open transaction; others may have expired."""
        ids = {entry.producer_id for entry in self._read_snapshot(offset) or ()}
        for producer in self._producers.view():
            if producer.current_txn_first_offset >= 0 and producer.producer_id not in ids:
                yield _problem(
                    self._snapshot(offset),
                    f"producer {producer.producer_id} with a transaction from offset"
                    f" {producer.current_txn_first_offset} is missing",
                )

    # --- epochs ---

    def _check_epochs(self) -> Iterator[Row]:
        file = f"{self._directory}/{LEADER_EPOCH_CHECKPOINT}"
        try:
            cached = read_epochs(self._fs, self._directory)
        except CheckpointError:
            return  # the check of the file reports it
        flushed = _flushed_below(self._fs, self._directory)
        if cached is None:
            if any(offset < flushed for _, offset in self._epochs):
                yield _problem(file, "the file is missing")
            return
        starts = dict(cached)
        log_start = _checkpointed(self._fs, self._directory, LOG_START_CHECKPOINT, 0)
        log_start = max(log_start, *_offsets_of_metadata_snapshots(self._names), 0)
        ends = [*(offset for _, offset in self._epochs[1:]), MAX_INT64]
        for (epoch, first), end in zip(
            self._epochs, ends, strict=False
        ):  # ``ends`` is longer if there is no epoch
            offset = max(first, log_start)
            if end <= log_start:
                continue  # forgotten when the log start moved
            if epoch not in starts and offset >= flushed:
                continue  # the next flush writes it, and a recovery restores it
            if epoch not in starts:
                yield _problem(file, f"epoch {epoch}, from offset {offset} on, is missing")
            elif starts[epoch] > offset > self._bases[0]:
                yield _problem(
                    file, f"epoch {epoch} begins at {starts[epoch]}, the log has it at {offset}"
                )
