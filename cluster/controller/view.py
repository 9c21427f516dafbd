"""What the rules of the controller look at: the image, and the controller's own settings.

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
from fencepost.cluster.controller.outcome import Change
from fencepost.cluster.controller.partition_change import Election, PartitionChange
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
    """What a controller is configured with."""

    cluster_id: str
    node_id: int = 0
    session_timeout_ms: int = 9_000
    """``broker.session.timeout.ms``."""
    num_partitions: int = 1
    """``num.partitions``."""
    default_replication_factor: int = 1
    """``default.replication.factor``."""
    topic_defaults: Mapping[str, str] = field(default_factory=dict)
    """Settings of the controller's own file that topics fall back to; with Kafka's defaults."""
    max_idle_interval_ms: int = 500
    """``metadata.max.idle.interval.ms``; 0 writes no NoOpRecord."""
    leader_rebalance: bool = True
    """``auto.leader.rebalance.enable``."""
    leader_imbalance_check_interval_ms: int = 300_000
    """``leader.imbalance.check.interval.seconds``."""
    leader_imbalance_percentage: int | None = None
    """``leader.imbalance.per.broker.percentage``; None balances every partition, as KRaft does."""
    state_topics: frozenset[str] = frozenset()
    """Topics of which only a request may have a replica elected that is not in sync."""
    unclean_check_interval_ms: int = 300_000
    """``unclean.leader.election.interval.ms``."""
    max_elections: int = 1_000
    """Elections in one step of a periodic task."""
    max_partitions_per_request: int = 10_000
    """Partitions that one request may create."""
    acl_limits: AclLimits = field(default_factory=AclLimits)
    """How many ACLs there are at most, and how long their texts."""
    max_topics: int = 100_000
    """``fencepost.max.topics``: topics of the cluster."""
    max_partitions: int = 200_000
    """``fencepost.max.partitions``: partitions of all topics."""
    max_configured_groups: int = 10_000
    """Groups with settings of their own, which outlive the group: nothing else removes them."""
    internal_topics: frozenset[str] = frozenset()
    """Topics that no request may delete or give more partitions."""
    broker_topics: frozenset[str] = frozenset()
    """Internal topics that brokers create and grow by requests to the controller."""
    reserved_topics: frozenset[str] = frozenset()
    """Topics that no request may create."""
    features: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Lowest and highest level of each feature that this controller supports."""
    tells_by_leader_epoch: bool = False
    """Whether brokers are told by requests, of which they pass over those whose leader epoch they
    know (LeaderAndIsr), instead of reading the records of every change."""


@dataclass(frozen=True, slots=True)
class View:
    """An image with the settings it is to be read with."""

    image: MetadataImage
    settings: ControllerSettings

    # --- brokers ---

    def is_active(self, broker_id: int) -> bool:
        """Whether a broker is registered, unfenced and not in controlled shutdown."""
        broker = self.image.brokers.get(broker_id)
        return broker is not None and broker.is_active

    def registered(self, broker_id: int, epoch: int) -> BrokerRegistration:
        """The broker with this epoch; raises StaleBrokerEpochError."""
        broker = self.image.brokers.get(broker_id)
        if broker is None:
            raise StaleBrokerEpochError(f"No broker registration found for broker id {broker_id}")
        if broker.epoch != epoch:
            raise StaleBrokerEpochError(f"Expected broker epoch {broker.epoch}, but got {epoch}")
        return broker

    def default_directory(self, broker_id: int) -> UUID:
        """Where a new replica of a broker lies, as far as the controller can tell."""
        broker = self.image.brokers.get(broker_id)
        if broker is None:
            return UNASSIGNED
        if not broker.directories:
            return MIGRATING
        return broker.directories[0] if len(broker.directories) == 1 else UNASSIGNED

    # --- settings and features ---

    def topic_config(self, topic: str, key: str) -> str:
        """A setting of a topic: its own, this node's, the cluster's, the file's."""
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
        """``min.insync.replicas``."""
        return int(self.topic_config(topic, MIN_INSYNC_REPLICAS) or 1)

    def allows_unclean_election(self, topic: str) -> bool:
        """``unclean.leader.election.enable``, which does not reach the coordinators' state."""
        if topic in self.settings.state_topics:
            return False
        return self.topic_config(topic, UNCLEAN_LEADER_ELECTION).lower() == "true"

    @property
    def elr_enabled(self) -> bool:
        """Whether eligible leader replicas are kept (KIP-966)."""
        return self.image.features.get(ELR_VERSION, 0) > 0

    # --- partitions ---

    def partitions(self) -> Iterator[tuple[TopicImage, int, PartitionRegistration]]:
        """All of them."""
        for topic in self.image.topics_by_id.values():
            for index, partition in enumerate(topic.partitions):
                yield topic, index, partition

    def change(
        self, topic: TopicImage, index: int, *, removed: int = NO_LEADER, added: int = NO_LEADER
    ) -> PartitionChange:
        """A change to be filled in, with the rules of the topic and of the living brokers.

        ``removed`` can not lead although the image says so, ``added`` can.
        """
        partition = topic.partitions[index]
        return PartitionChange(
            partition=partition,
            topic_id=topic.topic_id,
            index=index,
            is_acceptable=self._acceptable(partition, removed, added),
            min_isr=self.min_isr(topic.name),
            default_directory=self.default_directory,
            elr_enabled=self.elr_enabled,
            raises_leader_epoch=self.settings.tells_by_leader_epoch,
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
                return self._goes_on(partition, broker)
            return broker.has_online(partition.directory_of(broker_id))

        return is_acceptable

    def _goes_on(self, partition: PartitionRegistration, broker: BrokerRegistration) -> bool:
        """Whether a leader that is about to go leads until then: nobody else may."""
        return (
            self.settings.tells_by_leader_epoch
            and broker.broker_id == partition.leader
            and not broker.fenced
            and not any(map(self.is_active, partition.isr))
        )

    def changed(self, topic: TopicImage, change: PartitionChange, cause: str) -> list[Change]:
        """What a change makes of a partition: one, or none if it stays as it is."""
        record = change.build()
        if record is None:
            return []
        before = change.partition
        return [Change(topic.name, change.index, before, before.merge(record), record, cause)]

    def leader_and_isr_updates(
        self,
        partitions: Iterable[tuple[TopicImage, int]],
        cause: str,
        *,
        removed: int = NO_LEADER,
        added: int = NO_LEADER,
        is_unclean_shutdown: bool = False,
        at_most: int | None = None,
    ) -> list[Change]:
        """Take ``removed`` out of the ISR and of leadership, or let ``added`` lead.

        After an unclean shutdown it leaves the eligible leader replicas, too. With so many changes
        as ``at_most`` it is over, there may be more then.
        """
        changes: list[Change] = []
        rules: dict[str, tuple[int, Election]] = {}
        elr_enabled = self.elr_enabled
        for topic, index in partitions:
            rule = rules.get(topic.name)
            if rule is None:
                allows = self.allows_unclean_election(topic.name)
                election = Election.UNCLEAN if allows else Election.ONLINE
                rule = rules[topic.name] = self.min_isr(topic.name), election
            partition = topic.partitions[index]
            change = PartitionChange(
                partition,
                topic.topic_id,
                index,
                self._acceptable(partition, removed, added),
                rule[0],
                self.default_directory,
                elr_enabled,
                rule[1],
            )
            change.raises_leader_epoch = self.settings.tells_by_leader_epoch
            if is_unclean_shutdown:
                change.unclean_shutdown = frozenset((removed,))
            if removed in partition.isr:
                change.isr = tuple([one for one in partition.isr if one != removed])
            changes += self.changed(topic, change, cause)
            if len(changes) == at_most:
                break
        return changes
