"""The long poll of a Fetch: requests that wait for records.

A delayed fetch listens to its partitions. Each append updates the number of bytes available in its
partition. The wait ends when the sum reaches the requested minimum, when the leader epoch changes,
or when the fetch offset can no longer be read. The response is then read in a separate turn of the
event loop, not inside the append that ended the wait.

Bytes that were available before the wait also count, including those that the first read left out
because it returns only whole batches.

Source: ``DelayedFetch``, ``DelayedOperationPurgatory``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from fencepost.coordinator.runtime.background import call_later
from fencepost.logcore.machine import DomainError
from fencepost.logcore.partition import Partition
from fencepost.logcore.reading import Isolation


class WatchedPartition(NamedTuple):
    """A partition of a delayed fetch, the fetch offset, and how many of its bytes count at most."""

    partition: Partition
    offset: int
    max_bytes: int


class DelayedFetch:
    """A wait until the partitions have ``min_bytes``, for ``max_wait_ms`` at most.

    The end of the wait completes the future ``over``. The creator must always call :meth:`cancel`,
    which has no effect after the end.
    """

    def __init__(
        self,
        purgatory: DelayedFetches,
        isolation: Isolation,
        *,
        min_bytes: int,
        max_wait_ms: int,
        known_high_watermark: int | None = None,
    ) -> None:
        self._purgatory = purgatory
        self.known_high_watermark = known_high_watermark
        """The high watermark that a follower sent: a higher one also ends the wait (KIP-1166)."""
        self._isolation = isolation
        self._min_bytes = min_bytes
        loop = asyncio.get_running_loop()
        self._loop = loop
        self.over: asyncio.Future[None] = loop.create_future()
        self._woken = False
        self._bytes: list[int] = []
        self._total = 0
        self._undo: list[Callable[[], None]] = []
        self._timer = call_later(loop, max_wait_ms, "long poll", self._complete)
        self.over.add_done_callback(self._done)
        purgatory.add(self)

    def watch(self, one: WatchedPartition) -> None:
        """Listen to one more partition."""
        place, now = len(self._bytes), self._available(one)
        self._bytes.append(now)
        self._undo.append(one.partition.marks.listen(self._listener(place, one)))
        self._total += now
        if self._total >= self._min_bytes:
            self.wake()

    def _listener(self, place: int, one: WatchedPartition) -> Callable[[], None]:
        epoch = one.partition.marks.leader_epoch

        def changed() -> None:
            if self._woken:
                return
            partition = one.partition
            if partition.marks.leader_epoch != epoch:
                self.wake()
                return
            try:
                now = self._available(one)
            except DomainError:
                self.wake()
                return
            if partition.marks.stopped or not (
                partition.log_start_offset <= one.offset <= partition.log_end_offset
            ):
                self.wake()
                return
            self._total += now - self._bytes[place]
            self._bytes[place] = now
            if self._total >= self._min_bytes:
                self.wake()

        return changed

    def _available(self, one: WatchedPartition) -> int:
        return min(one.partition.reader.available_bytes(one.offset, self._isolation), one.max_bytes)

    def wake(self) -> None:
        """Complete in the next turn of the event loop."""
        if not self._woken:
            self._woken = True
            self._loop.call_soon(self._complete)

    def cancel(self) -> None:
        """End the wait without a result."""
        self.over.cancel()

    def _complete(self) -> None:
        if not self.over.done():
            self.over.set_result(None)

    def _done(self, _over: asyncio.Future[None]) -> None:
        self._woken = True
        self._timer.cancel()
        for undo in self._undo:
            undo()
        self._purgatory.discard(self)


class DelayedFetches:
    """All Fetch requests that wait for records (``services.fetches.delayed``)."""

    def __init__(self) -> None:
        self._waiting: dict[DelayedFetch, None] = {}
        """In the order of their arrival, which is the order of their responses."""
        self.closed = False

    def add(self, fetch: DelayedFetch) -> None:
        """Keep a fetch until it is done; complete it at once if the broker is stopping."""
        self._waiting[fetch] = None
        if self.closed:
            fetch.wake()

    def discard(self, fetch: DelayedFetch) -> None:
        """Remove a fetch."""
        self._waiting.pop(fetch, None)

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
