"""The event loop of a broker in a thread, whose time continues while a test has frozen time.

An asyncio loop takes its time from ``time.monotonic``. If a test freezes that, timers set before
would be due at once, and timers set later never.
"""

from __future__ import annotations

import asyncio

from fencepost.logcore.clock import monotonic_s


class RealTimeLoop(asyncio.SelectorEventLoop):
    """A selector loop on the machine's monotonic clock."""

    def time(self) -> float:
        """Return the monotonic time in seconds."""
        return monotonic_s()
