"""Counts the bytes that the process has received and decompressed, for the garbage collector.

Python's collector counts objects. Garbage that holds a request of 100 MB may be a dozen objects, so
a collection also runs after a number of bytes (``coordinator/daemon/collector.py``).
"""

from __future__ import annotations

from collections.abc import Callable


class ByteCount:
    """Counts bytes, and calls the function given to :meth:`watch` when there are many.

    Threads may count at the same time. An addition lost between two threads does not matter.
    """

    __slots__ = ("_bytes", "_limit", "_on_limit")

    def __init__(self) -> None:
        self.watch(0, None)

    def watch(self, limit: int, on_limit: Callable[[], None] | None) -> None:
        """Restart at 0. Call ``on_limit``, in any thread, after each ``limit`` further bytes."""
        self._bytes, self._limit, self._on_limit = 0, limit, on_limit

    def add(self, count: int) -> None:
        """Count ``count`` more bytes."""
        self._bytes += count
        if self._bytes >= self._limit and self._on_limit is not None:
            self._bytes = 0
            self._on_limit()


INPUT_BYTES = ByteCount()
"""The count of this process, for its garbage collector."""
