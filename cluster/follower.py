"""One partition that this broker follows: what to fetch next, and how to apply an answer.

The caller owns the log. :class:`PartitionFollower` is a state machine that reads the log's end and
epochs through :class:`FollowerLog`. It returns the necessary action as a :class:`FollowerStep`, and
the caller reports that the action is done (:meth:`PartitionFollower.on_appended`,
:meth:`~PartitionFollower.on_truncated`) or has failed. Only leader epochs decide where a log is
truncated; a lower high watermark alone truncates nothing.

Source: ``AbstractFetcherThread``, ``ReplicaFetcherThread``, ``PartitionFetchState``; KIP-101,
KIP-279, KIP-320, KIP-595 (truncation on fetch).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, StrEnum
from typing import Any, Final, Protocol
from uuid import UUID

from fencepost.cluster.divergence import NO_EPOCH, UNKNOWN_OFFSET, EpochEnds, truncation_offset
from fencepost.cluster.errors import Errors, error_name
from fencepost.cluster.image import PartitionRegistration
from fencepost.logcore.machine import Event, InvariantViolation
from fencepost.logcore.values import dataclass

DEFAULT_REPLICA_FETCH_BACKOFF_MS: Final = 1_000


class FollowerLog(EpochEnds, Protocol):
    """The part of the replica's log that a follower reads."""

    @property
    def log_start_offset(self) -> int:
        """The first offset in the log."""

    @property
    def high_watermark(self) -> int:
        """The high watermark as this replica knows it."""

    @property
    def latest_epoch(self) -> int:
        """The newest leader epoch of the epoch cache, −1 if it is empty."""


# --- states ---


class FetchState(StrEnum):
    """The state of a follower."""

    STOPPED = "Stopped"
    """The partition has no leader, or this broker does not follow it."""
    TRUNCATING = "Truncating"
    """The log is being truncated; fetching continues afterwards."""
    FETCHING = "Fetching"
    APPENDING = "Appending"
    """The records of an answer are being appended."""
    RESETTING = "Resetting"
    """The fetch offset is outside the leader's log; the follower asks for the leader's offsets."""
    DELAYED = "Delayed"
    FAILED = "Failed"
    """Fetching stops until the leader epoch changes or the log is available again."""


class FetchTrigger(Enum):
    """An event that changes a follower's state."""

    START = "a leader epoch begins, the log knows its epochs"
    START_WITHOUT_EPOCHS = "a leader epoch begins, and the log has no epochs"
    RECORDS = "an answer with records"
    APPENDED = "they are in the log"
    CUT = "the log has to be cut"
    DONE = "it is cut"
    OUT_OF_RANGE = "the leader does not have that offset"
    RESET = "the leader's ends are known, and there is nothing to cut"
    RETRY = "an error that passes"
    READY = "the delay is over"
    FAIL = "an error that does not pass"
    STOP = "there is no leader to follow"


_IDLE: Final = tuple(
    state for state in FetchState if state not in (FetchState.APPENDING, FetchState.TRUNCATING)
)
FETCH_TRANSITIONS: Final[Mapping[tuple[FetchState, FetchTrigger], FetchState]] = (
    {(state, FetchTrigger.START): FetchState.FETCHING for state in _IDLE}
    | {(state, FetchTrigger.START_WITHOUT_EPOCHS): FetchState.TRUNCATING for state in _IDLE}
    | {(state, FetchTrigger.STOP): FetchState.STOPPED for state in FetchState}
    | {(state, FetchTrigger.FAIL): FetchState.FAILED for state in FetchState if state != "Stopped"}
    | {
        (FetchState.FETCHING, FetchTrigger.RECORDS): FetchState.APPENDING,
        (FetchState.APPENDING, FetchTrigger.APPENDED): FetchState.FETCHING,
        (FetchState.FETCHING, FetchTrigger.CUT): FetchState.TRUNCATING,
        (FetchState.APPENDING, FetchTrigger.CUT): FetchState.TRUNCATING,
        (FetchState.RESETTING, FetchTrigger.CUT): FetchState.TRUNCATING,
        (FetchState.TRUNCATING, FetchTrigger.DONE): FetchState.FETCHING,
        (FetchState.FETCHING, FetchTrigger.OUT_OF_RANGE): FetchState.RESETTING,
        (FetchState.RESETTING, FetchTrigger.RESET): FetchState.FETCHING,
        (FetchState.FETCHING, FetchTrigger.RETRY): FetchState.DELAYED,
        (FetchState.APPENDING, FetchTrigger.RETRY): FetchState.DELAYED,
        (FetchState.RESETTING, FetchTrigger.RETRY): FetchState.DELAYED,
        (FetchState.DELAYED, FetchTrigger.READY): FetchState.FETCHING,
    }
)
"""Every allowed transition; any other transition violates an invariant. An append or a truncation
that has begun is finished first: a leader epoch that begins meanwhile takes effect with the next
fetch."""


class ErrorReaction(Enum):
    """How a follower reacts to an error from the leader."""

    RETRY = "delay the partition, the others go on"
    RESET = "ask for the leader's ends"
    FAIL = "stop until a later leader epoch is known here"


FETCH_ERRORS: Final[Mapping[int, ErrorReaction]] = {
    Errors.OFFSET_OUT_OF_RANGE: ErrorReaction.RESET,
    Errors.FENCED_LEADER_EPOCH: ErrorReaction.FAIL,
}
"""A fetch with any other error is retried. UNKNOWN_LEADER_EPOCH, NOT_LEADER_OR_FOLLOWER and errors
about unknown topics end once the metadata has propagated, and the leader may recover from all other
errors."""

APPEND_ERRORS_THAT_PASS: Final = frozenset(
    {Errors.CORRUPT_MESSAGE, Errors.INVALID_RECORD, Errors.OFFSET_OUT_OF_RANGE}
)
"""Errors after which the records are fetched again: the answer was damaged, or its records begin at
an unexpected offset. Any other append error fails the follower."""


# --- inputs and outputs ---


@dataclass(frozen=True, slots=True)
class PartitionFetch:
    """One partition of a Fetch request."""

    topic: str
    topic_id: UUID
    index: int
    current_leader_epoch: int
    fetch_offset: int
    last_fetched_epoch: int
    log_start_offset: int

    @property
    def key(self) -> tuple[UUID, int]:
        """The partition."""
        return self.topic_id, self.index


@dataclass(frozen=True, slots=True)
class PartitionResponse:
    """One partition of a Fetch response."""

    error: int = Errors.NONE
    high_watermark: int = UNKNOWN_OFFSET
    log_start_offset: int = UNKNOWN_OFFSET
    diverging: tuple[int, int] | None = None
    """The leader's (epoch, end offset) if its log diverges from the follower's."""
    records: Any = None
    """The records, in any form that the caller can append. The follower reads only ``size``."""
    size: int = 0
    """The size of the records in bytes."""


class OffsetSpec(Enum):
    """The start or the end of the leader's log, as ListOffsets' timestamp for this offset."""

    LATEST = -1
    EARLIEST = -2


@dataclass(frozen=True, slots=True, eq=False)
class ListOffsetsRequest:
    """A ListOffsets request that the caller must send as a replica; equal only to itself."""

    end: OffsetSpec
    current_leader_epoch: int


@dataclass(frozen=True, slots=True)
class Truncation:
    """Truncate the log to ``offset``; with ``full``, delete all records, and continue there.

    Indexes, leader epochs that begin at or after the offset, and producer states are truncated as
    well. With ``full`` the high watermark becomes the offset, too (KAFKA-9491).
    """

    offset: int
    full: bool = False
    below_high_watermark: bool = False
    """Whether ``offset`` is below the high watermark. This is allowed, but deserves a warning: an
    election was unclean, or a disk has lost records."""


@dataclass(frozen=True, slots=True)
class FollowerStep:
    """Actions for the caller; at most one of the first three is set."""

    append_up_to_epoch: int | None = None
    """Append the answer's records, but skip batches of a higher leader epoch (KAFKA-18723)."""
    truncate: Truncation | None = None
    offset_request: ListOffsetsRequest | None = None
    """Send this ListOffsets request with this broker's id as the replica id. To a replica, the
    leader answers with its log end offset instead of its high watermark."""
    high_watermark: int | None = None
    """Set the replica's high watermark to this offset, even if it is lower, and wake waiting
    consumers."""
    log_start_offset: int | None = None
    """Advance the replica's log start offset to this offset."""
    delayed_until_ms: int | None = None
    events: tuple[Event, ...] = ()


NOTHING: Final = FollowerStep()


class PartitionFollower:
    """The state machine of one followed partition; see the module docstring."""

    def __init__(
        self,
        topic: str,
        topic_id: UUID,
        index: int,
        log: FollowerLog,
        *,
        backoff_ms: int = DEFAULT_REPLICA_FETCH_BACKOFF_MS,
    ) -> None:
        self.topic, self.topic_id, self.index = topic, topic_id, index
        self._log = log
        self.backoff_ms = backoff_ms
        """kafka: ``replica.fetch.backoff.ms``."""
        self.state = FetchState.STOPPED
        self.leader = -1
        self.leader_epoch = -1
        self.partition_epoch = -1
        self.fetch_offset = UNKNOWN_OFFSET
        self.last_fetched_epoch = NO_EPOCH
        self.lag: int | None = None
        """Committed records that this replica lacks; None if unknown. A lagging replica may be
        throttled."""
        self.delayed_until_ms: int | None = None
        self._answer: tuple[PartitionFetch, PartitionResponse] | None = None
        """The request and the answer whose records are being appended."""
        self._offset_request: ListOffsetsRequest | None = None
        self._leader_end = UNKNOWN_OFFSET
        """The leader's log end offset, from the first of the two ListOffsets answers."""

    @property
    def key(self) -> tuple[UUID, int]:
        """The partition."""
        return self.topic_id, self.index

    # --- the leader ---

    def become_follower(self, registration: PartitionRegistration) -> FollowerStep:
        """Follow the leader of ``registration``.

        A registration with an older partition epoch is ignored. Fetching restarts only if the
        leader epoch has grown: a change of the ISR must not interrupt fetching (KAFKA-13790).
        """
        if registration.partition_epoch < self.partition_epoch:
            return NOTHING
        self.partition_epoch = registration.partition_epoch
        if registration.leader < 0:
            self.leader, self.leader_epoch = registration.leader, registration.leader_epoch
            self.stop()
            return NOTHING
        restart = registration.leader_epoch > self.leader_epoch
        self.leader, self.leader_epoch = registration.leader, registration.leader_epoch
        if not restart and self.state is not FetchState.STOPPED:
            return NOTHING
        return self._start()

    def resume(self) -> FollowerStep:
        """Fetch again from the same leader, because the log is available again."""
        return self._start() if self.leader >= 0 else NOTHING

    def _start(self) -> FollowerStep:
        """Begin to fetch at the log end offset.

        A log without epochs cannot be compared with the leader's log. Such a log is truncated to
        the high watermark, as before KIP-101.
        """
        if self.state in (FetchState.APPENDING, FetchState.TRUNCATING):
            return NOTHING
        self._clear()
        self._set_position()
        log = self._log
        if self.last_fetched_epoch != NO_EPOCH or log.high_watermark >= log.log_end_offset:
            self._transition(FetchTrigger.START)
            return NOTHING
        self._transition(FetchTrigger.START_WITHOUT_EPOCHS)
        return self._truncate_to(log.high_watermark)

    def _set_position(self) -> None:
        """Set the fetch position to the end of the log.

        Do not call this after an answer without records, because the epoch that the leader compares
        must not change then (KAFKA-15510).
        """
        self.fetch_offset = self._log.log_end_offset
        self.last_fetched_epoch = self._log.latest_epoch

    def stop(self) -> None:
        """Stop following: this broker leads, has no replica of the partition, or shuts down."""
        self._clear()
        self._transition(FetchTrigger.STOP)

    def _clear(self) -> None:
        self.lag = self.delayed_until_ms = self._answer = self._offset_request = None

    # --- fetching ---

    @property
    def is_in_sync(self) -> bool:
        """Whether the replica has every committed record; such a replica is never throttled."""
        return self.lag is not None and self.lag <= 0

    def fetch(self, now_ms: int) -> PartitionFetch | None:
        """Return the partition's part of the next Fetch request, None if it must wait."""
        if self.state is FetchState.DELAYED and now_ms >= (self.delayed_until_ms or 0):
            self.delayed_until_ms = None
            self._transition(FetchTrigger.READY)
        if self.state is not FetchState.FETCHING:
            return None
        return PartitionFetch(
            self.topic,
            self.topic_id,
            self.index,
            self.leader_epoch,
            self.fetch_offset,
            self.last_fetched_epoch,
            self._log.log_start_offset,
        )

    def on_answer(
        self, sent: PartitionFetch, answer: PartitionResponse, now_ms: int
    ) -> FollowerStep:
        """Handle the leader's answer; ignore it if it does not match the current fetch position.

        An answer to a request of a former leader epoch is ignored (KAFKA-18723). If its error is
        FENCED_LEADER_EPOCH, the partition waits for the backoff.
        """
        # Since the request, the log may have been truncated and filled to the same offset, so the
        # epoch is compared as well.
        position = self.fetch_offset, self.last_fetched_epoch
        if self.state is not FetchState.FETCHING or position != (
            sent.fetch_offset,
            sent.last_fetched_epoch,
        ):
            return NOTHING
        if sent.current_leader_epoch != self.leader_epoch:
            is_behind = answer.error == Errors.FENCED_LEADER_EPOCH
            return self.delay(now_ms) if is_behind else NOTHING
        if answer.error != Errors.NONE:
            return self._handle_error(answer.error, now_ms)
        if answer.diverging is not None:
            return self._diverging(*answer.diverging)
        if self._log.log_end_offset != self.fetch_offset:
            return self.fail(
                f"the log ends at {self._log.log_end_offset}, {self.fetch_offset} was fetched"
            )
        if answer.size:
            self._answer = sent, answer
            self._transition(FetchTrigger.RECORDS)
            return FollowerStep(append_up_to_epoch=self.leader_epoch)
        return self._apply_offsets(answer)

    def on_appended(self) -> FollowerStep:
        """Continue after the answer's records, except skipped ones, have been appended."""
        if self._answer is None:
            if self.state is FetchState.FETCHING:
                self._set_position()
            return NOTHING
        (sent, answer), self._answer = self._answer, None
        self._transition(FetchTrigger.APPENDED)
        self._set_position()
        return (
            self._apply_offsets(answer)
            if sent.current_leader_epoch == self.leader_epoch
            else NOTHING
        )

    def _apply_offsets(self, answer: PartitionResponse) -> FollowerStep:
        """Return a step with the high watermark and log start offset that follow from an answer."""
        log, end = self._log, self.fetch_offset
        self.lag = max(0, answer.high_watermark - end)
        high = max(log.log_start_offset, min(answer.high_watermark, end))
        start = min(answer.log_start_offset, high)
        moved_high_watermark = high if high != log.high_watermark else None
        moved_start = start if start > log.log_start_offset else None
        if moved_high_watermark is None and moved_start is None:
            return NOTHING
        return FollowerStep(high_watermark=moved_high_watermark, log_start_offset=moved_start)

    # --- errors ---

    def _handle_error(self, error: int, now_ms: int) -> FollowerStep:
        reaction = FETCH_ERRORS.get(error, ErrorReaction.RETRY)
        if reaction is ErrorReaction.RESET:
            self._transition(FetchTrigger.OUT_OF_RANGE)
            return self._request_offset(OffsetSpec.LATEST)
        if reaction is ErrorReaction.FAIL:
            return self._fenced()
        return self.delay(now_ms)

    def _fenced(self) -> FollowerStep:
        """Stop until the metadata names the leader's later epoch."""
        self._clear()
        self._transition(FetchTrigger.FAIL)
        detail = {"leader": self.leader, "leader_epoch": self.leader_epoch}
        return FollowerStep(events=(Event("follower-fenced", str(self), detail, routine=True),))

    def delay(self, now_ms: int) -> FollowerStep:
        """Wait for the backoff after an error of the partition or of the whole request."""
        if self.state in (FetchState.FETCHING, FetchState.APPENDING, FetchState.RESETTING):
            self._answer = self._offset_request = None
            self._transition(FetchTrigger.RETRY)
            self.delayed_until_ms = now_ms + self.backoff_ms
        return FollowerStep(delayed_until_ms=self.delayed_until_ms)

    def append_failed(self, error: int, now_ms: int) -> FollowerStep:
        """Handle an answer whose records could not be appended.

        OFFSET_OUT_OF_RANGE means that the records begin below the follower's log end offset.
        """
        if self._answer is None:
            return NOTHING
        start = self._answer[1].log_start_offset
        # The leader's log starts inside a batch, at or above the follower's log end offset, so the
        # leader has none of the follower's records: restart the log. (Kafka's follower fails.)
        if error == Errors.OFFSET_OUT_OF_RANGE and start >= self._log.log_end_offset:
            self._answer = None
            self._transition(FetchTrigger.CUT)
            return self._truncate_to(start, full=True)
        if error in APPEND_ERRORS_THAT_PASS:
            return self.delay(now_ms)
        return self.fail(f"the answer could not be appended: {error_name(error)}")

    def fail(self, reason: str) -> FollowerStep:
        """Stop until the leader epoch changes or :meth:`resume` is called."""
        if self.state is FetchState.STOPPED:
            return NOTHING
        self._clear()
        self._transition(FetchTrigger.FAIL)
        detail = {"reason": reason, "leader": self.leader, "leader_epoch": self.leader_epoch}
        return FollowerStep(events=(Event("follower-failed", str(self), detail),))

    # --- truncation ---

    def _diverging(self, epoch: int, end: int) -> FollowerStep:
        """Truncate to an offset up to which the logs agree, and fetch from there (KIP-279).

        All other fields of an answer with a diverging epoch are ignored (KAFKA-14704).
        """
        self._transition(FetchTrigger.CUT)
        return self._truncate_to(truncation_offset(self._log, epoch, end, self.fetch_offset))

    def _truncate_to(self, offset: int, *, full: bool = False) -> FollowerStep:
        end, high = self._log.log_end_offset, self._log.high_watermark
        below = offset < high
        detail = {
            "offset": offset,
            "log_end_offset": end,
            "leader": self.leader,
            "leader_epoch": self.leader_epoch,
        }
        if below:
            detail["below_high_watermark"] = high
        cut = Truncation(offset, full=full, below_high_watermark=below)
        return FollowerStep(truncate=cut, events=(Event("log-truncated", str(self), detail),))

    def on_truncated(self) -> FollowerStep:
        """Fetch from the end of the truncated log.

        That end may be below the requested offset, because truncation drops whole batches.
        """
        if self.state is not FetchState.TRUNCATING:
            return NOTHING
        self._set_position()
        self._transition(FetchTrigger.DONE)
        return NOTHING

    # --- out of range ---

    def _request_offset(self, end: OffsetSpec) -> FollowerStep:
        self._offset_request = ListOffsetsRequest(end, self.leader_epoch)
        return FollowerStep(offset_request=self._offset_request)

    def on_offset(
        self, request: ListOffsetsRequest, offset: int, error: int, now_ms: int
    ) -> FollowerStep:
        """Handle the leader's answer to :attr:`FollowerStep.offset_request`.

        Kafka: ``fetchOffsetAndTruncate``.
        """
        if request is not self._offset_request:
            return NOTHING
        self._offset_request = None
        if error == Errors.FENCED_LEADER_EPOCH:
            return self._fenced()
        if error != Errors.NONE:
            return self.delay(now_ms)
        end = self._log.log_end_offset
        if request.end is OffsetSpec.LATEST:
            if offset >= end:
                self._leader_end = offset
                return self._request_offset(OffsetSpec.EARLIEST)
            self.lag = 0
            self._transition(FetchTrigger.CUT)
            return self._truncate_to(offset)
        self.lag = max(0, self._leader_end - max(offset, end))
        if offset > end:
            self._transition(FetchTrigger.CUT)
            return self._truncate_to(offset, full=True)
        self._set_position()
        self._transition(FetchTrigger.RESET)
        return NOTHING

    def _transition(self, trigger: FetchTrigger) -> None:
        try:
            self.state = FETCH_TRANSITIONS[self.state, trigger]
        except KeyError:
            raise InvariantViolation(f"{self}: {trigger.name} in {self.state}") from None

    def __str__(self) -> str:
        return f"{self.topic}-{self.index}"
