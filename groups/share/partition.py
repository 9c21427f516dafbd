"""One share partition on the leader of its partition: its offsets and its in-flight records.

A share partition is soft state. The share coordinator stores the outcomes of deliveries, never
acquisitions, so a new leader delivers acquired records again. Inputs take a ``DecisionBuilder``,
which has the time and collects replies, effects, events and the timer of the acquisition locks. The
inputs are in ``acquire.py``, ``acknowledge.py`` and ``completion.py``; this module has the state
that they share, and the steps that keep it consistent.

One rule differs from Kafka: an offset below the start offset has no state. Kafka keeps acquired
offsets below the start offset until their locks end, and every method must make an exception for
such offsets.

Source: Kafka's ``SharePartition``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from fencepost.groups.share import errors
from fencepost.groups.share.batches import UNKNOWN_OFFSET, StateBatch, combine
from fencepost.groups.share.commands import (
    EARLIEST_TIMESTAMP,
    LATEST_TIMESTAMP,
    DropPartition,
    InFlightRange,
    Initialized,
    LookUpStartOffset,
    OffsetReset,
    ReadState,
    SendToDeadLetterQueue,
    SharePartitionKey,
    ShareSettings,
    StateRead,
    WakeFetches,
    WriteState,
)
from fencepost.groups.share.events import EventKind
from fencepost.groups.share.in_flight import InFlightRecords, Run
from fencepost.groups.share.outcomes import Outcomes, in_portions
from fencepost.groups.share.persister_errors import reading_failed
from fencepost.groups.share.states import Cause, PartitionState, RecordState, require_legal
from fencepost.logcore.machine import DecisionBuilder, DomainError, InvariantViolation, Token
from fencepost.logcore.values import dataclass

LOADED: Final = "opened by a fetch; records acquired before are available again"
"""The reason in the event history when a state has been read; acquisitions are not persisted."""

LOCK_TIMER: Final = "share-lock"
"""The first part of the timer's key. The second part is the key of the share partition."""


@dataclass(slots=True)
class GapWindow:
    """The offsets between persisted batches, which are read from the log like new ones.

    These offsets were acquired under an earlier leader and never acknowledged. ``gap_start`` is the
    first offset that was not read yet. The window ends when ``end_offset`` is no longer the
    partition's end offset: from then on holes between batches are offsets without records.
    """

    end_offset: int
    gap_start: int


@dataclass(frozen=True, slots=True)
class PendingWrite:
    """State that is being written."""

    ranges: tuple[tuple[int, int], ...]
    token: Token | None
    """The request that waits for the write."""
    is_transition: bool
    """Whether the new states become final with the write, and are undone if it fails."""
    dead_letters: tuple[SendToDeadLetterQueue, ...] = ()
    """Records that go to the dead-letter queue when the write has ended, successfully or not."""


class SharePartition:
    """The state of one share partition. ``settings`` is called at each use."""

    def __init__(
        self,
        key: SharePartitionKey,
        leader_epoch: int,
        settings: Callable[[], ShareSettings],
        topic: str = "",
    ) -> None:
        self.key = key
        self.topic = topic
        """The name of the topic, for the event history."""
        self.leader_epoch = leader_epoch
        self.settings = settings
        self.state = PartitionState.EMPTY
        self.state_epoch = 0
        self.start_offset = 0
        """The first offset whose delivery is not complete: SPSO."""
        self.end_offset = 0
        """The last in-flight offset, or the next offset to fetch if none is in flight: SPEO."""
        self.records = InFlightRecords()
        self.delivery_complete_count = 0
        """The number of offsets at or after the start offset that are in a terminal state."""
        self.acquired_count = 0
        """The number of offsets that members have acquired."""
        self.gap: GapWindow | None = None
        self.may_be_available = False
        """Whether an in-flight record may be available: ``findNextFetchOffset``. If not, the next
        fetch begins after the end offset without a search."""
        self.writes: dict[int, PendingWrite] = {}
        self._write_ids = 0
        self._waiting: list[Token] = []
        self._lock_deadline_ms: int | None = None
        """When the timer of the acquisition locks fires; no lock ends earlier."""
        self._fetch_lock: object | None = None

    # --- initialization --------------------------------------------------------------------------

    def initialize(self, decision: DecisionBuilder, token: Token) -> None:
        """Answer ``token`` with :class:`Initialized` when the state has been read."""
        match self.state:
            case PartitionState.ACTIVE:
                decision.reply(token, Initialized())
            case PartitionState.FAILED | PartitionState.FENCED:
                decision.reply(token, self.gone_error())
            case PartitionState.INITIALIZING:
                self._waiting.append(token)
            case PartitionState.EMPTY:
                self.state = PartitionState.INITIALIZING
                self._waiting.append(token)
                decision.effect(ReadState(self.key, self.leader_epoch))

    def state_read(self, decision: DecisionBuilder, result: StateRead | DomainError) -> None:
        """Take over the persisted state, or fail."""
        if self.state is not PartitionState.INITIALIZING:
            return
        if isinstance(result, DomainError):
            self._fail(decision, reading_failed(result))
            return
        self.state_epoch = result.state_epoch
        if result.start_offset == UNKNOWN_OFFSET:
            timestamp = self._reset_timestamp(decision.now_ms)
            decision.effect(LookUpStartOffset(self.key, timestamp))
            return
        self._activate(decision, result.start_offset, result.batches)

    def start_offset_found(self, decision: DecisionBuilder, result: int | DomainError) -> None:
        """Start at the offset that ``share.auto.offset.reset`` selects, or fail."""
        if self.state is not PartitionState.INITIALIZING:
            return
        if isinstance(result, DomainError):
            self._fail(decision, result)
            return
        self._activate(decision, result, ())

    def _reset_timestamp(self, now_ms: int) -> int:
        settings = self.settings()
        match settings.auto_offset_reset:
            case OffsetReset.LATEST:
                return LATEST_TIMESTAMP
            case OffsetReset.EARLIEST:
                return EARLIEST_TIMESTAMP
            case OffsetReset.BY_DURATION:
                return max(0, now_ms - settings.reset_duration_ms)

    def _activate(
        self, decision: DecisionBuilder, start_offset: int, batches: Sequence[StateBatch]
    ) -> None:
        self.start_offset = self.end_offset = start_offset
        previous_last = start_offset - 1
        gap_start: int | None = None
        for batch in batches:
            if (
                batch.first <= previous_last
                or batch.last < batch.first
                or batch.state == RecordState.ACQUIRED
            ):
                self._fail(decision, errors.SharePartitionFailedError(f"invalid batch {batch}"))
                return
            if gap_start is None and batch.first > previous_last + 1:
                gap_start = previous_last + 1
            previous_last = batch.last
            run = Run(batch.first, batch.last, RecordState(batch.state), batch.delivery_count)
            self.records.add(run)
            self.delivery_complete_count += run.size if run.state.is_terminal else 0
        if self.records:
            self.may_be_available = True
            self.end_offset = previous_last
            if gap_start is not None:
                self.gap = GapWindow(previous_last, gap_start)
        self.state = PartitionState.ACTIVE
        # The persisted start offset may be behind: the start offset is written before it moves.
        self.advance_start_offset()
        self._resume_archiving(decision)
        for token in self._waiting:
            decision.reply(token, Initialized())
        self._waiting.clear()
        self._event(
            decision,
            EventKind.SHARE_PARTITION_LOADED,
            reason=LOADED,
            start_offset=self.start_offset,
            end_offset=self.end_offset,
            state_epoch=self.state_epoch,
            leader_epoch=self.leader_epoch,
        )

    def _resume_archiving(self, decision: DecisionBuilder) -> None:
        """Send records that an earlier leader left in ARCHIVING to the dead-letter queue."""
        limit = self.settings().delivery_count_limit
        for batch in self.records:
            for run in batch.runs:
                if run.state is RecordState.ARCHIVING:
                    # The cause is not persisted.
                    cause = Cause.LOCK_EXPIRED if run.count >= limit else Cause.REJECTED
                    decision.effect(
                        SendToDeadLetterQueue(self.key, run.first, run.last, run.count, cause)
                    )

    def _fail(self, decision: DecisionBuilder, error: DomainError) -> None:
        self.state = PartitionState.FAILED
        self.records.clear()
        self.delivery_complete_count = 0
        for token in self._waiting:
            decision.reply(token, error)
        self._waiting.clear()
        decision.effect(DropPartition(self.key))
        self._event(decision, EventKind.SHARE_PARTITION_FAILED, error=str(error))

    def fence(self, decision: DecisionBuilder, reason: str) -> None:
        """Stop serving. Writes under way still answer their requests."""
        if self.state is PartitionState.FENCED:
            return
        self.state = PartitionState.FENCED
        self._lock_deadline_ms = None
        decision.disarm(self._timer_key)
        for token in self._waiting:
            decision.reply(token, self.gone_error())
        self._waiting.clear()
        decision.effect(DropPartition(self.key))
        self._event(
            decision,
            EventKind.SHARE_PARTITION_FENCED,
            reason=reason,
            acquired=self.acquired_count,
            leader_epoch=self.leader_epoch,
        )

    @property
    def is_gone(self) -> bool:
        """Whether the share partition has failed or was fenced: it accepts no further requests."""
        return self.state in (PartitionState.FAILED, PartitionState.FENCED)

    def gone_error(self) -> DomainError:
        """Return the error for requests to a share partition that is gone."""
        if self.state is PartitionState.FAILED:
            return errors.SharePartitionFailedError("The share partition failed to load.")
        return errors.SharePartitionFencedError("The share partition is fenced.")

    # --- fetching --------------------------------------------------------------------------------

    def take_fetch_lock(self, fetch: object) -> bool:
        """Let ``fetch`` read the log for this share partition; return whether it may."""
        if self.state is not PartitionState.ACTIVE or self._fetch_lock is not None:
            return False
        self._fetch_lock = fetch
        return True

    def release_fetch_lock(self, fetch: object) -> None:
        """Release the fetch lock if ``fetch`` holds it."""
        if self._fetch_lock is fetch:
            self._fetch_lock = None

    @property
    def fetch_lock(self) -> object | None:
        """The fetch that reads the log for this share partition."""
        return self._fetch_lock

    @property
    def in_flight_count(self) -> int:
        """The number of offsets that count towards ``share.partition.max.record.locks``."""
        return self.end_offset - self.start_offset + 1 if self.records else 0

    def can_acquire(self) -> bool:
        """Whether a fetch may acquire records: there is room, or a record is available again."""
        if self.next_fetch_offset() != self.end_offset + 1:
            return True
        return self.in_flight_count < self.settings().max_record_locks

    def next_fetch_offset(self) -> int:
        """Return the lowest offset that a fetch should read: available, in a gap, or new."""
        if not self.records:
            self.may_be_available = False
            return self.end_offset
        if self.may_be_available:
            offset = self._first_available()
            if offset is not None:
                return offset
            self.may_be_available = False
        return self.end_offset + 1

    def _first_available(self) -> int | None:
        gap_start = self.gap.gap_start if self.gap is not None and self.has_gaps else None
        for batch in self.records:
            if gap_start is not None:
                if batch.first > gap_start:
                    return gap_start
                gap_start = max(gap_start, batch.last + 1)
            for run in batch.runs:
                if run.is_available:
                    return run.first
        return None

    @property
    def has_gaps(self) -> bool:
        """Whether holes between batches may have records that were not read yet."""
        return self.gap is not None and self.gap.end_offset == self.end_offset

    def gaps_read_up_to(self, offset: int) -> None:
        """Remember that the offsets below ``offset`` have been read."""
        if self.gap is None:
            return
        if self.has_gaps and offset <= self.gap.end_offset:
            self.gap.gap_start = max(self.gap.gap_start, offset)
        else:
            self.gap = None

    # --- states and offsets ----------------------------------------------------------------------

    def change(self, run: Run, state: RecordState, cause: Cause) -> None:
        """Give all offsets of a run another state."""
        require_legal(run.state, state, cause)
        if state.is_terminal != run.state.is_terminal:
            self.delivery_complete_count += run.size if state.is_terminal else -run.size
        if run.state is RecordState.ACQUIRED:
            self.acquired_count -= run.size
        if state is RecordState.ACQUIRED:
            self.acquired_count += run.size
        run.state = state
        if state is RecordState.AVAILABLE and run.transition is None:
            self.may_be_available = True

    def archive(self, run: Run, cause: Cause) -> None:
        """Archive a run without a write: its records were deleted, or must not be delivered.

        A write that is under way for the run has no further effect on the run.
        """
        self.change(run, RecordState.ARCHIVED, cause)
        run.member_id = run.deadline_ms = run.transition = None

    def archive_within(
        self, first: int, last: int, state: RecordState, cause: Cause
    ) -> list[tuple[int, int]]:
        """Archive the offsets from ``first`` to ``last`` in ``state``; return their ranges."""
        archived: list[tuple[int, int]] = []
        for batch in self.records.overlapping(first, last):
            if any(run.state is state for run in batch.overlapping(first, last)):
                for run in batch.carve(max(first, self.start_offset), last):
                    if run.state is state:
                        self.archive(run, cause)
                        archived.append((run.first, run.last))
        return archived

    def lock(self, decision: DecisionBuilder, run: Run, member_id: str) -> None:
        """Give the acquisition lock of a run to a member, for the full duration."""
        run.member_id = member_id
        run.deadline_ms = decision.now_ms + self.settings().record_lock_duration_ms
        self.watch_lock(decision, run.deadline_ms)

    def watch_lock(self, decision: DecisionBuilder, deadline_ms: int) -> None:
        """Have the timer of the acquisition locks fire at ``deadline_ms`` at the latest."""
        watched = self._lock_deadline_ms
        if watched is None or deadline_ms < watched:
            self._lock_deadline_ms = deadline_ms
            decision.arm(self._timer_key, deadline_ms - decision.now_ms)

    def earliest_lock_end(self) -> int | None:
        """Return when the first acquisition lock ends.

        The locks of runs in transition do not count: a rollback sets the timer for them.
        """
        return min(
            (
                run.deadline_ms
                for batch in self.records
                for run in batch.runs
                if run.state is RecordState.ACQUIRED and run.deadline_ms is not None
            ),
            default=None,
        )

    def rewatch_locks(self, decision: DecisionBuilder, deadline_ms: int | None) -> None:
        """Have the timer of the acquisition locks fire at ``deadline_ms``, or never with None."""
        self._lock_deadline_ms = None
        if deadline_ms is not None:
            self.watch_lock(decision, deadline_ms)
        else:
            decision.disarm(self._timer_key)

    @property
    def _timer_key(self) -> tuple[str, SharePartitionKey]:
        return (LOCK_TIMER, self.key)

    def advance_start_offset(self) -> bool:
        """Move the start offset past all offsets that are final; return whether it moved."""
        if not self.records:
            return False
        following = self.first_open_offset()
        if following is None:
            self.start_offset = self.end_offset = self.records.last.last + 1
            self.delivery_complete_count = 0
            self.records.clear()
            return True
        if following <= self.start_offset:
            return False
        self.set_start_offset(following)
        return True

    def first_open_offset(self) -> int | None:
        """Return the first offset whose delivery is not complete.

        Offsets of a gap may have been acquired, and never acknowledged (KAFKA-18494).
        """
        following = self.start_offset
        for batch in self.records:
            if self.gap is not None and self.has_gaps:
                following = max(following, self.gap.gap_start)
                if following < batch.first:
                    return following
            for run in batch.runs:
                if not run.is_final:
                    return run.first
            following = batch.last + 1
        return None

    def set_start_offset(self, offset: int) -> None:
        """Forget everything below ``offset``, which is above the start offset."""
        for batch in self.records.overlapping(self.start_offset, offset - 1):
            for run in batch.overlapping(self.start_offset, offset - 1):
                forgotten = min(run.last, offset - 1) - run.first + 1
                if run.state.is_terminal:
                    self.delivery_complete_count -= forgotten
                elif run.state is RecordState.ACQUIRED:
                    self.acquired_count -= forgotten
        self.records.remove_below(offset)
        self.start_offset = offset
        self.end_offset = max(self.end_offset, offset)
        if self.gap is not None:
            self.gap.gap_start = max(self.gap.gap_start, offset)

    def log_start_moved(self, decision: DecisionBuilder, log_start_offset: int) -> None:
        """Drop the offsets below the log's start; an acknowledgement of one of them gets NONE.

        This writes nothing: the next write for another reason also persists the new start offset.
        """
        if self.state is not PartitionState.ACTIVE or log_start_offset <= self.start_offset:
            return
        self._event(
            decision,
            EventKind.SHARE_START_OFFSET_MOVED,
            reason="the log start offset passed the start offset",
            old=self.start_offset,
            new=log_start_offset,
        )
        self.set_start_offset(log_start_offset)
        self.may_be_available = True
        self.advance_start_offset()
        decision.effect(WakeFetches(self.key))

    # --- writing ---------------------------------------------------------------------------------

    def next_write_id(self) -> int:
        """Return the id of a new write."""
        self._write_ids += 1
        return self._write_ids

    def write(
        self,
        decision: DecisionBuilder,
        write_id: int,
        changed: Sequence[Run],
        pending: PendingWrite,
    ) -> None:
        """Request a write of the state of changed runs, and of the current start offset.

        The start offset moves only after the write. A reader of the state skips complete offsets at
        its beginning.
        """
        self.writes[write_id] = pending
        batches = [StateBatch(run.first, run.last, run.state, run.count) for run in changed]
        decision.effect(
            WriteState(
                self.key,
                write_id,
                self.state_epoch,
                self.leader_epoch,
                self.start_offset,
                self.delivery_complete_count,
                combine((), batches, self.start_offset),
            )
        )

    def record_outcomes(self, decision: DecisionBuilder, outcomes: Outcomes) -> None:
        """Record in the event history why records will be delivered again, or never again."""
        for kind, detail in outcomes.events(self.settings().delivery_count_limit):
            self._event(decision, kind, **detail)

    def record_ranges(
        self,
        decision: DecisionBuilder,
        kind: EventKind,
        ranges: Iterable[tuple[int, int]],
        **detail: object,
    ) -> None:
        """Record an event about ranges of offsets in the event history."""
        for part in in_portions([[first, last] for first, last in ranges]):
            self._event(decision, kind, **part, **detail)

    def _event(self, decision: DecisionBuilder, kind: EventKind, **detail: object) -> None:
        decision.event(
            kind,
            self.key.group_id,
            topic=self.topic,
            topic_id=self.key.topic_id.hex(),
            partition=self.key.partition,
            **detail,
        )

    # --- inspection ------------------------------------------------------------------------------

    def in_flight(self) -> list[InFlightRange]:
        """Return the in-flight offsets; the first entry keeps the start offset from moving."""
        return [
            InFlightRange(
                run.first,
                run.last,
                run.state,
                run.count,
                run.member_id,
                run.deadline_ms,
                run.transition is not None,
            )
            for batch in self.records
            for run in batch.runs
        ]

    def check(self) -> None:
        """Raise InvariantViolation unless the state is consistent."""
        complete, acquired, previous_last = 0, 0, self.start_offset - 1
        for batch in self.records:
            if batch.runs[-1].last != batch.last or batch.last < self.start_offset:
                raise InvariantViolation(f"batch {batch.first}-{batch.last} and its runs")
            if batch.runs[0].first != max(batch.first, self.start_offset):
                raise InvariantViolation(f"batch {batch.first}-{batch.last} below the start")
            for index, run in enumerate(batch.runs):
                if run.first <= previous_last or run.last < run.first:
                    raise InvariantViolation(f"{run.first}-{run.last} overlaps {previous_last}")
                if index and run.first != previous_last + 1:
                    raise InvariantViolation(f"batch {batch.first} has a hole at {run.first}")
                previous_last = run.last
                complete += run.size if run.state.is_terminal else 0
                acquired += run.size if run.state is RecordState.ACQUIRED else 0
                self._check_run(run)
        if complete != self.delivery_complete_count:
            raise InvariantViolation(f"{complete} complete, not {self.delivery_complete_count}")
        if acquired != self.acquired_count:
            raise InvariantViolation(f"{acquired} acquired, not {self.acquired_count}")
        if self.records and self.end_offset != previous_last:
            raise InvariantViolation(f"end offset {self.end_offset}, records to {previous_last}")
        if not self.records and self.start_offset != self.end_offset:
            raise InvariantViolation(f"nothing in {self.start_offset}-{self.end_offset}")
        if self.state is PartitionState.ACTIVE and not self.may_be_available:
            available = self._first_available() if self.records else None
            if available is not None:
                raise InvariantViolation(f"{available} is available, and not looked for")

    def _check_run(self, run: Run) -> None:
        acquired = run.state is RecordState.ACQUIRED
        if acquired != (run.member_id is not None):
            raise InvariantViolation(f"{run.state} has the owner {run.member_id}")
        if (acquired or run.transition is not None) != (run.deadline_ms is not None):
            raise InvariantViolation(f"{run.state} has a lock until {run.deadline_ms}")
        if acquired and run.transition is not None:
            raise InvariantViolation(f"{run.first} is acquired in a transition")
        if run.transition is not None and run.transition.write_id not in self.writes:
            raise InvariantViolation(f"{run.first} waits for a write that has ended")
        if acquired and run.count < 1:
            raise InvariantViolation(f"{run.first} is acquired and was never delivered")
        if self.state is PartitionState.ACTIVE and acquired and run.deadline_ms is not None:
            watched = self._lock_deadline_ms
            if watched is None or watched > run.deadline_ms:
                raise InvariantViolation(f"no timer ends the lock of {run.first}")
