"""The input of the controller's decisions: the image, and the controller's settings.

Source: ``ClusterControlManager``, ``ConfigurationControlManager.getTopicConfig``,
``ReplicationControlManager.generateLeaderAndIsrUpdates``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field
from uuid import UUID

from fencepost.cluster.acl import AclLimits
from fencepost.cluster.controller.activation import ELR_VERSION, MIN_INSYNC_REPLICAS
from fencepost.cluster.controller.errors import StaleBrokerEpochError
from fencepost.cluster.controller.outcome import PartitionChange
from fencepost.cluster.controller.partition_change import Election, PartitionChangeBuilder
from fencepost.cluster.image import (
    BROKER_RESOURCE,
    MIGRATING,
    NO_LEADER,
    UNASSIGNED,
    BrokerRegistration,
    MetadataImage,
    PartitionRegistration,
    TopicImage,
)
from fencepost.logcore.values import dataclass

UNCLEAN_LEADER_ELECTION = "unclean.leader.election.enable"
KRAFT_VERSION = "kraft.version"


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """A controller's settings."""

    cluster_id: str
    node_id: int = 0
    session_timeout_ms: int = 9_000
    """``broker.session.timeout.ms``."""
    num_partitions: int = 1
    """``num.partitions``."""
    default_replication_factor: int = 1
    """``default.replication.factor``."""
    topic_defaults: Mapping[str, str] = field(default_factory=dict)
    """Topic defaults from the controller's configuration file, including Kafka's defaults."""
    max_idle_interval_ms: int = 500
    """``metadata.max.idle.interval.ms``; with 0, no NoOpRecord is written."""
    leader_rebalance: bool = True
    """``auto.leader.rebalance.enable``."""
    leader_imbalance_check_interval_ms: int = 300_000
    """``leader.imbalance.check.interval.seconds``."""
    leader_imbalance_percentage: int | None = None
    """``leader.imbalance.per.broker.percentage``; None balances every partition, as KRaft does."""
    state_topics: frozenset[str] = frozenset()
    """Topics for which the controller holds an unclean election only if an ElectLeaders request
    asks for it; it ignores their ``unclean.leader.election.enable``."""
    unclean_check_interval_ms: int = 300_000
    """``unclean.leader.election.interval.ms``."""
    max_elections: int = 1_000
    """The maximum number of elections in one step of a periodic task."""
    max_partitions_per_request: int = 10_000
    """The maximum number of partitions that one request may create."""
    acl_limits: AclLimits = field(default_factory=AclLimits)
    """Limits on the number of ACLs and the length of their texts."""
    max_topics: int = 100_000
    """``fencepost.max.topics``: the maximum number of topics in the cluster."""
    max_partitions: int = 200_000
    """``fencepost.max.partitions``: the maximum number of partitions in the cluster."""
    max_configured_groups: int = 10_000
    """The maximum number of groups that have dynamic settings, including deleted groups, whose
    settings stay."""
    max_client_metrics: int = 1_000
    """The maximum number of client metrics subscriptions."""
    internal_topics: frozenset[str] = frozenset()
    """Topics that no request may delete; of these, only ``broker_topics`` may be enlarged."""
    broker_topics: frozenset[str] = frozenset()
    """Internal topics that brokers create and enlarge by requests to the controller."""
    reserved_topics: frozenset[str] = frozenset()
    """Topics that no request may create."""
    features: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Lowest and highest level of each feature that this controller supports."""
    needs_leader_epoch_bump: bool = False
    """Whether brokers learn of changes by LeaderAndIsr requests (ZooKeeper), not by metadata
    records. A broker ignores such a request if it knows the request's leader epoch."""


@dataclass(frozen=True, slots=True)
class ControllerView:
    """An image, and the settings to interpret it with."""

    image: MetadataImage
    settings: ControllerSettings

    # --- brokers ---

    def is_active(self, broker_id: int) -> bool:
        """Whether a broker is registered, unfenced and not in controlled shutdown."""
        broker = self.image.brokers.get(broker_id)
        return broker is not None and broker.is_active

    def registered(self, broker_id: int, epoch: int) -> BrokerRegistration:
        """Return the broker with this epoch; raises StaleBrokerEpochError."""
        broker = self.image.brokers.get(broker_id)
        if broker is None:
            raise StaleBrokerEpochError(f"No broker registration found for broker id {broker_id}")
        if broker.epoch != epoch:
            raise StaleBrokerEpochError(f"Expected broker epoch {broker.epoch}, but got {epoch}")
        return broker

    def default_directory(self, broker_id: int) -> UUID:
        """Return the directory of a broker's new replica; UNASSIGNED if the broker chooses it.

        MIGRATING stands for the directory of a broker that has registered none.
        """
        broker = self.image.brokers.get(broker_id)
        if broker is None:
            return UNASSIGNED
        if not broker.directories:
            return MIGRATING
        return broker.directories[0] if len(broker.directories) == 1 else UNASSIGNED

    # --- settings and features ---

    def topic_config(self, topic: str, key: str) -> str:
        """Return a topic's setting.

        The first value that exists applies: the topic's own, this node's, the value for all
        brokers, the value in the configuration file.
        """
        configs = self.image.configs
        for values in (
            self.image.topic_configs(topic),
            configs.get((BROKER_RESOURCE, str(self.settings.node_id)), {}),
            configs.get((BROKER_RESOURCE, ""), {}),
        ):
            if key in values:
                return values[key]
        return self.settings.topic_defaults.get(key, "")

    def min_isr(self, topic: str) -> int:
        """Return the topic's ``min.insync.replicas``."""
        return int(self.topic_config(topic, MIN_INSYNC_REPLICAS) or 1)

    def allows_unclean_election(self, topic: str) -> bool:
        """Whether ``unclean.leader.election.enable`` is set; always False for ``state_topics``."""
        if topic in self.settings.state_topics:
            return False
        return self.topic_config(topic, UNCLEAN_LEADER_ELECTION).lower() == "true"

    @property
    def elr_enabled(self) -> bool:
        """Whether eligible leader replicas are tracked (KIP-966)."""
        return self.image.features.get(ELR_VERSION, 0) > 0

    # --- partitions ---

    def partitions(self) -> Iterator[tuple[TopicImage, int, PartitionRegistration]]:
        """Yield every partition with its topic and index."""
        for topic in self.image.topics_by_id.values():
            for index, partition in enumerate(topic.partitions):
                yield topic, index, partition

    def change(
        self, topic: TopicImage, index: int, *, removed: int = NO_LEADER, added: int = NO_LEADER
    ) -> PartitionChangeBuilder:
        """Return a builder with the topic's settings and the active brokers, and no change yet.

        ``removed`` cannot lead even if it is active; ``added`` can lead even if it is not active.
        """
        partition = topic.partitions[index]
        return PartitionChangeBuilder(
            partition=partition,
            topic_id=topic.topic_id,
            index=index,
            is_acceptable=self._acceptable(partition, removed, added),
            min_isr=self.min_isr(topic.name),
            default_directory=self.default_directory,
            elr_enabled=self.elr_enabled,
            raises_leader_epoch=self.settings.needs_leader_epoch_bump,
        )

    def _acceptable(
        self, partition: PartitionRegistration, removed: int, added: int
    ) -> Callable[[int], bool]:
        brokers = self.image.brokers

        def is_acceptable(broker_id: int) -> bool:
            broker = brokers.get(broker_id)
            if broker is None or broker_id == removed:
                return False
            if broker_id != added and not broker.is_active:
                return self._must_keep_leading(partition, broker)
            return broker.has_online(partition.directory_of(broker_id))

        return is_acceptable

    def _must_keep_leading(
        self, partition: PartitionRegistration, broker: BrokerRegistration
    ) -> bool:
        """Whether a leader in controlled shutdown stays, because no other replica may lead."""
        return (
            self.settings.needs_leader_epoch_bump
            and broker.broker_id == partition.leader
            and not broker.fenced
            and not any(map(self.is_active, partition.isr))
        )

    def changed(
        self, topic: TopicImage, change: PartitionChangeBuilder, cause: str
    ) -> list[PartitionChange]:
        """Return the change of a partition in a list, which is empty if nothing changes."""
        record = change.build()
        if record is None:
            return []
        before = change.partition
        return [
            PartitionChange(topic.name, change.index, before, before.merge(record), record, cause)
        ]

    def leader_and_isr_updates(
        self,
        partitions: Iterable[tuple[TopicImage, int]],
        cause: str,
        *,
        removed: int = NO_LEADER,
        added: int = NO_LEADER,
        is_unclean_shutdown: bool = False,
        at_most: int | None = None,
    ) -> list[PartitionChange]:
        """Return the changes that remove ``removed`` from ISRs, or that let ``added`` lead.

        With ``is_unclean_shutdown``, ``removed`` also leaves the eligible leader replicas. If the
        result has ``at_most`` changes, more may be necessary.
        """
        changes: list[PartitionChange] = []
        rules: dict[str, tuple[int, Election]] = {}
        elr_enabled = self.elr_enabled
        for topic, index in partitions:
            rule = rules.get(topic.name)
            if rule is None:
                allows = self.allows_unclean_election(topic.name)
                election = Election.UNCLEAN if allows else Election.ONLINE
                rule = rules[topic.name] = self.min_isr(topic.name), election
            partition = topic.partitions[index]
            change = PartitionChangeBuilder(
                partition,
                topic.topic_id,
                index,
                self._acceptable(partition, removed, added),
                rule[0],
                self.default_directory,
                elr_enabled,
                rule[1],
            )
            change.raises_leader_epoch = self.settings.needs_leader_epoch_bump
            if is_unclean_shutdown:
                change.unclean_shutdown = frozenset((removed,))
            if removed in partition.isr:
                change.isr = tuple(
                    [broker_id for broker_id in partition.isr if broker_id != removed]
                )
            changes += self.changed(topic, change, cause)
            if len(changes) == at_most:
                break
        return changes
