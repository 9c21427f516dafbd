"""Measures how long callbacks block the event loop of a broker in this process.

While one callback runs, no client is served, so its duration is the longest delay that it causes.
Two durations are measured: wall time, which a client waits, and the processor time of the loop's
own thread. Tests check the processor time; waits for the disk happen in other threads, and other
tests cover them. ``bench`` measures wall time.

Other processes share caches and cores with the loop's thread, so they prolong its processor time.
Therefore a turn that seems too long is compared with a reference computation of known cost, which
runs right after the turn in the same thread. The limit grows by the factor by which that
computation was slower than on an idle machine.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Self

from fencepost.coordinator.daemon.collector import NEVER

MAX_STALL_MS = 50
"""The longest allowed turn of the loop in milliseconds."""

YARDSTICK_MS = 2.0
"""Processor time of the reference computation on the idle machine for which the limit of 50 ms is
chosen. On CPython 3.11 on a core of an AMD EPYC the shortest of a hundred runs takes 1.85 ms.
"""

MAX_SLOWNESS = 3.0
"""The largest factor by which a busy machine extends the limit."""


def slowness() -> float:
    """Return how many times slower Python is now in this thread, from 1 to :data:`MAX_SLOWNESS`."""
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        taken = median(_yardstick_ms() for _ in range(5))
    finally:
        if is_collecting:
            gc.enable()
    return min(max(1.0, taken / YARDSTICK_MS), MAX_SLOWNESS)


def _yardstick_ms() -> float:
    """Return the processor time of creating and dropping objects, as requests do."""
    # Other processes in the shared caches slow this loop down as much as they slow requests down.
    since = time.thread_time()
    _ = [(number, str(number)) for number in range(20_000)]
    del _
    return (time.thread_time() - since) * 1000


@dataclass(slots=True)
class Stall:
    """One turn of the loop: the callback, and its duration in milliseconds."""

    wall_ms: float = 0.0
    cpu_ms: float = 0.0
    what: str = "nothing"
    slowness: float = 1.0
    """The factor of :func:`slowness` right after the turn, if it seemed too long."""

    @property
    def judged_ms(self) -> float:
        """The processor time that the turn would have taken on an idle machine."""
        return self.cpu_ms / self.slowness


@dataclass(slots=True)
class LoopWatch:
    """The longest turns since the watch began."""

    wall: Stall = field(default_factory=Stall)
    """The longest turn by wall time."""

    cpu: Stall = field(default_factory=Stall)
    """The longest turn by the corrected processor time of the loop's thread."""

    def time(self, turn: Callable[[], object], what: object) -> None:
        """Run a turn, and note its duration."""
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
        """Whether no turn took more than :data:`MAX_STALL_MS` of corrected processor time."""
        return self.cpu.judged_ms <= MAX_STALL_MS

    def check(self) -> None:
        """Fail if a turn took more than :data:`MAX_STALL_MS` of corrected processor time."""
        assert self.is_short, (
            f"{self.cpu.cpu_ms:.1f} ms of processor time ({self.cpu.wall_ms:.1f} ms in all) in one "
            f"turn, while the machine was {self.cpu.slowness:.1f} times as slow as alone: "
            f"{self.cpu.what}"
        )


@contextmanager
def watched_loop() -> Iterator[LoopWatch]:
    """Watch every event loop of this process, so a test's clients must run in another process.

    The garbage collector scans only new objects, as in the daemon: objects of the test run are in
    the oldest generation, which is not collected. They are not frozen, since ``gc.unfreeze`` would
    also thaw what ``tests/conftest.py`` has frozen.
    """
    watch = LoopWatch()
    thresholds = gc.get_threshold()
    gc.collect()
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


PROBE_S = 0.001

_libc = ctypes.CDLL(None, use_errno=True)


class _Ticks:
    """Kernel timer that expires every :data:`PROBE_S`, Linux's ``timerfd_create(2)``.

    A thread that waits for a tick returns from ``read(2)`` without the interpreter lock. The number
    of ticks that it has read gives the time of that return. The difference from the present time is
    the time that the thread then waited for the lock.
    """

    def __init__(self) -> None:
        self._timer = _libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC)
        interval = (ctypes.c_long * 4)(0, int(PROBE_S * 1e9), 0, int(PROBE_S * 1e9))
        self._count, self._since = 0, time.monotonic()
        self._last, self._slept_s = self._since, 0.0
        if self._timer < 0 or _libc.timerfd_settime(self._timer, 0, interval, None) < 0:
            raise OSError(ctypes.get_errno(), "no timer")

    def wait(self) -> None:
        """Wait for a tick."""
        # The first read takes the ticks that passed while the thread did not have the lock. The
        # thread then has the lock, and the interpreter lets the thread keep it for 5 ms.
        os.set_blocking(self._timer, False)
        with suppress(BlockingIOError):
            self._take()
        os.set_blocking(self._timer, True)
        begun = time.monotonic()
        self._take()
        self._slept_s = max(0.0, self._since + self._count * PROBE_S - begun)

    def _take(self) -> None:
        self._count += int.from_bytes(os.read(self._timer, 8), sys.byteorder)

    def waited(self) -> float:
        """Return the seconds since the last call, without the time spent waiting for a tick."""
        self._last, last = time.monotonic(), self._last
        return self._last - last - self._slept_s

    def close(self) -> None:
        os.close(self._timer)


def _processor_times() -> dict[threading.Thread, float]:
    """Return the processor time of each thread of the process so far, in seconds."""
    times: dict[threading.Thread, float] = {}
    for thread in threading.enumerate():
        if thread.ident is not None:
            with suppress(OSError):  # the thread has ended
                clock = time.pthread_getcpuclockid(thread.ident)
                times[thread] = time.clock_gettime(clock)
    return times


class LockWatch:
    """Measures the longest time that a thread held the interpreter lock while another waited.

    A probe thread acquires the lock every millisecond and reads the processor time of all threads.
    A thread that held the lock has spent processor time while the probe waited for the lock. The
    result is the smaller of both times, because a busy machine prolongs the wait, and a thread may
    also work without the lock.
    """

    def __init__(self) -> None:
        self.longest_ms = 0.0
        self.where = "nothing"
        self.probes = 0
        self._is_over = threading.Event()

    def _watch(self, before: dict[threading.Thread, float]) -> None:
        ticks, waited_s = _Ticks(), 0.0
        while not self._is_over.is_set():
            ticks.wait()
            now = _processor_times()
            waited_before_s, waited_s = waited_s, ticks.waited()
            for thread, spent_s in now.items():
                # The lock may have been lost between the two measurements of the last round.
                longest_s = waited_before_s + waited_s
                took_ms = min(spent_s - before.get(thread, 0.0), longest_s) * 1000
                if thread is not self._probe and took_ms > self.longest_ms:
                    self.longest_ms, self.where = took_ms, thread.name
            before = now
            self.probes += 1
        ticks.close()

    def __enter__(self) -> Self:
        self._probe = threading.Thread(target=self._watch, args=(_processor_times(),), name="probe")
        self._probe.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._probe.join()

    @property
    def is_short(self) -> bool:
        """Whether no thread held the lock for more than :data:`MAX_STALL_MS`."""
        return self.longest_ms <= MAX_STALL_MS
