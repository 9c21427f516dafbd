"""The states of a shard (``shard.py``)."""

from __future__ import annotations

from enum import Enum


class ShardState(Enum):
    """A shard's life. A closed shard does not come back; a new one is made."""

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
"""Which state may follow which; anything else is a bug."""

LOADING_STATES = frozenset({ShardState.INITIAL, ShardState.LOADING})
"""In these a client should stay and ask again; in the others it looks for another coordinator."""
