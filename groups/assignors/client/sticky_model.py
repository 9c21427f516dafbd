"""The partitions that members of a sticky group report as owned, and their validity.

Source: ``AbstractStickyAssignor.MemberData`` and ``allSubscriptionsEqual``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import NamedTuple

from fencepost.groups.assignors.client.java_order import table_order
from fencepost.groups.assignors.client.model import Racks, Subscription, TopicPartition
from fencepost.logcore.values import dataclass

Parts = Mapping[str, Sequence[Racks]]
"""The existing subscribed topics → the racks of each of their partitions."""


class PreviousOwnership(NamedTuple):
    """The partitions that a member reports, and their generation."""

    partitions: tuple[TopicPartition, ...]
    generation: int


@dataclass(slots=True)
class ValidOwnership:
    """The valid ownership: member → partitions, and the partitions with two equal claims.

    ``by_member`` is in the order in which Kafka's leader iterates over it.
    """

    by_member: dict[str, list[TopicPartition]] = field(default_factory=dict)
    contested: set[TopicPartition] = field(default_factory=set)


def owned_now(
    parts: Parts, members: Mapping[str, Subscription], former: Mapping[str, PreviousOwnership]
) -> ValidOwnership:
    """Resolve the owner of each partition. ``members`` must be in table order.

    The newest generation wins; two claims of one generation cancel each other.
    """
    owned = ValidOwnership({member_id: [] for member_id in members})
    owner: dict[TopicPartition, str] = {}
    for member_id in members:
        partitions, generation = former[member_id]
        for partition in partitions:
            if not 0 <= partition[1] < len(parts.get(partition[0], ())):
                continue
            claimant = owner.get(partition)
            # Kafka compares with the generation in the other member's subscription, not in its user
            # data.
            if claimant is None:
                owned.by_member[member_id].append(partition)
            elif generation < members[claimant].generation:
                continue
            else:
                if partition in owned.by_member[claimant]:
                    owned.by_member[claimant].remove(partition)
                if generation == members[claimant].generation:
                    owned.contested.add(partition)
                else:
                    owned.by_member[member_id].append(partition)
            owner[partition] = member_id
    owned.by_member = {name: owned.by_member[name] for name in table_order(owned.by_member)}
    return owned
