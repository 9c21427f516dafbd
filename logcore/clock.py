"""Time as an argument: the only access to the machine's clocks.

Tests freeze time for the program under test, in the process that also runs the broker. freezegun
replaces the functions of :mod:`time`, also in modules that imported them, and time-machine replaces
the time of day; neither replaces ``clock_gettime`` of a monotonic clock. A timeout on a frozen
clock would never expire.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from fencepost.logcore import system

monotonic_s: Final[Callable[[], float]] = system.monotonic_s
"""Seconds that never go back, for timeouts and measurements."""

monotonic_ns: Final[Callable[[], int]] = system.monotonic_ns
"""Nanoseconds that never go back."""

time_of_day_ns: Final[Callable[[], int]] = system.time_of_day_ns
"""Nanoseconds since the epoch, at the machine's precision; time-machine replaces it."""


def machine_ms() -> int:
    """Return the time in ms since the epoch, up to a few ms late; tests cannot freeze it."""
    return system.real_time_of_day_ns() // 1_000_000


class Clock(Protocol):
    """The daemon's source of time."""

    def now_ms(self) -> int:
        """Return the wall-clock time, in milliseconds since the epoch."""

    def monotonic_ms(self) -> int:
        """Return a time that never goes back, in milliseconds, for differences only."""


def cluster_clock(clock: Clock) -> Clock:
    """Return the clock of sessions, fetches and ISRs between the nodes of a cluster.

    Nodes send heartbeats and fetches in real time. On a clock that a test advances, all heartbeats
    and fetches would be late at once; such a clock therefore provides a second one,
    ``between_nodes``.
    """
    result: Clock = getattr(clock, "between_nodes", clock)
    return result


class SystemClock:
    """The machine's clocks."""

    def now_ms(self) -> int:
        return time_of_day_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        return monotonic_ns() // 1_000_000
