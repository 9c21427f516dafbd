"""What a leader knows of its followers, and the states of an ISR while it is being changed.

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
"""The broker epoch of a fetch that is not compared with the registration's."""
NEVER_MS: Final = -(2**62)
"""A time so long ago that nobody has been caught up since."""
DEFAULT_REPLICA_LAG_TIME_MAX_MS: Final = 30_000
LEADER_RECOVERED: Final = 0


@dataclass(slots=True)
class ReplicationView:
    """What all leaders and followers of one broker look at; the shell keeps it up to date."""

    broker_id: int
    broker_epoch: int = -1
    """That of this broker's own registration."""
    replica_lag_time_max_ms: int = DEFAULT_REPLICA_LAG_TIME_MAX_MS
    brokers: Mapping[int, BrokerRegistration] = field(default_factory=dict)
    """Registrations as the latest image has them."""


# --- the states of an ISR and what moves it between them ---


class IsrState(StrEnum):
    """Whether the ISR is known, or a change of it is at the controller."""

    COMMITTED = "CommittedPartitionState"
    PENDING_EXPAND = "PendingExpandIsr"
    PENDING_SHRINK = "PendingShrinkIsr"


class IsrTrigger(Enum):
    """What happens to an ISR."""

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
"""The whole table; what is not in it must not happen. A new change is never begun while one is
pending, whatever else is true."""

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
"""What an answer's error means; every other one: ask the same again."""


# --- what goes in and out ---


@dataclass(frozen=True, slots=True, eq=False)
class IsrChange:
    """One change of an ISR as the controller is asked for it; equal only to itself."""

    topic: str
    topic_id: UUID
    index: int
    leader_epoch: int
    partition_epoch: int
    """The one that the change expects to find."""
    new_isr: tuple[tuple[int, int], ...]
    """Members with the broker epoch of the fetch by which each was judged; −1 if it has not fetched
    in this leader epoch."""
    joins: tuple[int, ...]
    leaves: tuple[int, ...]
    reason: str
    """For people: why."""
    leader_recovery_state: int = LEADER_RECOVERED


@dataclass(frozen=True, slots=True)
class AlteredPartition:
    """A partition's answer in AlterPartition without an error."""

    leader_epoch: int
    partition_epoch: int
    isr: tuple[int, ...]


@dataclass(slots=True)
class ReplicaState:
    """What the leader knows of one follower, from its fetches (kafka: ``ReplicaState``)."""

    broker_id: int
    log_end_offset: int = UNKNOWN_OFFSET
    log_start_offset: int = UNKNOWN_OFFSET
    last_fetch_leader_log_end_offset: int = 0
    """Where the leader's log ended when the follower last fetched."""
    last_fetch_ms: int = NEVER_MS
    last_caught_up_ms: int = NEVER_MS
    """The latest time at which the follower held all that the leader held then."""
    broker_epoch: int | None = None
    """That of its last fetch; None: it has not fetched yet."""

    def reset(self, now_ms: int, start: int, *, in_isr: bool) -> None:
        """Begin a leader epoch at ``start``.

        Where it is stays known, if it is. Who is in the ISR counts as caught up until now; who is
        not does not come back before it has fetched.
        """
        self.last_caught_up_ms = self.last_fetch_ms = now_ms if in_isr else NEVER_MS
        self.last_fetch_leader_log_end_offset = start

    def fetched(
        self, offset: int, log_start_offset: int, epoch: int, leader_end: int, now_ms: int
    ) -> None:
        """Note a fetch. Reaching the leader's end of the fetch before counts as of that time."""
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
        """Whether it holds all, or did within the lag time.

        Who holds all stays caught up for ever: a silent follower of a silent partition is no lag.
        """
        return self.log_end_offset == leader_end or now_ms - self.last_caught_up_ms <= max_lag_ms
