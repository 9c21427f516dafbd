"""The *range* assignor of clients: each member gets consecutive partitions of each topic.

If the partitions cannot be divided equally, the first members get one partition more. If racks can
be matched, each topic's partitions first go to members in the replicas' racks, without changing the
members' counts; topics with the same members and partition counts stay co-partitioned.

Source: Kafka's ``RangeAssignor``, KIP-881.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fencepost.groups.assignors.client.java_order import utf16
from fencepost.groups.assignors.client.model import (
    ClientAssignor,
    Racks,
    Result,
    Subscription,
    Topics,
    in_table_order,
    member_order,
    racks_matter,
    subscribed,
)


class RangeAssignor(ClientAssignor):
    """The *range* assignor; the module's docstring describes the algorithm."""

    name = "range"
    is_cooperative = False

    def assign(self, topics: Topics, members: Mapping[str, Subscription]) -> Result:
        """See :class:`fencepost.groups.assignors.client.model.ClientAssignor`."""
        result: Result = {member_id: [] for member_id in members}
        in_order = sorted(members.items(), key=member_order)
        parts = [
            _Topic(topic, racks, in_order)
            for topic, racks in subscribed(topics, in_table_order(members)).items()
        ]
        by_rack = any(part.needs_racks for part in parts)
        if by_rack:
            _match_racks(parts, result)
        for part in parts:
            _assign_ranges(part, lambda _member, _index: True, result)
        if by_rack:
            for partitions in result.values():
                partitions.sort(key=lambda partition: (utf16(partition[0]), partition[1]))
        return result


class _Topic:
    """The state of one topic's assignment."""

    def __init__(
        self, name: str, racks: Sequence[Racks], in_order: Sequence[tuple[str, Subscription]]
    ) -> None:
        self.name = name
        self.racks = racks
        self.consumers = {
            member_id: member.rack_id or None
            for member_id, member in in_order
            if name in member.topics
        }
        self.unassigned = dict.fromkeys(range(len(racks)))
        self._quota, self._extra = divmod(len(racks), len(self.consumers))
        self._counts = dict.fromkeys(self.consumers, 0)
        member_racks = {rack for rack in self.consumers.values() if rack is not None}
        self.needs_racks = racks_matter(member_racks, racks)

    def match(self, member_id: str, index: int) -> bool:
        """Whether the member may read the partition from its own rack, or has no rack."""
        rack = self.consumers[member_id]
        return rack is None or rack in self.racks[index]

    def max_assignable(self, member_id: str) -> int:
        """Return the number of partitions that the member may still get."""
        return max(0, self._quota + (self._extra > 0) - self._counts[member_id])

    def assign(self, member_id: str, indexes: Sequence[int], result: Result) -> None:
        """Assign partitions to a member."""
        result[member_id].extend((self.name, index) for index in indexes)
        self._counts[member_id] += len(indexes)
        if self._counts[member_id] > self._quota:
            self._extra -= 1
        for index in indexes:
            del self.unassigned[index]


def _assign_ranges(part: _Topic, is_assignable: Callable[[str, int], bool], result: Result) -> None:
    for member_id in part.consumers:
        fitting = [index for index in part.unassigned if is_assignable(member_id, index)]
        fitting = fitting[: part.max_assignable(member_id)]
        if fitting:
            part.assign(member_id, fitting, result)


def _match_racks(parts: Sequence[_Topic], result: Result) -> None:
    """Assign the partitions that can be read within racks."""
    alike: dict[tuple[tuple[tuple[str, str | None], ...], int], list[_Topic]] = {}
    for part in parts:
        # Kafka compares one table of racks per partition. The table is empty if no member has a
        # rack.
        count = len(part.racks) if any(part.consumers.values()) else 0
        key = (tuple(sorted(part.consumers.items(), key=lambda item: item[0])), count)
        alike.setdefault(key, []).append(part)
    for (_, count), group in alike.items():
        if len(group) > 1:
            _match_together(group, count, result)
        elif group[0].needs_racks:
            _assign_ranges(group[0], group[0].match, result)


def _match_together(group: Sequence[_Topic], count: int, result: Result) -> None:
    """Give partition n of all topics to a member that can read all of them in its own rack."""
    open_members = list(group[0].consumers)
    for index in range(count):
        for member_id in open_members:
            if all(
                part.match(member_id, index) and part.max_assignable(member_id) > 0
                for part in group
            ):
                break
        else:
            continue
        for part in group:
            part.assign(member_id, [index], result)
        if all(part.max_assignable(member_id) <= 0 for part in group):
            open_members.remove(member_id)
        if not open_members:
            break
