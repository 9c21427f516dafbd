"""Keyed timers for all shards, over one timer of the event loop.

A :class:`TimerQueue` belongs to one event loop. Each shard has a :class:`Timers` of its own on the
queue. So keys of different shards are independent, and an unloaded shard removes all its timers.
Setting a key again replaces its deadline. A cancelled or replaced timer never fires, even if the
loop's timer is already due, because only timers in the queue are examined.

Deadlines are wall-clock times (state machines compute them from their ``now_ms``), but the wait is
measured on the monotonic clock: a jump of the wall clock must not expire every session.

Nearly every deadline belongs to a session, which each heartbeat extends. An extended timer
therefore keeps its old entry in the queue until that entry is due, and only then gets a new one:
once per session timeout, not per heartbeat.

A timer fires only after the loop has read all data that had arrived by its deadline. Otherwise,
after a pause of the process or of the loop, the sessions of live members would expire although
their heartbeats have arrived and are only unread.

Source: the contract of ``CoordinatorTimerImpl``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterator
from functools import partial

from sortedcontainers import SortedList

from fencepost.coordinator.runtime.background import call_later, swallow
from fencepost.logcore.clock import Clock, monotonic_s

PASS_MS = 5
"""The time in milliseconds for which timers are fired before the event loop runs other work: each
timer may append a record, and thousands of sessions may expire at the same moment."""

Fire = Callable[[Hashable, int], None]


class _Timer:
    """One timer of a :class:`Timers`: a key and its deadline."""

    __slots__ = ("deadline_ms", "due_ms", "key", "owner", "placed", "sequence")

    def __init__(self, owner: Timers, key: Hashable) -> None:
        self.owner = owner
        self.key = key
        self.due_ms = 0
        """The due time on the monotonic clock."""
        self.deadline_ms = 0
        """The deadline on the wall clock."""
        self.sequence = 0
        """The order in which timers were set, which decides between timers with the same deadline.
        """
        self.placed = 0, 0
        """The due time and the sequence number of this timer's entry in the queue. The entry may be
        outdated."""


Entry = tuple[int, int, _Timer]
"""The time to examine a timer, and a unique sequence number, so that timers are never compared."""


class TimerQueue:
    """Waits for the earliest deadline of all :class:`Timers` created by :meth:`timers`."""

    def __init__(
        self, clock: Clock, loop: asyncio.AbstractEventLoop, pass_ms: float = PASS_MS
    ) -> None:
        self._clock = clock
        self._loop = loop
        self._pass_seconds = pass_ms / 1000
        self._queue: SortedList[Entry] = SortedList()
        self._sequence = 0
        self._handle: asyncio.TimerHandle | None = None
        self._armed_ms: int | None = None
        self.on_fire: Fire | None = None
        """Called before each timer that fires, with its key and the time passed to it."""

    def timers(self, fire: Fire) -> Timers:
        """Return a new set of timers; ``fire(key, now_ms)`` is called for each that expires."""
        return Timers(self, fire)

    def run_due(self, by_ms: int | None = None) -> int:
        """Fire timers that were due at ``by_ms``, for about :data:`PASS_MS`; return their number.

        If ``by_ms`` is None, fire those that are due now, as a test does after moving its clock.
        """
        self._disarm()
        horizon_ms = self._clock.monotonic_ms() if by_ms is None else by_ms
        # Real time, not the daemon's clock: it limits processor use.
        end = monotonic_s() + self._pass_seconds
        fired = moved = 0
        try:
            while self._queue and self._queue[0][0] <= horizon_ms:
                if (fired or (moved and by_ms is not None)) and monotonic_s() >= end:
                    break
                _, sequence, timer = self._queue.pop(0)
                if sequence != timer.sequence:
                    self._insert(timer)
                    moved += 1
                    continue
                key = timer.key
                fired += 1
                # A state machine must not see a time before its deadline, even if the wall clock
                # was set back.
                now_ms = max(timer.deadline_ms, self._clock.now_ms())
                if self.on_fire is not None:
                    self.on_fire(key, now_ms)
                with swallow("timer", key=key):
                    timer.owner.expire(key, now_ms)
        finally:
            self._arm()
        return fired

    def close(self) -> None:
        """Remove every timer."""
        self._queue.clear()
        self._disarm()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[tuple[int, Hashable]]:
        """Iterate over the due times, on the monotonic clock, with their keys, in order."""
        due = sorted((timer.due_ms, timer.sequence, timer.key) for _, _, timer in self._queue)
        return ((due_ms, key) for due_ms, _, key in due)

    def set(self, timer: _Timer, deadline_ms: int, now_ms: int | None, *, is_new: bool) -> None:
        """Make a timer fire at ``deadline_ms`` (called by :class:`Timers`)."""
        wait_ms = deadline_ms - (self._clock.now_ms() if now_ms is None else now_ms)
        timer.due_ms = due_ms = self._clock.monotonic_ms() + wait_ms
        timer.deadline_ms = deadline_ms
        self._sequence = timer.sequence = self._sequence + 1
        if is_new:
            self._insert(timer)
        elif due_ms < timer.placed[0]:
            self.discard(timer)
            self._insert(timer)
        else:
            return
        if self._armed_ms is None or due_ms < self._armed_ms:
            self._disarm()
            self._arm()

    def _insert(self, timer: _Timer) -> None:
        """Insert a timer into the queue at its time."""
        timer.placed = timer.due_ms, timer.sequence
        self._queue.add((*timer.placed, timer))

    def discard(self, timer: _Timer) -> None:
        """Remove a timer from the queue (called by :class:`Timers`).

        The loop's timer stays set: a call that finds no timer due costs less than a reset.
        """
        self._queue.discard((*timer.placed, timer))

    def _arm(self) -> None:
        if self._handle is not None or not self._queue:
            return
        due_ms: int = self._queue[0][0]
        delay_ms = due_ms - self._clock.monotonic_ms()
        self._armed_ms = due_ms
        self._handle = call_later(self._loop, max(delay_ms, 0), "timers", self._read_first)

    def _read_first(self) -> None:
        # call_later, not call_soon: the loop first polls its sockets, and then calls their readers
        # before its timers, but after the callbacks of call_soon.
        run_due = partial(self.run_due, self._clock.monotonic_ms())
        self._handle = call_later(self._loop, 0, "timers", run_due)

    def _disarm(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        self._armed_ms = None


class Timers:
    """The timers of one shard."""

    __slots__ = ("_fire", "_queue", "_timers")

    def __init__(self, queue: TimerQueue, fire: Fire) -> None:
        self._queue = queue
        self._fire = fire
        self._timers: dict[Hashable, _Timer] = {}

    def set(self, key: Hashable, deadline_ms: int | None, now_ms: int | None = None) -> None:
        """Make ``key`` fire at ``deadline_ms`` (wall clock), or never with None.

        The caller has added a timeout to ``now_ms``, by default the clock's time, to get the
        deadline. If the wall clock was set back, a timer that fires passes a time later than the
        clock's (see :meth:`TimerQueue.run_due`).
        """
        timer = self._timers.get(key)
        if deadline_ms is not None:
            is_new = timer is None
            if timer is None:
                timer = self._timers[key] = _Timer(self, key)
            self._queue.set(timer, deadline_ms, now_ms, is_new=is_new)
        elif timer is not None:
            del self._timers[key]
            self._queue.discard(timer)

    def clear(self) -> None:
        """Cancel all timers."""
        for timer in self._timers.values():
            self._queue.discard(timer)
        self._timers.clear()

    def deadline_ms(self, key: Hashable) -> int | None:
        """Return the deadline of ``key``; None if it is not set."""
        timer = self._timers.get(key)
        return None if timer is None else timer.deadline_ms

    def expire(self, key: Hashable, now_ms: int) -> None:
        """Fire ``key`` (called by :class:`TimerQueue`)."""
        del self._timers[key]
        self._fire(key, now_ms)

    def __len__(self) -> int:
        return len(self._timers)
