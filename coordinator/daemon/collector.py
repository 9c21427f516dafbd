"""Garbage collection in short steps: surviving objects are not scanned again.

CPython's full collection scans every object, and no client is served in the meantime. With 9,000
open partitions a collection takes 300 ms. This collector therefore disables automatic full
collections. When the process has grown by some megabytes, the collector collects the new objects,
which takes some milliseconds, and moves the survivors to the permanent generation (``gc.freeze``).
Reference counting still frees the survivors. A frozen object in a cycle is never freed, so numerous
objects must not be part of cycles. If the process does not grow, nothing is frozen, even if many
clients connect and disconnect.

A cycle of a few objects may hold a request of 100 MB. Therefore the objects that are not frozen are
also collected after each 64 MiB received and decompressed.

The settings apply to the whole process, so only a process that runs nothing but the broker may use
this collector.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from typing import Any

from fencepost.logcore.byte_count import INPUT_BYTES

GROWTH_BLOCKS = 100_000
"""The growth of the process that causes a full collection, in blocks of ``pymalloc``
(:func:`sys.getallocatedblocks`) of about 100 bytes each. Scanning the objects in that many blocks
takes about 10 ms."""

YOUNG_OBJECTS, YOUNG_ROUNDS = 10_000, 4
"""Thresholds of the youngest and the middle generation (:func:`gc.set_threshold`). A collection of
the youngest generation takes half a millisecond. With CPython's thresholds, 700 and 10, a Fetch
over a thousand partitions spent a fifth of its time scanning objects that were all in use."""

COLLECTED_BYTES = 64 << 20
"""The number of bytes received and decompressed between two full collections, so that garbage in
cycles holds at most this many bytes plus the last request. At 100 MB/s the collections take some 10
ms of each second."""

NEVER = 1 << 30
"""A threshold that no count of collections reaches."""


class Collector:
    """Configures the garbage collector of the process, from :meth:`start` to :meth:`stop`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thresholds = gc.get_threshold()
        self._blocks = 0
        self._is_due = False
        """Whether a collection is scheduled on the loop."""

    def start(self) -> None:
        """Freeze all existing objects, and watch the growth of the process."""
        gc.freeze()
        self._blocks = sys.getallocatedblocks()
        gc.set_threshold(YOUNG_OBJECTS, YOUNG_ROUNDS, NEVER)
        gc.callbacks.append(self._after)
        INPUT_BYTES.watch(COLLECTED_BYTES, self._after_bytes)

    def stop(self) -> None:
        """Restore the thresholds; frozen objects stay frozen."""
        INPUT_BYTES.watch(0, None)
        gc.callbacks.remove(self._after)
        gc.set_threshold(*self._thresholds)

    def _after(self, phase: str, info: dict[str, Any]) -> None:
        """Check how far the process has grown; any thread may have triggered the collection."""
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
        """Collect the objects that are not frozen, and freeze none.

        A request that is frozen while it is handled could stay in memory for good, since an error
        can put it into a cycle.
        """
        gc.collect()
        self._is_due = False

    def settle(self) -> None:
        """Collect all objects allocated since the last call, and freeze the survivors."""
        gc.collect()
        gc.freeze()
        self._blocks = sys.getallocatedblocks()
        self._is_due = False
