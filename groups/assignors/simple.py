"""The assignor ``simple`` of share groups: several members may share a partition.

With M members and P partitions, each partition is shared by ⌈M/P⌉ members, and each member gets
nearly the same number of partitions. Balance precedes stickiness, and racks do not matter.

Source: Kafka's ``SimpleAssignor`` and its two assignment builders. Kafka's result depends on the
order of Java's hash tables; here ties go to the smaller member id and partition.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from fencepost.groups.assignors.model import TopicIdPartition

NAME: Final = "simple"
"""The assignor's name in ``group.share.assignors``."""

Held = Mapping[str, frozenset[TopicIdPartition]]
"""Member id → partitions."""


def assign(
    topic_ids: Mapping[str, frozenset[bytes]],
    partitions: Collection[TopicIdPartition],
    held: Held,
) -> dict[str, frozenset[TopicIdPartition]]:
    """Return each member's partitions.

    ``topic_ids`` are the subscribed topics of every member, ``partitions`` are the partitions that
    may be assigned, and ``held`` are the members' present targets.
    """
    if len(set(topic_ids.values())) == 1:  # one subscription: balanced over all topics
        common_ids = next(iter(topic_ids.values()))
        common = [partition for partition in partitions if partition[0] in common_ids]
        return _balanced(sorted(topic_ids), sorted(common), held)
    targets: dict[str, set[TopicIdPartition]] = {member_id: set() for member_id in topic_ids}
    by_topic: dict[bytes, list[TopicIdPartition]] = {}
    for partition in sorted(partitions):
        by_topic.setdefault(partition[0], []).append(partition)
    for topic_id, of_topic in by_topic.items():
        members = sorted(name for name, ids in topic_ids.items() if topic_id in ids)
        for member_id, target in _balanced(members, of_topic, held).items():
            targets[member_id] |= target
    return {member_id: frozenset(target) for member_id, target in targets.items()}


def _balanced(
    members: list[str], partitions: list[TopicIdPartition], held: Held
) -> dict[str, frozenset[TopicIdPartition]]:
    """Assign partitions to members that subscribe to all of them."""
    if not members or not partitions:
        return {member_id: frozenset() for member_id in members}
    sharing = -(-len(members) // len(partitions))
    quotas = _quotas(members, sharing * len(partitions))
    all_partitions = set(partitions)
    target_of = {member_id: set(held.get(member_id, ())) & all_partitions for member_id in members}
    holders: dict[TopicIdPartition, set[str]] = {partition: set() for partition in partitions}
    for member_id, target in target_of.items():
        for partition in target:
            holders[partition].add(member_id)

    def revoke(member_id: str, partition: TopicIdPartition) -> None:
        target_of[member_id].remove(partition)
        holders[partition].remove(member_id)

    for partition in partitions:
        excess = len(holders[partition]) - sharing
        if excess > 0:
            # Members with too many partitions lose one first.
            order = sorted(
                holders[partition], key=lambda name: (len(target_of[name]) <= quotas[name], name)
            )
            for member_id in order[:excess]:
                revoke(member_id, partition)
    for member_id in members:
        excess = len(target_of[member_id]) - quotas[member_id]
        if excess > 0:
            order_of = sorted(target_of[member_id], key=lambda place: (-len(holders[place]), place))
            for partition in order_of[:excess]:
                revoke(member_id, partition)
    unfilled = {name: None for name in members if len(target_of[name]) < quotas[name]}
    for partition in partitions:
        # If every member with room already has the partition, fewer members share it.
        for member_id in [name for name in unfilled if name not in holders[partition]]:
            if len(holders[partition]) >= sharing:
                break
            target_of[member_id].add(partition)
            holders[partition].add(member_id)
            if len(target_of[member_id]) == quotas[member_id]:
                del unfilled[member_id]
    return {member_id: frozenset(target) for member_id, target in target_of.items()}


def _quotas(members: list[str], partition_count: int) -> dict[str, int]:
    """Return each member's number of partitions; the numbers differ by one at most."""
    upto = [-(-partition_count * index // len(members)) for index in range(len(members) + 1)]
    return {name: upto[at + 1] - upto[at] for at, name in enumerate(members)}
