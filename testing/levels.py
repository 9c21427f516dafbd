"""Settings of brokers for tests that differ from Kafka's defaults, and levels of features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fencepost.client.queries.session import ClusterSession, check

if TYPE_CHECKING:
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
"""Settings that differ from Kafka's defaults, which would make tests wait."""

UPGRADE, SAFE_DOWNGRADE = 1, 2


def set_level(session: ClusterSession, name: str, level: int) -> None:
    """Set the finalized level of a feature. Raises ApiError."""
    answer = session.client.call(
        "ApiVersions", client_software_name="fencepost", client_software_version="0"
    )
    now = {one.name: one.max_version_level for one in answer.finalized_features}.get(name, 0)
    answer = session.client.call(
        "UpdateFeatures",
        to_node=session.controller,
        check=False,
        entity=lambda make: make.message(
            timeout=session.timeout_ms,
            feature_updates=[
                make.FeatureUpdateKey(
                    feature=name,
                    max_version_level=level,
                    upgrade_type=SAFE_DOWNGRADE if level < now else UPGRADE,
                )
            ],
        ),
    )
    check(answer.error_code, "UpdateFeatures", name, answer.error_message)


async def level_of(broker: Broker, name: str) -> int:
    """Return the level of a feature that one broker knows."""
    return broker.storage.metadata.feature_level(name)
