"""The records of changes that this broker makes by itself, as the only one of its cluster."""

from __future__ import annotations

from collections.abc import Mapping
from uuid import UUID

from fencepost.cluster.records import ConfigRecord, PartitionRecord

NO_TOPIC = UUID(int=0)


def new_partition(node_id: int, directory_id: UUID, leader_epoch: int = 0) -> PartitionRecord:
    """A partition whose only replica is on this broker; for a template."""
    return PartitionRecord(
        topic_id=NO_TOPIC,
        partition_id=0,
        replicas=(node_id,),
        isr=(node_id,),
        removing_replicas=(),
        adding_replicas=(),
        leader=node_id,
        leader_epoch=leader_epoch,
        partition_epoch=leader_epoch,
        directories=(directory_id,),
    )


def new_settings(
    kind: int, name: str, now: Mapping[str, str], wanted: Mapping[str, str]
) -> list[ConfigRecord]:
    """What makes a resource's settings those that are wanted."""
    gone = [ConfigRecord(kind, name, key, None) for key in now if key not in wanted]
    changed = [
        ConfigRecord(kind, name, key, text) for key, text in wanted.items() if now.get(key) != text
    ]
    return gone + changed
