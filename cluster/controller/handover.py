"""Converts the metadata of a standalone broker for the controllers of a cluster, and back.

After the conversion the metadata describes a cluster whose only broker has shut down cleanly: the
broker is fenced, and its partitions have no leader until it registers. The first leader epoch that
the controllers begin is above every epoch in the broker's logs.

Source: ``ReplicationControlManager.handleBrokerFenced`` with one broker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from uuid import UUID

from fencepost.cluster.delta import MetadataDelta
from fencepost.cluster.image import (
    BROKER_RESOURCE,
    NO_LEADER,
    MetadataImage,
    PartitionRegistration,
    TopicImage,
)
from fencepost.cluster.records import BrokerRegistrationChangeRecord, PartitionChangeRecord

_FENCED = 1


def without_leaders(image: MetadataImage, broker_id: int) -> MetadataImage:
    """Return the image with its only broker fenced and its partitions without a leader.

    Raises CorruptRecordError if the broker is not registered.
    """
    delta = MetadataDelta(image)
    broker = image.brokers.get(broker_id)
    epoch = -1 if broker is None else broker.epoch
    delta.replay(BrokerRegistrationChangeRecord(broker_id, epoch, fenced=_FENCED))
    without_leader = PartitionChangeRecord(UUID(int=0), 0, leader=NO_LEADER)
    for _ in delta.change_all(without_leader, (broker_id,)):
        pass  # the iterator makes the changes
    return delta.apply(image.offset, image.epoch)


def reasons_against_successor(before: MetadataImage, after: MetadataImage) -> list[str]:
    """Return the reasons why ``after`` cannot be a later state of ``before``; empty if it can.

    ``before`` is the metadata of a standalone broker, ``after`` the metadata of the cluster that
    the broker is about to join for the first time. The cluster must have all of the broker's
    topics, in higher leader epochs, and must not allocate a producer id that the broker has
    reserved.
    """
    reasons: list[str] = []
    if after.next_producer_id < before.next_producer_id:
        reasons.append(
            f"its next producer id is {after.next_producer_id}, but this broker has reserved"
            f" all ids below {before.next_producer_id}"
        )
    for topic in before.topics.values():
        successor = after.topics_by_id.get(topic.topic_id)
        if successor is None:
            reasons.append(f"it has no topic {topic.name} with this id")
        elif not _is_successor(topic.partitions, successor.partitions):
            reasons.append(f"its topic {topic.name} is in an earlier state")
    return reasons


def _is_successor(
    before: tuple[PartitionRegistration, ...], after: tuple[PartitionRegistration, ...]
) -> bool:
    return len(before) <= len(after) and all(
        is_.leader_epoch > was.leader_epoch for was, is_ in zip(before, after, strict=False)
    )


def as_standalone(
    image: MetadataImage,
    broker_id: int,
    directory_id: UUID,
    features: Mapping[str, tuple[int, int]],
) -> tuple[MetadataImage, list[str]]:
    """Return the image with this broker as the only one, and the reasons against the conversion.

    ``features`` are the ranges of the features to keep. The broker must be in the ISR of every
    partition, or an eligible leader replica (KIP-966): with ELRs the ISR is empty once its last
    member has stopped. The other brokers with their replicas, the controllers and all other
    features are removed.
    """
    reasons: list[str] = []
    levels = {name: level for name, level in image.features.items() if name in features}
    for name, level in levels.items():
        low, high = features[name]
        if not low <= level <= high:
            reasons.append(
                f"{name} is at level {level}, and a standalone broker supports {low}-{high}"
            )
    topics: dict[str, TopicImage] = {}
    alone: dict[PartitionRegistration, PartitionRegistration] = {}
    for name, topic in image.topics.items():
        missing = [
            str(index)
            for index, registration in enumerate(topic.partitions)
            if broker_id not in registration.isr and broker_id not in registration.elr
        ]
        if missing:
            reasons.append(f"it is not in the ISR of {name}, partitions {', '.join(missing)}")
        for registration in {*topic.partitions} - alone.keys():
            alone[registration] = _sole_replica(registration, broker_id, directory_id)
        partitions = tuple(alone[registration] for registration in topic.partitions)
        topics[name] = TopicImage(name, topic.topic_id, partitions)
    brokers = {key: broker for key, broker in image.brokers.items() if key == broker_id}
    configs = {
        (kind, name): values
        for (kind, name), values in image.configs.items()
        if kind != BROKER_RESOURCE or name in ("", str(broker_id))
    }
    after = replace(
        image,
        features=levels,
        brokers=brokers,
        controllers={},
        topics=topics,
        topics_by_id={topic.topic_id: topic for topic in topics.values()},
        configs=configs,
        step=None,
    )
    return after, reasons


def _sole_replica(
    partition: PartitionRegistration, broker_id: int, directory_id: UUID
) -> PartitionRegistration:
    return PartitionRegistration(
        replicas=(broker_id,),
        isr=(broker_id,),
        leader=broker_id,
        leader_epoch=partition.leader_epoch,
        partition_epoch=partition.partition_epoch + 1,
        directories=(directory_id,),
    )
