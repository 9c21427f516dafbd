"""How long the event loop was kept: the longest turn of a broker that runs in this process.

While one callback runs nobody else is served, so its length is the longest silence that it causes.
Two figures are kept of each: wall time, which is what a client waits, and the processor time of the
loop's own thread. A test's verdict is on processor time; what waits for the disk instead is kept
off the loop's thread, and is tested there. ``bench`` shows wall time.

Processor time does not count what other processes take, but it grows with them: they share caches
and cores. So a turn that looks too long is measured against a yardstick, a piece of work of known
cost that is done right behind it in the same thread, and may be longer by as much as that was.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Self

from fencepost.coordinator.daemon.collector import NEVER

MAX_STALL_MS = 50
"""What a turn of the loop may take at most, in milliseconds."""

YARDSTICK_MS = 2.0
"""Processor time that the yardstick takes while nothing else runs, on the machine whose 50 ms are
meant: CPython 3.11 on a core of an AMD EPYC, where the shortest of a hundred takes 1.85."""

MAX_SLOWNESS = 3.0
"""What a busy machine excuses at most."""


def slowness() -> float:
    """How many times as long as it should Python takes now, in this thread; at least 1."""
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        taken = median(_yardstick_ms() for _ in range(5))
    finally:
        if is_collecting:
            gc.enable()
    return min(max(1.0, taken / YARDSTICK_MS), MAX_SLOWNESS)


def _yardstick_ms() -> float:
    """Make and drop objects, as requests do: that is what shared caches slow down."""
    since = time.thread_time()
    _ = [(number, str(number)) for number in range(20_000)]
    del _
    return (time.thread_time() - since) * 1000


@dataclass(slots=True)
class Stall:
    """One turn of the loop: what ran, and how long in milliseconds."""

    wall_ms: float = 0.0
    cpu_ms: float = 0.0
    what: str = "nothing"
    slowness: float = 1.0
    """How slow the machine was just then, if the turn looked too long."""

    @property
    def judged_ms(self) -> float:
        """The processor time that it would have taken on a machine with nothing else to do."""
        return self.cpu_ms / self.slowness


@dataclass(slots=True)
class LoopWatch:
    """The longest turns since the watch began."""

    wall: Stall = field(default_factory=Stall)
    """The longest by wall time."""

    cpu: Stall = field(default_factory=Stall)
    """The longest by the processor time of the thread that runs the loop, as it is judged."""

    def time(self, turn: Callable[[], object], what: object) -> None:
        """Run a turn and note how long it took."""
        wall, cpu = time.perf_counter(), time.thread_time()
        turn()
        self._note((time.perf_counter() - wall) * 1000, (time.thread_time() - cpu) * 1000, what)

    def _note(self, wall_ms: float, cpu_ms: float, what: object) -> None:
        if wall_ms > self.wall.wall_ms:
            self.wall = Stall(wall_ms, cpu_ms, repr(what))
        if cpu_ms > self.cpu.judged_ms:
            slow = slowness() if cpu_ms > MAX_STALL_MS else 1.0
            if cpu_ms / slow > self.cpu.judged_ms:
                self.cpu = Stall(wall_ms, cpu_ms, repr(what), slow)

    @property
    def is_short(self) -> bool:
        """Whether no turn took more than :data:`MAX_STALL_MS` of processor time, as judged."""
        return self.cpu.judged_ms <= MAX_STALL_MS

    def check(self) -> None:
        """Fail if a turn took more than :data:`MAX_STALL_MS` of processor time, as judged."""
        assert self.is_short, (
            f"{self.cpu.cpu_ms:.1f} ms of processor time ({self.cpu.wall_ms:.1f} ms in all) in one "
            f"turn, while the machine was {self.cpu.slowness:.1f} times as slow as alone: "
            f"{self.cpu.what}"
        )


@contextmanager
def watched_loop() -> Iterator[LoopWatch]:
    """Watch every event loop of this process; the clients of a test belong into another one.

    What the test run itself holds is set aside: the daemon's collector looks at none of it either.
    """
    watch = LoopWatch()
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*thresholds[:2], NEVER)
    run = asyncio.Handle._run

    def timed(handle: Any) -> None:
        watch.time(lambda: run(handle), handle)

    asyncio.Handle._run = timed  # type: ignore[method-assign, assignment]
    try:
        yield watch
    finally:
        asyncio.Handle._run = run  # type: ignore[method-assign]
        gc.set_threshold(*thresholds)
        gc.unfreeze()


PROBE_S = 0.001


def _processor_times() -> dict[threading.Thread, float]:
    """The processor time of each thread of the process so far, in seconds."""
    times: dict[threading.Thread, float] = {}
    for thread in threading.enumerate():
        if thread.ident is not None:
            with suppress(OSError):  # it has ended
                clock = time.pthread_getcpuclockid(thread.ident)
                times[thread] = time.clock_gettime(clock)
    return times


class LockWatch:
    """The longest time that a thread kept the interpreter lock from a thread that wants it.

    A probe asks for the lock every millisecond and compares the processor time of all threads: the
    time of one of them between two probes is what it took with the lock. Without the lock a thread
    runs beside the probe, which then has its turn.
    """

    def __init__(self) -> None:
        self.longest_ms = 0.0
        self.where = "nothing"
        self.probes = 0
        self._is_over = threading.Event()

    def _watch(self, before: dict[threading.Thread, float]) -> None:
        while not self._is_over.wait(PROBE_S):
            now = _processor_times()
            for thread, spent_s in now.items():
                took_ms = (spent_s - before.get(thread, 0.0)) * 1000
                if thread is not self._probe and took_ms > self.longest_ms:
                    self.longest_ms, self.where = took_ms, thread.name
            before = now
            self.probes += 1

    def __enter__(self) -> Self:
        self._probe = threading.Thread(target=self._watch, args=(_processor_times(),), name="probe")
        self._probe.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._probe.join()

    @property
    def is_short(self) -> bool:
        """Whether no thread kept the lock for more than :data:`MAX_STALL_MS`."""
        return self.longest_ms <= MAX_STALL_MS
