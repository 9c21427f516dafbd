"""The search for cyclic garbage, kept short: what has lived for a while is not looked at again.

CPython's full collection looks at every object there is, between two requests: 300 ms with 9,000
open partitions, while nobody is served. So it is not left to come by itself. When the process has
grown by some megabytes, what is new is looked at, in some milliseconds, and what of it is alive is
set aside for good (``gc.freeze``). Reference counts free that all the same when its time comes;
only what dies in a cycle after that stays, so what is numerous here has none. A process that does
not grow, whoever comes and goes, sets nothing aside.

A cycle of a few objects may hold a request of 100 MB. So a collection of the objects that are not
set aside also follows each 64 MiB received and inflated.

For a process that is the broker's own: the settings are those of the whole process.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from typing import Any

from fencepost.logcore.byte_count import TAKEN_IN

GROWTH_BLOCKS = 100_000
"""Blocks of memory, each an object or a part of one and about 100 bytes, by which the process grows
from one full collection to the next. It looks at no more objects than that: about 10 ms."""

YOUNG_OBJECTS, YOUNG_ROUNDS = 10_000, 4
"""New objects that are looked at together, half a millisecond, and how often that comes before
those that are left are looked at once more. With CPython's 700 and 10 a Fetch over a thousand
partitions spent a fifth of its time on a search among objects that all were in use."""

COLLECTED_BYTES = 64 << 20
"""Bytes received and inflated from one full collection to the next. Garbage holds no more than that
and the last request. At 100 MB a second it takes some 10 ms of each second."""

NEVER = 1 << 30
"""No count of collections gets there."""


class Collector:
    """Sets the garbage collector of the process to this, from :meth:`start` to :meth:`stop`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thresholds = gc.get_threshold()
        self._blocks = 0
        self._is_due = False
        """Whether a collection will come with one of the next turns of the loop."""

    def start(self) -> None:
        """Set aside what there is now, and watch what comes."""
        gc.freeze()
        self._blocks = sys.getallocatedblocks()
        gc.set_threshold(YOUNG_OBJECTS, YOUNG_ROUNDS, NEVER)
        gc.callbacks.append(self._after)
        TAKEN_IN.watch(COLLECTED_BYTES, self._after_bytes)

    def stop(self) -> None:
        """Let it run as before; what was set aside stays so."""
        TAKEN_IN.watch(0, None)
        gc.callbacks.remove(self._after)
        gc.set_threshold(*self._thresholds)

    def _after(self, phase: str, info: dict[str, Any]) -> None:
        """Look how far the process has grown; any thread may have made the last object."""
        if phase != "stop" or info["generation"] != 1 or self._is_due:
            return
        if sys.getallocatedblocks() - self._blocks >= GROWTH_BLOCKS:
            self._is_due = True
            self._loop.call_soon_threadsafe(self.settle)

    def _after_bytes(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon_threadsafe(self.collect)

    def collect(self) -> None:
        """Collect the objects that are not set aside, and set none aside.

        A request under way that was set aside, and then refused, could stay for good.
        """
        gc.collect()
        self._is_due = False

    def settle(self) -> None:
        """Look at all that was made since the last time, and set the living aside."""
        gc.collect()
        gc.freeze()
        self._blocks = sys.getallocatedblocks()
        self._is_due = False
