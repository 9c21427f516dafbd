"""An asyncio event loop of one simulated process, which runs on the simulation's queue and time.

It implements the parts that the daemon uses: callbacks, timers, futures and tasks.
:class:`tests.sim.sockets.SocketLoop` adds sockets and threads.
"""

from __future__ import annotations

import asyncio
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from math import ceil
from typing import Any, Final, cast
from weakref import WeakKeyDictionary

from tests.sim.network import Node

LATE: Final = 0.01
LATE_MS: Final = 600
"""The probability and the longest delay in milliseconds of a late ``call_soon_threadsafe``."""

MOST_TURNS: Final = 500
"""Turns after which the time advances by a millisecond: otherwise a task that yields until a
deadline would never reach it, as turns take no simulated time."""


class Loop(asyncio.AbstractEventLoop):
    """The event loop of the process that runs on ``node`` now; the loop ends with that process."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._incarnation = node.incarnation
        self._ready: deque[asyncio.Handle] = deque()
        self._is_armed = False
        self._turns = 0, 0
        """The last turn's time in milliseconds, and the number of turns at that time."""
        self._heard_ms = 0
        self._tasks: WeakKeyDictionary[asyncio.Task[Any], None] = WeakKeyDictionary()
        """All tasks in the order of their creation; the values are unused."""
        self.after_turn: Callable[[], None] = lambda: None
        """Called after each turn."""

    @property
    def is_alive(self) -> bool:
        """Whether the loop's process runs."""
        return self.node.is_up and self.node.incarnation == self._incarnation

    # --- order ---

    @contextmanager
    def running(self) -> Iterator[None]:
        """Make this the running loop within the block."""
        kept = events._get_running_loop()
        events._set_running_loop(self)
        try:
            yield
        finally:
            events._set_running_loop(kept)

    def _arm(self) -> None:
        if not self._is_armed:
            self._is_armed = True
            now, (last, turns) = self.node.scheduler.now, self._turns
            self._turns = now, turns + 1 if now == last else 1
            self.node.after(int(self._turns[1] > MOST_TURNS), self._turn)

    def _turn(self) -> None:
        """Run the ready callbacks; callbacks that they schedule run in the next turn."""
        self._is_armed = False
        kept = events._get_running_loop()
        events._set_running_loop(self)  # `running` would cost as much as a callback
        try:
            for _ in range(len(self._ready)):
                if not self.is_alive:
                    return  # the other callbacks of the dead process never run
                handle = self._ready.popleft()
                if not handle.cancelled():
                    handle._run()
        finally:
            events._set_running_loop(kept)
        self.after_turn()
        if self._ready:
            self._arm()

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        self._arm()
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.Handle:
        """Schedule a callback from another thread: sometimes late, but always in order."""
        scheduler = self.node.scheduler
        late_ms = scheduler.draw.randint(0, LATE_MS) if scheduler.chance(LATE) else 0
        handle = asyncio.Handle(callback, args, self, context)
        self._heard_ms = max(self._heard_ms, scheduler.now + late_ms)
        self.node.after(self._heard_ms - scheduler.now, self._hear, handle)
        return handle

    def hears_late(self, late_ms: int) -> None:
        """Delay all callbacks from other threads for at least ``late_ms``."""
        self._heard_ms = max(self._heard_ms, self.node.scheduler.now + late_ms)

    def _hear(self, handle: asyncio.Handle) -> None:
        self._ready.append(handle)
        self._arm()

    # --- time ---

    def time(self) -> float:
        return self.node.scheduler.now / 1000

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        delay_ms = max(ceil(when * 1000 - 1e-3) - self.node.scheduler.now, 0)
        if not delay_ms and when > self.time():
            # A rounding error must not run the callback early: a caller that compares the clock
            # with its deadline would wait again at the same time, without end.
            delay_ms = 1
        self.node.after(delay_ms, self._due, timer)
        return timer

    def _due(self, timer: asyncio.TimerHandle) -> None:
        if not timer.cancelled():
            self._ready.append(timer)
            self._arm()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: :meth:`_due` skips a cancelled timer."""

    # --- what runs ---

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Any, *, name: str | None = None, context: Any = None
    ) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name, context=context)
        self._tasks[task] = None
        return task

    def end(self) -> None:
        """Close the coroutines of all unfinished tasks, because their process has ended."""
        ended: set[asyncio.Task[Any]] = set()
        with self.running():
            # A closed coroutine may create further tasks in its `finally` blocks.
            while left := [task for task in self._tasks if not task.done() and task not in ended]:
                for task in left:
                    ended.add(task)
                    with suppress(Exception):
                        cast("Coroutine[Any, Any, Any]", task.get_coro()).close()

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return not self.is_alive

    def get_debug(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Raise for an uncaught error of a callback, unless the process has been killed."""
        if self.is_alive and "handle" in context:
            raise AssertionError(f"{self.node.name}: {context}") from context.get("exception")
