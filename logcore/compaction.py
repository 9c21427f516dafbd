"""One round of compaction: the choice of a range of the log, and the rewriting of its segments.

A round has three kinds of steps, so that a daemon can run the long steps outside of its event loop:

* *plan* (:func:`plan_round`, on the thread that owns the log) collects the input of the decisions:
  the sealed segments of the range, the aborted transactions, the last record of every producer;
* *clean* (:meth:`CompactionRound.map_keys`, then :meth:`CompactionRound.clean_next` per group of
  segments, on any thread) reads with handles of its own and writes ``.cleaned`` files;
* *install* (``Cleanup.install_cleaned``, on the owner's thread, after each ``clean_next``) replaces
  the source segments with the files, or drops the round if the log was truncated meanwhile. Groups
  are installed oldest first: a tombstone must not be removed before the records that it deletes.

Retention continues during a round. It deletes the oldest segments, so the rest of the round stays
valid: a deleted segment is skipped, and a group that has lost a segment is rewritten.

Every output segment keeps its last batch, without records if necessary: this batch tells recovery
how far an interrupted replacement reaches. (Kafka keeps only the last batch of the round.) A
batch's CRC is checked before the batch is decoded, so that damage is reported and never rewritten
with a good checksum.

Messages of format v0 and v1 become v2 batches, whose tombstones get their delete horizon in that
round; Kafka removes tombstones of these formats by the age of their segment.

Source: ``Cleaner``, ``LogCleanerManager.cleanableOffsets``, ``LocalLog.replaceSegments``.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import pairwise
from typing import Final, NamedTuple

from fencepost.logcore.batch import DEFAULT_MAX_OUTPUT_BYTES, parse_header, verify_crc
from fencepost.logcore.clock import Clock
from fencepost.logcore.config import LogConfig
from fencepost.logcore.fs import FileSystem, sync_path
from fencepost.logcore.index import MAX_RELATIVE_OFFSET, AbortedTxn, TimeIndex
from fencepost.logcore.log import CLEANED_SUFFIX, Log
from fencepost.logcore.record_retention import (
    AbortedTransaction,
    Batch,
    CleanerStats,
    LastRecord,
    OffsetMap,
    RecordFilter,
    Transactions,
    map_offsets,
)
from fencepost.logcore.segment import SEGMENT_SUFFIXES, TXN_INDEX_SUFFIX, Segment, file_stem
from fencepost.logcore.values import dataclass

DEDUPE_BUFFER_BYTES: Final = 134_217_728
"""``log.cleaner.dedupe.buffer.size``: the memory that a round may use for the keys of the dirty
part."""

MAX_SEGMENT_BYTES: Final = 0x7FFFFFFF
"""The maximum size of a segment: positions in the offset index are signed 32-bit numbers."""

_MIN_WAIT_SECONDS: Final = 0.01
"""The throttle does not sleep for less than this time; it carries a smaller debt over."""
_MAX_WAIT_SECONDS: Final = 1.0
"""After this time, a waiting throttle reads its rate again."""


class CompactionCancelled(Exception):  # noqa: N818 - not an error: nothing is wrong with the log
    """The round ends early: the daemon stops, or the log was truncated, closed or deleted."""


class CleanerThrottle:
    """Limits the reads and writes of a cleaner to ``bytes_per_second``, counted together.

    The rate is read at least once a second, so that a higher rate shortens a long wait. ``wait``
    sleeps for the given seconds and returns whether to stop, as ``threading.Event.wait`` does; the
    throttle then raises CompactionCancelled. Source: ``Throttler``,
    ``log.cleaner.io.max.bytes.per.second``.
    """

    def __init__(
        self, bytes_per_second: Callable[[], float], clock: Clock, wait: Callable[[float], bool]
    ) -> None:
        self._bytes_per_second = bytes_per_second
        self._clock = clock
        self._wait = wait
        self._owed_bytes = 0.0
        self._owed_at_ms = clock.monotonic_ms()

    def __call__(self, count: int) -> None:
        """Add ``count`` bytes to the debt, and sleep until it is below _MIN_WAIT_SECONDS."""
        self._wait_for_quota()
        self._owed_bytes += count
        while (owed_s := self._wait_for_quota()) >= _MIN_WAIT_SECONDS:
            if self._wait(min(owed_s, _MAX_WAIT_SECONDS)):
                raise CompactionCancelled("the cleaner stops")

    def _wait_for_quota(self) -> float:
        """Subtract the elapsed time from the debt; return the seconds for the remaining debt.

        Unused time is not saved up, because a later burst would hit the disk at once.
        """
        rate, now_ms = self._bytes_per_second(), self._clock.monotonic_ms()
        paid = (now_ms - self._owed_at_ms) / 1000 * rate
        self._owed_bytes, self._owed_at_ms = max(0.0, self._owed_bytes - paid), now_ms
        return self._owed_bytes / rate


def unthrottled(count: int) -> None:
    """A throttle that never waits."""
    del count


class DirtyRange(NamedTuple):
    """The range that a round on a log would clean, offsets [first_dirty, end), and its bytes.

    ``overdue_ms``: by how long the oldest dirty segment has exceeded ``max_compaction_lag_ms``,
    0 if it has not.
    """

    first_dirty_offset: int
    end_offset: int
    clean_bytes: int
    dirty_bytes: int
    overdue_ms: int

    @property
    def dirty_ratio(self) -> float:
        """Share of dirty bytes in the bytes that a round would read."""
        total = self.clean_bytes + self.dirty_bytes
        return self.dirty_bytes / total if total else 0.0


def dirty_range(
    log: Log,
    checkpoint: int | None,
    *,
    log_start_offset: int,
    last_stable_offset: int,
    now_ms: int,
) -> DirtyRange:
    """Return the cleanable range, which begins at ``checkpoint``, the end of the last round.

    The range ends before the first segment that is active, does not lie wholly below the last
    stable offset, or is not older than ``min_compaction_lag_ms``. A checkpoint outside of the log
    is ignored; None means that there was no round.
    """
    segments, config = log.segments, log.config
    first_dirty = log_start_offset
    if checkpoint is not None and log_start_offset <= checkpoint <= log.log_end_offset:
        first_dirty = checkpoint
    end = segments[0].base_offset
    clean_bytes = dirty_bytes = 0
    oldest: int | None = None
    for segment, following in pairwise(segments):
        next_base = following.base_offset
        dirty = next_base > first_dirty
        if next_base > last_stable_offset or (
            dirty
            and config.min_compaction_lag_ms > 0
            and segment.largest_timestamp_ms > now_ms - config.min_compaction_lag_ms
        ):
            break
        end = next_base
        if segment.base_offset < first_dirty:
            clean_bytes += segment.size
        if dirty:
            # A segment that is dirty from its middle on counts as clean and as dirty.
            dirty_bytes += segment.size
            first = segment.first_batch_timestamp
            if first is not None and first > 0 and (oldest is None or first < oldest):
                oldest = first
    overdue_ms = 0
    if oldest is not None:
        overdue_ms = max(now_ms - max(config.max_compaction_lag_ms, 0) - oldest, 0)
    return DirtyRange(first_dirty, max(end, first_dirty), clean_bytes, dirty_bytes, overdue_ms)


class CompactionSource(NamedTuple):
    """A sealed segment to read. The cleaning thread never touches ``segment``, the log's object."""

    segment: Segment
    base_offset: int
    size: int
    end_offset: int


@dataclass(frozen=True, slots=True)
class CleanedSegment:
    """Files with the suffix ``.cleaned``, ready to replace ``replaced``."""

    base_offset: int
    replaced: tuple[Segment, ...]
    suffixes: tuple[str, ...]
    """Suffixes of the existing files, the log file's first."""


def plan_round(
    fs: FileSystem,
    log: Log,
    dirty: DirtyRange,
    *,
    last_records: Callable[[], Mapping[int, LastRecord]],
    now_ms: int,
    budget_bytes: int,
    is_current: Callable[[], bool],
) -> CompactionRound | None:
    """Collect the input of a round over ``dirty``; return None if nothing is dirty.

    The cleaning thread calls ``is_current``, which returns whether the log was neither truncated
    nor closed.
    """
    if dirty.dirty_bytes == 0 or dirty.end_offset <= dirty.first_dirty_offset:
        return None
    segments = log.segments
    sources = [
        CompactionSource(segment, segment.base_offset, segment.size, following.base_offset)
        for segment, following in pairwise(segments)
        if following.base_offset <= dirty.end_offset
    ]
    aborted = [
        entry
        for segment in segments
        for entry in segment.txn_index.entries
        if entry.first_offset < dirty.end_offset
    ]
    return CompactionRound(
        fs,
        log.directory,
        log.config,
        dirty,
        sources,
        aborted,
        last_records=last_records,
        now_ms=now_ms,
        budget_bytes=budget_bytes,
        is_current=is_current,
        is_held=lambda segment: log.holds((segment,)),
    )


class CompactionRound:
    """The cleaning of one range of one log. Made by ``Cleanup.plan_compaction``.

    Call :meth:`map_keys` once, then :meth:`clean_next` until it returns False; after each True the
    owner calls ``install_cleaned``. ``map_keys`` and ``clean_next`` may run on any thread, but only
    one at a time. Both raise CompactionCancelled if the round ends early, and OSError,
    CorruptRecordError or InvalidRecordError if the log cannot be cleaned; then call
    :meth:`discard`.
    """

    def __init__(
        self,
        fs: FileSystem,
        directory: str,
        config: LogConfig,
        dirty: DirtyRange,
        sources: Sequence[CompactionSource],
        aborted: Sequence[AbortedTxn],
        *,
        last_records: Callable[[], Mapping[int, LastRecord]],
        now_ms: int,
        budget_bytes: int,
        is_current: Callable[[], bool],
        is_held: Callable[[Segment], bool],
    ) -> None:
        self._fs = fs
        self._directory = directory
        self._config = config
        self._sources = sources
        self._aborted = {AbortedTransaction(*entry[:3]): entry for entry in aborted}
        self._last_records = last_records
        self._now_ms = now_ms
        self._offsets = OffsetMap(budget_bytes)
        self._is_current = is_current
        self._is_held = is_held
        self._group: list[CompactionSource] = []
        self._transactions_before_group: Transactions | None = None
        self._filter: RecordFilter | None = None
        self._groups: deque[list[CompactionSource]] = deque()
        self._input_batch: object = None
        self.dirty = dirty
        self.next_dirty_offset = dirty.first_dirty_offset
        """The first offset of the next round, once every output of this round is installed."""
        self.relies_on = 0
        """The log end that must be on disk before any output is installed. Records are removed
        because of later records and markers, which a later power loss must not remove."""
        self.cleaned: CleanedSegment | None = None
        """The files that :meth:`clean_next` wrote last, until they are installed or discarded."""

    @property
    def figures(self) -> CleanerStats:
        """Counts of the bytes and records read and retained so far."""
        return CleanerStats() if self._filter is None else self._filter.figures

    @property
    def is_current(self) -> bool:
        """Whether the log was neither truncated nor closed since the plan."""
        return self._is_current()

    # --- first pass ---

    def map_keys(self, throttle: Callable[[int], None] = unthrottled) -> None:
        """Read the dirty part and note the last offset of each key, within the memory budget."""
        sources = [
            source for source in self._sources if source.end_offset > self.dirty.first_dirty_offset
        ]
        exhausted = False

        def batches() -> Generator[Batch, None, None]:
            nonlocal exhausted
            for source in sources:
                yield from self._read(source, throttle)
            exhausted = True

        with closing(batches()) as dirty:
            map_offsets(
                dirty,
                self._transactions_from(sources[0].base_offset),
                self._offsets,
                start=self.dirty.first_dirty_offset,
                max_output_bytes=DEFAULT_MAX_OUTPUT_BYTES,
                max_record_bytes=self._config.max_record_bytes,
            )
        self.next_dirty_offset = self.dirty.end_offset
        if not exhausted:
            self.next_dirty_offset = self._offsets.latest_offset + 1
        mapped = [source for source in self._sources if source.base_offset < self.next_dirty_offset]
        self._groups.extend(grouped(mapped, self._config))
        self._filter = RecordFilter(
            self._offsets,
            self._transactions_from(self._sources[0].base_offset),
            self._last_records(),
            last_offset=-1,
            now_ms=self._now_ms,
            delete_retention_ms=self._config.delete_retention_ms,
            max_output_bytes=DEFAULT_MAX_OUTPUT_BYTES,
            max_record_bytes=self._config.max_record_bytes,
        )

    def _transactions_from(self, offset: int) -> Transactions:
        """Return the aborted transactions that end at or after ``offset``.

        A transaction that ended earlier would make later batches of its producer count as aborted.
        """
        return Transactions(entry for entry in self._aborted if entry.last_offset >= offset)

    def _read(self, source: CompactionSource, throttle: Callable[[int], None]) -> Iterator[Batch]:
        """Yield the batches of a segment, each with its CRC checked, as format v2.

        Yields nothing if retention has removed the segment.
        """
        self._raise_if_cancelled()
        try:
            segment = self._open(source.base_offset)
        except FileNotFoundError:
            self._raise_if_cancelled()
            if self._is_held(source.segment):
                raise
            return
        try:
            for _, header, batch in segment.batches():
                throttle(header.size)
                self._raise_if_cancelled()
                verify_crc(batch, 0, header)
                yield header, batch
        finally:
            segment.close()

    def _open(self, base_offset: int, *, fresh: bool = False, suffix: str = "") -> Segment:
        return Segment(
            self._fs,
            self._directory,
            base_offset,
            self._config,
            created_ms=self._now_ms,
            fresh=fresh,
            suffix=suffix,
        )

    def _raise_if_cancelled(self) -> None:
        if not self._is_current():
            raise CompactionCancelled(f"{self._directory} was truncated, closed or deleted")

    # --- second pass ---

    def clean_next(self, throttle: Callable[[int], None] = unthrottled) -> bool:
        """Rewrite the next group of segments; return False when none is left.

        After True, :attr:`cleaned` must be installed. Segments that would not change are skipped.
        """
        while self._groups:
            self._raise_if_cancelled()
            self._group = [
                source for source in self._groups.popleft() if self._is_held(source.segment)
            ]
            if self._filter is not None:
                self._transactions_before_group = self._filter.transactions.copy()
            if self._group and self._rewrite(self._group, throttle):
                return True
        return False

    def repeat(self) -> None:
        """Drop the last output, and let :meth:`clean_next` rewrite what remains of its group."""
        self.discard()
        if self._filter is not None and self._transactions_before_group is not None:
            self._filter.transactions = self._transactions_before_group
        self._groups.appendleft(self._group)

    def _rewrite(self, group: list[CompactionSource], throttle: Callable[[int], None]) -> bool:
        """Write the ``.cleaned`` files of a group; return False if the group would not change."""
        base_offset = group[0].base_offset
        self._remove_files(base_offset)
        self._raise_if_cancelled()
        output = self._open(base_offset, fresh=True, suffix=CLEANED_SUFFIX)
        self.cleaned = CleanedSegment(
            base_offset, tuple(source.segment for source in group), SEGMENT_SUFFIXES
        )
        try:
            output.reset_indexes()
            changed = self._filter_into(output, group, throttle)
            aborts = self._aborts_between(base_offset, group[-1].end_offset)
            for entry in aborts:
                output.txn_index.append(entry)
            output.seal()
            if not changed and len(group) == 1 and output.size == group[0].size:
                self.discard()
                return False
            output.file.sync()
            output.txn_index.sync()
            for path in output.index_paths:
                sync_path(self._fs, path)
        finally:
            output.close()
        if not aborts:
            suffixes = tuple(suffix for suffix in SEGMENT_SUFFIXES if suffix != TXN_INDEX_SUFFIX)
            self.cleaned = CleanedSegment(base_offset, self.cleaned.replaced, suffixes)
        return True

    def _filter_into(
        self, output: Segment, group: list[CompactionSource], throttle: Callable[[int], None]
    ) -> bool:
        """Write the retained records of a group; return whether any record or batch changed."""
        if self._filter is None:
            raise ValueError("map_keys comes before clean_next")
        dropped = self._filter.figures.batches_dropped
        changed = False
        with closing(self._with_last_batch(self._read_all(group, throttle))) as batches:
            for retained in self._filter.run(batches):
                changed |= retained is not self._input_batch
                header = parse_header(retained)
                if output.size + header.size > MAX_SEGMENT_BYTES:
                    raise OSError(errno.EFBIG, "a cleaned segment is too large", output.path)
                throttle(header.size)
                output.append(
                    (retained,),
                    header.size,
                    header.base_offset,
                    header.last_offset,
                    header.max_timestamp,
                )
        return changed or self._filter.figures.batches_dropped > dropped

    def _read_all(
        self, group: list[CompactionSource], throttle: Callable[[int], None]
    ) -> Iterator[Batch]:
        for source in group:
            yield from self._read(source, throttle)

    def _with_last_batch(self, batches: Iterable[Batch]) -> Generator[Batch, None, None]:
        """Yield the batches, and tell the filter which one is the last."""
        previous: Batch | None = None
        for batch in batches:
            if previous is not None:
                self._input_batch = previous[1]
                yield previous
            previous = batch
        if previous is not None and self._filter is not None:
            self._filter.last_offset = previous[0].last_offset
            self._input_batch = previous[1]
            yield previous
            self._filter.last_offset = -1

    def _aborts_between(self, start: int, end: int) -> list[AbortedTxn]:
        """Return the retained transaction index entries whose markers lie in [start, end)."""
        if self._filter is None:
            return []
        retained = self._filter.transactions.retained_aborts
        entries = [self._aborted[entry] for entry in retained if start <= entry.last_offset < end]
        return sorted(entries, key=lambda entry: entry.last_offset)

    # --- giving up ---

    def discard(self) -> None:
        """Remove the output that was not installed. Raises OSError."""
        if self.cleaned is not None:
            self._remove_files(self.cleaned.base_offset)
            self.cleaned = None

    def _remove_files(self, base_offset: int) -> None:
        stem = f"{self._directory}/{file_stem(base_offset)}"
        for suffix in SEGMENT_SUFFIXES:
            self._fs.remove(stem + suffix + CLEANED_SUFFIX)


def grouped(sources: Sequence[CompactionSource], config: LogConfig) -> list[list[CompactionSource]]:
    """Group neighbours that together fit one segment (``Cleaner.groupSegmentsBySize``).

    An index has at most one entry per ``index_interval_bytes`` of log, so a limit on the log's size
    also limits the index.
    """
    max_bytes = min(
        config.segment_bytes,
        config.segment_index_bytes // TimeIndex.ENTRY_SIZE * config.index_interval_bytes,
    )
    groups: list[list[CompactionSource]] = []
    room = 0
    for source in sources:
        room -= source.size
        if (
            not groups
            or room < 0
            or source.end_offset - 1 - groups[-1][0].base_offset > MAX_RELATIVE_OFFSET
        ):
            groups.append([])
            room = max_bytes - source.size
        groups[-1].append(source)
    return groups
