"""What both kinds of groups have in common."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import field
from typing import ClassVar, Literal

from fencepost.groups.errors import GroupIdNotFoundError
from fencepost.logcore.machine import InvariantViolation
from fencepost.logcore.values import dataclass


@dataclass(slots=True)
class ShardTotals:
    """What the members of all groups of a shard add up to; see ``limits.GroupLimits``.

    Groups keep it up to date themselves; ``GroupMachine.check`` counts again.
    """

    members: int = 0
    metadata_bytes: int = 0
    pending: dict[tuple[str, str], None] = field(default_factory=dict)
    """(group id, member id) of members that have not come back with their id, oldest first."""


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
