"""The metadata of a broker that stood alone, as the controllers of a cluster are to find them.

They find what they would have left behind had that broker been theirs, the only one, and shut down
in an orderly way: it is fenced, and its partitions have no leader until it comes. The first leader
epoch that they begin is above any that is in its logs.

Source: ``ReplicationControlManager.handleBrokerFenced`` with one broker.
"""

from __future__ import annotations

from uuid import UUID

from fencepost.cluster.delta import MetadataDelta
from fencepost.cluster.image import NO_LEADER, MetadataImage, PartitionRegistration
from fencepost.cluster.records import BrokerRegistrationChangeRecord, PartitionChangeRecord

_FENCED = 1


def handed_over(image: MetadataImage, broker_id: int) -> MetadataImage:
    """The image without its only broker, which may come back at any time.

    Raises CorruptRecordError if there is no such broker.
    """
    delta = MetadataDelta(image)
    own = image.brokers.get(broker_id)
    epoch = -1 if own is None else own.epoch
    delta.replay(BrokerRegistrationChangeRecord(broker_id, epoch, fenced=_FENCED))
    nobody_leads = PartitionChangeRecord(UUID(int=0), 0, leader=NO_LEADER)
    for _ in delta.change_all(nobody_leads, (broker_id,)):
        pass  # it makes the changes as it goes
    return delta.apply(image.offset, image.epoch)


def left_behind(before: MetadataImage, after: MetadataImage) -> list[str]:
    """Why ``after`` can not be what became of ``before``; nothing if it can.

    ``before`` are the metadata of a broker that stood alone, ``after`` those of the cluster that it
    is about to join for the first time: all of its topics are there, none of their leader epochs is
    one that the broker has begun itself, and no producer id is given out twice.
    """
    reasons: list[str] = []
    if after.next_producer_id < before.next_producer_id:
        reasons.append(
            f"it gives out producer ids from {after.next_producer_id} on, this broker has reserved"
            f" all below {before.next_producer_id}"
        )
    for topic in before.topics.values():
        known = after.topics_by_id.get(topic.topic_id)
        if known is None:
            reasons.append(f"it knows no topic {topic.name} of this id")
        elif not _follow(topic.partitions, known.partitions):
            reasons.append(f"it knows the topic {topic.name} as it was before")
    return reasons


def _follow(
    before: tuple[PartitionRegistration, ...], after: tuple[PartitionRegistration, ...]
) -> bool:
    return len(before) <= len(after) and all(
        is_.leader_epoch > was.leader_epoch for was, is_ in zip(before, after, strict=False)
    )
