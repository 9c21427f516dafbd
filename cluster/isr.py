"""The followers' states as their leader knows them, and the states of an ISR change.

Source: ``Replica``, ``ReplicaState``, ``PartitionState``, ``LeaderAndIsr``; KIP-497.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from enum import Enum, StrEnum
from typing import Final
from uuid import UUID

from fencepost.cluster.errors import Errors
from fencepost.cluster.image import BrokerRegistration
from fencepost.logcore.values import dataclass

UNKNOWN_OFFSET: Final = -1
ANY_BROKER_EPOCH: Final = -1
"""A broker epoch that is not compared with the registration's."""
NEVER_MS: Final = -(2**62)
"""The ``last_caught_up_ms`` of a replica that has never been caught up."""
DEFAULT_REPLICA_LAG_TIME_MAX_MS: Final = 30_000
LEADER_RECOVERED: Final = 0


@dataclass(slots=True)
class ReplicationView:
    """State shared by all leaders and followers of one broker; its owner keeps it up to date."""

    broker_id: int
    broker_epoch: int = -1
    """The epoch of this broker's registration."""
    replica_lag_time_max_ms: int = DEFAULT_REPLICA_LAG_TIME_MAX_MS
    brokers: Mapping[int, BrokerRegistration] = field(default_factory=dict)
    """Broker registrations from the latest image."""


# --- the states of an ISR and their transitions ---


class IsrState(StrEnum):
    """Whether the ISR is committed, or a change of it is pending at the controller."""

    COMMITTED = "CommittedPartitionState"
    PENDING_EXPAND = "PendingExpandIsr"
    PENDING_SHRINK = "PendingShrinkIsr"


class IsrTrigger(Enum):
    """An event that changes the state of an ISR."""

    EXPAND = "a replica outside has caught up"
    SHRINK = "members have fallen behind"
    ACCEPTED = "the controller has answered with the ISR"
    REFUSED = "the controller has surely not applied the change"
    UNCERTAIN = "the controller knows better, or applied it and this broker goes"
    AGAIN = "the controller could not say"
    METADATA = "a later registration of the partition has arrived"


_COMMITTED, _EXPAND, _SHRINK = IsrState
_IsrTable = Mapping[tuple[IsrState, IsrTrigger], IsrState]
ISR_TRANSITIONS: Final[_IsrTable] = {
    (_COMMITTED, IsrTrigger.EXPAND): _EXPAND,
    (_COMMITTED, IsrTrigger.SHRINK): _SHRINK,
    (_COMMITTED, IsrTrigger.METADATA): _COMMITTED,
} | {
    (pending, trigger): pending if stays else _COMMITTED
    for pending in (_EXPAND, _SHRINK)
    for trigger, stays in (
        (IsrTrigger.ACCEPTED, False),
        (IsrTrigger.REFUSED, False),
        (IsrTrigger.UNCERTAIN, True),
        (IsrTrigger.AGAIN, True),
        (IsrTrigger.METADATA, False),
    )
}
"""Every allowed transition; any other transition violates an invariant. No change begins while
another one is pending."""

ALTER_PARTITION_ERRORS: Final[Mapping[int, IsrTrigger]] = {
    Errors.OPERATION_NOT_ATTEMPTED: IsrTrigger.REFUSED,
    Errors.INELIGIBLE_REPLICA: IsrTrigger.REFUSED,
    Errors.UNKNOWN_TOPIC_OR_PARTITION: IsrTrigger.UNCERTAIN,
    Errors.UNKNOWN_TOPIC_ID: IsrTrigger.UNCERTAIN,
    Errors.FENCED_LEADER_EPOCH: IsrTrigger.UNCERTAIN,
    Errors.INVALID_UPDATE_VERSION: IsrTrigger.UNCERTAIN,
    Errors.INVALID_REQUEST: IsrTrigger.UNCERTAIN,
    Errors.NEW_LEADER_ELECTED: IsrTrigger.UNCERTAIN,
}
"""How errors in AlterPartition answers affect the ISR; after any other error the same change is
sent again."""


# --- inputs and outputs ---


@dataclass(frozen=True, slots=True, eq=False)
class IsrChange:
    """One ISR change to submit to the controller; equal only to itself."""

    topic: str
    topic_id: UUID
    index: int
    leader_epoch: int
    partition_epoch: int
    """The partition epoch that the partition must still have at the controller."""
    new_isr: tuple[tuple[int, int], ...]
    """Members, each with the broker epoch of its last fetch; −1 if it has not fetched in this
    leader epoch."""
    joins: tuple[int, ...]
    leaves: tuple[int, ...]
    reason: str
    """An explanation for the event history."""
    leader_recovery_state: int = LEADER_RECOVERED


@dataclass(frozen=True, slots=True)
class AlteredPartition:
    """One partition of an AlterPartition answer without an error."""

    leader_epoch: int
    partition_epoch: int
    isr: tuple[int, ...]


@dataclass(slots=True)
class ReplicaState:
    """A follower's state as its leader knows it from fetches (kafka: ``ReplicaState``)."""

    broker_id: int
    log_end_offset: int = UNKNOWN_OFFSET
    log_start_offset: int = UNKNOWN_OFFSET
    last_fetch_leader_log_end_offset: int = 0
    """The leader's log end offset at the follower's last fetch."""
    last_fetch_ms: int = NEVER_MS
    last_caught_up_ms: int = NEVER_MS
    """The latest time at which the follower held every record that the leader held at that time."""
    broker_epoch: int | None = None
    """The broker epoch of the last fetch; None before the first fetch."""

    def reset(self, now_ms: int, start: int, *, in_isr: bool) -> None:
        """Begin a leader epoch at offset ``start``.

        The follower's known offsets are kept. A member of the ISR counts as caught up now; any
        other replica only after it has fetched.
        """
        self.last_caught_up_ms = self.last_fetch_ms = now_ms if in_isr else NEVER_MS
        self.last_fetch_leader_log_end_offset = start

    def update_fetch_state(
        self, offset: int, log_start_offset: int, epoch: int, leader_end: int, now_ms: int
    ) -> None:
        """Note a fetch.

        If the fetch offset is at or above the log end offset that the leader had at the previous
        fetch, then the follower was caught up at the time of that previous fetch.
        """
        if offset >= leader_end:
            self.last_caught_up_ms = max(self.last_caught_up_ms, now_ms)
        elif offset >= self.last_fetch_leader_log_end_offset:
            self.last_caught_up_ms = max(self.last_caught_up_ms, self.last_fetch_ms)
        self.log_end_offset = offset
        self.log_start_offset = log_start_offset
        self.last_fetch_leader_log_end_offset = max(
            leader_end, self.last_fetch_leader_log_end_offset
        )
        self.last_fetch_ms = now_ms
        self.broker_epoch = epoch

    def is_caught_up(self, leader_end: int, now_ms: int, max_lag_ms: int) -> bool:
        """Whether the follower holds every record, or did so within ``max_lag_ms``.

        A follower that holds every record stays caught up without fetching, as long as nothing is
        appended.
        """
        return self.log_end_offset == leader_end or now_ms - self.last_caught_up_ms <= max_lag_ms
