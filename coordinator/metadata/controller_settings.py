"""The settings of the controller, from the configuration."""

from __future__ import annotations

from fencepost.cluster.controller.activation import MIN_INSYNC_REPLICAS
from fencepost.cluster.controller.view import UNCLEAN_LEADER_ELECTION, ControllerSettings
from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.metadata.metadata import FEATURES
from fencepost.coordinator.metadata.names import HISTORY_TOPIC, INTERNAL_TOPICS
from fencepost.coordinator.metadata.state_topics import STATE_TOPICS


def controller_settings(
    config: BrokerConfig, *, node_id: int, cluster_id: str = ""
) -> ControllerSettings:
    """Return the settings for a controller in this process."""
    # In a cluster each broker asks the controller for a history partition of its own.
    is_cluster = config.items("controller.listener.names") or config.text("zookeeper.connect")
    history = frozenset({HISTORY_TOPIC})
    return ControllerSettings(
        cluster_id,
        node_id=node_id,
        session_timeout_ms=config.int("broker.session.timeout.ms"),
        num_partitions=config.int("num.partitions"),
        default_replication_factor=config.int("default.replication.factor"),
        # Only the static settings: the controller reads the dynamic defaults from its image.
        topic_defaults={
            name: config.static_text(name) or ""
            for name in (MIN_INSYNC_REPLICAS, UNCLEAN_LEADER_ELECTION)
        },
        max_idle_interval_ms=config.int("metadata.max.idle.interval.ms"),
        leader_rebalance=config.bool("auto.leader.rebalance.enable"),
        leader_imbalance_check_interval_ms=(
            config.int("leader.imbalance.check.interval.seconds") * 1000
        ),
        leader_imbalance_percentage=(
            config.int("leader.imbalance.per.broker.percentage")
            if config.text("zookeeper.connect")
            else None
        ),
        state_topics=STATE_TOPICS,
        unclean_check_interval_ms=config.int("unclean.leader.election.interval.ms"),
        max_topics=config.int("fencepost.max.topics"),
        max_partitions=config.int("fencepost.max.partitions"),
        internal_topics=INTERNAL_TOPICS,
        broker_topics=history if is_cluster else frozenset(),
        reserved_topics=frozenset() if is_cluster else history,
        features={name: (low, high) for name, (low, high, _) in FEATURES.items()},
    )
