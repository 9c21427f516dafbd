"""A clock that a test controls: time stands still, and deadlines fire when the test advances it.

::

    clock = TestClock()
    with OwnBroker(path, clock=clock) as broker:
        ...
        fired = clock.advance(seconds=46)  # [Fired(what='session', who='orders-group', …)]

An advance goes from deadline to deadline. At each deadline the brokers do the work that is due, and
the advance waits until they have finished it. A timer that this work sets, such as the rebalance
timeout after an expired session, therefore counts from the right time, and can fire in the same
advance. ``README.md`` lists the deadlines on this clock, and the work that stays on real time.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final, TypeVar

from fencepost.logcore.clock import Clock, SystemClock, machine_ms, monotonic_ns, monotonic_s
from fencepost.testing.arguments import LAST_MS, checked, flag
from fencepost.testing.deadlines import Deadlines, Fired

if TYPE_CHECKING:
    from fencepost.coordinator.daemon.broker import Broker

T = TypeVar("T")

ROUNDS_PER_ADVANCE: Final = 100
"""The maximum number of times that one advance runs each recurring task (retention, compaction,
upkeep), spread evenly. Without this limit, an advance of a week would run the cleaner 40,000 times.
"""

MAX_STEPS: Final = 100_000
"""The maximum number of deadlines in one advance. More deadlines mean a bug in the test or in the
broker."""

WALK_S: Final = 0.05
"""The longest sleep of an advance with ``speed``, in seconds. Sleeps are short because a client's
request may set an earlier deadline meanwhile."""

MAX_KEPT: Final = 10_000
"""The maximum number of entries in :attr:`TestClock.fired`; the oldest entries are dropped first.
"""


@checked
class TestClock:
    """A clock for brokers of this process, passed to them as ``clock=``.

    It stands still at ``now_ms`` (default: the time of day at its creation) until :meth:`advance`;
    with ``auto`` it runs, at real speed, from there. A test may call its methods from any thread,
    except that :meth:`advance` raises RuntimeError in a broker's thread.
    """

    __test__ = False  # tells pytest that this is no test class, in spite of its name

    between_nodes: Final[Clock] = SystemClock()
    """The clock for heartbeats, replica fetches and ISR checks in a cluster; it shows real time."""

    def __init__(self, now_ms: int | None = None, *, auto: bool = False) -> None:
        self._start_ms = machine_ms() if now_ms is None else now_ms
        self._passed_ms = 0
        self._running_since: int | None = _real_ms() if auto else None
        self._lock = threading.Lock()
        self._advancing = threading.Lock()
        self._brokers: dict[Broker, tuple[asyncio.AbstractEventLoop, Deadlines]] = {}
        self.fired: deque[Fired] = deque(maxlen=MAX_KEPT)
        """The last deadlines that fired, newest last. Deadlines fire during an advance. Outside of
        an advance a timer fires only if it has no delay, or if the clock runs by itself (``auto``).
        """

    # --- the time ---

    def now_ms(self) -> int:
        """Wall-clock time, milliseconds since the epoch."""
        return self._start_ms + self.monotonic_ms()

    def monotonic_ms(self) -> int:
        """Milliseconds since the clock was created; never goes back."""
        with self._lock:
            since = self._running_since
            return self._passed_ms + (0 if since is None else _real_ms() - since)

    @property
    def auto(self) -> bool:
        """Whether the clock runs by itself; can be set."""
        return self._running_since is not None

    @auto.setter
    def auto(self, runs: bool) -> None:
        flag("auto", runs)
        with self._lock:
            now, since = _real_ms(), self._running_since
            if since is not None:
                self._passed_ms += now - since
            self._running_since = now if runs else None

    def _move_to(self, at_ms: int) -> None:
        late_ms = at_ms - self.monotonic_ms()
        if late_ms > 0:
            with self._lock:
                self._passed_ms += late_ms

    # --- advancing ---

    def advance(
        self, *, seconds: float = 0, ms: float = 0, speed: float | None = None
    ) -> list[Fired]:
        """Advance the time, do the work that is due on the way, and return what fired, in order.

        By default the advance takes only the real time that the work takes. With ``speed`` it
        covers ``speed`` seconds per real second, so that clients have time to send heartbeats and
        to join a rebalance. Raises RuntimeError in a broker's own thread (see
        :meth:`advance_async`), ValueError for a negative time or one after :data:`LAST_MS`, and for
        an invalid speed.
        """
        span_ms = self._span_ms(seconds, ms)
        loops = [loop for loop, _ in self._brokers.values()]
        if not loops:
            self._move_to(self.monotonic_ms() + span_ms)
            return []
        if asyncio._get_running_loop() in loops:
            raise RuntimeError("a broker runs on this very loop: await clock.advance_async(…)")
        work = self._advance(span_ms, speed)
        return asyncio.run_coroutine_threadsafe(work, loops[0]).result()

    async def advance_async(
        self, *, seconds: float = 0, ms: float = 0, speed: float | None = None
    ) -> list[Fired]:
        """Do :meth:`advance` for a coroutine: other tasks of the loop continue meanwhile."""
        work = self._advance(self._span_ms(seconds, ms), speed)
        loops = [loop for loop, _ in self._brokers.values()]
        if not loops or asyncio.get_running_loop() in loops:
            return await work
        # The caller's loop may have a clock that the test has frozen; a broker's loop does not.
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loops[0]))

    def _span_ms(self, seconds: float, ms: float) -> int:
        span_ms = seconds * 1000 + ms
        if not self.now_ms() + span_ms <= LAST_MS:
            raise ValueError("a clock moves to the end of the year 9999 at most")
        return round(span_ms)

    async def _advance(self, span_ms: int, speed: float | None) -> list[Fired]:
        if not self._advancing.acquire(blocking=False):
            raise RuntimeError("another caller is moving the clock")
        try:
            begin_ms, begun = self.monotonic_ms(), monotonic_s()
            target_ms = begin_ms + span_ms
            # Requests that have already arrived are handled before the time moves.
            await self._each(
                lambda deadlines: deadlines.begin(target_ms, span_ms // ROUNDS_PER_ADVANCE)
            )
            fired: list[Fired] = []
            for _ in range(MAX_STEPS):
                due_times = await self._each(Deadlines.next_ms)
                due_ms = min(
                    (due_time for due_time in due_times if due_time is not None), default=None
                )
                at_ms = target_ms if due_ms is None else due_ms
                if speed is not None:
                    at_ms = await _walk(begin_ms, at_ms, begun, speed)
                self._move_to(at_ms)
                for step in await self._each(Deadlines.run_due):
                    fired += step
                if due_ms is None and at_ms >= target_ms:
                    await self._each(Deadlines.end)
                    return fired
            raise RuntimeError(f"more than {MAX_STEPS} deadlines in {span_ms} ms")
        finally:
            for _, deadlines in list(self._brokers.values()):
                deadlines.news = None
            self._advancing.release()

    async def _each(self, ask: Callable[[Deadlines], Coroutine[Any, Any, T]]) -> list[T]:
        """Call ``ask`` for every broker in turn, each on its own loop."""
        current = asyncio.get_running_loop()
        return [
            await ask(broker)
            if loop is current
            else await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(ask(broker), loop))
            for loop, broker in list(self._brokers.values())
        ]

    # --- for brokers ---

    def attach(self, broker: Broker) -> None:
        """Include the deadlines of ``broker`` from now on; the broker itself calls it."""
        deadlines = Deadlines(broker, self, self.fired.append)
        self._brokers[broker] = asyncio.get_running_loop(), deadlines

    def detach(self, broker: Broker) -> None:
        """Drop a broker that stops; the broker itself calls it."""
        _, deadlines = self._brokers.pop(broker, (None, None))
        if deadlines is not None:
            deadlines.close()


async def _walk(begin_ms: int, at_ms: int, begun: float, speed: float) -> int:
    """Sleep until the clock reaches ``at_ms``, at most WALK_S; return the clock's time then."""

    def now_ms() -> int:
        return begin_ms + int((monotonic_s() - begun) * 1000 * speed)

    late_s = (at_ms - now_ms()) / 1000 / speed
    if late_s > 0:
        await asyncio.sleep(min(late_s, WALK_S))
    return min(at_ms, now_ms())


def _real_ms() -> int:
    return monotonic_ns() // 1_000_000
