"""An event loop of one simulated process: its time and its order are those of the simulation.

It has what the daemon's code asks of a loop: callbacks, timers, futures and tasks.
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
"""How often the loop is late to hear of another thread, and how late at most."""

MOST_TURNS: Final = 500
"""Of a loop in one millisecond, for turns take time: a task that waits for a deadline of less than
the clock can tell would otherwise wait for ever."""


class Loop(asyncio.AbstractEventLoop):
    """Runs on a node, as long as the process that the node had when it was made."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._incarnation = node.incarnation
        self._ready: deque[asyncio.Handle] = deque()
        self._is_armed = False
        self._turns = 0, 0
        """A time, and the number of turns at it."""
        self._heard_ms = 0
        self._tasks: WeakKeyDictionary[asyncio.Task[Any], None] = WeakKeyDictionary()
        """In the order in which they were made."""
        self.after_turn: Callable[[], None] = lambda: None
        """Called whenever others may look at what has become of the process."""

    @property
    def is_alive(self) -> bool:
        """Whether its process is there."""
        return self.node.is_up and self.node.incarnation == self._incarnation

    # --- order ---

    @contextmanager
    def running(self) -> Iterator[None]:
        """Be the running loop meanwhile."""
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
        """Call what is ready by now; what comes of it has its turn later, as in asyncio."""
        self._is_armed = False
        with self.running():
            for _ in range(len(self._ready)):
                if not self.is_alive:
                    return  # what is ready stays here until the history ends
                handle = self._ready.popleft()
                if not handle.cancelled():
                    handle._run()
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
        """From another thread: now and then the loop hears of it late, but in order."""
        scheduler = self.node.scheduler
        late_ms = scheduler.draw.randint(0, LATE_MS) if scheduler.chance(LATE) else 0
        handle = asyncio.Handle(callback, args, self, context)
        self._heard_ms = max(self._heard_ms, scheduler.now + late_ms)
        self.node.after(self._heard_ms - scheduler.now, self._hear, handle)
        return handle

    def hears_late(self, late_ms: int) -> None:
        """Let the loop hear of other threads in ``late_ms`` at the earliest."""
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
            # Not before its time, were it by a rounding: who looks at the clock would wait again,
            # and for ever, for nothing that is done takes time.
            delay_ms = 1
        self.node.after(delay_ms, self._due, timer)
        return timer

    def _due(self, timer: asyncio.TimerHandle) -> None:
        if not timer.cancelled():
            self._ready.append(timer)
            self._arm()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Its turn passes without it."""

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
        """Let go of what its process had under way when it ended."""
        ended: set[asyncio.Task[Any]] = set()
        with self.running():
            # What ends may spawn tasks that end something else.
            while left := [one for one in self._tasks if not one.done() and one not in ended]:
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
        """What nobody has caught is a fault; what a killed process leaves behind is none."""
        if self.is_alive and "handle" in context:
            raise AssertionError(f"{self.node.name}: {context}") from context.get("exception")
