"""The sticky assignment of members that all subscribe to the same topics.

With P partitions and M members, each member gets P // M partitions, and some members get one more
until the remainder is used up. A member keeps at most that many of its owned partitions. The other
partitions are assigned in turn, first within racks if matching racks helps.

Source: ``AbstractStickyAssignor.ConstrainedAssignmentBuilder``.
"""

from __future__ import annotations

from fencepost.groups.assignors.client.java_order import utf16
from fencepost.groups.assignors.client.model import Result, TopicPartition
from fencepost.groups.assignors.client.racks import RackInfo
from fencepost.groups.assignors.client.sticky_model import Parts, ValidOwnership


class EvenBuilder:
    """Computes one assignment. Afterwards ``moving`` maps each moved partition to its new owner.

    ``_quota`` is Kafka's *min quota*, the quotient P // M. ``_below_quota`` has the members with
    fewer partitions. ``_exactly_at_quota`` has the members with exactly ``_quota`` partitions,
    which may get one more.
    """

    def __init__(self, parts: Parts, racks: RackInfo, owned: ValidOwnership) -> None:
        self._parts = parts
        self._racks = racks
        self._owned = owned
        self.moving: dict[TopicPartition, str] = {}
        total = sum(len(rows) for rows in parts.values())
        self._quota, self._max_over_quota = divmod(total, len(owned.by_member) or 1)
        self._full_size = self._quota + (self._max_over_quota > 0)
        self._over_quota_count = 0
        self._below_quota: list[str] = []
        self._exactly_at_quota: list[str] = []
        self._result: Result = {member_id: [] for member_id in owned.by_member}
        self._revoked: dict[TopicPartition, str] = {}
        self._turn = 0

    def build(self) -> Result:
        """Return the assignment."""
        if not self._result:
            return {}
        self._assign_owned()
        unassigned = self._unassigned()
        self._below_quota.sort(key=utf16)
        self._exactly_at_quota.sort(key=utf16)
        unassigned = self._racks.fewest_readers_first(unassigned)
        if self._racks.of_member:
            unassigned = [tp for tp in unassigned if not self._assign_in_rack(tp)]
        self._assign_round_robin(unassigned)
        return self._result

    def _assign_owned(self) -> None:
        """Let each member keep its owned partitions, up to its quota."""
        for member_id, partitions in self._owned.by_member.items():
            retained = []
            for partition in sorted(partitions, key=lambda tp: (tp[1], utf16(tp[0]))):
                if self._racks.mismatch(member_id, partition):
                    self._revoked[partition] = member_id
                elif partition not in self._owned.contested:
                    retained.append(partition)
            if len(retained) < self._quota:
                size = len(retained)
                self._below_quota.append(member_id)
            elif len(retained) >= self._full_size and self._over_quota_count < self._max_over_quota:
                size = self._full_size
                self._count_over_quota()
            else:
                size = self._quota
                if self._over_quota_count < self._max_over_quota:
                    self._exactly_at_quota.append(member_id)
            self._result[member_id] += retained[:size]
            self._revoked |= dict.fromkeys(retained[size:], member_id)

    def _count_over_quota(self) -> None:
        self._over_quota_count += 1
        if self._over_quota_count == self._max_over_quota:
            self._exactly_at_quota.clear()

    def _unassigned(self) -> list[TopicPartition]:
        assigned = {partition for mine in self._result.values() for partition in mine}
        return [
            (topic, index)
            for topic in sorted(self._parts, key=utf16)
            for index in range(len(self._parts[topic]))
            if (topic, index) not in assigned
        ]

    def _assign_in_rack(self, partition: TopicPartition) -> bool:
        """Give the partition to the next member with room in its rack; False if there is none."""
        position = self._racks.next_reader(partition, self._below_quota, self._turn)
        if position is not None:
            member_id = self._below_quota[position]
            count = len(self._result[member_id]) + 1
            if count >= self._quota:
                self._below_quota.remove(member_id)
                if count < self._full_size and self._over_quota_count < self._max_over_quota:
                    self._exactly_at_quota.append(member_id)
            else:
                position += 1
            self._turn = position % len(self._below_quota) if self._below_quota else 0
        else:
            position = self._racks.next_reader(partition, self._exactly_at_quota, 0)
            if position is None:
                return False
            member_id = self._exactly_at_quota[position]
            if len(self._result[member_id]) + 1 == self._full_size:
                del self._exactly_at_quota[position]
                self._count_over_quota()
        self._assign_to(partition, member_id)
        return True

    def _assign_round_robin(self, unassigned: list[TopicPartition]) -> None:
        """Fill members up to the quota in turn, then give one more to members that may have it."""
        position = 0
        for partition in unassigned:
            if self._below_quota:
                position %= len(self._below_quota)
                member_id = self._below_quota[position]
                self._assign_to(partition, member_id)
                if len(self._result[member_id]) == self._quota:
                    del self._below_quota[position]
                    self._exactly_at_quota.append(member_id)
                else:
                    position += 1
            else:
                self._assign_to(partition, self._exactly_at_quota.pop(0))

    def _assign_to(self, partition: TopicPartition, member_id: str) -> None:
        self._result[member_id].append(partition)
        former = self._revoked.get(partition, member_id)
        if former != member_id or partition in self._owned.contested:
            self.moving[partition] = member_id
