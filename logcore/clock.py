"""Time as an argument: the one door to the machine's clocks."""

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
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000
