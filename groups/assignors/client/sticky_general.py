"""The sticky assignment of members with different subscriptions, as balanced as possible.

Members keep owned partitions, and each unassigned partition goes to the subscriber with the fewest
partitions. Then single partitions move from fuller members to emptier ones until no move makes two
members more equal. If the result is not more balanced, the moves are undone.

Source: ``AbstractStickyAssignor.GeneralAssignmentBuilder`` and ``PartitionMovements``.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Mapping

from fencepost.groups.assignors.client.java_order import TableSet, partition_hash, utf16
from fencepost.groups.assignors.client.model import Result, Subscription, TopicPartition
from fencepost.groups.assignors.client.racks import RackInfo
from fencepost.groups.assignors.client.sticky_model import Parts, PreviousOwnership, ValidOwnership

_Pair = tuple[str, str]


class Movements:
    """Records moves, so that two members do not exchange partitions of the same topic."""

    def __init__(self) -> None:
        self._by_topic: dict[str, dict[_Pair, TableSet[TopicPartition]]] = {}
        self._by_partition: dict[TopicPartition, _Pair] = {}

    def move(self, partition: TopicPartition, source: str, to: str) -> None:
        """Record a move. Two moves of a partition count as one move from its first owner."""
        earlier = self._by_partition.pop(partition, None)
        if earlier is not None:
            self._by_topic[partition[0]][earlier].remove(partition)
            source = earlier[0]
        if source != to:
            self._by_partition[partition] = source, to
            pairs = self._by_topic.setdefault(partition[0], {})
            pairs.setdefault((source, to), TableSet(partition_hash)).add(partition)

    def better(self, partition: TopicPartition, source: str, to: str) -> TopicPartition:
        """Return a partition of the same topic that moved from ``to`` to ``source``.

        Return ``partition`` if no such partition exists.
        """
        if partition in self._by_partition:
            source = self._by_partition[partition][0]
        back = self._by_topic.get(partition[0], {}).get((to, source))
        return back.first() if back else partition


class GeneralBuilder:
    """Computes one assignment."""

    def __init__(
        self,
        parts: Parts,
        racks: RackInfo,
        owned: ValidOwnership,
        members: Mapping[str, Subscription],
        former: Mapping[str, PreviousOwnership],
    ) -> None:
        self._parts = parts
        self._racks = racks
        self._result: Result = owned.by_member
        self._topics_of = {
            name: frozenset(topic for topic in member.topics if topic in parts)
            for name, member in members.items()
        }
        self._readers: dict[str, list[str]] = {topic: [] for topic in parts}
        for name, topics in self._topics_of.items():
            for topic in topics:
                self._readers[topic].append(name)
        self._owner = {tp: name for name, mine in self._result.items() for tp in mine}
        in_order = sorted(parts, key=lambda topic: (len(self._readers[topic]), utf16(topic)))
        self._all = [(topic, index) for topic in in_order for index in range(len(parts[topic]))]
        self._former = _older(former)
        self._movements = Movements()
        self._by_size: list[tuple[int, bytes, str]] = []
        self._topic_counts: Counter[tuple[str, str]] = Counter()
        self._must_revoke = False

    def build(self) -> Result:
        """Return the assignment."""
        assigned = self._assign_owned()
        unassigned = [partition for partition in self._all if partition not in assigned]
        self._by_size = sorted(self._rank(name) for name in self._result)
        self._topic_counts = Counter(
            (tp[0], name) for name, mine in self._result.items() for tp in mine
        )
        was_empty = not self._result[self._by_size[-1][2]]
        self._assign_unassigned(unassigned)
        shared = {topic for topic, readers in self._readers.items() if len(readers) >= 2}
        movable = [partition for partition in self._all if partition[0] in shared]
        fixed = self._exclude_fixed(shared)
        before = {name: list(mine) for name, mine in self._result.items()}
        if not self._must_revoke:
            # As in Kafka, first try to balance with the newly assigned partitions alone.
            self._balance([partition for partition in unassigned if partition[0] in shared])
        moved = self._balance(movable)
        if moved and not was_empty and _unevenness(self._result) >= _unevenness(before):
            self._result = before
        return self._result | fixed

    def _assign_owned(self) -> set[TopicPartition]:
        retained: set[TopicPartition] = set()
        for name, owned in self._result.items():
            stays = []
            for partition in owned:
                if partition[0] in self._topics_of[name] and not self._racks.mismatch(
                    name, partition
                ):
                    stays.append(partition)
                else:
                    self._must_revoke = True
            self._result[name] = stays
            retained.update(stays)
        return retained

    def _assign_unassigned(self, unassigned: list[TopicPartition]) -> None:
        if self._racks.of_member:
            unassigned = [
                tp for tp in unassigned if not self._assign_to_emptiest(tp, within_racks=True)
            ]
        for partition in unassigned:
            self._assign_to_emptiest(partition, within_racks=False)

    def _assign_to_emptiest(self, partition: TopicPartition, *, within_racks: bool) -> bool:
        for _, _, name in self._by_size:
            if partition[0] in self._topics_of[name] and not (
                within_racks and self._racks.mismatch(name, partition)
            ):
                self._put(partition, name)
                return True
        return False

    def _exclude_fixed(self, shared: set[str]) -> Result:
        """Remove members that can neither receive nor give partitions; return their assignments."""
        fixed: Result = {}
        for name, topics in self._topics_of.items():
            partitions = self._result[name]
            most = sum(len(self._parts[topic]) for topic in topics)
            if len(partitions) >= most and not any(
                partition[0] in shared for partition in partitions
            ):
                self._unrank(name)
                fixed[name] = self._result.pop(name)
        return fixed

    # --- moving ----------------------------------------------------------------------------------

    def _balance(self, movable: Iterable[TopicPartition]) -> bool:
        """Move partitions until no move helps; return whether one was moved."""
        moved = False
        again = True
        movable = list(movable)
        while again:
            again = False
            for partition in movable:
                if self._is_balanced():
                    break
                if self._improve(partition):
                    moved = again = True
        return moved

    def _improve(self, partition: TopicPartition) -> bool:
        """Move the partition, or another one of its topic, if that improves the balance."""
        owner = self._owner[partition]
        size = len(self._result[owner])
        former = self._former.get(partition, ("", 0))[0]
        # Kafka returns a partition even to a member that no longer subscribes to its topic.
        may_return = former in self._result and partition[0] in self._topics_of[former]
        if may_return and size > len(self._result[former]) + 1:
            self._move(partition, former)
            return True
        if any(size > len(self._result[name]) + 1 for name in self._readers[partition[0]]):
            topic = partition[0]
            to = next(name for _, _, name in self._by_size if topic in self._topics_of[name])
            self._move(partition, to)
            return True
        return False

    def _is_balanced(self) -> bool:
        """Whether no member could take a partition from a member with at least two more."""
        if self._by_size[0][0] >= self._by_size[-1][0] - 1:
            return True
        fullest: dict[str, list[tuple[int, str]]] = {}
        for (topic, name), count in self._topic_counts.items():
            if count and name in self._result:
                fullest.setdefault(topic, []).append((len(self._result[name]), name))
        largest = {topic: max(owners)[0] for topic, owners in fullest.items()}
        return not any(
            largest.get(topic, 0) > size + 1
            for size, _, name in self._by_size
            for topic in self._topics_of[name]
        )

    def _move(self, partition: TopicPartition, to: str) -> None:
        partition = self._movements.better(partition, self._owner[partition], to)
        source = self._owner[partition]
        self._movements.move(partition, source, to)
        self._unrank(source)
        self._result[source].remove(partition)
        self._topic_counts[partition[0], source] -= 1
        insort(self._by_size, self._rank(source))
        self._put(partition, to)

    def _put(self, partition: TopicPartition, name: str) -> None:
        self._unrank(name)
        self._result[name].append(partition)
        self._owner[partition] = name
        self._topic_counts[partition[0], name] += 1
        insort(self._by_size, self._rank(name))

    def _rank(self, name: str) -> tuple[int, bytes, str]:
        return len(self._result[name]), utf16(name), name

    def _unrank(self, name: str) -> None:
        del self._by_size[bisect_left(self._by_size, self._rank(name))]


def _older(former: Mapping[str, PreviousOwnership]) -> dict[TopicPartition, tuple[str, int]]:
    """Return partition → (member, generation) of the newest claim below the newest generation."""
    newest = max((claim.generation for claim in former.values()), default=-1)
    previous: dict[TopicPartition, tuple[str, int]] = {}
    for name, (partitions, generation) in former.items():
        if generation < newest:
            for partition in partitions:
                if partition not in previous or generation > previous[partition][1]:
                    previous[partition] = name, generation
    return previous


def _unevenness(result: Result) -> int:
    """Return a measure of imbalance: the sum of the count differences of all pairs of members."""
    sizes = sorted(len(mine) for mine in result.values())
    return sum(size * (2 * rank - len(sizes) + 1) for rank, size in enumerate(sizes))
