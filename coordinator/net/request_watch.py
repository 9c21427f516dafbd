"""How many requests of each API and version were answered, and how long each API took."""

from __future__ import annotations

from collections import Counter, defaultdict

from fencepost.coordinator.runtime.histogram import Histogram


class RequestWatch:
    """Counts what the connections of one server answer; they do it only where there is one."""

    def __init__(self) -> None:
        self.answered: Counter[tuple[int, int]] = Counter()
        """Requests by API key and version."""
        self.seconds: defaultdict[int, Histogram] = defaultdict(Histogram)
        """By API key, from the decoded request to its encoded answer; waits are part of it."""

    def note(self, api_key: int, version: int, seconds: float) -> None:
        """Count one request."""
        self.answered[api_key, version] += 1
        self.seconds[api_key].note(seconds)
