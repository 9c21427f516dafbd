"""The states of a shard (``shard.py``)."""

from __future__ import annotations

from enum import Enum


class ShardState(Enum):
    """The states of a shard. A closed shard is never reopened; a new one is created."""

    INITIAL = "Initial"
    LOADING = "Loading"
    ACTIVE = "Active"
    FAILED = "Failed"
    CLOSED = "Closed"


SHARD_TRANSITIONS: dict[ShardState, frozenset[ShardState]] = {
    ShardState.INITIAL: frozenset({ShardState.LOADING, ShardState.CLOSED}),
    ShardState.LOADING: frozenset({ShardState.ACTIVE, ShardState.FAILED, ShardState.CLOSED}),
    ShardState.ACTIVE: frozenset({ShardState.FAILED, ShardState.CLOSED}),
    ShardState.FAILED: frozenset({ShardState.LOADING, ShardState.CLOSED}),
    ShardState.CLOSED: frozenset(),
}
"""The allowed transitions; any other is a bug."""

LOADING_STATES = frozenset({ShardState.INITIAL, ShardState.LOADING})
"""States in which a client should retry. In any other state it looks for another coordinator."""
