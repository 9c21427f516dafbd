"""What all parts of one shard share: the group table, the offsets, limits and settings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import field
from typing import Final

from fencepost.groups.assignors.remote import ASK_AGAIN_MS
from fencepost.groups.classic_group import ClassicGroup
from fencepost.groups.classic_members import ClassicMember
from fencepost.groups.consumer_commands import Environment
from fencepost.groups.consumer_group import ConsumerGroup
from fencepost.groups.errors import GroupLimitExceededError
from fencepost.groups.foreign_group import ForeignGroup
from fencepost.groups.group import ShardTotals
from fencepost.groups.limits import GroupLimits
from fencepost.groups.offset_store import OffsetStore, TopicPartition
from fencepost.logcore.values import dataclass

MAX_REMEMBERED_ASSIGNORS: Final = 20_000
"""Groups of a shard of which it is known that their assignor was asked; as many as a shard has. A
forgotten one is asked once more."""

Group = ClassicGroup | ConsumerGroup | ForeignGroup
"""One entry of the shard's group table."""

OffsetLook = tuple[str, TopicPartition | None]
"""What upkeep looks at: a group's offset of a partition, or with None the group as a whole."""

_NEVER: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Handover:
    """What is decided and comes about when the record of ``group`` is replayed.

    ``group`` takes its place in the table, if that is not its own yet, and ``successor`` the place
    of the static member with its instance id. Requests that wait in the group wait already.
    """

    group: ClassicGroup
    successor: ClassicMember | None = None


@dataclass(slots=True)
class Shard:
    """One partition of ``__consumer_offsets`` as it stands in memory."""

    limits: GroupLimits
    initial_rebalance_delay_ms: int
    offsets_retention_ms: int
    groups: dict[str, Group] = field(default_factory=dict)
    offsets: OffsetStore = field(default_factory=OffsetStore)
    totals: ShardTotals = field(default_factory=ShardTotals)
    environment: Callable[[str], Environment] = lambda _: Environment()
    """Asked for a group by each decision that needs it, be it of a command, a timer or a load."""
    handover: Handover | None = None
    """Of the decision whose records are not replayed yet."""
    given_ids: dict[tuple[str, str], None] = field(default_factory=dict)
    """(group id, member id) that consumer groups gave out and nobody has joined with, oldest first;
    at most ``max_shard_pending_members``."""
    walks: dict[Hashable, Iterator[OffsetLook]] = field(default_factory=dict)
    """By command of upkeep, what its next pass has to look at."""
    _ask_again_ms: dict[tuple[str, str], int] = field(default_factory=dict)
    """By group and assignor, when one that runs elsewhere is asked again; oldest first."""

    def asks(self, group_id: str, assignor: str, now_ms: int) -> None:
        """Note that an answer of an assignor that runs elsewhere is on its way."""
        if len(self._ask_again_ms) >= MAX_REMEMBERED_ASSIGNORS:
            del self._ask_again_ms[next(iter(self._ask_again_ms))]
        self._ask_again_ms[group_id, assignor] = now_ms + ASK_AGAIN_MS

    def answered(self, group_id: str, assignor: str) -> None:
        """Note that the group has what it asked for."""
        if (group_id, assignor) in self._ask_again_ms:
            self._ask_again_ms[group_id, assignor] = _NEVER

    def is_due(self, group_id: str, assignor: str, now_ms: int) -> bool:
        """Whether the assignor was never asked since the load, or too long ago in vain."""
        return now_ms >= self._ask_again_ms.get((group_id, assignor), 0)

    def give_id(self, group_id: str, member_id: str) -> None:
        """Remember that a consumer group told a classic member to come back with this id."""
        self.given_ids[group_id, member_id] = None
        if len(self.given_ids) > self.limits.max_shard_pending_members:
            del self.given_ids[next(iter(self.given_ids))]

    def require(self, what: str, amount: int, limit: str) -> None:
        """Raise :class:`GroupLimitExceededError` if ``amount`` is more than a limit allows."""
        most: int = getattr(self.limits, limit)
        if amount > most:
            raise GroupLimitExceededError(f"{what} exceeds {limit}={most}")

    def require_room_for_group(self, group_id: str) -> None:
        """Raise :class:`GroupLimitExceededError` unless a group may be created."""
        self.require_short("group id", group_id)
        self.require("the shard", len(self.groups) + 1, "max_groups")

    def require_room_for_members(self, members: int, metadata_bytes: int) -> None:
        """Raise :class:`GroupLimitExceededError` unless so much more fits into the shard."""
        totals = self.totals
        self.require("the shard", totals.members + members, "max_shard_members")
        more_bytes = totals.metadata_bytes + metadata_bytes
        self.require("the shard", more_bytes, "max_shard_metadata_bytes")

    def require_short(self, what: str, text: str, limit: str = "max_identifier_bytes") -> None:
        """Raise :class:`GroupLimitExceededError` if an identifier is longer than a limit allows."""
        # A character takes at most four bytes, so most texts need not be encoded to know.
        if len(text) * 4 > getattr(self.limits, limit):
            self.require(what, len(text.encode()), limit)

    def require_small_subscription(self, names: Collection[str], rack_id: str | None) -> None:
        """Raise :class:`GroupLimitExceededError` if a consumer's subscription is too large."""
        self.require("the subscription", len(names), "max_subscribed_topics")
        size = sum(len(name.encode()) for name in names)
        self.require("the subscription", size, "max_metadata_bytes")
        for name in names:
            self.require_short("a topic name", name, "max_topic_name_bytes")
        self.require_short("rack id", rack_id or "")
