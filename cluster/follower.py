"""One partition that this broker follows: what to ask its leader next, and what an answer means.

The shell keeps the log; the machine reads where it ends and what its epochs are through
:class:`FollowerLog`, and says what is to be done in a :class:`FollowerStep`. It is told when that
is done (:meth:`PartitionFollower.appended`, :meth:`~PartitionFollower.truncated`), or has failed.
The log is never cut below what epochs prove: a lower high watermark cuts nothing.

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
    """The replica's own log, as far as following needs to know it."""

    @property
    def log_start_offset(self) -> int:
        """The first offset that is there."""

    @property
    def high_watermark(self) -> int:
        """As this replica knows it."""

    @property
    def latest_epoch(self) -> int:
        """The newest leader epoch of the epoch cache, −1 if it is empty."""


# --- states ---


class FetchState(StrEnum):
    """What a follower does."""

    STOPPED = "Stopped"
    """It has no leader, or is none of the replicas."""
    TRUNCATING = "Truncating"
    """The log is being cut; only then does it go on."""
    FETCHING = "Fetching"
    APPENDING = "Appending"
    """An answer's records are on their way into the log."""
    RESETTING = "Resetting"
    """It is out of the leader's range and asks for the leader's ends."""
    DELAYED = "Delayed"
    FAILED = "Failed"
    """Nothing more until the leader epoch changes, or the log is back."""


class FetchTrigger(Enum):
    """What happens to a follower."""

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
    STOP = "there is nobody to follow"


_IDLE: Final = tuple(
    one for one in FetchState if one not in (FetchState.APPENDING, FetchState.TRUNCATING)
)
FETCH_TRANSITIONS: Final[Mapping[tuple[FetchState, FetchTrigger], FetchState]] = (
    {(one, FetchTrigger.START): FetchState.FETCHING for one in _IDLE}
    | {(one, FetchTrigger.START_WITHOUT_EPOCHS): FetchState.TRUNCATING for one in _IDLE}
    | {(one, FetchTrigger.STOP): FetchState.STOPPED for one in FetchState}
    | {(one, FetchTrigger.FAIL): FetchState.FAILED for one in FetchState if one != "Stopped"}
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
"""The whole table; what is not in it must not happen. What is being done to the log is done first:
a leader epoch that begins meanwhile takes effect with the next fetch."""


class Reaction(Enum):
    """What an error of the leader means."""

    RETRY = "delay the partition, the others go on"
    RESET = "ask for the leader's ends"
    FAIL = "stop until a later leader epoch is known here"


FETCH_ERRORS: Final[Mapping[int, Reaction]] = {
    Errors.OFFSET_OUT_OF_RANGE: Reaction.RESET,
    Errors.FENCED_LEADER_EPOCH: Reaction.FAIL,
}
"""Every other error passes: UNKNOWN_LEADER_EPOCH, NOT_LEADER_OR_FOLLOWER and unknown topics while
metadata travel, the rest because the leader may mend it."""

APPEND_ERRORS_THAT_PASS: Final = frozenset(
    {Errors.CORRUPT_MESSAGE, Errors.INVALID_RECORD, Errors.OFFSET_OUT_OF_RANGE}
)
"""A damaged answer is asked for again, also one whose records begin elsewhere than they may; any
other failure of the own log is one."""


# --- what goes in and out ---


@dataclass(frozen=True, slots=True)
class PartitionFetch:
    """A partition's part of a Fetch request."""

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
class PartitionAnswer:
    """A partition's part of a Fetch answer."""

    error: int = Errors.NONE
    high_watermark: int = UNKNOWN_OFFSET
    log_start_offset: int = UNKNOWN_OFFSET
    diverging: tuple[int, int] | None = None
    """(epoch, end offset) if the leader's log parts from the follower's."""
    records: Any = None
    """Whatever the shell appends; the machine looks only at ``size``."""
    size: int = 0
    """Bytes of records."""


class LogEnd(Enum):
    """An end of the leader's log, by the timestamp that asks ListOffsets for it."""

    LATEST = -1
    EARLIEST = -2


@dataclass(frozen=True, slots=True, eq=False)
class OffsetQuestion:
    """What ListOffsets is to ask the leader, as a replica; equal only to itself."""

    end: LogEnd
    current_leader_epoch: int


@dataclass(frozen=True, slots=True)
class Truncation:
    """Cut the log at ``offset``; ``start_anew``: drop all of it, it begins and ends there then.

    Everything goes with it: indexes, epochs that begin at the offset or later, producers' states.
    After ``start_anew`` the high watermark, too, is the offset (KAFKA-9491).
    """

    offset: int
    start_anew: bool = False
    below_high_watermark: bool = False
    """Allowed, and worth a warning: an election was unclean, or a disk has lost something."""


@dataclass(frozen=True, slots=True)
class FollowerStep:
    """What is to be done, at most one of the first three."""

    append_up_to_epoch: int | None = None
    """Append the answer's records; batches of a higher leader epoch are skipped (KAFKA-18723)."""
    truncate: Truncation | None = None
    ask: OffsetQuestion | None = None
    """Send ListOffsets with the own broker id, which answers with the leader's very end."""
    high_watermark: int | None = None
    """Set the own one there, be it lower; consumers that wait here are to be woken."""
    log_start_offset: int | None = None
    """Move the own log start up to there."""
    delayed_until_ms: int | None = None
    events: tuple[Event, ...] = ()


NOTHING: Final = FollowerStep()


class PartitionFollower:
    """The state machine of one followed partition; see the module."""

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
        """Records that the leader has committed and this replica does not hold; None: not known.
        A replica that lags may be throttled."""
        self.delayed_until_ms: int | None = None
        self._answer: tuple[PartitionFetch, PartitionAnswer] | None = None
        """What is being appended."""
        self._asked: OffsetQuestion | None = None
        self._leader_end = UNKNOWN_OFFSET
        """The leader's end, once it has told it."""

    @property
    def key(self) -> tuple[UUID, int]:
        """The partition."""
        return self.topic_id, self.index

    # --- whom to follow ---

    def become_follower(self, registration: PartitionRegistration) -> FollowerStep:
        """Follow by ``registration``, at once or on with it.

        An older partition epoch is ignored. Fetching begins anew only where the leader epoch grew:
        a change of the ISR must not disturb it (KAFKA-13790).
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
        """Fetch again by the same registration: the log is back, or a stop was premature."""
        return self._start() if self.leader >= 0 else NOTHING

    def _start(self) -> FollowerStep:
        """Begin at the own end.

        A log that knows no epoch cannot ask where it parts from the leader's, and is cut to the
        high watermark, as before KIP-101.
        """
        if self.state in (FetchState.APPENDING, FetchState.TRUNCATING):
            return NOTHING
        self._clear()
        self._take_position()
        log = self._log
        if self.last_fetched_epoch != NO_EPOCH or log.high_watermark >= log.log_end_offset:
            self._move(FetchTrigger.START)
            return NOTHING
        self._move(FetchTrigger.START_WITHOUT_EPOCHS)
        return self._cut(log.high_watermark)

    def _take_position(self) -> None:
        """Fetch on from where the log ends.

        An answer without records changes neither this nor the epoch that is compared with the
        leader's (KAFKA-15510).
        """
        self.fetch_offset = self._log.log_end_offset
        self.last_fetched_epoch = self._log.latest_epoch

    def stop(self) -> None:
        """Follow nobody: this broker leads, has no replica, or shuts down."""
        self._clear()
        self._move(FetchTrigger.STOP)

    def _clear(self) -> None:
        self.lag = self.delayed_until_ms = self._answer = self._asked = None

    # --- fetching ---

    @property
    def is_in_sync(self) -> bool:
        """Whether nothing is known to be missing; such a replica is never throttled."""
        return self.lag is not None and self.lag <= 0

    def fetch(self, now_ms: int) -> PartitionFetch | None:
        """What to ask the leader for, None while there is nothing to ask."""
        if self.state is FetchState.DELAYED and now_ms >= (self.delayed_until_ms or 0):
            self.delayed_until_ms = None
            self._move(FetchTrigger.READY)
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

    def answered(self, sent: PartitionFetch, answer: PartitionAnswer, now_ms: int) -> FollowerStep:
        """The leader's answer; one to a question that is not the present one means nothing.

        The epoch is compared as well: an answer that is late may tell of a log that has been cut
        and filled again since. Nor does one to a former leader epoch mean anything (KAFKA-18723),
        but that the leader is ahead of it.
        """
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
            return self._refused(answer.error, now_ms)
        if answer.diverging is not None:
            return self._diverging(*answer.diverging)
        if self._log.log_end_offset != self.fetch_offset:
            return self.failed(
                f"the log ends at {self._log.log_end_offset}, {self.fetch_offset} was fetched"
            )
        if answer.size:
            self._answer = sent, answer
            self._move(FetchTrigger.RECORDS)
            return FollowerStep(append_up_to_epoch=self.leader_epoch)
        return self._take(answer)

    def appended(self) -> FollowerStep:
        """The records of the answer are in the log, as far as they were not skipped."""
        if self._answer is None:
            if self.state is FetchState.FETCHING:
                self._take_position()
            return NOTHING
        (sent, answer), self._answer = self._answer, None
        self._move(FetchTrigger.APPENDED)
        self._take_position()
        return self._take(answer) if sent.current_leader_epoch == self.leader_epoch else NOTHING

    def _take(self, answer: PartitionAnswer) -> FollowerStep:
        """What an answer says beside its records."""
        log, end = self._log, self.fetch_offset
        self.lag = max(0, answer.high_watermark - end)
        high = max(log.log_start_offset, min(answer.high_watermark, end))
        start = min(answer.log_start_offset, high)
        moved_high = high if high != log.high_watermark else None
        moved_start = start if start > log.log_start_offset else None
        if moved_high is None and moved_start is None:
            return NOTHING
        return FollowerStep(high_watermark=moved_high, log_start_offset=moved_start)

    # --- errors ---

    def _refused(self, error: int, now_ms: int) -> FollowerStep:
        reaction = FETCH_ERRORS.get(error, Reaction.RETRY)
        if reaction is Reaction.RESET:
            self._move(FetchTrigger.OUT_OF_RANGE)
            return self._ask(LogEnd.LATEST)
        if reaction is Reaction.FAIL:
            return self._fenced()
        return self.delay(now_ms)

    def _fenced(self) -> FollowerStep:
        """The leader is in a later epoch, of which metadata will tell this broker, too."""
        self._clear()
        self._move(FetchTrigger.FAIL)
        detail = {"leader": self.leader, "leader_epoch": self.leader_epoch}
        return FollowerStep(events=(Event("follower-fenced", str(self), detail, routine=True),))

    def delay(self, now_ms: int) -> FollowerStep:
        """Wait for the backoff: the partition's answer, or the whole request, was an error."""
        if self.state in (FetchState.FETCHING, FetchState.APPENDING, FetchState.RESETTING):
            self._answer = self._asked = None
            self._move(FetchTrigger.RETRY)
            self.delayed_until_ms = now_ms + self.backoff_ms
        return FollowerStep(delayed_until_ms=self.delayed_until_ms)

    def append_failed(self, error: int, now_ms: int) -> FollowerStep:
        """The records could not be appended.

        OFFSET_OUT_OF_RANGE: they begin before the own end. The leader's log may start inside of a
        batch, and this one end there, cut to where the leader's epochs begin: then all that is here
        was deleted there, and the log begins anew. (Kafka's follower fails.)
        """
        if self._answer is None:
            return NOTHING
        start = self._answer[1].log_start_offset
        if error == Errors.OFFSET_OUT_OF_RANGE and start >= self._log.log_end_offset:
            self._answer = None
            self._move(FetchTrigger.CUT)
            return self._cut(start, start_anew=True)
        if error in APPEND_ERRORS_THAT_PASS:
            return self.delay(now_ms)
        return self.failed(f"the answer could not be appended: {error_name(error)}")

    def failed(self, reason: str) -> FollowerStep:
        """Stop until the leader epoch changes or :meth:`resume`."""
        if self.state is FetchState.STOPPED:
            return NOTHING
        self._clear()
        self._move(FetchTrigger.FAIL)
        detail = {"reason": reason, "leader": self.leader, "leader_epoch": self.leader_epoch}
        return FollowerStep(events=(Event("follower-failed", str(self), detail),))

    # --- truncation ---

    def _diverging(self, epoch: int, end: int) -> FollowerStep:
        """Cut to where the logs are sure to agree, and ask again from there (KIP-279).

        Nothing else of such an answer counts (KAFKA-14704).
        """
        self._move(FetchTrigger.CUT)
        return self._cut(truncation_offset(self._log, epoch, end, self.fetch_offset))

    def _cut(self, offset: int, *, start_anew: bool = False) -> FollowerStep:
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
        cut = Truncation(offset, start_anew=start_anew, below_high_watermark=below)
        return FollowerStep(truncate=cut, events=(Event("log-truncated", str(self), detail),))

    def truncated(self) -> FollowerStep:
        """The log is cut: go on from its end, which may lie below what was said (whole batches)."""
        if self.state is not FetchState.TRUNCATING:
            return NOTHING
        self._take_position()
        self._move(FetchTrigger.DONE)
        return NOTHING

    # --- out of range ---

    def _ask(self, end: LogEnd) -> FollowerStep:
        self._asked = OffsetQuestion(end, self.leader_epoch)
        return FollowerStep(ask=self._asked)

    def offset_listed(
        self, asked: OffsetQuestion, offset: int, error: int, now_ms: int
    ) -> FollowerStep:
        """The leader's answer to what :attr:`FollowerStep.ask` said.

        Kafka: ``fetchOffsetAndTruncate``.
        """
        if asked is not self._asked:
            return NOTHING
        self._asked = None
        if error == Errors.FENCED_LEADER_EPOCH:
            return self._fenced()
        if error != Errors.NONE:
            return self.delay(now_ms)
        end = self._log.log_end_offset
        if asked.end is LogEnd.LATEST:
            if offset >= end:
                self._leader_end = offset
                return self._ask(LogEnd.EARLIEST)
            self.lag = 0
            self._move(FetchTrigger.CUT)
            return self._cut(offset)
        self.lag = max(0, self._leader_end - max(offset, end))
        if offset > end:
            self._move(FetchTrigger.CUT)
            return self._cut(offset, start_anew=True)
        self._take_position()
        self._move(FetchTrigger.RESET)
        return NOTHING

    def _move(self, trigger: FetchTrigger) -> None:
        try:
            self.state = FETCH_TRANSITIONS[self.state, trigger]
        except KeyError:
            raise InvariantViolation(f"{self}: {trigger.name} in {self.state}") from None

    def __str__(self) -> str:
        return f"{self.topic}-{self.index}"
