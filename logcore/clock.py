"""Time as an argument: the one door to the machine's clocks.

Tests freeze time for the program under test, in the process that also has the broker. freezegun
replaces the functions of :mod:`time`, also in modules that imported them, and time-machine the time
of day; neither reaches ``clock_gettime`` of a monotonic clock. A time limit on a clock that stands
still would never end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

monotonic_s: Final[Callable[[], float]] = partial(time.clock_gettime, time.CLOCK_MONOTONIC)
"""Seconds that never go back, for limits and for measuring."""

monotonic_ns: Final[Callable[[], int]] = partial(time.clock_gettime_ns, time.CLOCK_MONOTONIC)
"""The same in nanoseconds."""

time_of_day_ns: Final[Callable[[], int]] = partial(time.clock_gettime_ns, time.CLOCK_REALTIME)
"""Nanoseconds since the epoch, as precise as the machine has them; time-machine replaces it."""

_CLOCK_REALTIME_COARSE: Final = 5  # Linux; `time` has no name for it


def machine_ms() -> int:
    """Milliseconds since the epoch, some of them late, which neither package replaces."""
    return time.clock_gettime_ns(_CLOCK_REALTIME_COARSE) // 1_000_000


class Clock(Protocol):
    """Where the daemon gets its time from."""

    def now_ms(self) -> int:
        """Wall-clock time, milliseconds since the epoch."""

    def monotonic_ms(self) -> int:
        """A time that never goes back, in milliseconds; only differences mean anything."""


def cluster_clock(clock: Clock) -> Clock:
    """Return the clock of sessions, fetches and ISRs between the nodes of a cluster.

    Nodes send heartbeats and fetches in real time. Where a test moves the time of its brokers on,
    all of these would be late at once, so that a clock which is moved names another for them.
    """
    found: Clock = getattr(clock, "between_nodes", clock)
    return found


class SystemClock:
    """The machine's own clock."""

    def now_ms(self) -> int:
        return time_of_day_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        return monotonic_ns() // 1_000_000
