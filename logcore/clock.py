"""Time as an argument: the one door to the wall clock, and a clock that tests own."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where the daemon gets its time from."""

    def now_ms(self) -> int:
        """Wall-clock time, milliseconds since the epoch."""

    def monotonic_ms(self) -> int:
        """A time that never goes back, in milliseconds; only differences mean anything."""


class SystemClock:
    """The machine's own clock."""

    def now_ms(self) -> int:
        """See :class:`Clock`."""
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        """See :class:`Clock`."""
        return time.monotonic_ns() // 1_000_000


class ManualClock:
    """A clock that stands still until told otherwise; for tests and the simulator."""

    def __init__(self, now_ms: int = 1_000_000) -> None:
        self._now_ms = now_ms
        self._jumped_ms = 0

    def now_ms(self) -> int:
        """See :class:`Clock`."""
        return self._now_ms + self._jumped_ms

    def monotonic_ms(self) -> int:
        """See :class:`Clock`."""
        return self._now_ms

    def advance(self, by_ms: int) -> int:
        """Move on by ``by_ms`` (may not be negative) and return the new time."""
        if by_ms < 0:
            raise ValueError("a manual clock moves forward only")
        self._now_ms += by_ms
        return self.now_ms()

    def jump(self, by_ms: int) -> None:
        """Set the wall clock, forward or back; the monotonic one does not notice."""
        self._jumped_ms += by_ms
