"""The *sticky* and *cooperative-sticky* assignors: balanced, with as few moves as possible.

A member keeps its owned partitions unless a member of a newer generation claims them too. Groups
with equal subscriptions have a direct solution (``sticky_even``); other groups are balanced step by
step (``sticky_general``).

*cooperative-sticky* computes the same assignment, and then removes each partition that its present
owner must first revoke. The owner rejoins without these partitions, and the next rebalance assigns
them, so that no two members ever read the same partition.

Source: Kafka's ``AbstractStickyAssignor``, ``StickyAssignor``, ``CooperativeStickyAssignor``;
KIP-54, KIP-429, KIP-881. Three differences: the highest generation is taken from the group's
present members, not from all groups that the assignor object has ever seen; a deleted partition has
no owner; and in a group of different subscriptions a partition does not return to a former owner
that no longer subscribes to its topic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fencepost.groups.assignors.client.model import (
    Result,
    Subscription,
    TopicPartition,
    Topics,
    in_table_order,
    subscribed,
)
from fencepost.groups.assignors.client.protocol import (
    decode_cooperative_data,
    decode_sticky_data,
    encode_cooperative_data,
    encode_sticky_data,
)
from fencepost.groups.assignors.client.racks import RackInfo
from fencepost.groups.assignors.client.sticky_even import EvenBuilder
from fencepost.groups.assignors.client.sticky_general import GeneralBuilder
from fencepost.groups.assignors.client.sticky_model import PreviousOwnership, owned_now


class StickyAssignor:
    """*sticky*: members revoke all partitions when they rejoin, and report them in user data."""

    name = "sticky"
    is_cooperative = False

    def assign(self, topics: Topics, members: Mapping[str, Subscription]) -> Result:
        """See :class:`fencepost.groups.assignors.client.model.ClientAssignor`."""
        return _assign(self.name, topics, members)[0]

    def user_data(self, owned: Iterable[TopicPartition] | None, generation: int) -> bytes | None:
        """See :class:`fencepost.groups.assignors.client.model.ClientAssignor`."""
        return None if owned is None else encode_sticky_data(owned, generation)


class CooperativeStickyAssignor:
    """*cooperative-sticky*: members keep their partitions, and report them in subscriptions."""

    name = "cooperative-sticky"
    is_cooperative = True

    def assign(self, topics: Topics, members: Mapping[str, Subscription]) -> Result:
        """See :class:`fencepost.groups.assignors.client.model.ClientAssignor`."""
        result, moving = _assign(self.name, topics, members)
        if moving is None:
            moving = _moving(members, result)
        for partition, member_id in moving.items():
            if partition in result[member_id]:
                result[member_id].remove(partition)
        return result

    def user_data(
        self,
        owned: Iterable[TopicPartition] | None,  # noqa: ARG002 - nothing to tell
        generation: int,
    ) -> bytes | None:
        """See :class:`fencepost.groups.assignors.client.model.ClientAssignor`."""
        return encode_cooperative_data(generation)


def former_of(assignor: str, member: Subscription) -> PreviousOwnership:
    """Return the partitions a member reports: *sticky* in user data, else in subscriptions."""
    if assignor == StickyAssignor.name:
        return PreviousOwnership(*decode_sticky_data(member.user_data))
    generation = member.generation
    if generation < 0:
        generation = decode_cooperative_data(member.user_data)
    return PreviousOwnership(member.owned, generation)


def _assign(
    assignor: str, topics: Topics, members: Mapping[str, Subscription]
) -> tuple[Result, dict[TopicPartition, str] | None]:
    """Return all assignments and, if the algorithm knows them, partitions with a new owner."""
    members = in_table_order(members)
    former = {name: former_of(assignor, member) for name, member in members.items()}
    parts = subscribed(topics, members)
    owned = owned_now(parts, members, former)
    racks = RackInfo(parts, members)
    if len({frozenset(member.topics) for member in members.values()}) <= 1:
        builder = EvenBuilder(parts, racks, owned)
        return builder.build(), builder.moving
    return GeneralBuilder(parts, racks, owned, members, former).build(), None


def _moving(members: Mapping[str, Subscription], result: Result) -> dict[TopicPartition, str]:
    """Return partition → new owner for the partitions that move from one member to another."""
    added: dict[TopicPartition, str] = {}
    revoked: set[TopicPartition] = set()
    for member_id, partitions in result.items():
        before = members[member_id].owned
        added |= {partition: member_id for partition in partitions if partition not in before}
        revoked |= set(before) - set(partitions)
    return {partition: to for partition, to in added.items() if partition in revoked}
