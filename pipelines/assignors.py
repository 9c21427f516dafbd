"""Client-side assignors for aiokafka: ``partition_assignment_strategy=[Strategy("sticky")]``.

aiokafka revokes everything before it rejoins, so a member of it owns nothing when it joins; with
*cooperative-sticky* it lives beside Java's and librdkafka's members, which keep what they own. As a
leader it must know what those own. aiokafka reads only the first version of what members say and
drops the rest, so importing this module widens what it reads
(``aiokafka.coordinator.protocol.ConsumerProtocol.METADATA``); other strategies do not notice.

What aiokafka does not tell its assignors is not taken into account: racks of replicas, instance
ids, the generation. One object per consumer: it remembers that consumer's last assignment.
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
    """A member's metadata as aiokafka reads it, with all of its bytes."""

    raw: bytes | None = None

    @classmethod
    def decode(cls, data: BytesIO | bytes) -> WholeMetadata:
        """Read the first version's fields, and keep everything."""
        raw = data.read() if isinstance(data, BytesIO) else bytes(data)
        found: WholeMetadata = super().decode(raw)
        found.raw = raw
        return found


ConsumerProtocol.METADATA = WholeMetadata


class Strategy(AbstractPartitionAssignor):  # type: ignore[misc]  # it has no types
    """One of the four built-in assignors by its name, or a ``ClientAssignor`` of your own.

    ``rack_id`` is ``client.rack``: leaders of other clients take it into account. Raises ValueError
    for a name that is none.
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
        """Return what this member says when it joins."""
        data = self._assignor.user_data(self._owned, NO_GENERATION)
        return encode_subscription(Subscription(tuple(topics), data, rack_id=self._rack_id))

    def assign(self, cluster: ClusterMetadata, members: Mapping[str, Any]) -> dict[str, bytes]:
        """Return every member's assignment, as the leader.

        Raises :class:`fencepost.logcore.errors.CorruptRecordError` for a member whose words make no
        sense.
        """
        said = {name: decode_subscription(member.raw) for name, member in members.items()}
        counts = {
            topic: len(cluster.partitions_for_topic(topic) or ())
            for topic in {topic for one in said.values() for topic in one.topics}
        }
        topics = topics_without_racks({topic: count for topic, count in counts.items() if count})
        result = self._assignor.assign(topics, said)
        return {name: encode_assignment(mine) for name, mine in result.items()}

    def on_assignment(self, assignment: Any) -> None:
        """Remember what this member got."""
        self._owned = tuple((one.topic, one.partition) for one in assignment.partitions())
