"""What brokers are told of a change: LeaderAndIsr, UpdateMetadata and StopReplica.

Pure: two images in, requests out, in the order in which each broker has to get them. A broker that
comes is told of the others first, then of all its replicas.

Source: ``AbstractControllerBrokerRequestBatch``, ``ReplicaStateMachine.doHandleStateChanges``,
``KafkaController.onBrokerStartup``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any, Final

from fencepost.cluster.controller.topics import NEVER_LED
from fencepost.cluster.image import (
    LOST,
    BrokerRegistration,
    MetadataImage,
    PartitionRegistration,
    TopicImage,
    changed_topics,
)
from fencepost.coordinator.wire.api import ApiKey
from fencepost.coordinator.wire.messages import request_factory
from fencepost.coordinator.wire.schema import Entity
from fencepost.logcore.values import dataclass

LEADER_DURING_DELETE: Final = -2
EPOCH_DURING_DELETE: Final = -2
"""How requests say that a topic is being deleted (kafka: ``LeaderAndIsr``)."""


@dataclass(frozen=True, slots=True)
class Controller:
    """Who tells."""

    broker_id: int
    epoch: int
    listener: str
    """By which brokers find each other."""


@dataclass(slots=True)
class _ForOne:
    """What one broker is told."""

    led: dict[str, list[Entity]] = field(default_factory=lambda: defaultdict(list))
    stopped: dict[str, list[Entity]] = field(default_factory=lambda: defaultdict(list))
    leaders: set[int] = field(default_factory=set)
    said: set[tuple[str, int]] = field(default_factory=set)
    """Partitions of ``led``."""


_LED = request_factory(ApiKey.LEADER_AND_ISR, 7)
_STOP = request_factory(ApiKey.STOP_REPLICA, 4)
_UPDATE = request_factory(ApiKey.UPDATE_METADATA, 8)


def alive(image: MetadataImage) -> dict[int, BrokerRegistration]:
    """Brokers that can be told something."""
    return {key: one for key, one in image.brokers.items() if not one.fenced}


def told(
    before: MetadataImage,
    after: MetadataImage,
    controller: Controller,
    deleted: Sequence[TopicImage] = (),
) -> Iterator[tuple[int, Entity]]:
    """Requests, each with the broker that it is for.

    ``deleted`` are topics whose deletion was told before: a broker that comes may know them.
    """
    was, now = alive(before), alive(after)
    came = {key for key, one in now.items() if key not in was or was[key].epoch != one.epoch}
    changed, gone = _changes(before, after)
    everything = _everything(after) if came else ()
    for broker_id, broker in sorted(now.items()) if came else ():
        # Apache Kafka's brokers follow nobody of whom they do not know that he lives.
        parts, going = (everything, deleted) if broker_id in came else ((), ())
        yield broker_id, _update(after, controller, broker, parts, going)
    each: dict[int, _ForOne] = defaultdict(_ForOne)
    for topic, index, old in changed:
        _tell(each, controller, after, topic, index, old)
    for topic, index in everything:
        for broker_id in came & set(topic.partitions[index].replicas):
            if topic.partitions[index].partition_epoch != NEVER_LED:
                _lead(each[broker_id], controller, topic, index, is_new=False)
    for name, index, replicas in _replicas_of(gone):
        for broker_id in replicas:
            _stop(each[broker_id], name, index, EPOCH_DURING_DELETE, deletes=True)
    for broker_id, one in sorted(each.items()):
        if broker_id in now and one.led:
            yield broker_id, _leader_and_isr(after, controller, now[broker_id], one)
    if changed or gone or _others_listen(was, now, came):
        parts = [(topic, index) for topic, index, _ in changed]
        for broker_id, broker in sorted(now.items()):
            if broker_id not in came or gone:
                yield broker_id, _update(after, controller, broker, parts, gone)
    for broker_id, one in sorted(each.items()):
        if broker_id in now and one.stopped:
            yield broker_id, stop_replica(controller, now[broker_id], one.stopped)


def _others_listen(
    was: Mapping[int, BrokerRegistration], now: Mapping[int, BrokerRegistration], came: set[int]
) -> bool:
    """Whether somebody has gone, or listens elsewhere; of who came everybody has heard."""
    return any(
        key not in now or now[key].listeners != one.listeners
        for key, one in was.items()
        if key not in came
    )


def replicas_of(image: MetadataImage, controller: Controller, broker_id: int) -> Entity | None:
    """All that a broker has a replica of, told again; None if that is nothing."""
    one = _ForOne()
    for topic, index in _everything(image):
        if broker_id in topic.partitions[index].replicas:
            _lead(one, controller, topic, index, is_new=False)
    if not one.led:
        return None
    return _leader_and_isr(image, controller, image.brokers[broker_id], one)


def _changes(
    before: MetadataImage, after: MetadataImage
) -> tuple[list[tuple[TopicImage, int, PartitionRegistration | None]], list[TopicImage]]:
    changed: list[tuple[TopicImage, int, PartitionRegistration | None]] = []
    gone = []
    for topic_id in changed_topics(before, after):
        old, topic = before.topics_by_id.get(topic_id), after.topics_by_id.get(topic_id)
        if topic is None:
            if old is not None:
                gone.append(old)
            continue
        former = () if old is None else old.partitions
        for index, one in enumerate(topic.partitions):
            known = former[index] if index < len(former) else None
            if known is not one and one.partition_epoch != NEVER_LED:
                changed.append((topic, index, known))
    return changed, gone


def _everything(image: MetadataImage) -> list[tuple[TopicImage, int]]:
    return [
        (topic, index)
        for topic in image.topics.values()
        for index, one in enumerate(topic.partitions)
        if one.partition_epoch != NEVER_LED
    ]


def _replicas_of(topics: Iterable[TopicImage]) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    for topic in topics:
        for index, one in enumerate(topic.partitions):
            yield topic.name, index, one.replicas


def _tell(
    each: dict[int, _ForOne],
    controller: Controller,
    image: MetadataImage,
    topic: TopicImage,
    index: int,
    old: PartitionRegistration | None,
) -> None:
    """One partition that has changed."""
    now = topic.partitions[index]
    if old is not None and old.partition_epoch == NEVER_LED:
        old = None
    for broker_id in now.replicas:
        broker = image.brokers.get(broker_id)
        if broker is None or broker.fenced:
            continue
        if broker.in_controlled_shutdown and broker_id not in now.isr:
            _stop(each[broker_id], topic.name, index, now.leader_epoch, deletes=False)
        elif old is None or old.leader_epoch != now.leader_epoch:
            is_new = old is None or broker_id not in old.replicas
            _lead(each[broker_id], controller, topic, index, is_new=is_new)
    for broker_id in () if old is None else old.replicas:
        if broker_id not in now.replicas:
            _stop(each[broker_id], topic.name, index, now.leader_epoch, deletes=True)


def _lead(
    one: _ForOne, controller: Controller, topic: TopicImage, index: int, *, is_new: bool
) -> None:
    now = topic.partitions[index]
    if (topic.name, index) in one.said:
        return
    one.said.add((topic.name, index))
    one.leaders.add(now.leader)
    one.led[topic.name].append(
        _LED.LeaderAndIsrPartitionState(
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
    )


def _stop(one: _ForOne, topic: str, index: int, leader_epoch: int, *, deletes: bool) -> None:
    one.stopped[topic].append(stopped_partition(index, leader_epoch, deletes=deletes))


def stopped_partition(index: int, leader_epoch: int, *, deletes: bool) -> Entity:
    """A partition of a StopReplica."""
    return _STOP.StopReplicaPartitionState(
        partition_index=index, leader_epoch=leader_epoch, delete_partition=deletes
    )


def _leader_and_isr(
    image: MetadataImage, controller: Controller, broker: BrokerRegistration, one: _ForOne
) -> Entity:
    leaders = []
    for leader in sorted(one.leaders):
        known = image.brokers.get(leader)
        endpoint = None if known is None else known.listeners.get(controller.listener)
        if endpoint is not None:
            leaders.append(
                _LED.LeaderAndIsrLiveLeader(
                    broker_id=leader, host_name=endpoint.host, port=endpoint.port
                )
            )
    return _LED.message(
        controller_id=controller.broker_id,
        controller_epoch=controller.epoch,
        broker_epoch=broker.epoch,
        type_=0,
        topic_states=[
            _LED.LeaderAndIsrTopicState(
                topic_name=name, topic_id=image.topics[name].topic_id, partition_states=states
            )
            for name, states in one.led.items()
        ],
        live_leaders=leaders,
    )


def stop_replica(
    controller: Controller, broker: BrokerRegistration, topics: Mapping[str, Iterable[Entity]]
) -> Entity:
    """A StopReplica."""
    return _STOP.message(
        controller_id=controller.broker_id,
        controller_epoch=controller.epoch,
        broker_epoch=broker.epoch,
        topic_states=[
            _STOP.StopReplicaTopicState(topic_name=name, partition_states=tuple(states))
            for name, states in topics.items()
        ],
    )


def _update(
    image: MetadataImage,
    controller: Controller,
    broker: BrokerRegistration,
    partitions: Iterable[tuple[TopicImage, int]],
    gone: Iterable[TopicImage],
) -> Entity:
    live = alive(image)
    states: dict[str, list[Any]] = defaultdict(list)
    ids = {}
    for topic, index in partitions:
        ids[topic.name] = topic.topic_id
        states[topic.name].append(_updated(controller, live, topic.partitions[index], index))
    for topic in gone:
        ids[topic.name] = topic.topic_id
        for index, one in enumerate(topic.partitions):
            state = _updated(controller, live, one, index, leader=LEADER_DURING_DELETE)
            states[topic.name].append(state)
    return _UPDATE.message(
        controller_id=controller.broker_id,
        controller_epoch=controller.epoch,
        broker_epoch=broker.epoch,
        topic_states=[
            _UPDATE.UpdateMetadataTopicState(
                topic_name=name, topic_id=ids[name], partition_states=parts
            )
            for name, parts in states.items()
        ],
        live_brokers=[
            _UPDATE.UpdateMetadataBroker(
                id=one.broker_id,
                endpoints=[
                    _UPDATE.UpdateMetadataEndpoint(
                        port=end.port,
                        host=end.host,
                        listener=end.name,
                        security_protocol=end.security_protocol,
                    )
                    for end in one.listeners.values()
                ],
                rack=one.rack,
            )
            for _, one in sorted(live.items())
        ],
    )


def _updated(
    controller: Controller,
    live: Mapping[int, BrokerRegistration],
    one: PartitionRegistration,
    index: int,
    leader: int | None = None,
) -> Entity:
    return _UPDATE.UpdateMetadataPartitionState(
        partition_index=index,
        controller_epoch=controller.epoch,
        leader=one.leader if leader is None else leader,
        leader_epoch=one.leader_epoch,
        isr=one.isr,
        zk_version=one.partition_epoch,
        replicas=one.replicas,
        offline_replicas=tuple(
            replica
            for replica in one.replicas
            if replica not in live or one.directory_of(replica) == LOST
        ),
    )
