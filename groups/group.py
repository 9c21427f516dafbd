"""The common part of all kinds of groups."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import field
from typing import ClassVar, Final, Literal

from fencepost.groups.errors import GroupIdNotFoundError
from fencepost.logcore.budget import Account
from fencepost.logcore.machine import InvariantViolation
from fencepost.logcore.values import dataclass

GROUP_BYTES: Final = 1_536
"""The memory, in bytes, of a group without its id and its members. This constant and the next three
were measured."""
MEMBER_BYTES: Final = 1_024
"""The memory, in bytes, of a member without its strings: its fields, its timers, and its part of
the group's record."""
NAME_BYTES: Final = 64
"""The memory, in bytes, of a string without its characters."""
PARTITION_BYTES: Final = 512
"""The memory, in bytes, of one partition of a consumer group. The partition is in a member's
current assignment and in the member's target."""


@dataclass(slots=True)
class ShardTotals:
    """The memory of a shard's groups, and the member ids that the groups gave out.

    The groups update these totals; ``GroupMachine.check`` recounts them.
    """

    memory: Account = field(default_factory=Account)
    """The memory of all groups with their members; see :data:`GROUP_BYTES` and what follows it."""
    pending: dict[tuple[str, str], None] = field(default_factory=dict)
    """The (group id, member id) of members that have not rejoined with their id, oldest first."""

    def add_pending(self, group_id: str, member_id: str) -> None:
        """Remember a member id that was given out."""
        if (group_id, member_id) not in self.pending:
            self.pending[group_id, member_id] = None
            self.memory.add(pending_bytes(group_id, member_id))

    def forget_pending(self, group_id: str, member_id: str) -> None:
        """Forget a member id if it is pending."""
        if (group_id, member_id) in self.pending:
            del self.pending[group_id, member_id]
            self.memory.add(-pending_bytes(group_id, member_id))


def pending_bytes(group_id: str, member_id: str) -> int:
    """Return the memory of a pending member id, with its timer."""
    return MEMBER_BYTES + text_bytes(group_id, member_id)


def protocols_bytes(protocols: Iterable[tuple[str, bytes]]) -> int:
    """Return the memory of a classic member's metadata for all its protocols."""
    return sum(NAME_BYTES + len(metadata) + text_bytes(name) for name, metadata in protocols)


def text_bytes(*texts: str | None) -> int:
    """Return the memory of strings."""
    return sum(NAME_BYTES + len(text) * (1 if text.isascii() else 4) for text in texts if text)


TimerKind = Literal["assignor", "join", "rebalance", "regex", "session", "sync"]


def not_found(group: object, group_id: str, kind: str = "") -> GroupIdNotFoundError:
    """Return Kafka's error for a group that does not exist, or is not of this kind."""
    reason = "not found" if group is None else f"is not a {kind} group"
    return GroupIdNotFoundError(f"Group {group_id} {reason}.")


class GroupBase:
    """Base of all kinds of groups; ``totals`` counts the memory of the group's shard.

    ``offsets.py`` and ``admin.py`` call the same methods for every kind of group; the docstrings of
    ``ClassicGroup`` describe these methods.
    """

    type_name: ClassVar[str]
    """Kafka's name of the type, as in ListGroups."""

    def __init__(self, group_id: str, totals: ShardTotals) -> None:
        self.group_id = group_id
        self._totals = totals

    def timer(self, kind: TimerKind, *member_id: str) -> Hashable:
        """Return the key of a group's or member's timer; ``groups/README.md`` lists them."""
        return (kind, self.group_id, *member_id)

    @property
    def state_name(self) -> str:
        """Kafka's name of the group's state."""
        raise NotImplementedError

    def _require(self, condition: bool, problem: str) -> None:
        if not condition:
            kind, state = self.type_name, self.state_name
            raise InvariantViolation(f"{kind} group {self.group_id!r} in {state}: {problem}")
