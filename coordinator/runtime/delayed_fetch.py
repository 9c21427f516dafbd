"""The long poll of a Fetch: requests that wait for records.

A delayed fetch listens to its partitions. Each append updates the number of bytes available in its
partition. The wait ends when the sum reaches the requested minimum, when the leader epoch changes,
or when the fetch offset can no longer be read. The response is then read by an action of the
:class:`ActionQueue`, not inside the append that ended the wait.

Bytes that were available before the wait also count, including those that the first read left out
because it returns only whole batches.

Source: ``DelayedFetch``, ``DelayedOperationPurgatory``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple

from fencepost.coordinator.runtime.background import call_later
from fencepost.coordinator.runtime.turns import ActionQueue, Pause
from fencepost.logcore.machine import DomainError
from fencepost.logcore.partition import Partition
from fencepost.logcore.reading import Isolation

_KEPT_DEADLINES: Final = 64
"""The number of deadlines of ended fetches that may always stay in the queue, because removing only
a few of them costs more than it saves."""


class WatchedPartition(NamedTuple):
    """A partition of a delayed fetch, the fetch offset, and how many of its bytes count at most."""

    partition: Partition
    offset: int
    max_bytes: int


class DelayedFetch(Pause):
    """A wait until the partitions have ``min_bytes``, for ``max_wait_ms`` at most.

    The creator must always call :meth:`cancel`, which has no effect after the end.
    """

    __slots__ = (
        "_bytes",
        "_isolation",
        "_min_bytes",
        "_purgatory",
        "_total",
        "_undo",
        "_woken",
        "known_high_watermark",
    )

    def __init__(
        self,
        purgatory: DelayedFetches,
        isolation: Isolation,
        *,
        min_bytes: int,
        max_wait_ms: int,
        known_high_watermark: int | None = None,
    ) -> None:
        super().__init__()
        self._purgatory = purgatory
        self.known_high_watermark = known_high_watermark
        """The high watermark that a follower sent: a higher one also ends the wait (KIP-1166)."""
        self._isolation = isolation
        self._min_bytes = min_bytes
        self._woken = False
        self._bytes: list[int] = []
        self._total = 0
        self._undo: list[Callable[[], None]] = []
        purgatory.add(self, max_wait_ms)

    def watch(self, watched: WatchedPartition) -> None:
        """Listen to one more partition."""
        place, now = len(self._bytes), self._available(watched)
        self._bytes.append(now)
        self._undo.append(watched.partition.marks.listen(self._listener(place, watched)))
        self._total += now
        if self._total >= self._min_bytes:
            self.wake()

    def _listener(self, place: int, watched: WatchedPartition) -> Callable[[], None]:
        epoch = watched.partition.marks.leader_epoch

        def changed() -> None:
            if self._woken:
                return
            partition = watched.partition
            if partition.marks.leader_epoch != epoch:
                self.wake()
                return
            try:
                now = self._available(watched)
            except DomainError:
                self.wake()
                return
            if partition.marks.stopped or not (
                partition.log_start_offset <= watched.offset <= partition.log_end_offset
            ):
                self.wake()
                return
            self._total += now - self._bytes[place]
            self._bytes[place] = now
            if self._total >= self._min_bytes:
                self.wake()

        return changed

    def _available(self, watched: WatchedPartition) -> int:
        return min(
            watched.partition.reader.available_bytes(watched.offset, self._isolation),
            watched.max_bytes,
        )

    def wake(self) -> None:
        """End the wait soon."""
        if not self._woken:
            self._woken = True
            self._purgatory.actions.add(self.end)

    def cancel(self) -> None:
        """End the wait without a result."""
        if not self.is_over:
            super().cancel()
            self._woken = True
            for undo in self._undo:
                undo()
            self._purgatory.discard(self)


class DelayedFetches:
    """All Fetch requests that wait for records (``services.fetches.delayed``).

    They share one timer of the event loop. Most fetches end long before ``max_wait_ms`` has passed.
    The end of a fetch removes neither its deadline nor the timer. The deadline stays in the queue
    until it has passed, or until most deadlines in the queue belong to ended fetches.
    """

    def __init__(self, actions: ActionQueue | None = None) -> None:
        self.actions = ActionQueue() if actions is None else actions
        """Completes the fetches."""
        self._waiting: dict[DelayedFetch, None] = {}
        """The waiting fetches, in the order of their arrival; responses are sent in the same order.
        """
        self._deadlines: list[tuple[float, int, DelayedFetch]] = []
        """A heap of due time, number and fetch. The number orders fetches with the same due time.
        """
        self._added = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self.closed = False

    def add(self, fetch: DelayedFetch, max_wait_ms: int) -> None:
        """Keep a fetch until it is done; complete it at once if the broker is stopping."""
        self._waiting[fetch] = None
        if self.closed:
            fetch.wake()
            return
        loop = asyncio.get_running_loop()
        due = loop.time() + max_wait_ms / 1000
        self._added += 1
        heappush(self._deadlines, (due, self._added, fetch))
        if self._timer is None or due < self._timer_due:
            self._arm(loop, due, max_wait_ms)

    def discard(self, fetch: DelayedFetch) -> None:
        """Remove a fetch."""
        self._waiting.pop(fetch, None)
        if len(self._deadlines) > 2 * len(self._waiting) + _KEPT_DEADLINES:
            self._deadlines[:] = [
                deadline for deadline in self._deadlines if not deadline[2].is_over
            ]
            heapify(self._deadlines)

    def _arm(self, loop: asyncio.AbstractEventLoop, due: float, delay_ms: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due = due
        self._timer = call_later(loop, delay_ms, "long poll", self._expire)

    def _expire(self) -> None:
        """Complete the fetches whose ``max_wait_ms`` has passed, and wait for the next deadline."""
        self._timer = None
        loop = asyncio.get_running_loop()
        now = max(loop.time(), self._timer_due)
        deadlines = self._deadlines
        while deadlines and (deadlines[0][0] <= now or deadlines[0][2].is_over):
            heappop(deadlines)[2].wake()
        if deadlines:
            self._arm(loop, deadlines[0][0], (deadlines[0][0] - now) * 1000)

    def __len__(self) -> int:
        return len(self._waiting)

    def high_watermark_moved(self, high_watermark: int) -> None:
        """Complete the requests that wait for a higher high watermark."""
        for fetch in list(self._waiting):
            known_high_watermark = fetch.known_high_watermark
            if known_high_watermark is not None and known_high_watermark < high_watermark:
                fetch.wake()

    def wake_all(self) -> None:
        """Complete all requests, for example after the deletion of a topic."""
        for fetch in list(self._waiting):
            fetch.wake()

    def close(self) -> None:
        """Complete all requests, and each later request at once, because the broker is stopping."""
        self.closed = True
        self.wake_all()
        self._deadlines.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
