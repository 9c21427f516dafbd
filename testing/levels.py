"""Settings of test brokers where they differ from Kafka's defaults, and levels of features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fencepost.client.queries.features import (
    SAFE_DOWNGRADE,
    finalized_levels,
    update_features,
)

if TYPE_CHECKING:
    from fencepost.client.queries.session import ClusterSession
    from fencepost.coordinator.daemon.broker import Broker

SETTINGS: Mapping[str, str] = {
    "group.min.session.timeout.ms": "100",
    "group.consumer.heartbeat.interval.ms": "100",
    "group.consumer.min.heartbeat.interval.ms": "100",
    "group.consumer.assignment.interval.ms": "0",
    "group.consumer.min.session.timeout.ms": "100",
    "group.share.heartbeat.interval.ms": "100",
    "group.share.min.heartbeat.interval.ms": "100",
    "group.share.assignment.interval.ms": "0",
    "group.share.min.session.timeout.ms": "100",
}
"""Settings that differ from Kafka's defaults, because the defaults would make tests wait."""


def set_level(session: ClusterSession, name: str, level: int) -> None:
    """Set the finalized level of a feature. Raises ApiError."""
    now = finalized_levels(session)
    update_features(session, {name: level}, now, SAFE_DOWNGRADE)


async def level_of(broker: Broker, name: str) -> int:
    """Return the level of a feature that one broker knows."""
    return broker.storage.metadata.feature_level(name)
