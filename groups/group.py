"""What every kind of group has in common, as far as offsets and administration need it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from fencepost.groups.commands import ListedGroup, OffsetToCommit
from fencepost.groups.errors import GroupIdNotFoundError
from fencepost.logcore.machine import DecisionBuilder, Record


@dataclass(slots=True)
class ShardTotals:
    """What the members of all groups of a shard add up to; see ``limits.GroupLimits``.

    Groups keep it up to date themselves; ``GroupMachine.check`` counts again.
    """

    members: int = 0
    metadata_bytes: int = 0
    pending: dict[tuple[str, str], None] = field(default_factory=dict)
    """(group id, member id) of members that have not come back with their id, oldest first."""


def not_found(group: Group | None, group_id: str, kind: str = "") -> GroupIdNotFoundError:
    """Say in Kafka's words that there is no such group, or that it is not of this kind."""
    what = "not found" if group is None else f"is not a {kind} group"
    return GroupIdNotFoundError(f"Group {group_id} {what}.")


class Group(ABC):
    """One entry of the shard's group table. Subclasses are the group types."""

    type_name: ClassVar[str]
    """Kafka's name of the type, as ListGroups tells it."""

    def __init__(self, group_id: str) -> None:
        self.group_id = group_id

    @property
    @abstractmethod
    def state_name(self) -> str:
        """Kafka's name of the group's state."""

    @property
    @abstractmethod
    def is_empty(self) -> bool:
        """Whether the group has no members, so that it may be deleted."""

    @property
    @abstractmethod
    def is_awaited(self) -> bool:
        """Whether somebody is about to join the empty group, so that upkeep leaves it alone."""

    @abstractmethod
    def listed(self) -> ListedGroup:
        """Return the group's line in ListGroups."""

    @abstractmethod
    def validate_commit(
        self,
        member_id: str,
        group_instance_id: str | None,
        generation_id: int,
        offsets: Iterable[OffsetToCommit],
        *,
        in_txn: bool,
        knows_member_epochs: bool,
    ) -> None:
        """Raise a :class:`fencepost.groups.errors.GroupError` unless this sender may commit now.

        ``knows_member_epochs``: the request is of a version that does (OffsetCommit v9,
        TxnOffsetCommit v6).
        """

    @abstractmethod
    def validate_fetch(self, member_id: str | None, member_epoch: int) -> None:
        """Raise a ``GroupError`` unless this sender may fetch offsets."""

    @abstractmethod
    def committed(self, decision: DecisionBuilder, member_id: str) -> None:
        """Count an accepted, not transactional commit as a sign of life of ``member_id``."""

    @abstractmethod
    def validate_offset_delete(self) -> None:
        """Raise ``NonEmptyGroupError`` unless offsets may be deleted."""

    @abstractmethod
    def is_subscribed_to(self, topic: str) -> bool:
        """Whether a member consumes ``topic``, or might."""

    @abstractmethod
    def expiry_base_ms(self, commit_timestamp_ms: int) -> int | None:
        """Return when the retention of an offset committed then begins; None while it does not."""

    @abstractmethod
    def tombstones(self) -> Iterable[Record]:
        """Return the records that remove the group from the log, offsets aside."""

    @abstractmethod
    def removed(self, decision: DecisionBuilder) -> None:
        """Cancel timers and forget who was about to join: the group's tombstone is decided."""

    @abstractmethod
    def unloaded(self, decision: DecisionBuilder) -> None:
        """Answer every parked request: the shard stops serving."""

    @abstractmethod
    def durable_state(self) -> object:
        """Return what the log says of the group, None if nothing, in a form with a stable repr."""

    @abstractmethod
    def check(self) -> None:
        """Raise ``InvariantViolation`` if the group contradicts itself."""
