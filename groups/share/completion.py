"""Results of writes to the share coordinator and to the dead-letter queue.

Source: ``SharePartition.rollbackOrProcessStateUpdates``, ``initiateDLQAndArchive``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fencepost.groups.share.acknowledge import expire_locks, ranges_of, undo
from fencepost.groups.share.commands import (
    Acknowledged,
    SendToDeadLetterQueue,
    WakeFetches,
)
from fencepost.groups.share.events import EventKind
from fencepost.groups.share.in_flight import Run
from fencepost.groups.share.outcomes import Outcomes
from fencepost.groups.share.partition import PendingWrite, SharePartition
from fencepost.groups.share.persister_errors import FENCING_ERRORS, writing_failed
from fencepost.groups.share.states import Cause, PartitionState, RecordState
from fencepost.logcore.machine import DecisionBuilder, DomainError


def state_written(
    partition: SharePartition, decision: DecisionBuilder, write_id: int, error: DomainError | None
) -> None:
    """End a write: confirm or undo its transitions, and answer the request that waits for it."""
    pending = partition.writes.pop(write_id)
    runs = list(_runs_of(partition, write_id, pending)) if pending.is_transition else []
    if error is not None and isinstance(error, FENCING_ERRORS):
        partition.fence(decision, str(error))
    if error is None or not pending.is_transition:
        has_returned = _confirm(partition, decision, runs, pending, is_written=error is None)
    else:
        kind, ranges = EventKind.SHARE_STATE_NOT_WRITTEN, ranges_of(runs)
        partition.record_ranges(decision, kind, ranges, error=str(error))
        has_returned = _roll_back(partition, decision, runs)
    if partition.state is PartitionState.ACTIVE and (
        partition.advance_start_offset() or has_returned
    ):
        decision.effect(WakeFetches(partition.key))
    # Once per batch: acknowledgements of single offsets have thousands of ranges in one batch.
    touched = {
        batch.first: batch
        for first, last in pending.ranges
        for batch in partition.records.overlapping(first, last)
    }
    for batch in touched.values():
        batch.join()
    if pending.token is not None:
        decision.reply(pending.token, Acknowledged() if error is None else writing_failed(error))


def dead_lettered(
    partition: SharePartition,
    decision: DecisionBuilder,
    ranges: Sequence[tuple[int, int]],
    *,
    queue: str,
    failure: str | None = None,
) -> None:
    """Archive ranges of records after the attempt to produce them to the dead-letter queue.

    ``queue`` is the queue's topic, and ``failure`` the reason why the records are not in the queue.
    The records are archived all the same, because a queue that is down must not hold back the start
    offset. If a share partition was removed with the group's last session and has no successor, its
    records are archived too.
    """
    if partition.state not in {PartitionState.ACTIVE, PartitionState.FENCED}:
        return
    archived: list[Run] = []
    for first, last in ranges:
        for batch in partition.records.overlapping(first, last):
            for run in batch.carve(max(first, partition.start_offset), last):
                if run.state is RecordState.ARCHIVING and run.transition is None:
                    partition.change(run, RecordState.ARCHIVED, Cause.DEAD_LETTERED)
                    archived.append(run)
    if archived:
        if failure is None:
            kind, detail = EventKind.SHARE_RECORDS_DEAD_LETTERED, {}
        else:
            kind, detail = EventKind.SHARE_DEAD_LETTER_FAILED, {"reason": failure}
        partition.record_ranges(decision, kind, ranges_of(archived), queue=queue, **detail)
        pending = PendingWrite(ranges_of(archived), None, False)
        partition.write(decision, partition.next_write_id(), archived, pending)


def _runs_of(partition: SharePartition, write_id: int, pending: PendingWrite) -> Iterator[Run]:
    """Yield the runs that still wait for the write. The log start may have passed other runs."""
    for first, last in pending.ranges:
        for batch in partition.records.overlapping(first, last):
            for run in batch.overlapping(first, last):
                if run.transition is not None and run.transition.write_id == write_id:
                    yield run


def _confirm(
    partition: SharePartition,
    decision: DecisionBuilder,
    runs: list[Run],
    pending: PendingWrite,
    *,
    is_written: bool,
) -> bool:
    """Make new states final; return whether records are available again.

    A share partition that was removed with the group's last session still sends records to the
    dead-letter queue.
    """
    is_available = False
    dead_letters, outcomes = list(pending.dead_letters), Outcomes()
    for run in runs:
        transition = run.transition
        run.transition = run.deadline_ms = None
        if transition is None:
            continue
        outcomes.add(run, transition.cause, transition.member_id)
        if run.state is RecordState.AVAILABLE:
            is_available = partition.may_be_available = True
        elif run.state is RecordState.ARCHIVING:
            dead_letters.append(
                SendToDeadLetterQueue(
                    partition.key, run.first, run.last, run.count, transition.cause
                )
            )
    partition.record_outcomes(decision, outcomes)
    if is_written or partition.state is PartitionState.ACTIVE:
        for request in dead_letters:
            decision.effect(request)
    return is_available


def _roll_back(partition: SharePartition, decision: DecisionBuilder, runs: list[Run]) -> bool:
    """Give records back to their owners, or release them if their locks ended meanwhile.

    Kafka archives a record at its delivery limit without writing the new state. Here the record is
    released as after any other expired lock.
    """
    has_expired = False
    for run in runs:
        undo(partition, run)
        if run.deadline_ms is not None and partition.state is PartitionState.ACTIVE:
            has_expired = has_expired or run.deadline_ms <= decision.now_ms
            partition.watch_lock(decision, run.deadline_ms)
    if has_expired:
        expire_locks(partition, decision)
    return has_expired
