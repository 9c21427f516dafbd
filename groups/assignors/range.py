"""The *range* assignor: each member gets consecutive partitions of each topic.

Members have the same order for every topic, so that topics with equal subscribers and equal
partition counts are co-partitioned: partition n of each topic goes to the same member.

Source: Kafka's server-side ``RangeAssignor``.
"""

from __future__ import annotations

from fencepost.groups.assignors.model import (
    GroupAssignment,
    GroupSpec,
    TopicIdPartition,
    member_order,
)


class RangeAssignor:
    """The *range* assignor; the module's docstring describes the algorithm."""

    name = "range"

    def assign(self, group: GroupSpec) -> GroupAssignment:
        """Return the assignment. If the division leaves a remainder, the first members get more."""
        targets: dict[str, set[TopicIdPartition]] = {
            member_id: set() for member_id in group.members
        }
        in_order = sorted(group.members.items(), key=member_order)
        for topic_id, partition_count in group.partition_counts.items():
            subscribers = [name for name, spec in in_order if topic_id in spec.topic_ids]
            if not subscribers:
                continue
            quota, extra = divmod(partition_count, len(subscribers))
            start = 0
            for position, member_id in enumerate(subscribers):
                end = start + quota + (position < extra)
                targets[member_id].update((topic_id, index) for index in range(start, end))
                start = end
        return {member_id: frozenset(partitions) for member_id, partitions in targets.items()}
