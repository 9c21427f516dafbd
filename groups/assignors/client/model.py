"""The input and the result of a client-side assignor.

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
"""The generation of a member that reports none."""

Racks = frozenset[str]

Topics = Mapping[str, Sequence[Racks]]
"""Topic → the racks of each partition's replicas; empty if no rack is known."""

Result = dict[str, list[TopicPartition]]
"""Member id → its partitions, in the order in which the leader encodes them."""


@dataclass(frozen=True, slots=True)
class Subscription:
    """A member's subscription when it joins: ``ConsumerProtocolSubscription``.

    ``user_data`` belongs to the assignor; ``owned`` are the partitions that the member has not
    revoked (from version 1); ``generation`` is the generation of ``owned`` (from 2); ``rack_id`` is
    ``client.rack`` (from 3). The instance id is not part of the subscription; JoinGroup has it.
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
        """Whether members may keep their partitions while they rejoin (KIP-429)."""

    def assign(self, topics: Topics, members: Mapping[str, Subscription]) -> Result:
        """Return every member's partitions.

        ``members`` are in the order of the JoinGroup response. ``topics`` has no deleted topics.
        """

    def user_data(
        self,
        owned: Iterable[TopicPartition] | None,  # noqa: ARG002 - nothing to tell
        generation: int,  # noqa: ARG002 - nothing to tell
    ) -> bytes | None:
        """Return a member's user data for JoinGroup; None by default.

        ``owned`` is the member's assignment of ``generation``; None before its first assignment.
        """
        return None


def topics_without_racks(counts: Mapping[str, int]) -> dict[str, tuple[Racks, ...]]:
    """Return topics with these partition counts, and without racks."""
    return {topic: (frozenset(),) * count for topic, count in counts.items()}


def in_table_order(members: Mapping[str, Subscription]) -> dict[str, Subscription]:
    """Return the members in the order in which Kafka's leader iterates over them."""
    return {name: members[name] for name in table_order(members)}


def subscribed(topics: Topics, members: Mapping[str, Subscription]) -> dict[str, Sequence[Racks]]:
    """Return the ``topics`` with a subscriber, in the order of Kafka's leader.

    ``members`` are in table order already. Topics without partitions are omitted.
    """
    names = table_order(topic for member in members.values() for topic in member.topics)
    existing = [topic for topic in names if topics.get(topic)]
    return {topic: topics[topic] for topic in table_order(existing)}


def member_order(item: tuple[str, Subscription]) -> tuple[bool, bytes]:
    """Return a sort key: static members by instance id, then dynamic members by member id.

    Source: ``AbstractPartitionAssignor.MemberInfo``.
    """
    member_id, subscription = item
    if subscription.instance_id is None:
        return True, utf16(member_id)
    return False, utf16(subscription.instance_id)


def racks_matter(
    consumer_racks: frozenset[str] | set[str], partition_racks: Iterable[Racks]
) -> bool:
    """Whether rack awareness can help.

    It can if a rack has both a consumer and a replica, and if not every partition has replicas in
    the same racks.

    Source: ``AbstractPartitionAssignor.useRackAwareAssignment``.
    """
    racks = list(partition_racks)
    everywhere = frozenset[str]().union(*racks)
    if not consumer_racks or everywhere.isdisjoint(consumer_racks):
        return False
    return any(rack != everywhere for rack in racks)
