"""The requests by which the controller reports a change: LeaderAndIsr, UpdateMetadata, StopReplica.

This module compares two images, without I/O, and returns the requests in the order in which each
broker must receive them. A newly registered broker first receives the list of live brokers, then
all of its replicas.

Source: ``AbstractControllerBrokerRequestBatch``, ``ReplicaStateMachine.doHandleStateChanges``,
``KafkaController.onBrokerStartup``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Final
from uuid import UUID

from fencepost.cluster.image import (
    LOST,
    NEVER_LED,
    BrokerRegistration,
    MetadataImage,
    PartitionRegistration,
    TopicImage,
    changed_topics,
)
from fencepost.coordinator.zookeeper.loading import batched
from fencepost.logcore.values import dataclass
from fencepost.protocol.api import ApiKey
from fencepost.protocol.messages import request_factory
from fencepost.protocol.schema import Entity

LEADER_DURING_DELETE: Final = -2
EPOCH_DURING_DELETE: Final = -2
"""The values in requests that mark a topic as under deletion (kafka: ``LeaderAndIsr``)."""

MAX_UPDATED_PARTITIONS: Final = 500
"""The maximum number of partitions in one UpdateMetadata, so that controller and broker can run
other tasks between two requests.

A LeaderAndIsr is never split. Apache Kafka's brokers begin to checkpoint high watermarks after the
first LeaderAndIsr, and the checkpoint would have only the partitions of that request (kafka:
``ReplicaManager.becomeLeaderOrFollower``).
"""

_Part = tuple[TopicImage, int, int | None]
"""A partition by topic and index, and the leader to send if the image has another leader."""


@dataclass(frozen=True, slots=True)
class ControllerIdentity:
    """The controller that sends a request."""

    broker_id: int
    epoch: int
    listener: str
    """The inter-broker listener."""


@dataclass(slots=True)
class _BrokerRequests:
    """The partitions of the requests to one broker."""

    led: dict[tuple[str, int], tuple[TopicImage, int, bool]] = field(default_factory=dict)
    """The partitions of a LeaderAndIsr, each with a flag whether its replica is new."""
    stopped: dict[str, list[Entity]] = field(default_factory=lambda: defaultdict(list))


_LED = request_factory(ApiKey.LEADER_AND_ISR, 7)
_STOP = request_factory(ApiKey.STOP_REPLICA, 4)
_UPDATE = request_factory(ApiKey.UPDATE_METADATA, 8)


def alive(image: MetadataImage) -> dict[int, BrokerRegistration]:
    """Return the brokers that can receive requests: those that are not fenced."""
    return {key: broker for key, broker in image.brokers.items() if not broker.fenced}


def requests_after(
    before: MetadataImage,
    after: MetadataImage,
    controller: ControllerIdentity,
    deleted: Sequence[TopicImage] = (),
) -> Iterator[tuple[int, Entity]]:
    """Yield the requests that report ``after`` to the brokers, each with its broker's id.

    ``deleted`` are topics whose deletion was sent before; a newly registered broker may still have
    their replicas.
    """
    live_before, live = alive(before), alive(after)
    new_ids = {
        key
        for key, broker in live.items()
        if key not in live_before or live_before[key].epoch != broker.epoch
    }
    changed, deleted_topics = _changes(before, after)
    everything = _all_partitions(after) if new_ids else []
    # Apache Kafka's brokers only follow a leader in their list of live brokers.
    if new_ids:
        parts_and_deleted = [*everything, *_under_deletion(deleted)]
        for broker in _sorted(live):
            parts = parts_and_deleted if broker.broker_id in new_ids else ()
            yield from _updates(after, controller, broker, parts)
    each = _requests_by_broker(after, changed, everything, new_ids)
    for name, index, replicas in _replicas_of(deleted_topics):
        for broker_id in replicas:
            _add_stop_replica(each[broker_id], name, index, EPOCH_DURING_DELETE, deletes=True)
    for broker in _sorted(live):
        led = each[broker.broker_id].led
        if led:
            yield broker.broker_id, _leader_and_isr(after, controller, broker, led.values())
    if changed or deleted_topics or _endpoints_changed(live_before, live, new_ids):
        parts = [
            *((topic, index, None) for topic, index, _ in changed),
            *_under_deletion(deleted_topics),
        ]
        for broker in _sorted(live):
            if broker.broker_id not in new_ids or deleted_topics:
                yield from _updates(after, controller, broker, parts)
    for broker in _sorted(live):
        stopped = each[broker.broker_id].stopped
        if stopped:
            yield broker.broker_id, stop_replica(controller, broker, stopped)


def _sorted(brokers: Mapping[int, BrokerRegistration]) -> list[BrokerRegistration]:
    return [broker for _, broker in sorted(brokers.items())]


def _requests_by_broker(
    image: MetadataImage,
    changed: Iterable[tuple[TopicImage, int, PartitionRegistration | None]],
    everything: Iterable[_Part],
    new_ids: set[int],
) -> dict[int, _BrokerRequests]:
    """Return the partitions of each broker's requests.

    A broker's requests contain the changed partitions; for a broker in ``new_ids``, they contain
    all partitions of which it has a replica.
    """
    each: dict[int, _BrokerRequests] = defaultdict(_BrokerRequests)
    for topic, index, old in changed:
        _add_change(each, image, topic, index, old)
    for topic, index, _ in everything:
        for broker_id in topic.partitions[index].replicas:
            if broker_id in new_ids:
                _add_leader_and_isr(each[broker_id], topic, index, is_new=False)
    return each


def _endpoints_changed(
    before: Mapping[int, BrokerRegistration],
    after: Mapping[int, BrokerRegistration],
    new_ids: set[int],
) -> bool:
    """Return whether a broker has left or changed its listeners.

    Brokers in ``new_ids`` are ignored, because their listeners have already been sent.
    """
    return any(
        key not in after or after[key].listeners != broker.listeners
        for key, broker in before.items()
        if key not in new_ids
    )


def replicas_of(
    image: MetadataImage, controller: ControllerIdentity, broker_id: int
) -> Entity | None:
    """Return a LeaderAndIsr with all replicas of a broker; None if it has none."""
    requests = _BrokerRequests()
    for topic, index, _ in _all_partitions(image):
        if broker_id in topic.partitions[index].replicas:
            _add_leader_and_isr(requests, topic, index, is_new=False)
    if not requests.led:
        return None
    return _leader_and_isr(image, controller, image.brokers[broker_id], requests.led.values())


def _changes(
    before: MetadataImage, after: MetadataImage
) -> tuple[list[tuple[TopicImage, int, PartitionRegistration | None]], list[TopicImage]]:
    changed: list[tuple[TopicImage, int, PartitionRegistration | None]] = []
    deleted_topics = []
    for topic_id in changed_topics(before, after):
        old, topic = before.topics_by_id.get(topic_id), after.topics_by_id.get(topic_id)
        if topic is None:
            if old is not None:
                deleted_topics.append(old)
            continue
        former = () if old is None else old.partitions
        for index, part in enumerate(topic.partitions):
            former_part = former[index] if index < len(former) else None
            if former_part is not part and part.partition_epoch != NEVER_LED:
                changed.append((topic, index, former_part))
    return changed, deleted_topics


def _all_partitions(image: MetadataImage) -> list[_Part]:
    return [
        (topic, index, None)
        for topic in image.topics.values()
        for index, partition in enumerate(topic.partitions)
        if partition.partition_epoch != NEVER_LED
    ]


def _under_deletion(topics: Iterable[TopicImage]) -> Iterator[_Part]:
    for topic in topics:
        for index in range(len(topic.partitions)):
            yield topic, index, LEADER_DURING_DELETE


def _replicas_of(topics: Iterable[TopicImage]) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    for topic in topics:
        for index, partition in enumerate(topic.partitions):
            yield topic.name, index, partition.replicas


def _add_change(
    each: dict[int, _BrokerRequests],
    image: MetadataImage,
    topic: TopicImage,
    index: int,
    old: PartitionRegistration | None,
) -> None:
    """Add one changed partition to the requests of its brokers."""
    now = topic.partitions[index]
    if old is not None and old.partition_epoch == NEVER_LED:
        old = None
    for broker_id in now.replicas:
        broker = image.brokers.get(broker_id)
        if broker is None or broker.fenced:
            continue
        if broker.in_controlled_shutdown and broker_id not in now.isr:
            _add_stop_replica(each[broker_id], topic.name, index, now.leader_epoch, deletes=False)
        elif old is None or old.leader_epoch != now.leader_epoch:
            is_new = old is None or broker_id not in old.replicas
            _add_leader_and_isr(each[broker_id], topic, index, is_new=is_new)
    for broker_id in () if old is None else old.replicas:
        if broker_id not in now.replicas:
            _add_stop_replica(each[broker_id], topic.name, index, now.leader_epoch, deletes=True)


def _add_leader_and_isr(
    requests: _BrokerRequests, topic: TopicImage, index: int, *, is_new: bool
) -> None:
    requests.led.setdefault((topic.name, index), (topic, index, is_new))


def _add_stop_replica(
    requests: _BrokerRequests, topic: str, index: int, leader_epoch: int, *, deletes: bool
) -> None:
    requests.stopped[topic].append(stopped_partition(index, leader_epoch, deletes=deletes))


def stopped_partition(index: int, leader_epoch: int, *, deletes: bool) -> Entity:
    """Return a partition of a StopReplica."""
    return _STOP.StopReplicaPartitionState(
        partition_index=index, leader_epoch=leader_epoch, delete_partition=deletes
    )


def _leader_and_isr(
    image: MetadataImage,
    controller: ControllerIdentity,
    broker: BrokerRegistration,
    led: Collection[tuple[TopicImage, int, bool]],
) -> Entity:
    states: dict[tuple[str, UUID], list[Entity]] = defaultdict(list)
    for topic, index, is_new in led:
        state = _led(controller, topic.partitions[index], index, is_new=is_new)
        states[topic.name, topic.topic_id].append(state)
    return _LED.message(
        controller_id=controller.broker_id,
        controller_epoch=controller.epoch,
        broker_epoch=broker.epoch,
        type_=0,
        topic_states=[
            _LED.LeaderAndIsrTopicState(topic_name=name, topic_id=topic_id, partition_states=parts)
            for (name, topic_id), parts in states.items()
        ],
        live_leaders=[*_leaders(image, controller, led)],
    )


def _led(
    controller: ControllerIdentity, now: PartitionRegistration, index: int, is_new: bool
) -> Entity:
    return _LED.LeaderAndIsrPartitionState(
        partition_index=index,
        controller_epoch=controller.epoch,
        leader=now.leader,
        leader_epoch=now.leader_epoch,
        isr=now.isr,
        partition_epoch=now.partition_epoch,
        replicas=now.replicas,
        adding_replicas=now.adding_replicas,
        removing_replicas=now.removing_replicas,
        is_new=is_new,
        leader_recovery_state=now.leader_recovery_state,
    )


def _leaders(
    image: MetadataImage,
    controller: ControllerIdentity,
    parts: Iterable[tuple[TopicImage, int, bool]],
) -> Iterator[Entity]:
    for leader in sorted({topic.partitions[index].leader for topic, index, _ in parts}):
        broker = image.brokers.get(leader)
        endpoint = None if broker is None else broker.listeners.get(controller.listener)
        if endpoint is not None:
            yield _LED.LeaderAndIsrLiveLeader(
                broker_id=leader, host_name=endpoint.host, port=endpoint.port
            )


def stop_replica(
    controller: ControllerIdentity,
    broker: BrokerRegistration,
    topics: Mapping[str, Iterable[Entity]],
) -> Entity:
    """Return a StopReplica."""
    return _STOP.message(
        controller_id=controller.broker_id,
        controller_epoch=controller.epoch,
        broker_epoch=broker.epoch,
        topic_states=[
            _STOP.StopReplicaTopicState(topic_name=name, partition_states=tuple(states))
            for name, states in topics.items()
        ],
    )


def _updates(
    image: MetadataImage,
    controller: ControllerIdentity,
    broker: BrokerRegistration,
    partitions: Sequence[_Part],
) -> Iterator[tuple[int, Entity]]:
    """Yield UpdateMetadata requests: at least one, which carries the live brokers."""
    live = alive(image)
    for batch in batched(partitions, MAX_UPDATED_PARTITIONS) if partitions else ((),):
        states: dict[tuple[str, UUID], list[Entity]] = defaultdict(list)
        for topic, index, leader in batch:
            state = _updated(controller, live, topic.partitions[index], index, leader)
            states[topic.name, topic.topic_id].append(state)
        request = _UPDATE.message(
            controller_id=controller.broker_id,
            controller_epoch=controller.epoch,
            broker_epoch=broker.epoch,
            topic_states=[
                _UPDATE.UpdateMetadataTopicState(
                    topic_name=name, topic_id=topic_id, partition_states=parts
                )
                for (name, topic_id), parts in states.items()
            ],
            live_brokers=[
                _UPDATE.UpdateMetadataBroker(
                    id=broker.broker_id,
                    endpoints=[
                        _UPDATE.UpdateMetadataEndpoint(
                            port=end.port,
                            host=end.host,
                            listener=end.name,
                            security_protocol=end.security_protocol,
                        )
                        for end in broker.listeners.values()
                    ],
                    rack=broker.rack,
                )
                for broker in _sorted(live)
            ],
        )
        yield broker.broker_id, request


def _updated(
    controller: ControllerIdentity,
    live: Mapping[int, BrokerRegistration],
    registration: PartitionRegistration,
    index: int,
    leader: int | None,
) -> Entity:
    return _UPDATE.UpdateMetadataPartitionState(
        partition_index=index,
        controller_epoch=controller.epoch,
        leader=registration.leader if leader is None else leader,
        leader_epoch=registration.leader_epoch,
        isr=registration.isr,
        zk_version=registration.partition_epoch,
        replicas=registration.replicas,
        offline_replicas=tuple(
            replica
            for replica in registration.replicas
            if replica not in live or registration.directory_of(replica) == LOST
        ),
    )
