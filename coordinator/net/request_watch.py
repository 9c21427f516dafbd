"""Metrics of answered requests: their number by API and version, and their duration by API."""

from __future__ import annotations

from collections import Counter, defaultdict

from fencepost.coordinator.runtime.histogram import Histogram


class RequestWatch:
    """Counts the requests of one server's connections; optional."""

    def __init__(self) -> None:
        self.answered: Counter[tuple[int, int]] = Counter()
        """The number of requests by API key and version."""
        self.seconds: defaultdict[int, Histogram] = defaultdict(Histogram)
        """By API key, from the decoded request to its encoded response, including waits."""

    def note(self, api_key: int, version: int, seconds: float) -> None:
        """Count one request."""
        self.answered[api_key, version] += 1
        self.seconds[api_key].note(seconds)
