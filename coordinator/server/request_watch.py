"""Metrics of answered requests: their number by API and version, and their duration by API.

Source: ``RequestChannel.Request.updateRequestMetrics``, for the Fetch requests of followers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Final

from fencepost.coordinator.handlers import replica_id_of
from fencepost.coordinator.runtime.histogram import Histogram
from fencepost.protocol.api import ApiKey
from fencepost.protocol.codec import Request

FETCH_CONSUMER: Final = "FetchConsumer"
"""Kafka's metric name for Fetch requests of consumers."""

FETCH_FOLLOWER: Final = "FetchFollower"
"""Kafka's metric name for Fetch requests of followers."""


class RequestWatch:
    """Counts the requests of one server's connections; optional."""

    def __init__(self) -> None:
        self.answered: Counter[tuple[int, int]] = Counter()
        """The number of requests by API key and version."""
        self.seconds: defaultdict[int, Histogram] = defaultdict(Histogram)
        """The durations by API key, from the decoded request to its encoded response, with waits.
        """
        self.fetches: Counter[tuple[str, int]] = Counter()
        """The number of Fetch requests, by metric name and version; also part of ``answered``."""
        self.fetch_seconds: defaultdict[str, Histogram] = defaultdict(Histogram)
        """The durations of Fetch requests, by metric name; also part of ``seconds``."""

    def note(self, request: Request, seconds: float) -> None:
        """Count one request."""
        api_key, version = request.api_key, request.api_version
        self.answered[api_key, version] += 1
        self.seconds[api_key].note(seconds)
        if api_key == ApiKey.FETCH:
            name = FETCH_CONSUMER if replica_id_of(request.body) < 0 else FETCH_FOLLOWER
            self.fetches[name, version] += 1
            self.fetch_seconds[name].note(seconds)
