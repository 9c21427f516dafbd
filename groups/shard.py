"""The state that all parts of one shard share: groups, offsets, limits and settings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import field
from typing import Final

from fencepost.groups.assignors.remote import RETRY_MS
from fencepost.groups.classic_group import ClassicGroup
from fencepost.groups.classic_members import ClassicMember
from fencepost.groups.consumer_commands import Environment
from fencepost.groups.consumer_group import ConsumerGroup
from fencepost.groups.errors import GroupLimitExceededError
from fencepost.groups.foreign_group import ForeignGroup
from fencepost.groups.group import GROUP_BYTES, ShardTotals, pending_bytes, text_bytes
from fencepost.groups.limits import GroupLimits
from fencepost.groups.offset_store import OffsetStore, TopicPartition
from fencepost.groups.records import batch_bytes
from fencepost.groups.share_group import ShareGroup
from fencepost.logcore.machine import Record
from fencepost.logcore.values import dataclass

MAX_BATCH_BYTES: Final = 1_048_588
"""Kafka's default of ``max.message.bytes``."""

MAX_REMEMBERED_ASSIGNORS: Final = 20_000
"""The maximum number of remembered requests to assignors, equal to ``max_groups``. A forgotten
request is sent again."""

Group = ClassicGroup | ConsumerGroup | ShareGroup | ForeignGroup
"""One entry of the shard's group table."""

OffsetScanItem = tuple[str, TopicPartition | None]
"""An item of a scan over all offsets: a group id with a partition, or with None at the group's
end."""

_NEVER: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class PendingInstall:
    """Soft state that the replay of a GroupMetadata record installs.

    ``group`` is a new or converted group that the replay puts into the group table; requests may
    already be parked in the group. ``successor`` replaces the static member with the same instance
    id.
    """

    group: ClassicGroup
    successor: ClassicMember | None = None


@dataclass(slots=True)
class Shard:
    """The state of one partition of ``__consumer_offsets`` in memory."""

    limits: GroupLimits
    initial_rebalance_delay_ms: int
    offsets_retention_ms: int
    groups: dict[str, Group] = field(default_factory=dict)
    offsets: OffsetStore = field(default_factory=OffsetStore)
    totals: ShardTotals = field(default_factory=ShardTotals)
    max_batch_bytes: Callable[[], int] = lambda: MAX_BATCH_BYTES
    """``max.message.bytes`` of ``__consumer_offsets``: a decision's records form one batch."""
    environment: Callable[[str], Environment] = lambda _: Environment()
    """Returns the environment of a group. It is called by each decision that needs the environment:
    on a command, on an expired timer, or when the shard is loaded."""
    pending_install: PendingInstall | None = None
    """The soft state of the decision whose records are not replayed yet."""
    pending_member_ids: dict[tuple[str, str], None] = field(default_factory=dict)
    """The pending members of consumer groups: (group id, member id), oldest first; at most
    ``max_shard_pending_members``."""
    upkeep_passes: dict[Hashable, Iterator[OffsetScanItem]] = field(default_factory=dict)
    """ExpireOffsets or TopicsDeleted command → the items that its scan has yet to examine."""
    share_rebalances: int = 0
    """The number of heartbeats that required a new assignment of a share group."""
    _retry_at_ms: dict[tuple[str, str], int] = field(default_factory=dict)
    """When a group may ask a remote assignor again, by (group, assignor); the oldest first."""

    def note_assignor_request(self, group_id: str, assignor: str, now_ms: int) -> None:
        """Note a request to a remote assignor."""
        if len(self._retry_at_ms) >= MAX_REMEMBERED_ASSIGNORS:
            del self._retry_at_ms[next(iter(self._retry_at_ms))]
        self._retry_at_ms[group_id, assignor] = now_ms + RETRY_MS

    def mark_answered(self, group_id: str, assignor: str) -> None:
        """Note that the assignor has answered the group's request."""
        if (group_id, assignor) in self._retry_at_ms:
            self._retry_at_ms[group_id, assignor] = _NEVER

    def may_request_assignor(self, group_id: str, assignor: str, now_ms: int) -> bool:
        """Whether the assignor was not asked since the load, or has not answered in time."""
        return now_ms >= self._retry_at_ms.get((group_id, assignor), 0)

    def reserve_member_id(self, group_id: str, member_id: str) -> None:
        """Note that a classic member must rejoin a consumer group with this id (KIP-394)."""
        if (group_id, member_id) not in self.pending_member_ids:
            self.pending_member_ids[group_id, member_id] = None
            self.totals.memory.add(pending_bytes(group_id, member_id))
        if len(self.pending_member_ids) > self.limits.max_shard_pending_members:
            self.release_member_id(*next(iter(self.pending_member_ids)))

    def release_member_id(self, group_id: str, member_id: str) -> None:
        """Forget a member id of a consumer group if it is pending."""
        if (group_id, member_id) in self.pending_member_ids:
            del self.pending_member_ids[group_id, member_id]
            self.totals.memory.add(-pending_bytes(group_id, member_id))

    # --- the table of groups ---

    def put_group(self, group: Group) -> None:
        """Put ``group`` into the table, in place of another group with its name."""
        if group.group_id not in self.groups:
            self.totals.memory.add(group_bytes(group.group_id))
        self.groups[group.group_id] = group

    def drop_group(self, group_id: str) -> None:
        """Remove a group from the table, if the table contains it."""
        if self.groups.pop(group_id, None) is not None:
            self.totals.memory.add(-group_bytes(group_id))

    # --- limits ---

    def require(self, subject: str, amount: int, limit: str) -> None:
        """Raise :class:`GroupLimitExceededError` if ``amount`` exceeds a limit."""
        most: int = getattr(self.limits, limit)
        if amount > most:
            raise GroupLimitExceededError(f"{subject} exceeds {limit}={most}")

    def require_room_for_group(self, group_id: str) -> None:
        """Raise :class:`GroupLimitExceededError` unless a group may be created."""
        self.require_short("group id", group_id)
        self.require("the shard", len(self.groups) + 1, "max_groups")
        self.require_memory(group_id)

    def require_memory(self, group_id: str, added_bytes: int = 0) -> None:
        """Raise :class:`GroupLimitExceededError` unless the memory limit allows the addition."""
        memory = self.totals.memory
        if group_id not in self.groups:
            added_bytes += group_bytes(group_id)
        if not memory.has_room(added_bytes):
            raise GroupLimitExceededError(memory.budget.exceeded)

    def require_batch(self, subject: str, records: Collection[Record]) -> None:
        """Raise :class:`GroupLimitExceededError` unless records fit one batch of the topic."""
        why = self.too_large(subject, records)
        if why is not None:
            raise GroupLimitExceededError(why)

    def too_large(self, subject: str, records: Collection[Record]) -> str | None:
        """Return why records do not fit one batch of the topic, None if they do."""
        size, most = batch_bytes(records), self.max_batch_bytes()
        if size <= most:
            return None
        return f"{subject} takes {size} bytes, max.message.bytes of the offsets topic is {most}"

    def require_short(self, subject: str, text: str) -> None:
        """Raise :class:`GroupLimitExceededError` if a string is longer than a record can hold."""
        # A character takes at most four bytes, so most texts need not be encoded for the check.
        if len(text) * 4 > self.limits.max_string_bytes:
            self.require(subject, len(text.encode()), "max_string_bytes")

    def require_fits_record(self, subject: str, size: int) -> None:
        """Raise :class:`GroupLimitExceededError` if no record could hold ``size`` bytes."""
        most = self.max_batch_bytes()
        if size > most:
            raise GroupLimitExceededError(
                f"{subject} takes {size} bytes, max.message.bytes of the offsets topic is {most}"
            )

    def require_small_subscription(self, names: Collection[str], rack_id: str | None) -> None:
        """Raise :class:`GroupLimitExceededError` if a consumer's subscription is too large."""
        self.require("the subscription", len(names), "max_subscribed_topics")
        self.require_fits_record("the subscription", sum(len(name.encode()) for name in names))
        for name in names:
            self.require_short("a topic name", name)
        self.require_short("rack id", rack_id or "")


def group_bytes(group_id: str) -> int:
    """Return the memory of a group without its members and offsets."""
    return GROUP_BYTES + text_bytes(group_id)
