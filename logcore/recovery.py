"""Opening a partition's directory: what is kept, what is finished, what is cut off.

After a clean shutdown nothing is scanned. Otherwise every segment that holds data at or behind the
recovery point, and the active one always, is walked batch by batch: CRC, size, order of offsets,
leader epoch. At the first batch that fails, the later segments are removed (from the end, so that a
second kill leaves no hole) and then the file is cut there. Indexes, transaction index, producer
state and leader epochs of what was walked are built anew.

A torn tail after ``kill -9`` is a write nobody was told of. Good batches behind a bad one are
another matter: then a disk has lost data. Both are cut, as in Kafka, and the report says which.

Messages of format v0 and v1, from before an upgrade, are checked by their own CRC and kept.

Source: ``LogLoader``, ``UnifiedLog.rebuildProducerState``, ``LogSegment.recover``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from logcore.batch import HEADER_SIZE, LOG_OVERHEAD, MAGIC, BatchHeader, parse_header, verify_crc
from logcore.config import LogConfig
from logcore.epoch_check import NO_EPOCH, lowest_epoch
from logcore.epochs import LeaderEpochs
from logcore.errors import CorruptRecordError, InvalidRecordError, LogError
from logcore.fs import TEMPORARY_SUFFIX, FileSystem
from logcore.index import AbortedTxn, CorruptIndexError
from logcore.legacy import as_batch_header, magic_at, parse_message, verify_message_crc
from logcore.log import CLEANED_SUFFIX, DELETED_SUFFIX, SNAPSHOT_SUFFIX, SWAP_SUFFIX, Log
from logcore.producers import ProducerStateManager
from logcore.segment import (
    INDEX_SUFFIX,
    LOG_SUFFIX,
    SCAN_BYTES,
    SEGMENT_SUFFIXES,
    TXN_INDEX_SUFFIX,
    Segment,
    file_stem,
)

_OFFSET_DIGITS: Final = 20


@dataclass(slots=True)
class RecoveryReport:
    """What a recovery did to a partition's files; bytes are those of log files."""

    scanned_segments: int = 0
    scanned_bytes: int = 0
    truncated_bytes: int = 0
    removed_segments: int = 0
    reason: str = ""
    """Why the log was cut, empty if it was not."""

    valid_data_removed: bool = False
    """Whether good batches stood behind the bad one: not a torn tail but damage."""

    lost_offsets: int = 0
    """How far the log ends before the checkpointed high watermark: acknowledged and gone."""


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """How a partition was left: the checkpoints' values, and whether the shutdown was clean."""

    name: str
    config: LogConfig
    now_ms: int
    clean: bool
    recovery_point: int = 0
    log_start_offset: int = 0
    leader_epoch: int = 0
    gaps_below: int = 0
    """Up to where compaction may have emptied whole segments; a gap there is no loss."""

    remove_later: Callable[[str], None] | None = None
    """Removes a file behind the open; without it that is done at once."""


@dataclass(slots=True)
class LoadedLog:
    """A partition's parts, ready for appends."""

    log: Log
    log_start_offset: int
    report: RecoveryReport | None


def load_log(
    fs: FileSystem,
    directory: str,
    options: OpenOptions,
    producers: ProducerStateManager,
    epochs: LeaderEpochs,
) -> LoadedLog:
    """Open the log in ``directory``, made if it is missing, and fill producers and epochs.

    Raises OSError, and StorageError for a log that must not be opened.
    """
    return _Loader(fs, directory, options, producers, epochs).load()


class _Loader:
    def __init__(
        self,
        fs: FileSystem,
        directory: str,
        options: OpenOptions,
        producers: ProducerStateManager,
        epochs: LeaderEpochs,
    ) -> None:
        self._fs = fs
        self._directory = directory
        self._options = options
        self._producers = producers
        self._epochs = epochs
        self._log = Log(fs, directory, options.name, options.config, options.now_ms)
        self._log.remove_later = options.remove_later
        self._report = RecoveryReport()
        self._highest_epoch: int | None = None
        self._epoch = NO_EPOCH
        self._new_epochs: list[tuple[int, int]] = []
        self._known_starts: dict[int, int] = {}
        self._is_dense = True

    def load(self) -> LoadedLog:
        names = self._fs.list_directory(self._directory)
        if names is None:
            self._fs.make_directory(self._directory)
            return self._fresh()
        names = self._finish_interrupted(names)
        first_bad = self._open_segments(names)
        if self._log.is_empty:
            return self._fresh()
        # A lost or malformed epoch file is no reason to read everything: what recovery walks fills
        # in the epochs that truncation can ask for, and appends carry on from there.
        if self._epochs.load():
            self._highest_epoch = max(self._epochs.latest, self._options.leader_epoch)
        start = max(self._options.log_start_offset, self._log.first_offset)
        scan_from = self._scan_from(first_bad)
        if scan_from is None:
            try:
                self._log.log_end_offset = self._log.active.next_offset()
            except CorruptRecordError:
                scan_from = self._log.active.base_offset
        if scan_from is None:
            self._load_producers(self._log.log_end_offset)
        else:
            self._recover(scan_from)
        return self._finish(start)

    def _fresh(self) -> LoadedLog:
        """Begin an empty log where the checkpoint says the old one ended."""
        start = self._options.log_start_offset
        for offset in list(self._producers.snapshot_offsets):
            self._producers.remove_snapshot(offset)
        self._epochs.clear()
        self._log.log_end_offset = start
        self._log.create_segment(start, self._options.now_ms)
        self._producers.clear(start)
        return LoadedLog(self._log, start, None)

    # --- files ---

    def _finish_interrupted(self, names: list[str]) -> list[str]:
        """Remove what was on its way out, and roll a finished compaction forward.

        As in Kafka: a ``.swap`` file at or behind a ``.cleaned`` one belongs to a compaction that
        had not finished all its files; any other ``.swap`` replaces the segments it covers. The
        ``.cleaned`` files go last, for they tell the two apart should this be cut short as well.
        """
        odd = (DELETED_SUFFIX, CLEANED_SUFFIX, SWAP_SUFFIX, TEMPORARY_SUFFIX)
        if not any(name.endswith(odd) for name in names):
            return names
        cleaned = [_offset_of(name) for name in names if name.endswith(CLEANED_SUFFIX)]
        oldest_cleaned = min((one for one in cleaned if one is not None), default=None)
        swaps: list[str] = []
        abandoned = False
        for name in names:
            offset = _offset_of(name)
            if name.endswith(DELETED_SUFFIX):
                remove = self._options.remove_later or self._fs.remove
                remove(f"{self._directory}/{name}")
            elif name.endswith(TEMPORARY_SUFFIX):
                self._remove(name)
            elif name.endswith(SWAP_SUFFIX) and offset is not None:
                if oldest_cleaned is not None and offset >= oldest_cleaned:
                    self._remove(name)
                    abandoned = True
                else:
                    swaps.append(name)
        if abandoned:
            self._fs.sync_directory(self._directory)
        for name in names:
            if name.endswith(CLEANED_SUFFIX):
                self._remove(name)
        if swaps:
            self._swap_in(names, swaps)
            self._fs.sync_directory(self._directory)
        return self._fs.list_directory(self._directory) or []

    def _swap_in(self, names: list[str], swaps: list[str]) -> None:
        """Put the ``.swap`` files in the place of the segments that they cover.

        A log file gives up its suffix before its indexes do: the next start, if this one is cut
        short, must not take the new indexes for old ones.
        """
        logs = [name for name in swaps if name.endswith(LOG_SUFFIX + SWAP_SUFFIX)]
        if logs:
            bases = {_offset_of(name) or 0 for name in logs}
            low, high = min(bases), max(self._end_of(name) for name in logs)
            for name in names:
                offset = _offset_of(name)
                if offset is None or not low <= offset < max(high, low + 1):
                    continue
                # The producers as of the beginning of a new segment are what they were.
                if name.endswith(SEGMENT_SUFFIXES) or (
                    name.endswith(SNAPSHOT_SUFFIX) and offset not in bases
                ):
                    self._remove(name)
            self._fs.sync_directory(self._directory)
        for name in logs + sorted(set(swaps) - set(logs)):
            path = f"{self._directory}/{name}"
            self._fs.rename(path, path.removesuffix(SWAP_SUFFIX))

    def _end_of(self, name: str) -> int:
        """Return the offset behind the last batch of a ``.swap`` log, its base if it is empty."""
        end = _offset_of(name) or 0
        handle = self._fs.open(f"{self._directory}/{name}")
        try:
            position, size = 0, self._fs.size(handle)
            while position < size:
                header = parse_header(self._fs.read(handle, HEADER_SIZE, position))
                end = header.next_offset
                position += header.size
        finally:
            self._fs.close(handle)
        return end

    def _open_segments(self, names: list[str]) -> int | None:
        """Open what is there; return the base of the first segment whose indexes are unusable."""
        bases: dict[str, set[int]] = defaultdict(set)
        for name in names:
            offset = _offset_of(name)
            if offset is not None:
                bases[name[_OFFSET_DIGITS:]].add(offset)
        logs = bases[LOG_SUFFIX]
        for suffix in SEGMENT_SUFFIXES:
            for offset in bases[suffix] - logs:
                self._remove(file_stem(offset) + suffix)
        self._producers.snapshot_offsets = bases[SNAPSHOT_SUFFIX]
        self._producers.remove_stray_snapshots(logs)
        first_bad: int | None = None
        for offset in sorted(logs):
            has_txn_index = offset in bases[TXN_INDEX_SUFFIX]
            segment = self._log.open_segment(offset, has_txn_index=has_txn_index)
            usable = offset in bases[INDEX_SUFFIX] or segment.size == 0
            if self._options.config.preallocate and segment.ends_in_zeros:
                # Power loss may have taken the trim back, also below the recovery point.
                usable = False
            if has_txn_index:
                try:
                    segment.txn_index.check(offset)
                except CorruptIndexError:
                    usable = False
            if not usable and first_bad is None:
                first_bad = offset
        return first_bad

    def _remove(self, name: str) -> None:
        self._fs.remove(f"{self._directory}/{name}")

    # --- scanning ---

    def _scan_from(self, first_bad: int | None) -> int | None:
        if self._options.clean:
            return first_bad
        point = min(self._options.recovery_point, self._log.active.base_offset)
        return point if first_bad is None else min(point, first_bad)

    def _recover(self, scan_from: int) -> None:
        segments = self._log.from_offset(scan_from)
        first = segments[0]
        self._load_producers(first.base_offset)
        known = self._epochs.entries
        self._known_starts = dict(known)
        claimed = self._epochs.epoch_at(first.base_offset)
        with suppress(CorruptRecordError):
            self._epoch = lowest_epoch(self._log, first, claimed)
        self._epochs.truncate_from_end(first.base_offset)
        end = first.base_offset
        # Whoever made these files may have been killed before their names were on disk.
        self._log.directory_changed = True
        for segment in segments:
            if segment.base_offset < end:
                self._report.reason = f"segment {segment.base_offset} overlaps the one before"
                self._drop(segments[segments.index(segment) :])
                break
            if segment.base_offset > end and self._is_loss(end):
                self._report.reason = f"offsets {end} to {segment.base_offset - 1} are missing"
                self._drop(segments[segments.index(segment) :])
                break
            if segment is not first:
                self._producers.map_end_offset = segment.base_offset
                self._producers.remove_snapshots_above(segment.base_offset - 1)
                self._producers.take_snapshot()
            end = self._recover_segment(segment)
            if self._report.reason:
                break
        self._log.log_end_offset = end
        for epoch, start in self._new_epochs:
            self._epochs.assign(epoch, start)
        # What the file says already need not be written again.
        self._epochs.is_synced = self._epochs.entries == known

    def _is_loss(self, end: int) -> bool:
        """Whether a gap between two segments is what a power loss has left.

        Compaction makes gaps as well: below the recovery point, and hardly ever at the end of a
        segment that has none inside. Ours makes none between segments; Apache Kafka's leaves an
        empty segment, below the cleaner's checkpoint.
        """
        return self._is_dense and end >= max(self._options.recovery_point, self._options.gaps_below)

    def _recover_segment(self, segment: Segment) -> int:
        """Walk one segment, build its indexes, cut it at the first bad batch; return its end."""
        report = self._report
        report.scanned_segments += 1
        report.scanned_bytes += segment.size
        segment.reset_indexes()
        position, expected = 0, segment.base_offset
        # Only compaction makes holes, and it never touches the last segment.
        strict = segment is self._log.active
        self._is_dense = True
        aborted: list[AbortedTxn] = []
        chunk, start = memoryview(b""), 0
        while position < segment.size:
            try:
                chunk, start, header = _verified(segment, chunk, start, position)
                self._check_order(header, expected, strict=strict)
                if header.base_offset > expected and header.magic >= MAGIC:
                    self._check_gap(segment, position + header.size, header)
                batch = chunk[position - start : position - start + header.size]
                completed = self._producers.replay(header, batch)
            except (CorruptRecordError, InvalidRecordError) as error:
                if self._options.config.preallocate and segment.is_blank_from(position):
                    # Nobody got to trim the file; there is nothing in what goes.
                    segment.cut(position)
                else:
                    self._cut(segment, position, str(error))
                break
            segment.index_batch(header.last_offset, header.max_timestamp, position, header.size)
            if completed is not None and not completed.commit:
                aborted.append(self._producers.aborted_txn(completed))
            self._note_epoch(header, expected)
            self._is_dense = self._is_dense and header.base_offset == expected
            expected, self._epoch = header.next_offset, max(self._epoch, header.leader_epoch)
            position += header.size
        segment.txn_index.rebuild(aborted)
        if segment is not self._log.active:
            segment.seal()
            self._log.sealed.append(segment)
        return expected

    def _check_order(self, header: BatchHeader, expected: int, *, strict: bool) -> None:
        """Check what the CRC does not cover: base offset and leader epoch."""
        base_offset = header.base_offset
        if header.magic < MAGIC:
            # A message is known by its last offset only, and belongs to no epoch.
            if base_offset < expected:
                raise CorruptRecordError(f"offset {base_offset} where {expected} is next")
            return
        if base_offset < expected or (strict and base_offset > expected):
            raise CorruptRecordError(f"offset {base_offset} where {expected} is next")
        if header.last_offset_delta < 0:
            raise CorruptRecordError(f"the batch at offset {base_offset} ends before it begins")
        highest = self._highest_epoch
        if header.leader_epoch < self._epoch or (
            highest is not None and header.leader_epoch > highest
        ):
            raise CorruptRecordError(
                f"the batch at offset {base_offset} has leader epoch {header.leader_epoch}"
            )

    def _check_gap(self, segment: Segment, behind: int, header: BatchHeader) -> None:
        """Check a batch behind a gap against what follows it: no CRC covers its base offset."""
        if behind + LOG_OVERHEAD <= segment.size:
            following = int.from_bytes(segment.read(behind, behind + 8), "big")
        else:
            later = self._log.from_offset(segment.base_offset)[1:]
            following = later[0].base_offset if later else header.next_offset
        if header.next_offset > following:
            raise CorruptRecordError(
                f"offset {header.base_offset} before a batch at offset {following}"
            )

    def _note_epoch(self, header: BatchHeader, expected: int) -> None:
        """Note a new epoch. Compaction may have taken its first batch: the file knows where."""
        latest = self._new_epochs[-1][0] if self._new_epochs else self._epochs.latest
        if header.leader_epoch > latest:
            start = self._known_starts.get(header.leader_epoch, -1)
            if not expected <= start <= header.base_offset:
                start = header.base_offset
            self._new_epochs.append((header.leader_epoch, start))

    def _cut(self, segment: Segment, position: int, reason: str) -> None:
        self._report.reason = reason
        self._report.valid_data_removed = _good_batch_behind(segment, position)
        self._drop([one for one in self._log.segments if one.base_offset > segment.base_offset])
        self._report.truncated_bytes += segment.size - position
        segment.cut(position)

    def _drop(self, segments: list[Segment]) -> None:
        """Remove segments, the last one first, each before the next one: no order survives else."""
        for segment in reversed(segments):
            self._report.truncated_bytes += segment.size
            self._report.removed_segments += 1
            if segment.size:
                self._report.valid_data_removed = True
            self._log.remove([segment], now_ms=0, delay_ms=0)

    # --- producers and the end of loading ---

    def _load_producers(self, upto: int) -> None:
        """Build the producer state as of ``upto``: newest snapshot, then the log behind it."""
        producers = self._producers
        offset = producers.load_snapshot(upto, self._log.first_offset, self._options.now_ms)
        replay_producers(self._log, producers, offset, upto)

    def _finish(self, start: int) -> LoadedLog:
        log, producers = self._log, self._producers
        if log.log_end_offset < start:
            self._report.reason = f"the log ends at {log.log_end_offset}, before its start {start}"
            log.restart_at(start, self._options.now_ms)
            producers.remove_snapshots_above(-1)
            producers.clear(start)
        end = log.log_end_offset
        producers.map_end_offset = end
        producers.remove_snapshots_above(end)
        self._epochs.truncate_from_end(end)
        self._epochs.truncate_from_start(start)
        report = self._report
        return LoadedLog(log, start, report if report.scanned_segments or report.reason else None)


def replay_producers(log: Log, producers: ProducerStateManager, offset: int, upto: int) -> None:
    """Bring the producer state from ``offset`` to ``upto`` by reading the log between them."""
    if offset < upto:
        for _, header, batch in log.batches(offset, upto):
            if offset <= header.base_offset < upto:
                producers.replay(header, batch)
    producers.map_end_offset = upto


def _verified(
    segment: Segment, chunk: memoryview, start: int, position: int
) -> tuple[memoryview, int, BatchHeader]:
    """Return a chunk of the file, its position, and the header of the whole batch at ``position``.

    CorruptRecordError when the file ends before its end, or its CRC is wrong.
    """
    # A message of an older format may be shorter than the header of a batch.
    count = min(HEADER_SIZE, segment.size - position)
    chunk, start = _cover(segment, chunk, start, position, count)
    if magic_at(chunk, position - start) < MAGIC:
        message = parse_message(chunk, position - start)
        chunk, start = _cover(segment, chunk, start, position, message.size)
        verify_message_crc(chunk, position - start, message)
        return chunk, start, as_batch_header(message)
    header = parse_header(chunk, position - start)
    chunk, start = _cover(segment, chunk, start, position, header.size)
    verify_crc(chunk, position - start, header)
    return chunk, start, header


def _cover(
    segment: Segment, chunk: memoryview, start: int, position: int, count: int
) -> tuple[memoryview, int]:
    """Return a chunk of the file, and its position, that holds ``count`` bytes at ``position``.

    CorruptRecordError when the file ends before.
    """
    if position + count > segment.size:
        raise CorruptRecordError(f"the file ends inside the batch at position {position}")
    if position - start + count <= len(chunk):
        return chunk, start
    end = min(position + max(count, SCAN_BYTES), segment.size)
    return memoryview(segment.read(position, end)), position


def _good_batch_behind(segment: Segment, position: int) -> bool:
    """Whether an intact batch follows the bad one, as far as the bad one's length leads to it."""
    try:
        length = int.from_bytes(segment.read(position + 8, position + LOG_OVERHEAD), "big")
        position += LOG_OVERHEAD + length
        _verified(segment, memoryview(b""), position, position)
    except LogError:
        return False
    return True


def _offset_of(name: str) -> int | None:
    """Return the offset a file of a segment is named by, None for any other file."""
    digits = name[:_OFFSET_DIGITS]
    if len(digits) == _OFFSET_DIGITS and digits.isdecimal() and name[_OFFSET_DIGITS:][:1] == ".":
        return int(digits)
    return None
