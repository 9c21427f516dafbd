"""A view of a share partition for operators: counts of records, and the first incomplete record.

Computing the view takes one pass over the in-flight ranges, of which there are at most 10,000.
"""

from __future__ import annotations

from typing import NamedTuple

from fencepost.groups.share.in_flight import Run
from fencepost.groups.share.partition import SharePartition
from fencepost.groups.share.states import RecordState


class FirstOpen(NamedTuple):
    """The first incomplete offsets, all in one state. They keep the start offset from moving."""

    first: int
    last: int
    state: str
    """``ACQUIRED``, ``AVAILABLE`` and so on; ``NOT_READ`` for a gap that no fetch has read."""
    delivery_count: int
    member: str | None
    """The owner; during a transition, the former owner."""
    lock_end_ms: int | None
    is_in_transition: bool
    """Whether the state is being written."""


class PartitionView(NamedTuple):
    """The state of a share partition in the memory of its leader."""

    state: str
    leader_epoch: int
    start_offset: int
    end_offset: int
    acquired: int
    available: int
    """The number of in-flight records that a fetch may acquire, most of them not for the first
    time."""
    complete: int
    """The number of records after the start offset that are acknowledged or archived."""
    unwritten: int
    """The number of records whose new state is being written, or that go to the dead-letter queue.
    """
    max_delivery_count: int
    """The highest delivery count of the records that are not complete."""
    first_lock_end_ms: int | None
    lock_duration_ms: int
    delivery_count_limit: int
    first_open: FirstOpen | None


def view_of(partition: SharePartition) -> PartitionView:
    """Return the view of a share partition."""
    acquired = available = complete = unwritten = max_count = 0
    lock_end_ms: int | None = None
    first_open: Run | None = None
    for batch in partition.records:
        for run in batch.runs:
            if run.is_final:
                complete += run.size
                continue
            first_open = first_open or run
            max_count = max(max_count, run.count)
            if run.state is RecordState.ACQUIRED:
                acquired += run.size
                if run.deadline_ms is not None:
                    lock_end_ms = min(run.deadline_ms, lock_end_ms or run.deadline_ms)
            elif run.is_available:
                available += run.size
            else:
                unwritten += run.size
    settings = partition.settings()
    return PartitionView(
        partition.state.value,
        partition.leader_epoch,
        partition.start_offset,
        partition.end_offset,
        acquired,
        available,
        complete,
        unwritten,
        max_count,
        lock_end_ms,
        settings.record_lock_duration_ms,
        settings.delivery_count_limit,
        _first_open(partition, first_open),
    )


def _first_open(partition: SharePartition, run: Run | None) -> FirstOpen | None:
    following = partition.first_open_offset()
    if following is None or (run is not None and run.first <= following):
        if run is None:
            return None
        owner = run.member_id if run.transition is None else run.transition.member_id
        is_written = run.transition is None
        return FirstOpen(
            run.first, run.last, run.state.name, run.count, owner, run.deadline_ms, not is_written
        )
    last = partition.end_offset if run is None else run.first - 1
    return FirstOpen(following, last, "NOT_READ", 0, None, None, is_in_transition=False)
