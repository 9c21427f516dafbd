"""What the configuration says to a controller."""

from __future__ import annotations

from fencepost.cluster.controller.activation import MIN_INSYNC_REPLICAS
from fencepost.cluster.controller.view import UNCLEAN_LEADER_ELECTION, ControllerSettings, View
from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.metadata.log import MetadataLimits, MetadataLog
from fencepost.coordinator.metadata.metadata import FEATURES, Metadata
from fencepost.coordinator.metadata.state_topics import STATE_TOPICS


def controller_settings(
    config: BrokerConfig, *, node_id: int, cluster_id: str = "", max_partitions_per_request: int
) -> ControllerSettings:
    """The settings of the controller that this process may be."""
    return ControllerSettings(
        cluster_id,
        node_id=node_id,
        session_timeout_ms=config.int("broker.session.timeout.ms"),
        num_partitions=config.int("num.partitions"),
        default_replication_factor=config.int("default.replication.factor"),
        topic_defaults={
            MIN_INSYNC_REPLICAS: str(config.int(MIN_INSYNC_REPLICAS)),
            UNCLEAN_LEADER_ELECTION: str(config.bool(UNCLEAN_LEADER_ELECTION)).lower(),
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
        max_partitions_per_request=max_partitions_per_request,
        features={name: (low, high) for name, (low, high, _) in FEATURES.items()},
    )


def view_of(metadata: Metadata, config: BrokerConfig, node_id: int) -> View:
    """What the controller's rules look at now; a member of a cluster only tries changes out."""
    limits = metadata.limits if isinstance(metadata, MetadataLog) else MetadataLimits()
    settings = controller_settings(
        config,
        node_id=node_id,
        max_partitions_per_request=limits.max_partitions_per_request,
    )
    return View(metadata.image, settings)
