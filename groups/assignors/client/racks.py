"""The members that can read a partition from their own rack.

Source: ``AbstractStickyAssignor.RackInfo``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from fencepost.groups.assignors.client.model import (
    Racks,
    Subscription,
    TopicPartition,
    racks_matter,
)
from fencepost.groups.assignors.client.sticky_model import Parts


class RackInfo:
    """The racks of members and partitions; empty if matching them would not help."""

    def __init__(self, parts: Parts, members: Mapping[str, Subscription]) -> None:
        racks = {name: member.rack_id for name, member in members.items() if member.rack_id}
        partitions: dict[TopicPartition, Racks] = {}
        if racks:
            partitions = {
                (topic, index): replicas
                for topic, rows in parts.items()
                for index, replicas in enumerate(rows)
            }
        members_of_rack = Counter(racks.values())
        self._reach = {
            partition: sum(members_of_rack[rack] for rack in replicas)
            for partition, replicas in partitions.items()
        }
        useful = racks_matter(set(racks.values()), partitions.values())
        self.of_member: dict[str, str] = racks if useful else {}
        self.of_partition = partitions if useful else {}

    def mismatch(self, member_id: str, partition: TopicPartition) -> bool:
        """Whether the member's rack is known and has no replica of the partition."""
        rack = self.of_member.get(member_id)
        return rack is not None and rack not in self.of_partition.get(partition, ())

    def fewest_readers_first(self, partitions: list[TopicPartition]) -> list[TopicPartition]:
        """Return the partitions ordered by the number of members in their racks."""
        if not self._reach:
            return partitions
        return sorted(partitions, key=lambda partition: self._reach.get(partition, 0))

    def next_reader(
        self, partition: TopicPartition, members: Sequence[str], start: int
    ) -> int | None:
        """Return the position of the next member in a rack of the partition; None without one.

        The search begins at ``start``, and continues at the first member after the last one.
        """
        replicas = self.of_partition.get(partition)
        if not replicas:
            return None
        for step in range(len(members)):
            position = (start + step) % len(members)
            if self.of_member.get(members[position]) in replicas:
                return position
        return None
