"""Client-side assignors for aiokafka: ``partition_assignment_strategy=[Strategy("sticky")]``.

aiokafka revokes all partitions before it rejoins, so its members own nothing when they join. With
*cooperative-sticky* they can share a group with members of Java's client and of librdkafka, which
keep their partitions. As the group's leader, an aiokafka member must know which partitions the
others keep. aiokafka reads only the first version of members' metadata and drops the rest, so
importing this module makes aiokafka keep all bytes
(``aiokafka.coordinator.protocol.ConsumerProtocol.METADATA``); other strategies are unaffected.

aiokafka does not pass on the racks of replicas, instance ids and the generation, so they are not
considered. Use one :class:`Strategy` per consumer, as it remembers the consumer's last assignment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from io import BytesIO
from typing import Any

from aiokafka.cluster import ClusterMetadata
from aiokafka.coordinator.assignors.abstract import AbstractPartitionAssignor
from aiokafka.coordinator.protocol import ConsumerProtocol, ConsumerProtocolMemberMetadata

from fencepost.groups.assignors.client.built_in import BUILT_IN
from fencepost.groups.assignors.client.model import (
    NO_GENERATION,
    ClientAssignor,
    Subscription,
    TopicPartition,
    topics_without_racks,
)
from fencepost.groups.assignors.client.protocol import (
    decode_subscription,
    encode_assignment,
    encode_subscription,
)


class WholeMetadata(ConsumerProtocolMemberMetadata):  # type: ignore[misc]  # it has no types
    """A member's metadata as aiokafka parses it, together with all of its bytes."""

    raw: bytes | None = None

    @classmethod
    def decode(cls, data: BytesIO | bytes) -> WholeMetadata:
        """Parse the first version's fields, and keep all bytes."""
        raw = data.read() if isinstance(data, BytesIO) else bytes(data)
        metadata: WholeMetadata = super().decode(raw)
        metadata.raw = raw
        return metadata


ConsumerProtocol.METADATA = WholeMetadata


class Strategy(AbstractPartitionAssignor):  # type: ignore[misc]  # it has no types
    """One of the four built-in assignors by its name, or a ``ClientAssignor`` of your own.

    ``rack_id`` is ``client.rack``; it is used only if the group's leader uses another client
    library. Raises ValueError for an unknown name.
    """

    def __init__(self, assignor: str | ClientAssignor, rack_id: str | None = None) -> None:
        if isinstance(assignor, str):
            if assignor not in BUILT_IN:
                raise ValueError(f"assignor {assignor!r}: built in are {', '.join(BUILT_IN)}")
            assignor = BUILT_IN[assignor]
        self._assignor = assignor
        self._rack_id = rack_id
        self._owned: tuple[TopicPartition, ...] | None = None

    @property
    def name(self) -> str:
        """The name of the group protocol."""
        return self._assignor.name

    def metadata(self, topics: Iterable[str]) -> bytes:
        """Return this member's metadata for JoinGroup."""
        data = self._assignor.user_data(self._owned, NO_GENERATION)
        return encode_subscription(Subscription(tuple(topics), data, rack_id=self._rack_id))

    def assign(self, cluster: ClusterMetadata, members: Mapping[str, Any]) -> dict[str, bytes]:
        """Return every member's assignment, as the leader.

        Raises :class:`fencepost.logcore.errors.CorruptRecordError` for malformed metadata of a
        member.
        """
        subscriptions = {name: decode_subscription(member.raw) for name, member in members.items()}
        counts = {
            topic: len(cluster.partitions_for_topic(topic) or ())
            for topic in {
                topic for subscription in subscriptions.values() for topic in subscription.topics
            }
        }
        topics = topics_without_racks({topic: count for topic, count in counts.items() if count})
        result = self._assignor.assign(topics, subscriptions)
        return {name: encode_assignment(partitions) for name, partitions in result.items()}

    def on_assignment(self, assignment: Any) -> None:
        """Remember this member's assignment."""
        self._owned = tuple(
            (partition.topic, partition.partition) for partition in assignment.partitions()
        )
