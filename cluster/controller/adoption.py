"""The records of a topic that is imported from its partition directories.

Each partition's only replica is on the importing node's broker, which leads it in a leader epoch
above every epoch in the directories.
"""

from __future__ import annotations

from collections.abc import Mapping
from uuid import UUID

from fencepost.cluster.controller.outcome import ControllerResult
from fencepost.cluster.controller.topics import check_partition_limit, topic_head
from fencepost.cluster.controller.view import ControllerView
from fencepost.cluster.image import PartitionRegistration
from fencepost.cluster.image_records import partition_record
from fencepost.cluster.topic_records import TopicRecords
from fencepost.logcore.values import dataclass


@dataclass(frozen=True, slots=True)
class AdoptedTopic:
    """A topic as its partition directories describe it.

    The caller has checked that its name and id are unused and that its settings are valid.
    """

    name: str
    topic_id: UUID
    partitions: int
    configs: Mapping[str, str]
    leader_epoch: int


def adopt_topic(view: ControllerView, topic: AdoptedTopic) -> ControllerResult[None]:
    """Create a topic from directories of this node's broker. Raises PolicyViolationError."""
    check_partition_limit(view, 1, topic.partitions)
    node_id = view.settings.node_id
    state = local_partition(node_id, view.default_directory(node_id), topic.leader_epoch)
    form = partition_record(topic.topic_id, 0, state)
    head = topic_head(topic.name, topic.topic_id, topic.configs)
    return ControllerResult(None, TopicRecords(head, topic.topic_id, 0, (form,) * topic.partitions))


def local_partition(node_id: int, directory_id: UUID, leader_epoch: int) -> PartitionRegistration:
    """Return the state of a partition whose only replica is on one broker."""
    return PartitionRegistration(
        replicas=(node_id,),
        isr=(node_id,),
        leader=node_id,
        leader_epoch=leader_epoch,
        partition_epoch=leader_epoch,
        directories=(directory_id,),
    )
