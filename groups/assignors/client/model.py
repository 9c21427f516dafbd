"""What a client-side assignor is given and what it returns.

Source: Kafka's ``ConsumerPartitionAssignor`` and ``AbstractPartitionAssignor``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from fencepost.groups.assignors.client.java_order import table_order, utf16
from fencepost.logcore.values import dataclass

TopicPartition = tuple[str, int]
"""A topic's name and a partition index."""

NO_GENERATION = -1
"""The generation of a member that does not tell one."""

Racks = frozenset[str]

Topics = Mapping[str, Sequence[Racks]]
"""Topic → for each of its partitions the racks that have a replica; empty where none is known."""

Result = dict[str, list[TopicPartition]]
"""Member id → its partitions, in the order in which the leader writes them down."""


@dataclass(frozen=True, slots=True)
class Subscription:
    """What one member says when it joins: ``ConsumerProtocolSubscription``.

    ``user_data`` is the assignor's own; ``owned`` what the member has not revoked (from version 1);
    ``generation`` that of ``owned`` (from 2); ``rack_id`` is ``client.rack`` (from 3). The instance
    id does not travel in the subscription but beside it.
    """

    topics: tuple[str, ...]
    user_data: bytes | None = None
    owned: tuple[TopicPartition, ...] = ()
    generation: int = NO_GENERATION
    rack_id: str | None = None
    instance_id: str | None = None


@runtime_checkable
class ClientAssignor(Protocol):
    """Computes the assignment of a classic group. Pure: the same input gives the same result."""

    @property
    def name(self) -> str:
        """The name of the protocol in JoinGroup."""

    @property
    def is_cooperative(self) -> bool:
        """Whether members may keep what they own while they rejoin (KIP-429)."""

    def assign(self, topics: Topics, members: Mapping[str, Subscription]) -> Result:
        """Return every member's partitions.

        ``members`` in the order of JoinGroup's answer. Topics that do not exist are not in
        ``topics``.
        """

    def user_data(
        self,
        owned: Iterable[TopicPartition] | None,  # noqa: ARG002 - nothing to tell
        generation: int,  # noqa: ARG002 - nothing to tell
    ) -> bytes | None:
        """Return what a member sends along when it joins; nothing unless an assignor says more.

        ``owned`` is its last assignment, of ``generation``; None before the first.
        """
        return None


def topics_without_racks(counts: Mapping[str, int]) -> dict[str, tuple[Racks, ...]]:
    """Return topics of so many partitions, of whose replicas nothing is known."""
    return {topic: (frozenset(),) * count for topic, count in counts.items()}


def in_table_order(members: Mapping[str, Subscription]) -> dict[str, Subscription]:
    """Return the members in the order in which Kafka's leader walks them."""
    return {name: members[name] for name in table_order(members)}


def subscribed(topics: Topics, members: Mapping[str, Subscription]) -> dict[str, Sequence[Racks]]:
    """Return those of ``topics`` that somebody subscribes to, in Kafka's leader's order.

    ``members`` are in table order already. A topic without partitions is left out.
    """
    wanted = table_order(topic for member in members.values() for topic in member.topics)
    known = [topic for topic in wanted if topics.get(topic)]
    return {topic: topics[topic] for topic in table_order(known)}


def member_order(item: tuple[str, Subscription]) -> tuple[bool, bytes]:
    """Return a sort key: static members first by instance id, then dynamic ones by member id.

    Source: ``AbstractPartitionAssignor.MemberInfo``.
    """
    member_id, subscription = item
    if subscription.instance_id is None:
        return True, utf16(member_id)
    return False, utf16(subscription.instance_id)


def racks_matter(
    consumer_racks: frozenset[str] | set[str], partition_racks: Iterable[Racks]
) -> bool:
    """Whether matching racks can bring anything: some partition is not to be had in every rack.

    Source: ``AbstractPartitionAssignor.useRackAwareAssignment``.
    """
    racks = list(partition_racks)
    everywhere = frozenset[str]().union(*racks)
    if not consumer_racks or everywhere.isdisjoint(consumer_racks):
        return False
    return any(one != everywhere for one in racks)
