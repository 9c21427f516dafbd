"""What the names of other exporters are filled from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from fencepost.logcore.values import dataclass

if TYPE_CHECKING:
    from fencepost.coordinator.metrics.snapshot import Snapshot
    from fencepost.coordinator.net.server import Server
    from fencepost.coordinator.services import Services

RATE_SECONDS: Final = 900
"""Rates are those of a quarter of an hour, older ones counting for less and less."""


@dataclass(frozen=True, slots=True)
class View:
    """A broker that serves, as one scrape has found it."""

    services: Services
    server: Server
    snapshot: Snapshot
    rates: Mapping[tuple[str, str], float]
    """Bytes a second by topic and direction, ``bytes_in`` or ``bytes_out``; "" is all topics."""

    @property
    def brokers(self) -> tuple[int, int]:
        """How many brokers are active, and how many are fenced; who stands alone is one."""
        known = self.services.metadata.image.brokers
        fenced = sum(one.fenced for one in known.values())
        return len(known) - fenced or 1, fenced

    @property
    def controller(self) -> int | None:
        """The active controller; None where controllers are apart, and known to themselves."""
        services = self.services
        if services.zookeeper is not None:
            return services.zookeeper.controller_id
        roles = services.config.items("process.roles")
        return services.node_id if "controller" in roles else None


class Rates:
    """Bytes a second of the last quarter of an hour, from what each scrape has found.

    Source: the exponentially weighted rates of Kafka's meters (``FifteenMinuteRate``).
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], int] = {}
        self._rates: dict[tuple[str, str], float] = {}
        self._at: float | None = None

    def after(
        self, counts: Mapping[tuple[str, str], int], now: float
    ) -> Mapping[tuple[str, str], float]:
        """Take counters as they are at ``now``, in seconds, and say how fast they grow."""
        passed = 0.0 if self._at is None else now - self._at
        if passed > 0:
            weight = 1 - math.exp(-passed / RATE_SECONDS)
            rates = {}
            for key, count in counts.items():
                grown = max(0, count - self._seen.get(key, 0)) / passed
                before = self._rates.get(key)
                rates[key] = grown if before is None else before + weight * (grown - before)
            self._rates = rates
        self._seen, self._at = dict(counts), now
        return {key: self._rates.get(key, 0.0) for key in counts}
