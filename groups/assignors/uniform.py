"""The *uniform* assignor: even numbers of partitions, and as few of them moved as can be.

Equal subscriptions have a closed solution: everybody gets the quotient, as many as the remainder
one more, and those who hold most keep most. Different subscriptions start from what is held, give
each unassigned partition to the subscriber with the fewest, and then move single partitions from
fuller members to emptier ones until no such move makes two members more even.

Source: Kafka's ``UniformAssignor`` (homogeneous and heterogeneous builders).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from fencepost.groups.assignors.model import (
    GroupAssignment,
    GroupSpec,
    TopicIdPartition,
    member_order,
)


class UniformAssignor:
    """See the module."""

    name = "uniform"

    def assign(self, group: GroupSpec) -> GroupAssignment:
        """Return who gets what; the present targets in ``group`` are what is kept if possible."""
        if not group.members:
            return {}
        kept = _kept(group)
        given = _homogeneous(group, kept) if group.is_homogeneous else _heterogeneous(group, kept)
        return {member_id: frozenset(partitions) for member_id, partitions in given.items()}


def _kept(group: GroupSpec) -> dict[str, list[TopicIdPartition]]:
    """Return what members hold and still may hold, in order; a contested partition's first owner.

    The order of members is that of their names, so that equal input gives equal output.
    """
    taken: set[TopicIdPartition] = set()
    kept: dict[str, list[TopicIdPartition]] = {}
    for member_id, spec in sorted(group.members.items(), key=member_order):
        mine = sorted(
            partition
            for partition in spec.assigned
            if partition not in taken
            and partition[0] in spec.topic_ids
            and 0 <= partition[1] < group.partition_counts.get(partition[0], 0)
        )
        taken.update(mine)
        kept[member_id] = mine
    return kept


def _unassigned(
    group: GroupSpec, topic_ids: Sequence[bytes], kept: dict[str, list[TopicIdPartition]]
) -> list[TopicIdPartition]:
    held = {partition for partitions in kept.values() for partition in partitions}
    return [
        (topic_id, index)
        for topic_id in topic_ids
        for index in range(group.partition_counts.get(topic_id, 0))
        if (topic_id, index) not in held
    ]


# --- equal subscriptions -------------------------------------------------------------------------


def _homogeneous(
    group: GroupSpec, kept: dict[str, list[TopicIdPartition]]
) -> dict[str, list[TopicIdPartition]]:
    topic_ids = sorted(next(iter(group.members.values())).topic_ids)
    partition_count = sum(group.partition_counts.get(topic_id, 0) for topic_id in topic_ids)
    quota, extra = divmod(partition_count, len(kept))
    # Who holds most gets the remainder: every other choice would move more.
    by_held = sorted(kept, key=lambda member_id: -len(kept[member_id]))
    size = {member_id: quota + (rank < extra) for rank, member_id in enumerate(by_held)}
    given = {member_id: mine[: size[member_id]] for member_id, mine in kept.items()}
    loose = deque(_unassigned(group, topic_ids, given))
    # One at a time to each in turn, so that a topic's partitions spread over the members.
    hungry = deque(member_id for member_id in given if len(given[member_id]) < size[member_id])
    while loose:
        member_id = hungry.popleft()
        given[member_id].append(loose.popleft())
        if len(given[member_id]) < size[member_id]:
            hungry.append(member_id)
    return given


# --- different subscriptions ---------------------------------------------------------------------


def _heterogeneous(
    group: GroupSpec, kept: dict[str, list[TopicIdPartition]]
) -> dict[str, list[TopicIdPartition]]:
    subscribers: dict[bytes, list[str]] = {}
    for member_id in kept:
        for topic_id in group.members[member_id].topic_ids:
            subscribers.setdefault(topic_id, []).append(member_id)
    # Topics with the fewest subscribers first: the others leave more freedom to even things out.
    topic_ids = sorted(subscribers, key=lambda topic_id: (len(subscribers[topic_id]), topic_id))
    given: dict[str, list[TopicIdPartition]] = {
        member_id: list(mine) for member_id, mine in kept.items()
    }
    rank = {member_id: position for position, member_id in enumerate(kept)}
    for partition in _unassigned(group, topic_ids, given):
        emptiest = min(subscribers[partition[0]], key=lambda name: (len(given[name]), rank[name]))
        given[emptiest].append(partition)
    _even_out(given, topic_ids, subscribers, rank)
    return given


def _even_out(
    given: dict[str, list[TopicIdPartition]],
    topic_ids: Sequence[bytes],
    subscribers: dict[bytes, list[str]],
    rank: dict[str, int],
) -> None:
    """Move single partitions while that helps.

    Each move lowers the sum of the squares of the members' counts, so there is an end.
    """
    by_topic: dict[tuple[str, bytes], list[TopicIdPartition]] = {}
    count = {member_id: len(mine) for member_id, mine in given.items()}
    for member_id, mine in given.items():
        for partition in mine:
            by_topic.setdefault((member_id, partition[0]), []).append(partition)
    moved = True
    while moved:
        moved = False
        for topic_id in topic_ids:
            names = subscribers[topic_id]
            while True:
                owners = [name for name in names if by_topic.get((name, topic_id))]
                if not owners:
                    break
                fullest = max(owners, key=lambda name: (count[name], rank[name]))
                emptiest = min(names, key=lambda name: (count[name], rank[name]))
                if count[fullest] - count[emptiest] < 2:
                    break
                partition = by_topic[fullest, topic_id].pop()
                by_topic.setdefault((emptiest, topic_id), []).append(partition)
                count[fullest] -= 1
                count[emptiest] += 1
                moved = True
    for mine in given.values():
        mine.clear()
    for (member_id, _), partitions in by_topic.items():
        given[member_id].extend(partitions)
