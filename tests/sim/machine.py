"""Simulated clocks, threads, randomness and disks, with which the daemon's own code runs.

The monotonic clock is the simulated time, and the time of day comes from the running loop's node.
Random numbers come from the seed, and work for threads runs on the event loop after a delay.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
from asyncio import events
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, Self, cast

import structlog

from fencepost.coordinator.replication import membership
from fencepost.coordinator.runtime import background, fair_threads
from fencepost.logcore import clock
from tests.sim.loop import Loop
from tests.sim.scheduler import Scheduler
from tests.sim.sockets import SocketLoop, Work
from tests.support.memory_disk import MemoryDisk

EPOCH_MS: Final = 1_700_000_000_000
"""The time of day when a simulated run begins."""

THREAD_STEP_S: Final = 0.001
"""Processor time that passes between two calls of ``time.thread_time``."""

NOTED: Final = frozenset({"warning", "error", "critical", "exception"})
"""Levels of the log lines that the trace contains."""

FAILURES: Final = frozenset({"background work failed", "handler failed"})
"""Log lines about unexpected errors, which fail the simulated run."""


class Disk:
    """A machine's disk. A kill keeps all writes; a power loss may lose unsynced writes."""

    def __init__(self, directory: str) -> None:
        self.files = MemoryDisk()
        self.files.make_directory(directory)
        self.files.sync_directory("")
        self._loss = MemoryDisk().base()

    def _note(self) -> None:
        for _ in self._loss.walk(self.files.steps):
            pass
        self.files.steps.clear()

    def kill(self) -> None:
        """Give the next process a copy, so that the killed process's late writes have no effect."""
        self._note()
        self.files = self.files.after_kill()

    def lose_power(self, draw: random.Random) -> None:
        """Keep all synced writes, and a random part of the others."""
        self._note()
        self.files = self._loss.state(draw)
        self._loss = self.files.base()


class Pool:
    """Replaces ``ThreadPoolExecutor``: starts work in order, at most ``count`` items at a time."""

    def __init__(self, count: int = 1, **_options: Any) -> None:
        self._loop = cast("SocketLoop", asyncio.get_running_loop())
        self._count = count
        self._waiting: deque[Work] = deque()
        self._running: dict[Work, None] = {}

    def begin(self, work: Work) -> None:
        """Run ``work`` when a thread is free."""
        work.on_end = partial(self._ended, work)
        self._waiting.append(work)
        self._next()

    def _next(self) -> None:
        while self._waiting and len(self._running) < self._count:
            work = self._waiting.popleft()
            self._running[work] = None
            self._loop.node.after(self._loop.disk_delay(), work)

    def _ended(self, work: Work) -> None:
        self._running.pop(work, None)
        self._next()

    def submit(self, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Schedule a call, as an executor does; callers ignore the returned future."""
        work = Work(self._loop, self._loop.create_future(), func, args)
        self.begin(work)
        return work.future

    def shutdown(self, *, cancel_futures: bool = False) -> None:
        """Run all started work, and the waiting work as well unless it is cancelled."""
        if cancel_futures:
            self._waiting.clear()
        while work := next(iter([*self._running, *self._waiting]), None):
            if work in self._waiting:
                self._waiting.remove(work)
            work()
            self._running.pop(work, None)


class _Thread:
    """Replaces a thread that runs its own event loop."""

    def __init__(self, target: Callable[[], None], **_options: Any) -> None:
        self._target = target

    def start(self) -> None:
        self._target()

    def join(self, _timeout_s: float | None = None) -> None:
        """Return at once: the tasks on its loop end by themselves."""


class _Runner:
    """Replaces ``asyncio.Runner``: ``run`` only creates a task, on a second loop of the node."""

    def __init__(self, **_options: Any) -> None:
        owner = cast("SocketLoop", asyncio.get_running_loop())
        self._loop = SocketLoop(owner.node, owner.wires, owner.disk_ms)
        owner.others.append(self._loop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        """Do nothing: the task runs on."""

    def run(self, coroutine: Any) -> None:
        self._loop.create_task(coroutine)


class Machines:
    """The clocks, the randomness and the daemon's log of all machines of a simulated run."""

    def __init__(self, scheduler: Scheduler, creep_ns: int = 0) -> None:
        self._scheduler = scheduler
        self._creep_ns = creep_ns
        """Nanoseconds that pass between two calls of the monotonic clock."""
        self._last_ns = 0
        self._thread_s = 0.0
        self.draw = random.Random(scheduler.draw.getrandbits(64))
        self.failures: list[str] = []
        self.unexpected = FAILURES
        """Log lines that fail the simulated run, besides all exceptions and critical lines."""
        self.changes: tuple[tuple[Any, str, Any], ...] = ()
        """(module, name, value): attributes to replace in this simulated run."""

    # --- time ---

    def _monotonic_ns(self) -> int:
        now_ns = max(self._last_ns, self._scheduler.now * 1_000_000) + self._creep_ns
        self._last_ns = now_ns
        return now_ns

    def _monotonic_s(self) -> float:
        return self._monotonic_ns() / 1e9

    def _time_of_day_ns(self) -> int:
        loop = events._get_running_loop()
        ahead_ms = loop.node.clock_ms if isinstance(loop, Loop) else 0
        return (EPOCH_MS + self._scheduler.now + ahead_ms) * 1_000_000

    def _thread_time(self) -> float:
        self._thread_s += THREAD_STEP_S
        return self._thread_s

    # --- the log ---

    def _log(self, _logger: object, method: str, event: Any) -> Any:
        name = event.get("event")
        if method in NOTED:
            loop = events._get_running_loop()
            who = loop.node.name if isinstance(loop, Loop) else "?"
            said = " ".join(
                f"{key}={value}" for key, value in sorted(event.items()) if key != "exc_info"
            )
            self._scheduler.say(who, said)
        loop = events._get_running_loop()
        is_ending = isinstance(loop, Loop) and not loop.is_alive
        """Whether a task of a killed process logged the line while it was being closed."""
        if not is_ending and (name in self.unexpected or method in ("exception", "critical")):
            cause = event.get("exc_info")
            failure = AssertionError(str(dict(event)))
            if isinstance(cause, BaseException):
                failure.__cause__ = cause
            self.failures.append(repr(event))
            raise failure
        raise structlog.DropEvent

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace clocks, threads, randomness and logging within the block."""
        kept_clocks = [(counter, counter.__reduce__()[2]) for counter in _CLOCKS]
        kept_log, had_log = structlog.get_config(), structlog.is_configured()
        state, urandom = random.getstate(), os.urandom
        changes: list[tuple[Any, str, Any]] = [
            (os, "urandom", self.draw.randbytes),
            (random, "_urandom", self.draw.randbytes),
            (background, "ThreadPoolExecutor", Pool),
            (fair_threads, "ThreadPoolExecutor", Pool),
            (fair_threads, "time", SimpleNamespace(thread_time=self._thread_time)),
            (membership, "threading", SimpleNamespace(Thread=_Thread, Event=threading.Event)),
            (asyncio, "Runner", _Runner),
            *self.changes,
        ]
        kept = [(where, name, getattr(where, name)) for where, name, _ in changes]
        try:
            for counter, now in zip(
                _CLOCKS,
                (self._monotonic_s, self._monotonic_ns, self._time_of_day_ns),
                strict=True,
            ):
                counter.__setstate__((now, (), {}, {}))
            for where, name, value in changes:
                setattr(where, name, value)
            random.seed(self.draw.getrandbits(64))
            structlog.configure(
                processors=[self._log],
                wrapper_class=structlog.make_filtering_bound_logger(20),
                logger_factory=structlog.ReturnLoggerFactory(),
                cache_logger_on_first_use=False,
            )
            yield
        finally:
            assert os.urandom is not urandom
            for where, name, value in kept:
                setattr(where, name, value)
            for counter, before in kept_clocks:
                counter.__setstate__(before)
            random.setstate(state)
            if had_log:
                structlog.configure(**kept_log)
            else:
                structlog.reset_defaults()


_CLOCKS: Final = cast(
    "tuple[Any, ...]", (clock.monotonic_s, clock.monotonic_ns, clock.time_of_day_ns)
)
"""``functools.partial`` objects that modules import by name. Their state is replaced instead of the
objects, so that the change reaches all importers.
"""
