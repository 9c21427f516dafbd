"""Requests from the controller to a broker, turned into metadata records.

This module has no I/O. Other parts of the broker see only the resulting image, and work as with a
KRaft controller. Both LeaderAndIsr and UpdateMetadata contain a partition's state. The state with
the highest leader and partition epoch wins, even if an older state arrives later. A replica on
this broker becomes leader or follower only after a request has named its leader.

Source: ``ReplicaManager.becomeLeaderOrFollower``/``stopReplicas``/``maybeUpdateMetadataCache``,
``ZkMetadataCache.updateMetadata``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final
from uuid import UUID

from fencepost.cluster.delta import MetadataDelta
from fencepost.cluster.image import (
    NO_LEADER,
    BrokerRegistration,
    MetadataImage,
    PartitionRegistration,
    TopicImage,
)
from fencepost.cluster.image_records import partition_record
from fencepost.cluster.records import (
    BrokerEndpoint,
    MetadataRecord,
    RegisterBrokerRecord,
    RemoveTopicRecord,
    TopicRecord,
    UnregisterBrokerRecord,
)
from fencepost.coordinator.zookeeper.request_batch import LEADER_DURING_DELETE
from fencepost.logcore.steps import Steps
from fencepost.protocol.schema import Entity

NONE, STALE_CONTROLLER_EPOCH, STALE_BROKER_EPOCH = 0, 11, 77
FENCED_LEADER_EPOCH, UNKNOWN_TOPIC_ID, INCONSISTENT_TOPIC_ID = 74, 100, 103
"""Kafka's error codes."""

UNKNOWN_EPOCH: Final = -1
"""The epoch of other brokers in UpdateMetadata, which contains only the receiver's epoch."""

UNTOLD: Final = -1
"""The epochs of a partition before the first request about it."""

MAX_GONE: Final = 10_000
"""The maximum number of deleted topics that are remembered."""

_NO_INCARNATION: Final = UUID(int=0)


def without_leaders(image: MetadataImage, broker_id: int) -> Steps[MetadataImage]:
    """Return the image of a starting broker, in which the broker's partitions have no leaders.

    The broker may have lost records since its previous session. If it became leader again in the
    same leader epoch, replicas could diverge. Each step changes one partition.
    """
    delta = MetadataDelta(image)
    for topic in image.topics.values():
        for index, part in enumerate(topic.partitions):
            if broker_id in part.replicas:
                untold = replace(
                    part, leader=NO_LEADER, leader_epoch=UNTOLD, partition_epoch=UNTOLD
                )
                delta.replay(partition_record(topic.topic_id, index, untold))
            elif part.adding_replicas or part.removing_replicas:
                # No request will report that a reassignment between other brokers was cancelled.
                settled = replace(part, adding_replicas=(), removing_replicas=())
                delta.replay(partition_record(topic.topic_id, index, settled))
            yield
    for broker in image.brokers.values():
        delta.replay(UnregisterBrokerRecord(broker.broker_id, broker.epoch))
    return delta.apply(image.offset + 1, image.epoch)


def unknown_topics(body: Entity, image: MetadataImage) -> list[str]:
    """Return the topics in a LeaderAndIsr or UpdateMetadata that a broker does not know yet."""
    return [
        topic.topic_name
        for topic in body.topic_states
        if topic.topic_name not in image.topics
        and all(state.leader != LEADER_DURING_DELETE for state in topic.partition_states)
    ]


class ControllerRequestApplier:
    """Turns the controller's requests to broker ``node_id`` into metadata records.

    ``on_failover`` is called when the first request of a later controller arrives.
    """

    def __init__(self, node_id: int, on_failover: Callable[[], None]) -> None:
        self.node_id, self._on_failover = node_id, on_failover
        self.controller_epoch = 0
        """The highest controller epoch received."""
        self.controller_id = -1
        self._connected_s = 0.0
        """When the controller's latest connection was accepted, by the loop's clock."""
        self._gone: dict[UUID, None] = {}
        """Recently deleted topics; a request that names one of them is outdated, and ignored."""

    def forget(self, topic_id: UUID) -> RemoveTopicRecord:
        """Return the removal of a topic, and remember its id, which is never reused."""
        self._gone[topic_id] = None
        if len(self._gone) > MAX_GONE:
            del self._gone[next(iter(self._gone))]
        return RemoveTopicRecord(topic_id)

    def refuses(self, body: Entity, broker_epoch: int, connected_s: float) -> int:
        """Return the error for a request from a stale controller or for an earlier broker epoch.

        A controller has one connection to a broker at a time. A request that arrives on an earlier
        connection is stale: the controller has given up that connection and resent the request.
        """
        if body.controller_epoch < self.controller_epoch:
            return STALE_CONTROLLER_EPOCH
        # Compare the ages of the connections, because the list of live brokers in an UpdateMetadata
        # has no epoch to compare.
        if body.controller_epoch == self.controller_epoch and connected_s < self._connected_s:
            return STALE_CONTROLLER_EPOCH
        if body.broker_epoch < broker_epoch:
            return STALE_BROKER_EPOCH
        if 0 < self.controller_epoch < body.controller_epoch:
            self._on_failover()
        self.controller_epoch, self.controller_id = body.controller_epoch, body.controller_id
        self._connected_s = connected_s
        return NONE

    # --- LeaderAndIsr ---

    def leader_and_isr(
        self, image: MetadataImage, topic: Entity, parts: Sequence[Entity], count: int = 0
    ) -> tuple[list[MetadataRecord], dict[int, int]]:
        """Return records and errors by partition index, for these partitions of a topic.

        The topic has at least ``count`` partitions.
        """
        topic_image = image.topics.get(topic.topic_name)
        if topic_image is not None and topic_image.topic_id != topic.topic_id:
            return [], {part.partition_index: INCONSISTENT_TOPIC_ID for part in parts}
        if topic.topic_id in self._gone:
            return [], {part.partition_index: UNKNOWN_TOPIC_ID for part in parts}
        errors: dict[int, int] = {}
        states: dict[int, PartitionRegistration] = {}
        for part in parts:
            index, now = part.partition_index, _led(part)
            old = _partition(topic_image, index)
            errors[index] = NONE
            if old is not None and now.leader_epoch < old.leader_epoch:
                errors[index] = STALE_CONTROLLER_EPOCH
            elif old is None or _epochs(now) >= _epochs(old):
                states[index] = now
        records = _topic_records(topic.topic_name, topic.topic_id, topic_image, states, count)
        return [*records], errors

    # --- UpdateMetadata ---

    def update_metadata(
        self, image: MetadataImage, topic: Entity, parts: Sequence[Entity], count: int = 0
    ) -> list[MetadataRecord]:
        """Return records for these partitions of a topic, which has at least ``count``."""
        topic_image = image.topics.get(topic.topic_name)
        if any(part.leader == LEADER_DURING_DELETE for part in parts):
            if topic.topic_id is None:
                return []
            removal = self.forget(topic.topic_id)
            return (
                [removal]
                if topic_image is not None and topic_image.topic_id == topic.topic_id
                else []
            )
        if topic.topic_id in self._gone:
            return []
        records: list[MetadataRecord] = []
        if topic_image is not None and topic_image.topic_id != topic.topic_id:
            records.append(self.forget(topic_image.topic_id))
            topic_image = None
        states: dict[int, PartitionRegistration] = {}
        for part in parts:
            old = _partition(topic_image, part.partition_index)
            now = _updated(part, old)
            if old is None or _epochs(now) > _epochs(old) or _replaces_torn_read(now, old):
                states[part.partition_index] = now
        records += _topic_records(topic.topic_name, topic.topic_id, topic_image, states, count)
        return records

    def live_brokers(
        self, image: MetadataImage, body: Entity, broker_epoch: int
    ) -> list[MetadataRecord]:
        """Return records for the brokers in an UpdateMetadata."""
        # The request may arrive before ZooKeeper's response to this broker's registration.
        own_epoch = max(broker_epoch, body.broker_epoch)
        return [*self._brokers(image, body.live_brokers, own_epoch)]

    def _brokers(
        self, image: MetadataImage, live: tuple[Any, ...], broker_epoch: int
    ) -> Iterator[MetadataRecord]:
        ids = {broker.id for broker in live}
        for broker_id, broker in image.brokers.items():
            if broker_id not in ids:
                yield UnregisterBrokerRecord(broker_id, broker.epoch)
        for live_broker in live:
            epoch = broker_epoch if live_broker.id == self.node_id else UNKNOWN_EPOCH
            listeners = {
                end.listener: BrokerEndpoint(
                    end.listener, end.host, end.port, end.security_protocol
                )
                for end in live_broker.endpoints
            }
            known_one = image.brokers.get(live_broker.id)
            if known_one is None or _differs(known_one, epoch, listeners, live_broker.rack):
                yield RegisterBrokerRecord(
                    broker_id=live_broker.id,
                    incarnation_id=_NO_INCARNATION,
                    broker_epoch=epoch,
                    end_points=tuple(listeners.values()),
                    features=(),
                    rack=live_broker.rack,
                    fenced=False,
                )

    # --- StopReplica ---

    def stop_replica(
        self, image: MetadataImage, body: Entity
    ) -> tuple[list[MetadataRecord], list[tuple[str, int, int]]]:
        """Return records, and the error of each partition by topic and index.

        A replica that is not deleted keeps following the leader that UpdateMetadata names.
        """
        records: list[MetadataRecord] = []
        errors = []
        for topic in body.topic_states:
            topic_image = image.topics.get(topic.topic_name)
            states: dict[int, PartitionRegistration] = {}
            for part in topic.partition_states:
                index, old, error = part.partition_index, None, NONE
                if topic_image is not None:
                    old = _partition(topic_image, index)
                if old is not None and 0 <= part.leader_epoch < old.leader_epoch:
                    error = FENCED_LEADER_EPOCH
                elif old is not None and part.delete_partition and self.node_id in old.replicas:
                    states[index] = self._without(old)
                errors.append((topic.topic_name, index, error))
            if topic_image is not None:
                records += _topic_records(
                    topic_image.name, topic_image.topic_id, topic_image, states
                )
        return records, errors

    def _without(self, old: PartitionRegistration) -> PartitionRegistration:
        others = tuple(replica for replica in old.replicas if replica != self.node_id)
        leader = NO_LEADER if old.leader == self.node_id else old.leader
        return replace(old, replicas=others, leader=leader, directories=())


def _epochs(registration: PartitionRegistration) -> tuple[int, int]:
    return registration.leader_epoch, registration.partition_epoch


def _replaces_torn_read(now: PartitionRegistration, old: PartitionRegistration) -> bool:
    """Whether ``old`` has the replicas of an earlier state.

    A starting broker reads the replicas from the topic's znode and then the rest from the
    partition's state, and a reassignment may end in between.
    """
    return _epochs(now) == _epochs(old) and set(now.replicas) != set(old.replicas)


def _partition(topic: TopicImage | None, index: int) -> PartitionRegistration | None:
    if topic is None or index >= len(topic.partitions):
        return None
    return topic.partitions[index]


def _led(state: Any) -> PartitionRegistration:
    return PartitionRegistration(
        replicas=tuple(state.replicas),
        isr=tuple(state.isr),
        leader=state.leader,
        leader_epoch=state.leader_epoch,
        partition_epoch=state.partition_epoch,
        removing_replicas=tuple(state.removing_replicas),
        adding_replicas=tuple(state.adding_replicas),
        leader_recovery_state=state.leader_recovery_state,
    )


def _updated(state: Any, old: PartitionRegistration | None) -> PartitionRegistration:
    """Return a partition's new state; fields that UpdateMetadata lacks come from the old state.

    If the replicas have changed, a LeaderAndIsr will set these fields.
    """
    replicas = tuple(state.replicas)
    same = old is not None and set(old.replicas) == set(replicas)
    return PartitionRegistration(
        replicas=replicas,
        isr=tuple(state.isr),
        leader=state.leader,
        leader_epoch=state.leader_epoch,
        partition_epoch=state.zk_version,
        removing_replicas=old.removing_replicas if old is not None and same else (),
        adding_replicas=old.adding_replicas if old is not None and same else (),
    )


def _topic_records(
    name: str,
    topic_id: UUID,
    topic_image: TopicImage | None,
    states: Mapping[int, PartitionRegistration],
    count: int = 0,
) -> Iterator[MetadataRecord]:
    """Yield records for partition states of a topic with at least ``count`` partitions.

    A partition that is not in any request yet gets a record without replicas.
    """
    if not states:
        return
    if topic_image is None:
        yield TopicRecord(name, topic_id)
    there = 0 if topic_image is None else len(topic_image.partitions)
    nothing = PartitionRegistration((), (), NO_LEADER, UNTOLD, UNTOLD)
    for index in sorted({*states, *range(there, max(count, max(states) + 1))}):
        yield partition_record(topic_id, index, states.get(index, nothing))


def _differs(
    registered: BrokerRegistration,
    epoch: int,
    listeners: Mapping[str, BrokerEndpoint],
    rack: str | None,
) -> bool:
    return (registered.epoch, registered.listeners, registered.rack) != (epoch, listeners, rack)
