"""The event loop of a broker in a thread: its time goes on where a test has frozen that of others.

An asyncio loop takes its time from ``time.monotonic``. Timers set before a test freezes it would be
due at once, and those set while it is frozen never.
"""

from __future__ import annotations

import asyncio

from fencepost.logcore.clock import monotonic_s


class RealTimeLoop(asyncio.SelectorEventLoop):
    """A selector loop on the machine's monotonic clock."""

    def time(self) -> float:
        """Seconds that never go back."""
        return monotonic_s()
