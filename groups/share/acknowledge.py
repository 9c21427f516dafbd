"""Acknowledgements, released sessions and expired locks, each of which ends an acquisition.

An acknowledgement and a release take two steps. The first gives records their new state and
requests its write; until the write has ended, the records can be neither acquired nor acknowledged.
The second step (``completion.py``) makes the new state final, or gives the records back to their
owner. An expired lock takes one step: it takes effect whether or not the new state can be written.

Source: ``SharePartition.acknowledge``, ``releaseAcquiredRecords`` and
``releaseAcquisitionLockOnTimeout``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from typing import Final

from fencepost.groups.share.commands import (
    AcknowledgeBatch,
    Acknowledged,
    SendToDeadLetterQueue,
    WakeFetches,
)
from fencepost.groups.share.errors import (
    InvalidRecordStateError,
    InvalidShareRequestError,
)
from fencepost.groups.share.in_flight import InFlightBatch, Run, Transition
from fencepost.groups.share.outcomes import Outcomes
from fencepost.groups.share.partition import PendingWrite, SharePartition
from fencepost.groups.share.states import AcknowledgeType, Cause, PartitionState, RecordState
from fencepost.logcore.machine import DecisionBuilder, DomainError, Token

NOT_CACHED: Final = "Batch record not found. The request batch offsets are not found in the cache."
FIRST_PAST_END: Final = (
    "Batch record not found. The first offset in request is past acquired records."
)
LAST_PAST_END: Final = (
    "Batch record not found. The last offset in request is past acquired records."
)
BATCH_NOT_ACQUIRED: Final = (
    "The batch cannot be acknowledged. The batch is not in the acquired state."
)
OFFSET_NOT_ACQUIRED: Final = "The offset cannot be acknowledged. The offset is not acquired."
BATCH_OF_ANOTHER_MEMBER: Final = "Member is not the owner of batch record"
OFFSET_OF_ANOTHER_MEMBER: Final = "Member is not the owner of offset"
RENEW_DISABLED: Final = "Renewing acquisition locks is not enabled for the group."

MAX_EXPIRED_RUNS: Final = 400
"""The maximum number of runs (see ``in_flight.py``) that one step releases because their locks have
ended. The step takes about 10 ms. For further runs, the timer fires again at once."""

_CAUSES: Final = {
    AcknowledgeType.GAP: Cause.NO_RECORD,
    AcknowledgeType.ACCEPT: Cause.ACKNOWLEDGED,
    AcknowledgeType.RELEASE: Cause.RELEASED,
    AcknowledgeType.REJECT: Cause.REJECTED,
}


def acknowledge(
    partition: SharePartition,
    decision: DecisionBuilder,
    token: Token,
    member_id: str,
    batches: Sequence[AcknowledgeBatch],
) -> None:
    """Answer ``token`` with :class:`Acknowledged` once the new states are written.

    If a batch has an error, the request fails. The batches before it are undone, except renewals of
    locks.
    """
    write_id = partition.next_write_id()
    changed: list[Run] = []
    try:
        if partition.is_gone:
            raise partition.gone_error()
        for batch in batches:
            for in_flight, first, last, kind in _parts(partition, batch, member_id):
                for run in in_flight.overlapping(first, last):
                    _require_owner(in_flight, run, member_id)
                    runs = in_flight.carve(max(first, run.first), min(last, run.last))
                    changed += _apply(partition, decision, runs, kind, member_id, write_id)
    except DomainError as error:
        for run in changed:
            undo(partition, run)
        decision.reply(token, error)
        return
    if not changed:
        decision.reply(token, Acknowledged())
        return
    _write_transition(partition, decision, write_id, changed, token)


def release(
    partition: SharePartition,
    decision: DecisionBuilder,
    token: Token | None,
    member_id: str,
    cause: Cause = Cause.SESSION_CLOSED,
) -> None:
    """Release the records that a member holds, because its share session ends.

    ``cause`` is SESSION_CLOSED or CONNECTION_CLOSED. ``token``, if any, is answered once the new
    states are written. Delivery counts are not lowered: otherwise a record that crashes its
    consumers would be delivered for ever (KAFKA-19972).
    """
    write_id = partition.next_write_id()
    changed: list[Run] = []
    for batch in () if partition.is_gone else partition.records:
        for run in batch.runs:
            if run.state is RecordState.ACQUIRED and run.member_id == member_id:
                start_transition(
                    partition,
                    run,
                    released_state(partition, run),
                    write_id,
                    cause,
                )
                changed.append(run)
    if changed:
        _write_transition(partition, decision, write_id, changed, token)
    elif token is not None:
        decision.reply(token, Acknowledged())


def expire_locks(partition: SharePartition, decision: DecisionBuilder) -> int:
    """Release the records whose acquisition locks have ended; set the timer to the next lock.

    A step releases at most :data:`MAX_EXPIRED_RUNS` runs. Return the number of released offsets.
    """
    if partition.state is not PartitionState.ACTIVE:
        return 0
    expired: list[Run] = []
    outcomes = Outcomes()
    for run in islice(_past_deadline(partition, decision.now_ms), MAX_EXPIRED_RUNS):
        owner = run.member_id or ""
        run.member_id = run.deadline_ms = None
        partition.change(run, released_state(partition, run), Cause.LOCK_EXPIRED)
        expired.append(run)
        outcomes.add(run, Cause.LOCK_EXPIRED, owner)
    if expired:
        partition.record_outcomes(decision, outcomes)
        dead_letters = tuple(
            SendToDeadLetterQueue(partition.key, run.first, run.last, run.count, Cause.LOCK_EXPIRED)
            for run in expired
            if run.state is RecordState.ARCHIVING
        )
        pending = PendingWrite(ranges_of(expired), None, False, dead_letters)
        partition.write(decision, partition.next_write_id(), expired, pending)
        decision.effect(WakeFetches(partition.key))
    if len(expired) == MAX_EXPIRED_RUNS:  # more locks may have ended: fire again at once
        partition.rewatch_locks(decision, decision.now_ms)
    else:
        partition.rewatch_locks(decision, partition.earliest_lock_end())
    return sum(run.size for run in expired)


def _past_deadline(partition: SharePartition, now_ms: int) -> Iterator[Run]:
    for batch in partition.records:
        for run in batch.runs:
            if (
                run.state is RecordState.ACQUIRED
                and run.deadline_ms is not None
                and run.deadline_ms <= now_ms
            ):
                yield run


# --- the two steps -------------------------------------------------------------------------------


def released_state(partition: SharePartition, run: Run) -> RecordState:
    """Return the new state of a run whose owner releases it, or whose lock ends."""
    settings = partition.settings()
    if run.count < settings.delivery_count_limit:
        return RecordState.AVAILABLE
    return RecordState.ARCHIVING if settings.dead_letter_queue else RecordState.ARCHIVED


def start_transition(
    partition: SharePartition,
    run: Run,
    state: RecordState,
    write_id: int,
    cause: Cause,
) -> None:
    """Give an acquired run its new state, until the write confirms or undoes it."""
    run.transition = Transition(write_id, run.member_id or "", cause)
    run.member_id = None
    partition.change(run, state, cause)


def undo(partition: SharePartition, run: Run) -> None:
    """Give a run in transition back to its owner, whose lock has kept running."""
    transition = run.transition
    if transition is not None:
        partition.change(run, RecordState.ACQUIRED, Cause.ROLLED_BACK)
        run.member_id = transition.member_id
        run.transition = None


def ranges_of(runs: Sequence[Run]) -> tuple[tuple[int, int], ...]:
    """Return the offsets of runs; the runs may be split or joined until the write ends."""
    ranges: list[tuple[int, int]] = []
    for run in runs:
        if ranges and ranges[-1][1] + 1 == run.first:
            ranges[-1] = ranges[-1][0], run.last
        else:
            ranges.append((run.first, run.last))
    return tuple(ranges)


def _write_transition(
    partition: SharePartition,
    decision: DecisionBuilder,
    write_id: int,
    changed: Sequence[Run],
    token: Token | None,
) -> None:
    pending = PendingWrite(ranges_of(changed), token, True)
    partition.write(decision, write_id, changed, pending)


# --- checks, in Kafka's order --------------------------------------------------------------------


def _parts(
    partition: SharePartition, batch: AcknowledgeBatch, member_id: str
) -> Iterator[tuple[InFlightBatch, int, int, AcknowledgeType]]:
    """Yield the in-flight batches of an acknowledged range with their offsets and types.

    The offsets below the start offset are skipped, and so are holes between batches.
    """
    try:
        types = [AcknowledgeType(kind) for kind in batch.types]
    except ValueError as error:
        raise InvalidShareRequestError(f"Invalid acknowledge type: {list(batch.types)}") from error
    if len(types) not in (1, batch.last - batch.first + 1):
        raise InvalidShareRequestError(f"{len(types)} types for {batch.first}-{batch.last}")
    start = partition.start_offset
    if batch.last < start:
        return
    records = partition.records
    floor = records.floor(batch.first)
    if floor is None and not (batch.first < start and records.overlapping(start, batch.last)):
        raise InvalidRecordStateError(NOT_CACHED)
    last_known = records.floor(batch.last)
    if last_known is None or last_known.last < batch.first:
        raise InvalidShareRequestError(FIRST_PAST_END)
    if last_known.last < batch.last:
        raise InvalidShareRequestError(LAST_PAST_END)
    for in_flight in records.overlapping(max(batch.first, start), batch.last):
        first, last = max(in_flight.first, batch.first, start), min(in_flight.last, batch.last)
        if len(types) == 1:
            yield in_flight, first, last, types[0]
            continue
        if not in_flight.is_divided:
            _require_owner(in_flight, in_flight.runs[0], member_id)
            in_flight.is_divided = True
        offset = first
        for kind, same in groupby(types[first - batch.first : last - batch.first + 1]):
            size = len(list(same))
            yield in_flight, offset, offset + size - 1, kind
            offset += size


def _require_owner(batch: InFlightBatch, run: Run, member_id: str) -> None:
    """Raise InvalidRecordStateError unless the member holds the lock of a run."""
    if run.state is not RecordState.ACQUIRED:
        raise InvalidRecordStateError(
            OFFSET_NOT_ACQUIRED if batch.is_divided else BATCH_NOT_ACQUIRED
        )
    if run.member_id != member_id:
        raise InvalidRecordStateError(
            OFFSET_OF_ANOTHER_MEMBER if batch.is_divided else BATCH_OF_ANOTHER_MEMBER
        )


def _apply(
    partition: SharePartition,
    decision: DecisionBuilder,
    runs: Sequence[Run],
    kind: AcknowledgeType,
    member_id: str,
    write_id: int,
) -> list[Run]:
    """Renew locks, or start transitions; return the runs in transition."""
    settings = partition.settings()
    if kind is AcknowledgeType.RENEW:
        if not settings.renew_acknowledge_enabled:
            raise InvalidRecordStateError(RENEW_DISABLED)
        for run in runs:
            partition.lock(decision, run, member_id)
        return []
    for run in runs:
        match kind:
            case AcknowledgeType.ACCEPT:
                state = RecordState.ACKNOWLEDGED
            case AcknowledgeType.RELEASE:
                state = released_state(partition, run)
            case AcknowledgeType.REJECT if settings.dead_letter_queue:
                state = RecordState.ARCHIVING
            case _:
                state = RecordState.ARCHIVED
        start_transition(partition, run, state, write_id, _CAUSES[kind])
    return list(runs)
