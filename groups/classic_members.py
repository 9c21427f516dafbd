"""The members of a classic group, and the vote for a protocol.

Source: Kafka's ``ClassicGroupMember`` and ``ClassicGroup.selectProtocol``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fencepost.groups.group import MEMBER_BYTES, protocols_bytes, text_bytes
from fencepost.logcore.machine import InvariantViolation, Token


@dataclass(slots=True, kw_only=True)
class ClassicMember:
    """One member. ``protocols`` are (name, metadata) in the member's order of preference."""

    member_id: str
    group_instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocols: tuple[tuple[str, bytes], ...]
    assignment: bytes = b""
    is_new: bool = False
    """Whether no JoinGroup of the member was ever answered, so that it sends no heartbeats."""
    join_token: Token | None = None
    sync_token: Token | None = None

    @property
    def is_static(self) -> bool:
        """Whether the member has an instance id (KIP-345)."""
        return self.group_instance_id is not None

    @property
    def counts_as_alive(self) -> bool:
        """Whether an expired session has no effect, because the member waits for a response.

        The session of a new member does expire.
        """
        waits = self.join_token is not None or self.sync_token is not None
        return waits and not self.is_new

    @property
    def memory_bytes(self) -> int:
        """Memory of the member without its assignment; the group counts the assignments."""
        strings = text_bytes(
            self.member_id, self.group_instance_id, self.client_id, self.client_host
        )
        return MEMBER_BYTES + strings + protocols_bytes(self.protocols)

    @property
    def protocol_names(self) -> frozenset[str]:
        """The names of the offered protocols."""
        return frozenset(name for name, _ in self.protocols)

    def metadata(self, protocol_name: str | None) -> bytes:
        """Return the metadata for an offered protocol."""
        for name, metadata in self.protocols:
            if name == protocol_name:
                return metadata
        raise InvariantViolation(f"member {self.member_id!r} does not offer {protocol_name!r}")


def select_protocol(members: Sequence[ClassicMember]) -> str:
    """Return the protocol of the next generation.

    Candidates are the names that all members offer. Each member votes for the candidate that it
    lists first. On a tie, the candidate that received its first vote earliest wins; in Kafka, the
    order of a hash table decides.
    """
    candidates = frozenset.intersection(*(member.protocol_names for member in members))
    votes: Counter[str] = Counter()
    for member in members:
        vote = next((name for name, _ in member.protocols if name in candidates), None)
        if vote is None:
            raise InvariantViolation(f"no protocol suits every member, {member.member_id!r} too")
        votes[vote] += 1
    return votes.most_common(1)[0][0]
