"""How long the event loop was kept: the longest turn of a broker that runs in this process.

While one callback runs nobody else is served, so its length is the longest silence that it causes.
Two figures are kept of each: wall time, which is what a client waits, and the processor time of the
loop's own thread, which a busy machine does not change. A test's verdict is on processor time;
what waits for the disk instead is kept off the loop's thread, and is tested there. ``bench`` shows
wall time.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from coordinator.collector import NEVER

MAX_STALL_MS = 50
"""What a turn of the loop may take at most, in milliseconds."""


@dataclass(slots=True)
class Stall:
    """One turn of the loop: what ran, and how long in milliseconds."""

    wall_ms: float = 0.0
    cpu_ms: float = 0.0
    what: str = "nothing"


@dataclass(slots=True)
class LoopWatch:
    """The longest turns since the watch began."""

    wall: Stall = field(default_factory=Stall)
    """The longest by wall time."""

    cpu: Stall = field(default_factory=Stall)
    """The longest by the processor time of the thread that runs the loop."""

    def take(self, wall_ms: float, cpu_ms: float, handle: asyncio.Handle) -> None:
        """Note a turn."""
        if wall_ms > self.wall.wall_ms:
            self.wall = Stall(wall_ms, cpu_ms, repr(handle))
        if cpu_ms > self.cpu.cpu_ms:
            self.cpu = Stall(wall_ms, cpu_ms, repr(handle))

    def check(self, most_ms: float = MAX_STALL_MS) -> None:
        """Fail if a turn took more processor time than ``most_ms``."""
        assert self.cpu.cpu_ms <= most_ms, self.cpu


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
        wall, cpu = time.perf_counter(), time.thread_time()
        run(handle)
        watch.take((time.perf_counter() - wall) * 1000, (time.thread_time() - cpu) * 1000, handle)

    asyncio.Handle._run = timed  # type: ignore[method-assign, assignment]
    try:
        yield watch
    finally:
        asyncio.Handle._run = run  # type: ignore[method-assign]
        gc.set_threshold(*thresholds)
        gc.unfreeze()
