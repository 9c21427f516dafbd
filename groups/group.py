"""What both kinds of groups have in common."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import field
from typing import ClassVar, Final, Literal

from fencepost.groups.errors import GroupIdNotFoundError
from fencepost.logcore.budget import Account
from fencepost.logcore.machine import InvariantViolation
from fencepost.logcore.values import dataclass

GROUP_BYTES: Final = 1_536
"""Memory of a group besides its id and its members; this and the others are measured."""
MEMBER_BYTES: Final = 1_024
"""Memory of a member besides its strings, with its timers and its part of the group's record."""
NAME_BYTES: Final = 64
"""Memory of one string besides its characters."""
PARTITION_BYTES: Final = 512
"""Memory of a partition that a member of a consumer group has, in its target as well."""


@dataclass(slots=True)
class ShardTotals:
    """The memory of a shard's groups, and the ids that they gave out.

    Groups keep it up to date themselves; ``GroupMachine.check`` counts again.
    """

    memory: Account = field(default_factory=Account)
    """Bytes of all groups with their members; see :data:`GROUP_BYTES` and what follows it."""
    pending: dict[tuple[str, str], None] = field(default_factory=dict)
    """(group id, member id) of members that have not come back with their id, oldest first."""

    def add_pending(self, group_id: str, member_id: str) -> None:
        """Remember an id that was given out."""
        if (group_id, member_id) not in self.pending:
            self.pending[group_id, member_id] = None
            self.memory.add(pending_bytes(group_id, member_id))

    def forget_pending(self, group_id: str, member_id: str) -> None:
        """Forget an id that was given out; no harm if it was not."""
        if (group_id, member_id) in self.pending:
            del self.pending[group_id, member_id]
            self.memory.add(-pending_bytes(group_id, member_id))


def pending_bytes(group_id: str, member_id: str) -> int:
    """Return the memory of an id that was given out, with its timer."""
    return MEMBER_BYTES + text_bytes(group_id, member_id)


def protocols_bytes(protocols: Iterable[tuple[str, bytes]]) -> int:
    """Return the memory of what a classic member says in each protocol."""
    return sum(NAME_BYTES + len(metadata) + text_bytes(name) for name, metadata in protocols)


def text_bytes(*texts: str | None) -> int:
    """Return the memory of strings."""
    return sum(NAME_BYTES + len(text) * (1 if text.isascii() else 4) for text in texts if text)


TimerKind = Literal["assignor", "join", "rebalance", "regex", "session", "sync"]


def not_found(group: object, group_id: str, kind: str = "") -> GroupIdNotFoundError:
    """Say in Kafka's words that there is no such group, or that it is not of this kind."""
    what = "not found" if group is None else f"is not a {kind} group"
    return GroupIdNotFoundError(f"Group {group_id} {what}.")


class GroupBase:
    """A group; ``totals`` are those of its shard.

    What offsets and administration ask of either kind, both have: see ``ClassicGroup``.
    """

    type_name: ClassVar[str]
    """Kafka's name of the type, as ListGroups tells it."""

    def __init__(self, group_id: str, totals: ShardTotals) -> None:
        self.group_id = group_id
        self._totals = totals

    def timer(self, kind: TimerKind, *member_id: str) -> Hashable:
        """Name a timer of the group, or of one of its members; ``groups/README.md`` lists them."""
        return (kind, self.group_id, *member_id)

    @property
    def state_name(self) -> str:
        """Kafka's name of the group's state."""
        raise NotImplementedError

    def _require(self, condition: bool, what: str) -> None:
        if not condition:
            kind, state = self.type_name, self.state_name
            raise InvariantViolation(f"{kind} group {self.group_id!r} in {state}: {what}")
