"""Counts, step by step, the offsets of a partition that consumers do not receive.

An offset is *hidden* if no consumer receives a record for it: it holds a transaction marker, or
compaction has removed the record. It is *aborted* if only read_uncommitted consumers receive the
record. Hidden and aborted offsets form runs, which are collected from batch headers; all other
offsets are records. Batches that this process has appended since the last marker are not scanned:
none of their offsets is hidden.

Offsets that are not scanned yet count as records, so a computed lag is exact or too large, never
too small.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from itertools import islice
from typing import Final

from fencepost.logcore.batch import BatchHeader
from fencepost.logcore.errors import LogError
from fencepost.logcore.partition import Partition

BATCHES_PER_STEP: Final = 200
"""The number of headers to scan before yielding to other tasks: about half a millisecond."""

OFFSETS_PER_PART: Final = 50_000
"""The number of offsets for which aborted transactions are looked up together."""

MIN_RUNS: Final = 64
"""The number of runs that every tally may keep, regardless of the number of tallies."""


class PartitionTally:
    """Hidden and aborted offsets of a partition from ``start`` to ``end``.

    ``aborts`` tells whether all transactions in the range have ended. Beyond the last stable offset
    some transactions have not ended, and no offset counts as aborted.
    """

    def __init__(self, partition: Partition, start: int, cleaned: int, *, aborts: bool) -> None:
        self.partition = partition
        self.start = self.end = start
        self.cleaned = cleaned
        """The offset at which the last compaction ended; another compaction makes this tally
        invalid."""
        self.times: dict[int, int] = {}
        """Timestamps by offset, for the record that each consumer would read next."""
        self._aborts = aborts
        self._markers = 0
        self._quiet_from = 0
        # By run: first offset, length, and cumulative sums up to the end of the run.
        self._first, self._length = array("q"), array("q")
        self._hidden, self._aborted = array("q"), array("q")
        self._forgotten = 0, 0
        """The hidden and aborted offsets in runs that have been dropped."""

    @property
    def runs(self) -> int:
        """The number of runs that are kept."""
        return len(self._first)

    # --- asking ---

    def between(self, offset: int, limit: int) -> tuple[int, int]:
        """Return the numbers of known hidden and known aborted offsets in [offset, limit)."""
        low, high = self._below(offset), self._below(limit)
        return max(0, high[0] - low[0]), max(0, high[1] - low[1])

    def _below(self, offset: int) -> tuple[int, int]:
        at = bisect_left(self._first, offset) - 1
        hidden, aborted = self._sums(at)
        beyond = self._first[at] + self._length[at] - offset if at >= 0 else 0
        if beyond > 0:
            if aborted > self._sums(at - 1)[1]:
                aborted -= beyond
            else:
                hidden -= beyond
        return hidden, aborted

    def _sums(self, at: int) -> tuple[int, int]:
        return (self._hidden[at], self._aborted[at]) if at >= 0 else self._forgotten

    def next_record(self, offset: int) -> int:
        """Return the first offset at or after this one that no run covers."""
        at = max(0, bisect_left(self._first, offset + 1) - 1)
        while at < len(self._first) and self._first[at] <= offset:
            offset = max(offset, self._first[at] + self._length[at])
            at += 1
        return offset

    # --- learning ---

    def learn(self, limit: int) -> Iterator[None]:
        """Scan the headers below ``limit``, in steps, except those that need no scan."""
        traffic = self.partition.traffic
        if traffic.markers != self._markers:
            self._markers = traffic.markers
            self._quiet_from = self.partition.log_end_offset
        opened_at = self.partition.log_end_offset - traffic.records_in
        look_until = min(limit, max(self._quiet_from, opened_at, self.cleaned))
        if self.end < look_until:
            yield from self._walk(look_until)
        if self.end >= look_until:
            self.end = max(self.end, limit)

    def _walk(self, limit: int) -> Iterator[None]:
        try:
            while self.end < limit:
                before = self.end
                yield from self._walk_part(min(limit, before + OFFSETS_PER_PART))
                if self.end == before:
                    return  # the log is empty there, even if its end offset is higher
        except (LogError, OSError):
            return  # a consumer that reads these offsets gets the error

    def _walk_part(self, limit: int) -> Iterator[None]:
        log = self.partition.log
        aborted = log.aborted_between(self.end, limit) if self._aborts else []
        coming = sorted(((first, who) for who, first in aborted), reverse=True)
        active: set[int] = set()
        while self.end < limit:
            before = self.end
            batches = log.batches(before, with_payload=False)
            for _, header, _ in islice(batches, BATCHES_PER_STEP):
                while coming and coming[-1][0] <= header.base_offset:
                    active.add(coming.pop()[1])
                self._add_batch(header, active)
                if self.end >= limit:
                    break
            if self.end == before:
                return
            yield

    def _add_batch(self, header: BatchHeader, active: set[int]) -> None:
        """Add the offsets from :attr:`end` to the end of a batch."""
        if header.base_offset > self.end:
            self._add(self.end, header.base_offset - self.end, is_aborted=False)
        behind = header.next_offset
        first = max(header.base_offset, self.end)
        span = behind - first
        if span <= 0:
            return
        if header.is_control:
            active.discard(header.producer_id)
            self._add(first, span, is_aborted=False)
        elif header.is_transactional and header.producer_id in active:
            self._add(first, span, is_aborted=True)
        elif first == header.base_offset and header.record_count < span:
            missing = span - max(0, header.record_count)
            self._add(behind - missing, missing, is_aborted=False)
        self.end = behind

    def _add(self, first: int, length: int, *, is_aborted: bool) -> None:
        hidden, aborted = self._sums(len(self._first) - 1)
        self._first.append(first)
        self._length.append(length)
        self._hidden.append(hidden if is_aborted else hidden + length)
        self._aborted.append(aborted + length if is_aborted else aborted)

    # --- forgetting ---

    def trim(self, start: int, most: int) -> None:
        """Drop runs below ``start``, and keep ``most`` runs at most.

        If more runs are left, every second run is merged into the previous run. For a consumer
        whose offset lies between two runs that are merged, the computed lag is then too large by
        the length of the second run.
        """
        if start > self.start:
            at = bisect_left(self._first, start)
            if at and self._first[at - 1] + self._length[at - 1] > start:
                at -= 1
            self._forgotten = self._sums(at - 1)
            for counts in (self._first, self._length, self._hidden, self._aborted):
                del counts[:at]
            self.start = start
        while len(self._first) > max(most, MIN_RUNS):
            for places in (self._first, self._length):
                places[:] = places[::2]
            for sums in (self._hidden, self._aborted):
                # With an odd number of runs, the last run has no neighbour, and is kept.
                sums[:] = sums[1::2] + (sums[-1:] if len(sums) % 2 else sums[:0])
