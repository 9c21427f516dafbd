"""Opening a partition's directory: recovery, truncation, and interrupted replacements.

After a clean shutdown nothing is scanned. Otherwise recovery scans the active segment, and every
segment with data at or after the recovery point. It checks each batch's CRC, size, offsets and
leader epoch. If a batch fails, it removes the later segments (from the end, so that a second kill
leaves no hole) and then truncates the file at this batch. It rebuilds the indexes, the transaction
index, the producer state and the leader epochs of the scanned segments.

A torn tail after ``kill -9`` was never acknowledged. Good batches after a bad one mean that a disk
has lost data. In both cases the log is truncated, as in Kafka; the report says which it was, and
the removed bytes are kept (``strays.py``).

Data below the recovery point was on disk, and is not truncated as long as a good batch follows.
Recovery leaves an unreadable batch there in place, and its readers get an error. (In the segment
that holds the recovery point, Kafka truncates at such a batch.)

Messages of format v0 and v1, from before an upgrade, are checked by their own CRC and kept.

Source: ``LogLoader``, ``UnifiedLog.rebuildProducerState``, ``LogSegment.recover``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import field
from typing import NamedTuple

from fencepost.logcore.batch import LOG_OVERHEAD, MAGIC, BatchHeader
from fencepost.logcore.bounds import check_offsets
from fencepost.logcore.config import MAX_INT64, LogConfig
from fencepost.logcore.epoch_check import NO_EPOCH, lowest_epoch
from fencepost.logcore.epochs import LeaderEpochs
from fencepost.logcore.errors import CorruptRecordError, InvalidRecordError, LogError
from fencepost.logcore.fs import FileSystem
from fencepost.logcore.index import MAX_RELATIVE_OFFSET, AbortedTxn, CorruptIndexError
from fencepost.logcore.leftovers import OFFSET_DIGITS, finish_interrupted, offset_of
from fencepost.logcore.log import SNAPSHOT_SUFFIX, Log
from fencepost.logcore.producers import ProducerStateManager
from fencepost.logcore.scan import end_by_length, is_intact, next_intact, verified
from fencepost.logcore.segment import (
    INDEX_SUFFIX,
    LOG_SUFFIX,
    SEGMENT_SUFFIXES,
    TXN_INDEX_SUFFIX,
    Segment,
    file_stem,
)
from fencepost.logcore.strays import TruncatedData
from fencepost.logcore.values import dataclass


class Damage(NamedTuple):
    """Damage that was left in place: unreadable bytes, or a batch with an implausible epoch."""

    offset: int
    next_offset: int
    """The offset of the next good batch."""
    reason: str


@dataclass(slots=True)
class RecoveryReport:
    """The changes that a recovery made to a partition's files; all byte counts are of log files."""

    scanned_segments: int = 0
    truncated_bytes: int = 0
    removed_segments: int = 0
    removed_records: int = 0
    """The number of removed records, as far as the headers of their batches can be read."""
    kept: list[str] = field(default_factory=list)
    """Names of the files in the partition's directory that hold the removed bytes."""
    reason: str = ""
    """Why the log was truncated, empty if it was not."""

    valid_data_removed: bool = False
    """Whether good batches followed the bad one, which then is damage and not a torn tail."""

    lost_offsets: int = 0
    """How many acknowledged offsets are gone: those from the log end to the larger of the
    checkpointed high watermark and the recovery point."""

    damaged: list[Damage] = field(default_factory=list)
    """Damage in data that had been flushed. It did not cause a truncation."""

    @property
    def is_loss(self) -> bool:
        """Whether more than an unacknowledged write was removed."""
        return self.valid_data_removed or self.lost_offsets > 0


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """The inputs of an open: settings, checkpointed values, whether the shutdown was clean."""

    name: str
    config: LogConfig
    now_ms: int
    clean: bool
    recovery_point: int = 0
    high_watermark: int = 0
    log_start_offset: int = 0
    leader_epoch: int = 0
    """The upper bound of the batches' leader epochs; ``NO_EPOCH`` if the caller knows none."""
    compacted_below: int = 0
    """Gaps below this offset come from compaction; Kafka also leaves gaps between segments."""
    is_replica: bool = False
    """Whether the log may have gaps anywhere, because it was fetched from a compacted log."""
    is_replicated: bool = False
    """Whether other replicas may lack the records at and above the high watermark."""
    keeps_removed: bool = True
    """Whether removed bytes are kept beside the log."""

    remove_later: Callable[[str], None] | None = None
    """Removes a file after the open; without it, the open removes files itself."""


@dataclass(slots=True)
class LoadedLog:
    """The parts of a partition, ready for appends."""

    log: Log
    log_start_offset: int
    recovery_point: int
    report: RecoveryReport | None


def load_log(
    fs: FileSystem,
    directory: str,
    options: OpenOptions,
    producers: ProducerStateManager,
    epochs: LeaderEpochs,
) -> LoadedLog:
    """Open the log in ``directory``, creating it if it is missing; fill producers and epochs.

    Raises OSError, and StorageError for a log that must not be opened.
    """
    log = Log(fs, directory, options.name, options.config, options.now_ms)
    log.remove_later = options.remove_later
    with ExitStack() as undo:
        undo.callback(log.close)
        loaded = _Loader(fs, log, options, producers, epochs).load()
        undo.pop_all()
    return loaded


class _Loader:
    def __init__(
        self,
        fs: FileSystem,
        log: Log,
        options: OpenOptions,
        producers: ProducerStateManager,
        epochs: LeaderEpochs,
    ) -> None:
        self._fs = fs
        self._log = log
        self._directory = log.directory
        self._options = options
        self._producers = producers
        self._epochs = epochs
        self._report = RecoveryReport()
        self._strays: TruncatedData | None = None
        self._flushed = MAX_INT64 if options.clean else options.recovery_point
        """Everything below this offset has been on disk: an unreadable batch there is damage."""
        self._highest_epoch: int | None = None
        self._epoch = NO_EPOCH
        self._new_epochs: list[tuple[int, int]] = []
        self._known_starts: dict[int, int] = {}
        self._has_no_gaps = True

    def load(self) -> LoadedLog:
        names = self._fs.list_directory(self._directory)
        if names is None:
            self._fs.make_directory(self._directory)
            return self._fresh()
        names = finish_interrupted(self._fs, self._directory, names, self._options.remove_later)
        if self._options.keeps_removed:
            self._strays = TruncatedData(self._fs, self._log, names)
        first_bad = self._open_segments(names)
        if self._log.is_empty:
            return self._fresh()
        # A lost or malformed epoch file is no reason to read the whole log: the walked segments
        # supply the epochs that truncation can ask for, and appends carry on from there.
        if self._epochs.load() and self._options.leader_epoch > NO_EPOCH:
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
        """Begin an empty log at the checkpointed log start offset."""
        start = self._options.log_start_offset
        for offset in list(self._producers.snapshot_offsets):
            self._producers.remove_snapshot(offset)
        self._epochs.clear()
        self._log.log_end_offset = start
        self._log.create_segment(start, self._options.now_ms)
        self._producers.clear(start)
        return self._loaded(start, None)

    # --- files ---

    def _open_segments(self, names: list[str]) -> int | None:
        """Open the segments; return the base of the first one whose indexes are unusable."""
        bases: dict[str, set[int]] = defaultdict(set)
        for name in names:
            offset = offset_of(name)
            if offset is not None:
                bases[name[OFFSET_DIGITS:]].add(offset)
        logs = bases[LOG_SUFFIX]
        for suffix in SEGMENT_SUFFIXES:
            for offset in bases[suffix] - logs:
                self._fs.remove(f"{self._directory}/{file_stem(offset)}{suffix}")
        self._producers.snapshot_offsets = bases[SNAPSHOT_SUFFIX]
        self._producers.remove_stray_snapshots(logs)
        first_bad: int | None = None
        for offset in sorted(logs):
            has_txn_index = offset in bases[TXN_INDEX_SUFFIX]
            segment = self._log.open_segment(offset, has_txn_index=has_txn_index)
            usable = offset in bases[INDEX_SUFFIX] or segment.size == 0
            if self._options.config.preallocate and self._may_be_untrimmed(segment):
                # Power loss may have undone the trim, also below the recovery point.
                usable = False
            if has_txn_index:
                try:
                    segment.txn_index.check(offset)
                except CorruptIndexError:
                    usable = False
            if not usable and first_bad is None:
                first_bad = offset
        return first_bad

    def _may_be_untrimmed(self, segment: Segment) -> bool:
        """Return whether zeros of a preallocation may follow the batches."""
        if segment.file.ends_in_zeros:
            return True
        if segment.size != self._options.config.segment_bytes:
            return False
        # A file of this size may end in fewer zeros than ``ends_in_zeros`` checks.
        try:
            segment.next_offset()
        except CorruptRecordError:
            return True
        return False

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
        former_epochs = self._epochs.entries
        self._known_starts = dict(former_epochs)
        claimed = self._epochs.epoch_at(first.base_offset)
        with suppress(CorruptRecordError):
            self._epoch = lowest_epoch(self._log, first, claimed)
        self._epochs.truncate_from_end(first.base_offset)
        end = first.base_offset
        # The process that made these files may have been killed before it synced their names.
        self._log.directory_changed = True
        before: Segment | None = None
        for segment in segments:
            if before is not None and segment.base_offset != end:
                reason = self._discontinuity(segment.base_offset, end)
                if reason:
                    self._report.reason = reason
                    self._end_with(before, end)
                    break
            if segment is not first:
                self._producers.map_end_offset = segment.base_offset
                self._producers.remove_snapshots_above(segment.base_offset - 1)
                self._producers.take_snapshot()
            end, before = self._recover_segment(segment), segment
            if self._report.reason:
                break
        self._log.log_end_offset = end
        for epoch, start in self._new_epochs:
            self._epochs.assign(epoch, start)
        # Entries that the file already has need not be written again.
        self._epochs.is_synced = self._epochs.entries == former_epochs

    def _discontinuity(self, base_offset: int, end: int) -> str:
        """Return why a segment cannot follow one that ends at ``end``, empty if it can.

        A gap is a loss unless Apache Kafka's compaction may have left it: in flushed data, below
        the cleaner's checkpoint or, without other replicas, after a segment with gaps. A follower
        that has fetched a gap flushes its log, which moves the recovery point past the gap.
        """
        if base_offset < end:
            return f"segment {base_offset} overlaps the one before"
        options = self._options
        expects_no_gaps = self._has_no_gaps or options.is_replicated
        if expects_no_gaps and end >= max(options.recovery_point, options.compacted_below):
            return f"offsets {end} to {base_offset - 1} are missing"
        return ""

    def _recover_segment(self, segment: Segment) -> int:
        """Walk a segment, build its indexes, truncate it at the first bad batch; return its end."""
        report = self._report
        report.scanned_segments += 1
        segment.reset_indexes()
        position, expected = 0, segment.base_offset
        is_active = segment is self._log.active
        self._has_no_gaps = True
        aborted: list[AbortedTxn] = []
        chunk, start = memoryview(b""), 0
        while position < segment.size:
            try:
                chunk, start, header = verified(segment, chunk, start, position)
                self._check_order(header, expected, strict=is_active and self._is_strict(expected))
                wrong_epoch = self._wrong_epoch(header, is_fatal=expected >= self._flushed)
                if header.base_offset > expected and header.magic >= MAGIC:
                    self._check_gap(segment, position + header.size, header)
                batch = chunk[position - start : position - start + header.size]
                completed = self._producers.replay(header, batch)
            except (CorruptRecordError, InvalidRecordError) as error:
                if self._is_untrimmed(segment, position):
                    segment.cut(position)
                    break
                resumed = self._skip_damage(segment, position, expected)
                if resumed is None:
                    self._cut(segment, position, expected, str(error))
                    break
                report.damaged.append(Damage(expected, resumed[1], str(error)))
                segment.index_next()
                position, expected = resumed
                self._has_no_gaps = False
                continue
            segment.index_batch(header.last_offset, header.max_timestamp, position, header.size)
            if completed is not None and not completed.commit:
                aborted.append(self._producers.aborted_txn(completed))
            position += header.size
            if wrong_epoch:
                report.damaged.append(Damage(expected, header.next_offset, wrong_epoch))
                self._settle_epoch(segment, position, header)
            else:
                self._note_epoch(header, expected)
            self._has_no_gaps = self._has_no_gaps and header.base_offset == expected
            expected = header.next_offset
        segment.txn_index.rebuild(aborted)
        if segment is not self._log.active:
            segment.seal()
            self._log.sealed.append(segment)
        return expected

    def _is_untrimmed(self, segment: Segment, position: int) -> bool:
        """Return whether only zeros of a preallocation follow from ``position``."""
        return self._options.config.preallocate and segment.file.is_blank_from(position)

    def _is_strict(self, expected: int) -> bool:
        """Return whether a gap at ``expected`` in the active segment is damage.

        A gap below the flushed offset or the cleaner's checkpoint, or in a fetched log, may come
        from compaction, which the segment went through before a truncation made it active.
        """
        options = self._options
        return not options.is_replica and expected >= max(self._flushed, options.compacted_below)

    def _skip_damage(
        self, segment: Segment, position: int, expected: int
    ) -> tuple[int, int] | None:
        """Return position and offset at which the log continues after a bad batch.

        None if the log must be truncated at the bad batch, because no good one follows, or because
        the bad batch and all later ones are not known to have been flushed.
        """
        if expected >= self._flushed:
            return None
        later = self._log.from_offset(segment.base_offset)[1:]
        high = later[0].base_offset if later else segment.base_offset + MAX_RELATIVE_OFFSET
        intact = next_intact(segment, position, expected, high, self._flushed)
        if intact is None and later and high <= self._flushed:
            # The rest of a sealed segment is bad; the segment that follows was on disk as well.
            return segment.size, high
        return intact

    def _check_order(self, header: BatchHeader, expected: int, *, strict: bool) -> None:
        """Check a batch's offsets against the previous batch: no CRC covers its base offset."""
        base_offset = header.base_offset
        if header.magic < MAGIC:
            # The header gives only a message's last offset; the first one is unknown.
            if base_offset < expected:
                raise CorruptRecordError(f"offset {base_offset} where {expected} is next")
            return
        if base_offset < expected or (strict and base_offset > expected):
            raise CorruptRecordError(f"offset {base_offset} where {expected} is next")
        if header.last_offset_delta < 0:
            raise CorruptRecordError(f"the batch at offset {base_offset} ends before it begins")
        check_offsets(header)

    def _wrong_epoch(self, header: BatchHeader, *, is_fatal: bool) -> str:
        """Return why the leader epoch, which no CRC covers, is wrong; empty if it is plausible."""
        epoch, highest = header.leader_epoch, self._highest_epoch
        if header.magic < MAGIC or (epoch >= self._epoch and (highest is None or epoch <= highest)):
            return ""
        reason = f"the batch at offset {header.base_offset} has leader epoch {epoch}"
        if is_fatal:
            raise CorruptRecordError(reason)
        return reason

    def _settle_epoch(self, segment: Segment, next_position: int, header: BatchHeader) -> None:
        """Lower the current epoch if both this batch and the next one have a lower epoch.

        Only batches below the flushed offset reach this method. Such a batch stays even if its
        epoch is wrong, because readers do not need epochs.
        """
        if header.leader_epoch >= self._epoch:
            return
        try:
            following = segment.header_at(next_position).leader_epoch
        except CorruptRecordError:
            following = header.leader_epoch
        if following < self._epoch:
            self._epoch = header.leader_epoch
            self._new_epochs = [entry for entry in self._new_epochs if entry[0] <= self._epoch]

    def _check_gap(self, segment: Segment, next_position: int, header: BatchHeader) -> None:
        """Check a batch after a gap against the next one: no CRC covers its base offset.

        If the next batch is torn or missing, the base offset cannot be checked.
        """
        if next_position + LOG_OVERHEAD <= segment.size:
            following = int.from_bytes(segment.file.read(next_position, next_position + 8), "big")
            is_checkable = header.next_offset <= following or is_intact(segment, next_position)
        else:
            later = self._log.from_offset(segment.base_offset)[1:]
            following = later[0].base_offset if later else header.next_offset
            is_checkable = True
        if header.next_offset > following and is_checkable:
            raise CorruptRecordError(
                f"offset {header.base_offset} before a batch at offset {following}"
            )

    def _note_epoch(self, header: BatchHeader, expected: int) -> None:
        """Note a new epoch. The checkpoint has its start if compaction removed its first batch."""
        self._epoch = max(self._epoch, header.leader_epoch)
        latest = self._new_epochs[-1][0] if self._new_epochs else self._epochs.latest
        if header.leader_epoch > latest:
            start = self._known_starts.get(header.leader_epoch, -1)
            if not expected <= start <= header.base_offset:
                start = header.base_offset
            self._new_epochs.append((header.leader_epoch, start))

    def _cut(self, segment: Segment, position: int, end: int, reason: str) -> None:
        """Truncate the log at the bad batch at ``position``, where offset ``end`` is expected."""
        report = self._report
        report.reason = reason
        report.valid_data_removed = is_intact(segment, end_by_length(segment, position))
        report.truncated_bytes += segment.size - position
        report.removed_records += _count_records(segment, position)
        later = self._log.from_offset(segment.base_offset)[1:]
        is_wanted = report.valid_data_removed or any(segment.size for segment in later)
        if self._strays is not None and not segment.file.is_blank_from(position):
            self._strays.copy_end(segment, position, end, is_wanted=is_wanted)
        self._end_with(segment, end)
        segment.cut(position)
        if segment is not self._log.active:
            # Later flushes cover only the active segment and those after it.
            segment.file.sync()
        report.kept = [] if self._strays is None else self._strays.kept

    def _end_with(self, segment: Segment, end: int) -> None:
        """Remove the segments after ``segment``, and add an empty one at ``end``.

        The empty segment becomes the active one, because compaction may have left gaps in
        ``segment``, and the active segment must have none. If possible, the empty segment is
        created first, so that ``segment`` is not the last one after a second kill. The last segment
        is removed first: a kill in between leaves no hole.
        """
        log, later = self._log, self._log.from_offset(segment.base_offset)[1:]
        if not later:
            return
        if end > segment.base_offset and end < later[0].base_offset:
            log.create_segment(end, self._options.now_ms)
            self._fs.sync_directory(self._directory)
        for dropped in reversed(later):
            self._drop(dropped)
        if end > segment.base_offset and log.active is segment:
            log.create_segment(end, self._options.now_ms)

    def _drop(self, segment: Segment) -> None:
        report = self._report
        report.truncated_bytes += segment.size
        report.removed_segments += 1
        report.removed_records += _count_records(segment, 0)
        if segment.size:
            report.valid_data_removed = True
        if self._strays is not None and segment.size:
            self._strays.set_aside(segment)
            report.kept = self._strays.kept
        else:
            self._log.remove([segment], now_ms=0, delay_ms=0)

    # --- producers and the end of loading ---

    def _load_producers(self, upto: int) -> None:
        """Build the producer state as of ``upto``: newest snapshot, then the log after it."""
        producers, first = self._producers, self._log.first_offset
        limit = self._snapshot_limit(upto)
        offset = producers.load_snapshot(limit, first, self._options.now_ms)
        self._report.damaged += replay_producers(self._log, producers, offset, upto)

    def _snapshot_limit(self, upto: int) -> int:
        """Return the highest offset whose producer snapshot may be loaded.

        The last stable offset waits for transactions whose marker is not below the high watermark.
        Snapshots do not record ended transactions, so these must come from the replay of the log.
        """
        options, mark = self._options, self._options.high_watermark
        if not options.is_replicated or not options.log_start_offset < mark < upto:
            return upto
        with suppress(CorruptRecordError):
            for _, header, _ in self._log.batches(mark, with_payload=False):
                if header.base_offset >= upto:
                    break
                if header.is_control and header.has_producer:
                    return mark
        return upto

    def _finish(self, start: int) -> LoadedLog:
        log, producers, report = self._log, self._producers, self._report
        if log.log_end_offset < start:
            report.reason = f"the log ends at {log.log_end_offset}, before its start {start}"
            report.truncated_bytes += log.size_bytes
            report.removed_records += sum(_count_records(segment, 0) for segment in log.segments)
            log.restart_at(start, self._options.now_ms)
            producers.remove_snapshots_above(-1)
            producers.clear(start)
        end = log.log_end_offset
        producers.map_end_offset = end
        producers.remove_snapshots_above(end)
        if log.active.base_offset == end and report.removed_segments:
            producers.take_snapshot()
        self._epochs.truncate_from_end(end)
        self._epochs.truncate_from_start(start)
        is_reported = report.scanned_segments or report.reason or report.damaged
        return self._loaded(start, report if is_reported else None)

    def _loaded(self, start: int, report: RecoveryReport | None) -> LoadedLog:
        """Build the result; report checkpointed offsets beyond the log end as lost."""
        options, end = self._options, self._log.log_end_offset
        point = end if options.clean else min(options.recovery_point, end)
        lost = max(options.recovery_point, options.high_watermark) - end
        if lost > 0:
            report = report or RecoveryReport()
            report.lost_offsets = lost
        return LoadedLog(self._log, start, max(point, start), report)


def replay_producers(
    log: Log, producers: ProducerStateManager, offset: int, upto: int
) -> list[Damage]:
    """Bring the producer state from ``offset`` to ``upto`` by reading the log between them.

    Return the unreadable stretches, which leave the producer state unchanged.
    """
    damaged: list[Damage] = []
    ends = [*(segment.base_offset for segment in log.segments), log.log_end_offset]
    for segment in log.from_offset(offset) if offset < upto else ():
        if segment.base_offset >= upto:
            break
        reached = max(offset, segment.base_offset)
        try:
            position = segment.locate(offset)
            for _, header, batch in segment.batches(position) if position is not None else ():
                if offset <= header.base_offset < upto:
                    producers.replay(header, batch)
                reached = header.next_offset
        except (CorruptRecordError, InvalidRecordError) as error:
            following = next(end for end in ends if end > segment.base_offset)
            damaged.append(Damage(reached, following, str(error)))
    producers.map_end_offset = upto
    return damaged


def _count_records(segment: Segment, position: int) -> int:
    """Count the records from ``position`` on, as far as one header leads to the next."""
    count = 0
    with suppress(LogError):
        for _, header, _ in segment.batches(position, with_payload=False):
            count += header.record_count
    return count
