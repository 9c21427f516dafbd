"""The *uniform* assignor: equal numbers of partitions, with as few moves as possible.

Equal subscriptions need no search: of P partitions, each of M members gets P // M, and the members
that had the most partitions get one more each from the remainder. With different subscriptions, the
assignor starts from the current targets, and gives each unassigned partition to the subscriber with
the fewest partitions. Then it moves single partitions from fuller members to emptier members, until
no move makes two members more equal.

Source: Kafka's ``UniformAssignor`` (homogeneous and heterogeneous builders).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace
from itertools import groupby
from operator import itemgetter
from typing import Final

from fencepost.groups.assignors.model import (
    GroupAssignment,
    GroupSpec,
    TopicIdPartition,
    member_order,
)

MIN_GAP: Final = 2
"""A move makes two members more equal if their counts differ by at least this number."""


class UniformAssignor:
    """The *uniform* assignor; the module's docstring describes the algorithm."""

    name = "uniform"

    def assign(self, group: GroupSpec) -> GroupAssignment:
        """Return the assignment; it keeps the current targets in ``group`` if possible."""
        if not group.members:
            return {}
        retained = _retained_targets(group)
        targets = (
            _homogeneous(group, retained)
            if group.is_homogeneous
            else _heterogeneous(group, retained)
        )
        return {member_id: frozenset(partitions) for member_id, partitions in targets.items()}


def _retained_targets(group: GroupSpec) -> dict[str, list[TopicIdPartition]]:
    """Return the targets that members may keep, in order.

    If two members have the same partition, the first of them keeps it. Members are ordered by name,
    so that equal input gives equal output.
    """
    assigned: set[TopicIdPartition] = set()
    targets: dict[str, list[TopicIdPartition]] = {}
    for member_id, spec in sorted(group.members.items(), key=member_order):
        target = sorted(
            partition
            for partition in spec.assigned
            if partition not in assigned
            and partition[0] in spec.topic_ids
            and 0 <= partition[1] < group.partition_counts.get(partition[0], 0)
        )
        assigned.update(target)
        targets[member_id] = target
    return targets


def _unassigned(
    group: GroupSpec, topic_ids: Sequence[bytes], targets: dict[str, list[TopicIdPartition]]
) -> list[TopicIdPartition]:
    held = {partition for partitions in targets.values() for partition in partitions}
    return [
        (topic_id, index)
        for topic_id in topic_ids
        for index in range(group.partition_counts.get(topic_id, 0))
        if (topic_id, index) not in held
    ]


# --- equal subscriptions -------------------------------------------------------------------------


def _homogeneous(
    group: GroupSpec, retained: dict[str, list[TopicIdPartition]]
) -> dict[str, list[TopicIdPartition]]:
    topic_ids = sorted(next(iter(group.members.values())).topic_ids)
    partition_count = sum(group.partition_counts.get(topic_id, 0) for topic_id in topic_ids)
    quota, extra = divmod(partition_count, len(retained))
    # Members with the most partitions get the remainder: any other choice would move more.
    by_held = sorted(retained, key=lambda member_id: -len(retained[member_id]))
    size = {member_id: quota + (rank < extra) for rank, member_id in enumerate(by_held)}
    targets = {member_id: mine[: size[member_id]] for member_id, mine in retained.items()}
    unassigned = deque(_unassigned(group, topic_ids, targets))
    # One partition at a time in turn, so that a topic's partitions spread over the members.
    below_quota = deque(
        member_id for member_id in targets if len(targets[member_id]) < size[member_id]
    )
    while unassigned:
        member_id = below_quota.popleft()
        targets[member_id].append(unassigned.popleft())
        if len(targets[member_id]) < size[member_id]:
            below_quota.append(member_id)
    return targets


# --- different subscriptions ---------------------------------------------------------------------
#
# A member is represented by its rank in the order of names, and its fullness by one number: its
# partition count times the number of members, plus its rank. The fullest member has the largest
# number, and the first of equally full members has the smallest. A heap entry with an outdated
# number is recognised and skipped.


def _heterogeneous(
    group: GroupSpec, retained: dict[str, list[TopicIdPartition]]
) -> dict[str, list[TopicIdPartition]]:
    names, crowd = list(retained), len(retained)
    fullness = [len(target) * crowd + rank for rank, target in enumerate(retained.values())]
    subscribers: dict[bytes, list[int]] = defaultdict(list)
    for rank, name in enumerate(names):
        for topic_id in group.members[name].topic_ids:
            subscribers[topic_id].append(rank)
    # Topics with the fewest subscribers first: topics with more subscribers leave more freedom to
    # balance.
    topic_ids = sorted(subscribers, key=lambda topic_id: (len(subscribers[topic_id]), topic_id))
    owned: dict[bytes, dict[int, list[TopicIdPartition]]] = {topic_id: {} for topic_id in topic_ids}
    for rank, target in enumerate(retained.values()):
        for partition in target:
            owned[partition[0]].setdefault(rank, []).append(partition)
    for topic_id, unassigned in groupby(_unassigned(group, topic_ids, retained), key=itemgetter(0)):
        queue = [fullness[rank] for rank in subscribers[topic_id]]
        heapify(queue)
        for partition in unassigned:
            fuller = queue[0] + crowd
            rank = fuller % crowd
            owned[topic_id].setdefault(rank, []).append(partition)
            fullness[rank] = fuller
            heapreplace(queue, fuller)
    _balance(owned, subscribers, fullness)
    targets: dict[str, list[TopicIdPartition]] = {name: [] for name in names}
    for owners in owned.values():
        for rank, partitions in owners.items():
            targets[names[rank]] += partitions
    return targets


def _balance(
    owned: dict[bytes, dict[int, list[TopicIdPartition]]],
    subscribers: dict[bytes, list[int]],
    fullness: list[int],
) -> None:
    """Move single partitions while that helps, topic by topic in the order of ``owned``.

    Each move lowers the sum of the squares of the members' counts, so the loop ends.
    """
    crowd, of = len(fullness), fullness.__getitem__
    moved = True
    while moved:
        moved = False
        # No move lowers the minimum, so most topics need no check of their subscribers.
        least = min(fullness) // crowd
        for topic_id, owners in owned.items():
            fullest = max(map(of, owners), default=0) // crowd
            if fullest - least < MIN_GAP:
                continue
            ranks = subscribers[topic_id]
            if fullest - min(map(of, ranks)) // crowd >= MIN_GAP:
                _balance_topic(owners, ranks, fullness)
                moved = True


def _balance_topic(
    owners: dict[int, list[TopicIdPartition]], subscribers: list[int], fullness: list[int]
) -> None:
    """Move partitions of one topic while that helps."""
    crowd = len(fullness)
    full, empty = [-fullness[rank] for rank in owners], [fullness[rank] for rank in subscribers]
    heapify(full)
    heapify(empty)
    while True:
        # Stale numbers from before a move are still in the heaps, and skipped here.
        while fullness[(giver := -full[0] % crowd)] != -full[0] or giver not in owners:
            heappop(full)
        while fullness[(taker := empty[0] % crowd)] != empty[0]:
            heappop(empty)
        if fullness[giver] // crowd - fullness[taker] // crowd < MIN_GAP:
            return
        owners.setdefault(taker, []).append(owners[giver].pop())
        if not owners[giver]:
            del owners[giver]
        fullness[giver] -= crowd
        fullness[taker] += crowd
        for rank in (giver, taker):
            heappush(full, -fullness[rank])
            heappush(empty, fullness[rank])
