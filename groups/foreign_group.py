"""Streams groups, whose records this broker keeps without coordinating the groups.

A partition of ``__consumer_offsets`` that Apache Kafka has led may contain such groups. A group of
another kind must not have the same name, because Kafka's coordinator could not load such a log. The
records of a streams group stay unchanged, and its offsets do not expire here; its members must wait
until a broker that supports such groups leads the partition.

Source: ``StreamsGroup`` and the ``*Key.json`` schemas of Kafka 4.3.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import ClassVar, Final

from fencepost.groups.commands import ListedGroup, OffsetToCommit
from fencepost.groups.errors import UnknownMemberIdError, UnsupportedGroupRequestError
from fencepost.groups.group import (
    MEMBER_BYTES,
    GroupBase,
    ShardTotals,
    text_bytes,
)
from fencepost.logcore.machine import DecisionBuilder, InvariantViolation, Record
from fencepost.logcore.values import dataclass

STREAMS: Final = "streams"


class ForeignRecordType(IntEnum):
    """The type at the beginning of a key."""

    STREAMS_METADATA = 17
    STREAMS_PARTITION_METADATA = 18
    STREAMS_MEMBER_METADATA = 19
    STREAMS_TARGET_ASSIGNMENT_METADATA = 20
    STREAMS_TARGET_ASSIGNMENT_MEMBER = 21
    STREAMS_CURRENT_MEMBER_ASSIGNMENT = 22
    STREAMS_TOPOLOGY = 23


_Type = ForeignRecordType
PER_MEMBER: Final = {
    _Type.STREAMS_MEMBER_METADATA,
    _Type.STREAMS_TARGET_ASSIGNMENT_MEMBER,
    _Type.STREAMS_CURRENT_MEMBER_ASSIGNMENT,
}
"""Types with a member id in the key."""


@dataclass(frozen=True, slots=True)
class ForeignKey:
    """A key. ``member_id`` is "" for a type with one record per group."""

    kind: ForeignRecordType
    group_id: str
    member_id: str = ""


@dataclass(frozen=True, slots=True)
class ForeignValue:
    """A value whose content is not read."""


class ForeignGroup(GroupBase):
    """A group whose protocol this broker does not support: its record keys and its member ids."""

    type_name: ClassVar[str] = "foreign"

    def __init__(self, group_id: str, totals: ShardTotals) -> None:
        super().__init__(group_id, totals)
        self.keys: set[ForeignKey] = set()

    @property
    def members(self) -> Mapping[str, None]:
        """The ids of the group's members. No limit applies to their number."""
        ids = (key.member_id for key in self.keys if key.kind is _Type.STREAMS_MEMBER_METADATA)
        return MappingProxyType(dict.fromkeys(ids))

    def replay(self, key: ForeignKey, *, exists: bool) -> None:
        """Note a record or its tombstone."""
        if exists == (key in self.keys):
            return
        if exists:
            self.keys.add(key)
        else:
            self.keys.remove(key)
        self._totals.memory.add(_key_bytes(key) if exists else -_key_bytes(key))

    @property
    def is_removed(self) -> bool:
        """Whether tombstones have removed every record of the group."""
        return not self.keys

    def discard(self) -> None:
        """Subtract the group from the shard's totals, because it leaves the table."""
        self._totals.memory.add(-self.memory_bytes)
        self.keys.clear()

    @property
    def memory_bytes(self) -> int:
        """See ``ClassicGroup``."""
        return sum(map(_key_bytes, self.keys))

    # --- methods of all kinds of groups ----------------------------------------------------------

    @property
    def state_name(self) -> str:
        """See ``ClassicGroup``. The state of a group with members is unknown here."""
        return "Unknown" if self.members else "Empty"

    @property
    def is_empty(self) -> bool:
        """See ``ClassicGroup``."""
        return not self.members

    @property
    def is_exempt_from_expiration(self) -> bool:
        """See ``ClassicGroup``: this broker never removes the group."""
        return True

    def as_listed_group(self) -> ListedGroup:
        """See ``ClassicGroup``."""
        return ListedGroup(self.group_id, STREAMS, self.state_name, STREAMS)

    def validate_commit(
        self,
        member_id: str,
        group_instance_id: str | None,
        generation_id: int,
        offsets: Iterable[OffsetToCommit],  # noqa: ARG002 - no member's epoch is known
        *,
        in_txn: bool,
        knows_member_epochs: bool,  # noqa: ARG002 - likewise
    ) -> None:
        """See ``ClassicGroup``."""
        if generation_id < 0 and not self.members:
            return
        if in_txn and (generation_id, member_id, group_instance_id) == (-1, "", None):
            return
        if member_id not in self.members:
            raise UnknownMemberIdError(f"group {self.group_id!r} has no member {member_id!r}")
        raise self.not_served()

    def validate_fetch(self, member_id: str | None, member_epoch: int) -> None:
        """See ``ClassicGroup``."""
        if member_id is None and member_epoch < 0:
            return
        if member_id not in self.members:
            raise UnknownMemberIdError(f"group {self.group_id!r} has no member {member_id!r}")

    def on_committed(self, decision: DecisionBuilder, member_id: str) -> None:
        """See ``ClassicGroup``."""

    def validate_offset_delete(self) -> None:
        """See ``ClassicGroup``. Any offset may be deleted."""

    def is_subscribed_to(self, topic: str) -> bool:  # noqa: ARG002 - any might be
        """See ``ClassicGroup``: the members' subscriptions are unknown."""
        return bool(self.members)

    def expiry_base_ms(self, commit_timestamp_ms: int) -> int | None:  # noqa: ARG002 - never
        """See ``ClassicGroup``: its offsets never expire on this broker."""
        return None

    def tombstones(self) -> Iterator[Record]:
        """See ``ClassicGroup``: this broker never removes the group."""
        raise InvariantViolation(f"streams group {self.group_id!r} is to be removed")

    def on_removed(self, decision: DecisionBuilder) -> None:
        """See ``ClassicGroup``."""

    def on_unloaded(self, decision: DecisionBuilder) -> None:
        """See ``ClassicGroup``. No request of such a group is ever parked."""

    def durable_state(self) -> object:
        """See ``ClassicGroup``."""
        return STREAMS, sorted((key.kind, key.member_id) for key in self.keys)

    def check(self) -> None:
        """See ``ClassicGroup``."""
        self._require(bool(self.keys), "a group without a record")

    def not_served(self) -> UnsupportedGroupRequestError:
        """Return the error for a request of a member of the group."""
        return UnsupportedGroupRequestError("this broker does not serve streams groups")


def _key_bytes(key: ForeignKey) -> int:
    return MEMBER_BYTES + text_bytes(key.member_id)
