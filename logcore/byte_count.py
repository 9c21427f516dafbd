"""The bytes that the process has received and inflated, which few objects hold.

Python's collector counts objects. Garbage that holds a request of 100 MB may be a dozen of them, so
it is looked for after so many bytes as well (``coordinator/daemon/collector.py``).
"""

from __future__ import annotations

from collections.abc import Callable


class ByteCount:
    """Counts bytes; :meth:`watch` says what happens when there are many.

    Threads may count at the same time. An addition lost between two of them does not matter.
    """

    __slots__ = ("_bytes", "_limit", "_on_limit")

    def __init__(self) -> None:
        self.watch(0, None)

    def watch(self, limit: int, on_limit: Callable[[], None] | None) -> None:
        """Begin at 0. Call ``on_limit``, in any thread, after each ``limit`` bytes from now on."""
        self._bytes, self._limit, self._on_limit = 0, limit, on_limit

    def add(self, count: int) -> None:
        """Count some more."""
        self._bytes += count
        if self._bytes >= self._limit and self._on_limit is not None:
            self._bytes = 0
            self._on_limit()


TAKEN_IN = ByteCount()
"""Of this process, as its garbage collector is."""
