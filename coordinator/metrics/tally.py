"""How many of a partition's offsets are no records that a reader gets, learned step by step.

An offset is *hidden* if nobody gets a record for it: markers of transactions, and what compaction
has removed. It is *aborted* if only a read_uncommitted reader does. Both come in runs, which are
taken down as batch headers are looked at; all other offsets are records. What this process has
appended since the last marker needs no look: no offset of it is hidden.

What is not looked at yet counts as records. So a figure is exact or too large, never too small.
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
"""Headers that are looked at before others may have their turn: about half a millisecond."""

OFFSETS_PER_PART: Final = 50_000
"""Offsets whose aborted transactions are looked up together."""

MIN_RUNS: Final = 64
"""Runs that every tally may keep, however many tallies there are."""


class Tally:
    """What is known of the offsets from ``start`` to ``end`` of a partition.

    ``aborts``: whether the outcome of all transactions is known there. Beyond the last stable
    offset it is not, and nothing counts as aborted.
    """

    def __init__(self, partition: Partition, start: int, cleaned: int, *, aborts: bool) -> None:
        self.partition = partition
        self.start = self.end = start
        self.cleaned = cleaned
        """Where the last round of compaction ended; another one makes this tally worthless."""
        self.times: dict[int, int] = {}
        """Timestamps of records that readers get next, by offset."""
        self._aborts = aborts
        self._markers = 0
        self._quiet_from = 0
        # By run: its first offset, its length, and what all runs up to it add up to.
        self._first, self._length = array("q"), array("q")
        self._hidden, self._aborted = array("q"), array("q")
        self._forgotten = 0, 0
        """The sums of runs that are not kept any more."""

    @property
    def runs(self) -> int:
        """How many runs are kept."""
        return len(self._first)

    # --- asking ---

    def between(self, offset: int, limit: int) -> tuple[int, int]:
        """How many offsets of [offset, limit) are known to be hidden, and aborted."""
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
        """The first offset from this one on that no run covers."""
        at = max(0, bisect_left(self._first, offset + 1) - 1)
        while at < len(self._first) and self._first[at] <= offset:
            offset = max(offset, self._first[at] + self._length[at])
            at += 1
        return offset

    # --- learning ---

    def learn(self, limit: int) -> Iterator[None]:
        """Look at all headers below ``limit`` that have to be looked at, some at a step."""
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
                    return  # nothing is there, whatever the marks say
        except (LogError, OSError):
            return  # whoever reads there hears of it

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
                self._take(header, active)
                if self.end >= limit:
                    break
            if self.end == before:
                return
            yield

    def _take(self, header: BatchHeader, active: set[int]) -> None:
        """Take down what a batch says of the offsets from ``end`` on."""
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

    def keep(self, start: int, most: int) -> None:
        """Forget what lies below ``start``, and keep ``most`` runs at most.

        Where those are too few every second one is dropped, and its offsets are told with those of
        the one before: a reader between the two seems to be behind by that much more.
        """
        if start > self.start:
            at = bisect_left(self._first, start)
            if at and self._first[at - 1] + self._length[at - 1] > start:
                at -= 1
            self._forgotten = self._sums(at - 1)
            for one in (self._first, self._length, self._hidden, self._aborted):
                del one[:at]
            self.start = start
        while len(self._first) > max(most, MIN_RUNS):
            for places in (self._first, self._length):
                places[:] = places[::2]
            for sums in (self._hidden, self._aborted):
                # Without a neighbour the last one stays as it is.
                sums[:] = sums[1::2] + (sums[-1:] if len(sums) % 2 else sums[:0])
