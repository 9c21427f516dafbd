"""The in-flight records of a share partition, as ranges.

Records enter the cache as *batches*, each with the bounds of an acquisition. A batch consists of
*runs*: neighbouring offsets with the same state, count, owner and deadline. A batch that no request
has divided is one run, so that its transitions cost the same for one record and for ten thousand.
The bounds of batches stay visible to clients: a batch is acquired again as a whole.

Source: Kafka's ``InFlightBatch`` and ``InFlightState``, where a divided batch has one state per
offset.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from operator import attrgetter
from typing import Final

from sortedcontainers import SortedDict

from fencepost.groups.share.states import Cause, RecordState
from fencepost.logcore.machine import InvariantViolation

_FIRST: Final = attrgetter("first")


class Transition:
    """A transition under way: its new state is being written. If that fails, it is undone."""

    __slots__ = ("cause", "member_id", "write_id")

    def __init__(self, write_id: int, member_id: str, cause: Cause) -> None:
        self.write_id = write_id
        self.member_id = member_id
        """The owner before the transition."""
        self.cause = cause


class Run:
    """Neighbouring offsets with one state."""

    __slots__ = ("count", "deadline_ms", "first", "last", "member_id", "state", "transition")

    def __init__(
        self,
        first: int,
        last: int,
        state: RecordState,
        count: int,
        member_id: str | None = None,
        deadline_ms: int | None = None,
        transition: Transition | None = None,
    ) -> None:
        self.first = first
        self.last = last
        self.state = state
        self.count = count
        """The delivery count."""
        self.member_id = member_id
        """The owner of the acquisition lock; None unless ACQUIRED."""
        self.deadline_ms = deadline_ms
        """The time at which the lock ends. The lock keeps running during a transition from
        ACQUIRED."""
        self.transition = transition

    @property
    def size(self) -> int:
        """The number of offsets."""
        return self.last - self.first + 1

    @property
    def is_available(self) -> bool:
        """Whether a fetch may acquire the offsets."""
        return self.state is RecordState.AVAILABLE and self.transition is None

    @property
    def is_final(self) -> bool:
        """Whether the start offset may pass the offsets."""
        return self.state.is_terminal and self.transition is None

    def split(self, first: int) -> Run:
        """Cut the run before ``first`` and return the second part."""
        rest = Run(
            first,
            self.last,
            self.state,
            self.count,
            self.member_id,
            self.deadline_ms,
            self.transition,
        )
        self.last = first - 1
        return rest

    def continues(self, previous: Run) -> bool:
        """Whether the run directly follows ``previous`` and equals it in everything else."""
        return (
            previous.last + 1 == self.first
            and previous.state is self.state
            and previous.count == self.count
            and previous.member_id == self.member_id
            and previous.deadline_ms == self.deadline_ms
            and previous.transition is self.transition
        )


class InFlightBatch:
    """One batch of the cache. ``runs`` cover the offsets that are not below the start offset."""

    __slots__ = ("first", "is_divided", "last", "runs")

    def __init__(self, run: Run) -> None:
        self.first = run.first
        self.last = run.last
        self.runs = [run]
        self.is_divided = False
        """Whether a request or the start offset has divided the batch: Kafka's ``offsetState``.
        Error messages, and the portions of throttled records, depend on it."""

    @property
    def size(self) -> int:
        """The number of offsets when the batch was first acquired."""
        return self.last - self.first + 1

    def lies_within(self, first: int, last: int) -> bool:
        """Whether a range contains the whole batch: Kafka's ``checkForFullMatch``."""
        return first <= self.first and self.last <= last

    def overlapping(self, first: int, last: int) -> list[Run]:
        """Return the runs that have offsets in the range."""
        start = max(0, bisect_right(self.runs, first, key=_FIRST) - 1)
        end = bisect_right(self.runs, last, key=_FIRST)
        return [run for run in self.runs[start:end] if run.last >= first]

    def next_available(self, first: int, last: int) -> Run | None:
        """Return the first run with offsets in the range that a fetch may acquire."""
        runs = self.runs
        for index in range(max(0, bisect_right(runs, first, key=_FIRST) - 1), len(runs)):
            run = runs[index]
            if run.first > last:
                return None
            if run.last >= first and run.is_available:
                return run
        return None

    def cut(self, first: int) -> None:
        """Split the run that contains ``first``, if any, so that a run begins at this offset."""
        index = bisect_right(self.runs, first, key=_FIRST) - 1
        if index >= 0 and self.runs[index].first < first <= self.runs[index].last:
            self.runs.insert(index + 1, self.runs[index].split(first))
            self.is_divided = True

    def carve(self, first: int, last: int) -> list[Run]:
        """Split runs at the ends of the range, and return the runs inside the range."""
        self.cut(first)
        self.cut(last + 1)
        return self.overlapping(first, last)

    def join(self) -> None:
        """Join neighbouring runs that became equal."""
        if len(self.runs) == 1:
            return
        joined = self.runs[:1]
        for run in self.runs[1:]:
            if run.continues(joined[-1]):
                joined[-1].last = run.last
            else:
                joined.append(run)
        self.runs = joined


class InFlightRecords:
    """The batches of a share partition, by first offset."""

    __slots__ = ("_batches",)

    def __init__(self) -> None:
        self._batches: SortedDict[int, InFlightBatch] = SortedDict()

    def __bool__(self) -> bool:
        return bool(self._batches)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[InFlightBatch]:
        return iter(self._batches.values())

    @property
    def last(self) -> InFlightBatch:
        """The batch with the highest offsets."""
        batch: InFlightBatch = self._batches.peekitem(-1)[1]
        return batch

    @property
    def first(self) -> InFlightBatch:
        """The batch with the lowest offsets."""
        batch: InFlightBatch = self._batches.peekitem(0)[1]
        return batch

    def add(self, run: Run) -> InFlightBatch:
        """Add a batch of one run; it must not overlap another batch."""
        floor = self.floor(run.last)
        if floor is not None and floor.last >= run.first:
            raise InvariantViolation(f"{run.first}-{run.last} overlaps {floor.first}-{floor.last}")
        batch = self._batches[run.first] = InFlightBatch(run)
        return batch

    def floor(self, offset: int) -> InFlightBatch | None:
        """Return the batch that begins at or below an offset; it may end before the offset."""
        index = self._batches.bisect_right(offset) - 1
        return self._batches.peekitem(index)[1] if index >= 0 else None

    def begun_within(self, first: int, last: int) -> list[InFlightBatch]:
        """Return the batches whose first offsets lie in the range."""
        return [self._batches[key] for key in self._batches.irange(first, last)]

    def overlapping(self, first: int, last: int) -> list[InFlightBatch]:
        """Return the batches that have offsets in the range."""
        floor = self.floor(first)
        start = first if floor is None or floor.last < first else floor.first
        return self.begun_within(start, last)

    def remove_below(self, start_offset: int) -> None:
        """Forget all offsets below the start offset."""
        batches = self._batches
        while batches and batches.peekitem(0)[1].last < start_offset:
            batches.popitem(0)
        if batches:
            first = batches.peekitem(0)[1]
            if first.runs[0].first < start_offset:
                first.runs = first.carve(start_offset, first.last)
                first.is_divided = True

    def clear(self) -> None:
        """Forget all offsets."""
        self._batches.clear()
