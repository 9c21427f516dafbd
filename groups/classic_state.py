"""The states of a classic group and every legal transition between them.

Every change of a group's state must be in :data:`TRANSITIONS`; any other change raises
InvariantViolation. A group that is loaded from its record starts in ``Stable`` (with members) or
``Empty`` (without), and a new group in ``Empty``; entering the first state is no transition.

Source: Kafka's ``ClassicGroupState``.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from fencepost.logcore.machine import InvariantViolation


class ClassicState(StrEnum):
    """A group's state; the value is the name in DescribeGroups and ListGroups."""

    EMPTY = "Empty"
    """No members; perhaps offsets."""
    PREPARING_REBALANCE = "PreparingRebalance"
    """The join phase: members are asked to rejoin, their JoinGroups are parked."""
    COMPLETING_REBALANCE = "CompletingRebalance"
    """The new generation is known; the group waits for its leader's SyncGroup."""
    STABLE = "Stable"
    """The leader's assignment is in the log."""
    DEAD = "Dead"
    """Removed, or the shard stops serving."""


_E = ClassicState.EMPTY
_P = ClassicState.PREPARING_REBALANCE
_C = ClassicState.COMPLETING_REBALANCE
_S = ClassicState.STABLE
_D = ClassicState.DEAD

TRANSITIONS: Final[Mapping[tuple[ClassicState, ClassicState], str]] = MappingProxyType(
    {
        (_E, _P): "first member joins",
        (_P, _C): "join phase ends with members",
        (_P, _E): "join phase ends without members",
        (_C, _S): "leader's assignment replayed",
        (_C, _P): "member joins, leaves, changes or does not sync",
        (_S, _P): "member joins, leaves, changes or expires",
        (_E, _D): "group deleted, expired or given another kind, shard unloaded",
        (_P, _D): "became a consumer group, shard unloaded",
        (_C, _D): "became a consumer group, shard unloaded",
        (_S, _D): "became a consumer group, shard unloaded",
    }
)
"""The cause of each transition (from, to)."""


def require_transition(source: ClassicState, target: ClassicState, group_id: str) -> None:
    """Raise :class:`InvariantViolation` unless the table lists ``source`` → ``target``."""
    if (source, target) not in TRANSITIONS:
        raise InvariantViolation(f"group {group_id!r} may not go from {source} to {target}")
