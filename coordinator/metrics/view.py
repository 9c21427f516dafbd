"""The state of the broker from which the metrics with other exporters' names are computed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from fencepost.logcore.values import dataclass

if TYPE_CHECKING:
    from fencepost.coordinator.broker_services import Services
    from fencepost.coordinator.metrics.snapshot import Snapshot
    from fencepost.coordinator.server.server import Server

RATE_SECONDS: Final = 900
"""The time over which rates are exponentially weighted: a quarter of an hour."""


@dataclass(frozen=True, slots=True)
class MetricsView:
    """The broker during one scrape."""

    services: Services
    server: Server
    snapshot: Snapshot
    rates: Mapping[tuple[str, str], float]
    """Bytes per second by topic and direction, ``bytes_in`` or ``bytes_out``; "" is all topics."""

    @property
    def brokers(self) -> tuple[int, int]:
        """The numbers of active and of fenced brokers; a standalone broker is one active broker."""
        registered = self.services.metadata.image.brokers
        fenced = sum(broker.fenced for broker in registered.values())
        return len(registered) - fenced or 1, fenced

    @property
    def controller(self) -> int | None:
        """The active controller; None on a broker whose controllers are other nodes."""
        services = self.services
        if services.zookeeper is not None:
            return services.zookeeper.controller_id
        roles = services.config.items("process.roles")
        return services.node_id if "controller" in roles else None


class ByteRates:
    """Bytes per second over the last quarter of an hour, from the counters at each scrape.

    Source: the exponentially weighted rates of Kafka's meters (``FifteenMinuteRate``).
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], int] = {}
        self._rates: dict[tuple[str, str], float] = {}
        self._at: float | None = None

    def after(
        self, counts: Mapping[tuple[str, str], int], now: float
    ) -> Mapping[tuple[str, str], float]:
        """Update the rates with counters at ``now``, in seconds, and return them."""
        passed = 0.0 if self._at is None else now - self._at
        if passed > 0:
            weight = 1 - math.exp(-passed / RATE_SECONDS)
            rates = {}
            for key, count in counts.items():
                grown = max(0, count - self._counts.get(key, 0)) / passed
                before = self._rates.get(key)
                rates[key] = grown if before is None else before + weight * (grown - before)
            self._rates = rates
        self._counts, self._at = dict(counts), now
        return {key: self._rates.get(key, 0.0) for key in counts}
