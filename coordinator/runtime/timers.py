"""Keyed timers for all shards, over one timer of the event loop.

A :class:`TimerQueue` belongs to one event loop; each shard has its own :class:`Timers` on it, so
that keys of different shards never meet and an unloaded shard takes all its timers with it. Setting
a key again replaces its deadline. A cancelled or replaced timer never fires, even if the loop's
timer has already gone off, because only what is still in the queue is looked at.

Deadlines are wall-clock times (machines compute them from the ``now_ms`` they are given), but the
wait is measured on the monotonic clock: a jump of the wall clock must not expire every session.

A deadline passes for good only once the loop has read what had arrived by then: after a pause of
the process, or of the loop, the heartbeats of everybody who lives lie unread in their sockets.

Source: the contract is that of ``CoordinatorTimerImpl``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable, Iterator
from functools import partial

from sortedcontainers import SortedList

from fencepost.coordinator.runtime.background import call_later, survived
from fencepost.logcore.clock import Clock

PASS_MS = 5
"""How long timers are fired before the loop gets its turn, in milliseconds: each may append a
record, and thousands of sessions may expire at the same moment."""

Fire = Callable[[Hashable, int], None]


class TimerQueue:
    """Waits for the earliest deadline of all :class:`Timers` made by :meth:`timers`."""

    def __init__(
        self, clock: Clock, loop: asyncio.AbstractEventLoop, pass_ms: float = PASS_MS
    ) -> None:
        self._clock = clock
        self._loop = loop
        self._pass_seconds = pass_ms / 1000
        # (due on the monotonic clock, sequence number, wall-clock deadline, owner, key): the
        # sequence number is unique, so keys are never compared.
        self._queue: SortedList = SortedList()
        self._sequence = 0
        self._handle: asyncio.TimerHandle | None = None
        self._armed_ms: int | None = None
        self.on_fire: Fire | None = None
        """Called before each timer that fires, with its key and the time that it is told."""

    def timers(self, fire: Fire) -> Timers:
        """A new set of timers; ``fire(key, now_ms)`` is called for each that expires."""
        return Timers(self, fire)

    def run_due(self, by_ms: int | None = None) -> int:
        """Fire what was due ``by_ms``, for about :data:`PASS_MS`; return how many were fired.

        A test that owns the clock calls this after moving the clock, for all that is due now.
        """
        self._disarm()
        horizon_ms = self._clock.monotonic_ms() if by_ms is None else by_ms
        # Real time, not the daemon's clock: it bounds our own use of the processor.
        end = time.perf_counter() + self._pass_seconds
        fired = 0
        try:
            while self._queue and self._queue[0][0] <= horizon_ms:
                if fired and time.perf_counter() >= end:
                    break
                _, _, deadline_ms, owner, key = self._queue.pop(0)
                fired += 1
                # The machine must not see a time before its own deadline, whatever the wall
                # clock did meanwhile.
                now_ms = max(deadline_ms, self._clock.now_ms())
                if self.on_fire is not None:
                    self.on_fire(key, now_ms)
                with survived("timer", key=key):
                    owner.expire(key, now_ms)
        finally:
            self._arm()
        return fired

    def close(self) -> None:
        """Forget every timer."""
        self._queue.clear()
        self._disarm()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[tuple[int, Hashable]]:
        """When each is due, on the monotonic clock, and its key; the earliest first."""
        return ((due_ms, key) for due_ms, _, _, _, key in self._queue)

    def add(
        self, owner: Timers, key: Hashable, deadline_ms: int, now_ms: int | None = None
    ) -> Entry:
        """Put a timer into the queue (called by :class:`Timers`)."""
        wait_ms = deadline_ms - (self._clock.now_ms() if now_ms is None else now_ms)
        due_ms = self._clock.monotonic_ms() + wait_ms
        self._sequence += 1
        entry: Entry = (due_ms, self._sequence, deadline_ms, owner, key)
        self._queue.add(entry)
        if self._armed_ms is None or due_ms < self._armed_ms:
            self._disarm()
            self._arm()
        return entry

    def discard(self, entry: Entry) -> None:
        """Take a timer out of the queue (called by :class:`Timers`).

        The loop's timer stays as it is: going off for nothing costs less than setting it anew at
        every heartbeat.
        """
        self._queue.discard(entry)

    def _arm(self) -> None:
        if self._handle is not None or not self._queue:
            return
        due_ms: int = self._queue[0][0]
        delay_ms = due_ms - self._clock.monotonic_ms()
        self._armed_ms = due_ms
        self._handle = call_later(self._loop, max(delay_ms, 0), "timers", self._read_first)

    def _read_first(self) -> None:
        # Between two turns the loop looks at its sockets. It calls their readers before it calls
        # timers; hence not call_soon.
        run_due = partial(self.run_due, self._clock.monotonic_ms())
        self._handle = call_later(self._loop, 0, "timers", run_due)

    def _disarm(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        self._armed_ms = None


class Timers:
    """The timers of one shard."""

    __slots__ = ("_entries", "_fire", "_queue")

    def __init__(self, queue: TimerQueue, fire: Fire) -> None:
        self._queue = queue
        self._fire = fire
        self._entries: dict[Hashable, Entry] = {}

    def set(self, key: Hashable, deadline_ms: int | None, now_ms: int | None = None) -> None:
        """Let ``key`` fire at ``deadline_ms`` (wall clock), or never with None.

        ``now_ms`` is the instant that the deadline was counted from, which is later than now where
        a timer set it that fires after the wall clock was set back.
        """
        old = self._entries.pop(key, None)
        if old is not None:
            self._queue.discard(old)
        if deadline_ms is not None:
            self._entries[key] = self._queue.add(self, key, deadline_ms, now_ms)

    def clear(self) -> None:
        """Cancel all."""
        for entry in self._entries.values():
            self._queue.discard(entry)
        self._entries.clear()

    def deadline_ms(self, key: Hashable) -> int | None:
        """When ``key`` will fire; None if it is not set."""
        entry = self._entries.get(key)
        return None if entry is None else entry[2]

    def expire(self, key: Hashable, now_ms: int) -> None:
        """``key`` is due (called by :class:`TimerQueue`)."""
        del self._entries[key]
        self._fire(key, now_ms)

    def __len__(self) -> int:
        return len(self._entries)


Entry = tuple[int, int, int, Timers, Hashable]
