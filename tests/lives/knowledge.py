"""The state that clients get from one broker's responses: ids, generations, epochs, sessions.

The keys do not depend on the broker: a member is a group and a slot, and a producer is a
transactional id and a slot. So the same requests can be sent to two brokers that choose different
ids.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

Slot = tuple[str, int]
"""A member (group and slot), or a producer (transactional id and slot)."""

NO_TOPIC = uuid.UUID(int=0)
KEPT = 4
"""How many former values are remembered, because a zombie may still send them."""


@dataclass
class Member:
    """One member of a group, of either protocol."""

    ids: list[str] = field(default_factory=list)
    generation: int = -1
    older: list[int] = field(default_factory=list)
    protocol: str | None = None
    last_error: str = ""
    leads: list[str] = field(default_factory=list)
    """The ids of all members, if this member is the group's leader."""
    epoch: int = 0
    owned: list[Any] = field(default_factory=list)
    """The assigned partitions of a consumer: rows of topic id and indexes."""

    @property
    def id(self) -> str:
        return self.ids[-1] if self.ids else ""


@dataclass
class Producer:
    """One claim of a transactional id, or an idempotent producer."""

    identities: list[tuple[int, int]] = field(default_factory=list)
    sequences: dict[tuple[str, int], int] = field(default_factory=dict)
    is_fenced: bool = False
    """Whether the broker has fenced the producer, which may still send requests."""

    @property
    def identity(self) -> tuple[int, int]:
        return self.identities[-1] if self.identities else (-1, -1)

    def now_is(self, identity: tuple[int, int]) -> None:
        """Continue with this id and epoch. If either has changed, sequences restart at zero."""
        self.is_fenced = False
        if identity != self.identity:
            self.identities = [*self.identities[-KEPT:], identity]
            self.sequences.clear()


SharePartition = tuple[str, uuid.UUID, int]
"""A group, a topic id and an index."""


@dataclass
class ShareMember:
    """One member of a share group, with its share session at the broker."""

    epoch: int = 0
    session: int = 0
    """The epoch that the next request of the session must have; 0 without a session."""
    partitions: set[SharePartition] = field(default_factory=set)
    """The partitions of the session."""
    held: dict[tuple[uuid.UUID, int], set[int]] = field(default_factory=dict)
    """Topic id and index → the offsets that the member has acquired and not acknowledged."""

    def close(self) -> None:
        """Forget the session. Its acquisition locks remain until the broker releases them."""
        self.session = 0
        self.partitions.clear()


class Knowledge:
    """Everything that the clients of one broker know."""

    def __init__(self) -> None:
        self.members: defaultdict[Slot, Member] = defaultdict(Member)
        self.producers: defaultdict[Slot, Producer] = defaultdict(Producer)
        self.shares: defaultdict[Slot, ShareMember] = defaultdict(ShareMember)
        self.read_shares: set[SharePartition] = set()
        """Share partitions whose state their leader has read."""
        self.topic_ids: defaultdict[str, list[uuid.UUID]] = defaultdict(list)
        self.sessions: dict[int, tuple[int, int]] = {}
        """Client → id and next epoch of its fetch session."""
        self.ends: dict[tuple[str, int], int] = {}
        """Partition → greatest log end offset that a response has shown."""

    def topic_id(self, name: str) -> uuid.UUID:
        """Return the last known id of ``name``, the zero id if none is known."""
        known = self.topic_ids.get(name)
        return known[-1] if known else NO_TOPIC

    def place(self, topic_id: uuid.UUID) -> tuple[str, int]:
        """Return a topic's name, and which of its successive ids this is."""
        for name, ids in self.topic_ids.items():
            if topic_id in ids:
                return name, ids.index(topic_id)
        return "", topic_id.int

    def saw_topic(self, name: str | None, topic_id: str | None) -> None:
        if not name or not topic_id:
            return
        seen = uuid.UUID(topic_id)
        if seen.int and seen != self.topic_id(name):
            self.topic_ids[name] = [*self.topic_ids[name][-KEPT:], seen]
