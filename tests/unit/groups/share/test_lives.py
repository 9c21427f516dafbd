"""Random runs of share partitions must find planted bugs."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from fencepost.groups.share import acknowledge, acquire, completion
from fencepost.groups.share.acquire import _Acquisition
from fencepost.groups.share.in_flight import InFlightRecords, Run
from fencepost.groups.share.partition import SharePartition
from fencepost.groups.share.states import Cause, RecordState
from fencepost.logcore.machine import InvariantViolation
from tests.support.quick import only, seeds
from tests.unit.groups.share.lives import Life

LIVES = int(os.environ.get("HISTORIES", "60"))
STEPS = 120
MAX_LIVES_TO_FIND = 150
"""A planted bug must be found within this number of random runs."""

Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.parametrize("seed", seeds(LIVES))
def test_share_partition_behaves_like_a_model_with_one_entry_per_record(seed: int) -> None:
    Life(seed).run(STEPS)


def a_start_offset_passes_unconfirmed_acknowledgements(patch: pytest.MonkeyPatch) -> None:
    """KAFKA-19436."""
    patch.setattr(Run, "is_final", property(lambda run: run.state.is_terminal))


def a_record_in_transition_counts_as_available(patch: pytest.MonkeyPatch) -> None:
    """KAFKA-19463."""
    patch.setattr(Run, "is_available", property(lambda run: run.state is RecordState.AVAILABLE))


def a_closed_session_lowers_the_delivery_count(patch: pytest.MonkeyPatch) -> None:
    """KAFKA-19972."""
    start = acknowledge.start_transition

    def lowering(owner, run, state, write_id, cause):
        start(owner, run, state, write_id, cause)
        run.count -= cause is Cause.SESSION_CLOSED

    patch.setattr(acknowledge, "start_transition", lowering)


def a_failed_write_leaves_an_expired_lock(patch: pytest.MonkeyPatch) -> None:
    """KAFKA-19476 (b): the record stays acquired, because its lock has no timer."""

    def without_watching(owner, decision, runs):
        for run in runs:
            acknowledge.undo(owner, run)
        return False

    patch.setattr(completion, "_roll_back", without_watching)


def a_failed_write_makes_records_available(patch: pytest.MonkeyPatch) -> None:
    def releasing(owner, run):
        run.state, run.transition, run.deadline_ms = RecordState.AVAILABLE, None, None
        owner.may_be_available = True

    patch.setattr(completion, "undo", releasing)


def a_fetch_at_the_limit_acquires_behind_the_end_offset(patch: pytest.MonkeyPatch) -> None:
    """KAFKA-19555, KAFKA-19808."""
    room = acquire._room
    patch.setattr(
        acquire,
        "_room",
        lambda owner, request, fetched: (
            fetched.batches[-1].last,
            room(owner, request, fetched)[1],
        ),
    )


def gaps_of_a_read_state_are_never_fetched(patch: pytest.MonkeyPatch) -> None:
    """KAFKA-18494."""
    patch.setattr(SharePartition, "has_gaps", property(lambda _: False))


def a_gap_stays_below_the_start_of_the_log(patch: pytest.MonkeyPatch) -> None:
    move = SharePartition.set_start_offset

    def keeping_the_gap(owner, offset):
        gap_start = owner.gap.gap_start if owner.gap is not None else 0
        move(owner, offset)
        if owner.gap is not None:
            owner.gap.gap_start = gap_start

    patch.setattr(SharePartition, "set_start_offset", keeping_the_gap)


def a_moved_start_offset_keeps_the_complete_count(patch: pytest.MonkeyPatch) -> None:
    move = SharePartition.set_start_offset

    def keeping_the_count(owner, offset):
        count = owner.delivery_complete_count
        move(owner, offset)
        owner.delivery_complete_count = count

    patch.setattr(SharePartition, "set_start_offset", keeping_the_count)


def a_moved_start_offset_forgets_whole_batches_only(patch: pytest.MonkeyPatch) -> None:
    def whole_batches_only(records, start_offset):
        batches = records._batches
        while batches and batches.peekitem(0)[1].last < start_offset:
            batches.popitem(0)

    patch.setattr(InFlightRecords, "remove_below", whole_batches_only)


def records_of_aborted_transactions_are_delivered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(acquire, "aborted_ranges", lambda _batches, _aborted: [])


def compacted_records_stay_available(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_Acquisition, "_skip_hole", lambda _acquisition, _first: None)


def released_records_are_not_looked_for(patch: pytest.MonkeyPatch) -> None:
    confirm = completion._confirm

    def without_flag(owner, decision, runs, pending, *, is_written):
        flag = owner.may_be_available
        confirmed = confirm(owner, decision, runs, pending, is_written=is_written)
        owner.may_be_available = flag
        return confirmed

    patch.setattr(completion, "_confirm", without_flag)


def throttling_begins_one_delivery_late(patch: pytest.MonkeyPatch) -> None:
    count = acquire.throttle_count
    patch.setattr(acquire, "throttle_count", lambda limit: count(limit) + 1)


def a_record_is_delivered_once_more_than_the_limit(patch: pytest.MonkeyPatch) -> None:
    released = acknowledge.released_state

    def late(owner, run):
        if run.count == owner.settings().delivery_count_limit:
            return RecordState.AVAILABLE
        return released(owner, run)

    patch.setattr(acknowledge, "released_state", late)


def another_member_may_acknowledge(patch: pytest.MonkeyPatch) -> None:
    require = acknowledge._require_owner

    def of_any_member(known, run, member_id):
        require(known, run, run.member_id or member_id)

    patch.setattr(acknowledge, "_require_owner", of_any_member)


def a_failed_acknowledgement_keeps_the_batches_before_it(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(acknowledge, "undo", lambda _owner, _run: None)


def ranges_with_different_counts_are_joined(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Run,
        "continues",
        lambda run, previous: (
            run.state is previous.state
            and run.member_id == previous.member_id
            and run.deadline_ms == previous.deadline_ms
            and run.transition is previous.transition
        ),
    )


def a_divided_range_loses_its_transition(patch: pytest.MonkeyPatch) -> None:
    """KAFKA-19476 (a): the log's start divides a batch whose release is being written."""
    split = Run.split

    def forgetting(run, first):
        rest = split(run, first)
        rest.transition = None
        return rest

    patch.setattr(Run, "split", forgetting)


def only_the_first_range_is_written(patch: pytest.MonkeyPatch) -> None:
    write = SharePartition.write
    patch.setattr(
        SharePartition,
        "write",
        lambda owner, decision, write_id, changed, pending: write(
            owner, decision, write_id, changed[:1], pending
        ),
    )


def expired_locks_are_not_written(patch: pytest.MonkeyPatch) -> None:
    write = SharePartition.write

    def transitions_only(owner, decision, write_id, changed, pending):
        write(owner, decision, write_id, changed if pending.is_transition else [], pending)

    patch.setattr(SharePartition, "write", transitions_only)


def a_renewed_lock_keeps_its_end(patch: pytest.MonkeyPatch) -> None:
    lock = SharePartition.lock

    def keeping(owner, decision, run, member_id):
        if run.deadline_ms is None:
            lock(owner, decision, run, member_id)

    patch.setattr(SharePartition, "lock", keeping)


def an_earlier_lock_does_not_reset_the_timer(patch: pytest.MonkeyPatch) -> None:
    watch = SharePartition.watch_lock

    def once(owner, decision, deadline_ms):
        if owner._lock_deadline_ms is None:
            watch(owner, decision, deadline_ms + 1)

    patch.setattr(SharePartition, "watch_lock", once)


def archiving_is_not_resumed_by_a_new_leader(patch: pytest.MonkeyPatch) -> None:
    """KAFKA-20672."""
    patch.setattr(SharePartition, "_resume_archiving", lambda _owner, _decision: None)


def the_start_offset_waits_for_a_write_after_aborted_records(patch: pytest.MonkeyPatch) -> None:
    def without_advance(owner, decision, request, fetched):
        advance = owner.advance_start_offset
        owner.advance_start_offset = lambda: False
        try:
            return original(owner, decision, request, fetched)
        finally:
            owner.advance_start_offset = advance

    original = acquire.acquire
    patch.setattr("tests.unit.groups.share.driver.acquire", without_advance)


PLANTS: tuple[Plant, ...] = (
    a_start_offset_passes_unconfirmed_acknowledgements,
    a_record_in_transition_counts_as_available,
    a_closed_session_lowers_the_delivery_count,
    a_failed_write_leaves_an_expired_lock,
    a_failed_write_makes_records_available,
    a_fetch_at_the_limit_acquires_behind_the_end_offset,
    gaps_of_a_read_state_are_never_fetched,
    a_gap_stays_below_the_start_of_the_log,
    a_moved_start_offset_keeps_the_complete_count,
    a_moved_start_offset_forgets_whole_batches_only,
    records_of_aborted_transactions_are_delivered,
    compacted_records_stay_available,
    released_records_are_not_looked_for,
    throttling_begins_one_delivery_late,
    a_record_is_delivered_once_more_than_the_limit,
    another_member_may_acknowledge,
    a_failed_acknowledgement_keeps_the_batches_before_it,
    ranges_with_different_counts_are_joined,
    a_divided_range_loses_its_transition,
    only_the_first_range_is_written,
    expired_locks_are_not_written,
    a_renewed_lock_keeps_its_end,
    an_earlier_lock_does_not_reset_the_timer,
    archiving_is_not_resumed_by_a_new_leader,
    the_start_offset_waits_for_a_write_after_aborted_records,
)


@pytest.mark.parametrize("plant", only(PLANTS, *PLANTS[::4]), ids=lambda plant: plant.__name__)
def test_random_histories_find_the_planted_bug(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    for seed in range(MAX_LIVES_TO_FIND):
        try:
            Life(seed).run(STEPS)
        except (AssertionError, InvariantViolation):
            return
    pytest.fail(f"{plant.__name__} was not found in {MAX_LIVES_TO_FIND} lives")
