"""Replication quotas, which limit the bandwidth of configured replicas, such as reassigned ones.

A broker has two such quotas: for bytes that it sends as a leader, and for bytes that it fetches as
a follower. In-sync replicas are never throttled.

Source: ``ReplicationQuotaManager``, ``ReplicationQuotaManagerConfig``; KIP-73.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.config.key import throttled_replicas
from fencepost.coordinator.security.rates import Rate, RateWindow
from fencepost.logcore.clock import Clock


class ReplicationSide(StrEnum):
    """Leader or follower; the value is the prefix of the side's configuration keys."""

    LEADER = "leader"
    FOLLOWER = "follower"

    @property
    def rate_key(self) -> str:
        """The broker's configuration key, in bytes per second."""
        if self is ReplicationSide.LEADER:
            return "leader.replication.throttled.rate"
        return "follower.replication.throttled.rate"

    @property
    def replicas_key(self) -> str:
        """The topics' configuration key that lists the throttled replicas."""
        return f"{self.value}.replication.throttled.replicas"


class ReplicationQuota:
    """The quota of one side, on one broker."""

    def __init__(
        self, config: BrokerConfig, clock: Clock, side: ReplicationSide, *, node_id: int
    ) -> None:
        self._config, self._clock, self._side = config, clock, side
        self._node_id = node_id
        self._rate = Rate(
            RateWindow(
                config.int("replication.quota.window.num"),
                1000 * config.int("replication.quota.window.size.seconds"),
            )
        )

    def covers(self, configs: Mapping[str, str], index: int) -> bool:
        """Return whether a topic's settings throttle the replica of a partition on this broker."""
        chosen = throttled_replicas(configs.get(self._side.replicas_key, ""))
        return chosen is None or (index, self._node_id) in chosen

    @property
    def is_exceeded(self) -> bool:
        """Whether throttled replicas must wait."""
        bound = self._config.int(self._side.rate_key)
        return self._rate.per_second(self._clock.monotonic_ms()) > bound

    def record(self, size: int) -> None:
        """Count bytes of a throttled replica."""
        self._rate.record(size, self._clock.monotonic_ms())
