"""An event loop whose time continues while a test has frozen ``time.monotonic``.

Brokers that run in a thread of a test use this loop. On asyncio's own loops, timers set before the
freeze would be due at once, and timers set after it would never be due.
"""

from __future__ import annotations

import asyncio

from fencepost.logcore.clock import monotonic_s


class RealTimeLoop(asyncio.SelectorEventLoop):
    """A selector loop on the system's monotonic clock."""

    def time(self) -> float:
        """Return the monotonic time in seconds."""
        return monotonic_s()
