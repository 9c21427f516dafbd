"""The states of a record in a share partition, and the table of legal transitions.

A record that no fetch has read has no state, and neither has a record below the start offset.

Source: Kafka's ``RecordState``, ``AcknowledgeType`` and ``SharePartition.SharePartitionState``.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Final

from fencepost.logcore.machine import InvariantViolation


class RecordState(IntEnum):
    """The delivery state of a record; the number is the one in records and requests."""

    AVAILABLE = 0
    ACQUIRED = 1
    ACKNOWLEDGED = 2
    ARCHIVING = 3
    """On its way to the dead-letter queue (KIP-1191)."""
    ARCHIVED = 4

    @property
    def is_terminal(self) -> bool:
        """Whether the delivery of the record is complete."""
        return self in _TERMINAL


_TERMINAL: Final = frozenset({RecordState.ACKNOWLEDGED, RecordState.ARCHIVED})


class AcknowledgeType(IntEnum):
    """The byte with which a client acknowledges a record."""

    GAP = 0
    """There is no record at the offset: it was compacted, or is a control record."""
    ACCEPT = 1
    RELEASE = 2
    REJECT = 3
    RENEW = 4


class PartitionState(Enum):
    """The state of a share partition as a whole."""

    EMPTY = "empty"
    INITIALIZING = "initializing"
    ACTIVE = "active"
    FAILED = "failed"
    """Reading the persisted state failed: the next fetch begins with a new share partition."""
    FENCED = "fenced"
    """The broker has dropped the share partition, because another broker leads the partition,
    because the share coordinator has a later state epoch, or because no session is left."""


class Cause(Enum):
    """The reason for a transition; the event history and the dead-letter queue report it."""

    FETCHED = "fetched"
    ACKNOWLEDGED = "acknowledged"
    RELEASED = "released by its owner"
    LOCK_EXPIRED = "acquisition lock expired"
    SESSION_CLOSED = "share session closed by its owner"
    CONNECTION_CLOSED = "its owner's connection closed"
    REJECTED = "rejected by its owner"
    ROLLED_BACK = "state not written"
    NO_RECORD = "no record at the offset"
    TRANSACTION_ABORTED = "transaction aborted"
    DEAD_LETTERED = "dead-letter queue done"


_S, _C = RecordState, Cause

TRANSITIONS: Final[dict[tuple[RecordState | None, RecordState], tuple[Cause, ...]]] = {
    (None, _S.ACQUIRED): (_C.FETCHED,),
    (None, _S.AVAILABLE): (_C.FETCHED,),
    (_S.AVAILABLE, _S.ACQUIRED): (_C.FETCHED, _C.ROLLED_BACK),
    (_S.AVAILABLE, _S.ARCHIVED): (_C.NO_RECORD,),
    (_S.ACQUIRED, _S.ACKNOWLEDGED): (_C.ACKNOWLEDGED,),
    (_S.ACQUIRED, _S.AVAILABLE): (
        _C.RELEASED,
        _C.LOCK_EXPIRED,
        _C.SESSION_CLOSED,
        _C.CONNECTION_CLOSED,
    ),
    (_S.ACQUIRED, _S.ARCHIVING): (
        _C.REJECTED,
        _C.RELEASED,
        _C.LOCK_EXPIRED,
        _C.SESSION_CLOSED,
        _C.CONNECTION_CLOSED,
    ),
    (_S.ACQUIRED, _S.ARCHIVED): (
        _C.REJECTED,
        _C.RELEASED,
        _C.LOCK_EXPIRED,
        _C.SESSION_CLOSED,
        _C.CONNECTION_CLOSED,
        _C.NO_RECORD,
        _C.TRANSACTION_ABORTED,
    ),
    (_S.ARCHIVING, _S.ARCHIVED): (_C.DEAD_LETTERED,),
    # A transition under way is undone when the state cannot be written.
    (_S.ACKNOWLEDGED, _S.ACQUIRED): (_C.ROLLED_BACK,),
    (_S.ARCHIVING, _S.ACQUIRED): (_C.ROLLED_BACK,),
    (_S.ARCHIVED, _S.ACQUIRED): (_C.ROLLED_BACK,),
}
"""The causes of each transition (old state, new state). An unread record has the old state None."""


def require_legal(old: RecordState | None, new: RecordState, cause: Cause) -> None:
    """Raise InvariantViolation unless the table contains the transition."""
    if cause not in TRANSITIONS.get((old, new), ()):
        raise InvariantViolation(f"{old} to {new}: {cause.value}")


MIN_THROTTLE_COUNT: Final = 2
"""Kafka's ``MINIMUM_THROTTLE_RECORDS_DELIVERY_LIMIT``: a record delivered once is not throttled."""


def throttle_count(delivery_count_limit: int) -> int:
    """Return the delivery count from which on records are delivered in smaller portions.

    A record that crashes its consumer would otherwise raise the count of the whole batch.
    """
    return max(MIN_THROTTLE_COUNT, (delivery_count_limit + 1) // 2)
