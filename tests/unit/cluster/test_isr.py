"""The ISR: replicas that join and leave, and the controller's responses.

Tests with Kafka's names are cases of ``PartitionTest``, ``IsrExpirationTest`` and
``AlterPartitionManagerTest``.
"""

from __future__ import annotations

from itertools import product
from uuid import UUID

import pytest

from fencepost.cluster.alter_partition import RETRY_MS, AlterPartitions
from fencepost.cluster.errors import Errors
from fencepost.cluster.isr import (
    ALTER_PARTITION_ERRORS,
    ISR_TRANSITIONS,
    AlteredPartition,
    IsrChange,
    IsrState,
    IsrTrigger,
)
from fencepost.cluster.leader import NOTHING, AcksVerdict
from tests.unit.cluster.replicas import LAG_MS, TOPIC_ID, Led, broker, registration, view

# --- expansion ---


def _expanding(end: int = 10) -> tuple[Led, IsrChange]:
    """Return a leader with an ISR of one, whose expansion by broker 2 is pending."""
    led = Led(registration(isr=[1]), end=end, high=end)
    change = led.fetch(2, end).send
    assert change is not None
    return led, change


def test_isr_expansion():
    led, change = _expanding()
    assert change.new_isr == ((1, 101), (2, 102))
    assert (change.leader_epoch, change.partition_epoch) == (5, 10)
    assert led.leader.state is IsrState.PENDING_EXPAND
    assert led.leader.isr == (1,)
    assert led.leader.maximal_isr == {1, 2}
    step = led.accept(change)
    assert step.isr_changed
    assert (led.leader.isr, led.leader.partition_epoch) == ((1, 2), 11)
    (event,) = step.events
    assert (event.kind, event.detail["joined"]) == ("isr-expanded", [2])


def test_follower_joins_the_isr_at_the_high_watermark():
    led = Led(registration(isr=[1, 3]), end=0)
    led.append(20)
    led.fetch(3, 10)
    led.fetch(2, 9)
    assert led.leader.high_watermark == 10
    assert led.fetch(2, 9).send is None
    assert led.fetch(2, 10).send is not None


def test_follower_does_not_join_isr_until_caught_up_to_offset_within_current_leader_epoch():
    """KAFKA-7128."""
    led = Led(registration(isr=[1, 3]), end=100, high=80)
    assert led.fetch(2, 85).send is None
    assert led.fetch(2, 99).send is None
    assert led.fetch(2, 100).send is not None


@pytest.mark.parametrize("now", [broker(2, fenced=True), broker(2, leaving=True)])
def test_isr_not_expanded_if_replica_is_fenced_or_shutdown(now):
    """KIP-841: a fenced replica, or one that shuts down, is not eligible.

    KAFKA-13916: the controller would refuse each proposal to add it.
    """
    led = Led(registration(isr=[1]), end=10, high=10)
    led.knows(now)
    assert led.fetch(2, 10).send is None
    led.knows(broker(2))
    assert led.fetch(2, 10).send is not None


@pytest.mark.parametrize(("fetched", "joins"), [(-1, True), (102, True), (103, False)])
def test_isr_can_expanded_if_broker_epochs_match(fetched, joins):
    led = Led(registration(isr=[1]), end=10, high=10)
    change = led.fetch(2, 10, epoch=fetched).send
    assert (change is not None) == joins
    if change is not None:
        assert change.new_isr == ((1, 101), (2, fetched))


def test_is_replica_isr_eligible_with_unregistered_broker():
    led = Led(registration([1, 9], isr=[1]), end=10, high=10)
    assert led.fetch(9, 10).send is None


# --- shrinking ---


def test_isr_expiration_for_stuck_followers():
    led = Led(registration([1, 2]), end=10)
    led.fetch(2, 10)
    led.append(5)
    led.wait(LAG_MS)
    assert led.leader.check_isr(led.now_ms) is NOTHING
    led.wait(1)
    assert led.shrink().leaves == (2,)


def test_isr_expiration_if_no_fetch_request_made():
    led = Led(registration([1, 2]), end=10)
    led.wait(LAG_MS)
    assert led.leader.check_isr(led.now_ms) is NOTHING
    led.wait(1)
    change = led.shrink()
    assert (change.leaves, change.new_isr) == ((2,), ((1, 101),))


def test_isr_expiration_for_slow_followers():
    """The follower fetches all the time and never reaches the log end offset."""
    led = Led(registration([1, 2]), end=10)
    led.fetch(2, 10)
    for _ in range(40):
        led.append(100)
        led.wait(1_000)
        led.fetch(2, led.leader.log_end_offset - 250)
    assert led.shrink().leaves == (2,)


def test_should_not_shrink_isr_if_previous_fetch_is_caught_up():
    led = Led(registration([1, 2]), end=10)
    for _ in range(100):
        led.append(5)
        led.wait(1_000)
        led.fetch(2, led.leader.log_end_offset - 5)
    assert led.leader.check_isr(led.now_ms) is NOTHING


def test_should_not_shrink_isr_if_follower_caught_up_to_log_end():
    """A follower that has stopped fetching is in sync until the next append."""
    led = Led(registration([1, 2]), end=10)
    led.fetch(2, 10)
    led.wait(10 * LAG_MS)
    assert led.leader.check_isr(led.now_ms) is NOTHING
    led.append(1)
    assert led.shrink().leaves == (2,)


def test_maybe_shrink_isr():
    """KAFKA-13091: the committed shrink advances the high watermark and completes acks=all."""
    led = Led(registration([1, 2]), end=5, high=5)
    led.fetch(2, 5)
    led.append(5)
    led.wait(LAG_MS + 1)
    change = led.shrink()
    assert led.leader.state is IsrState.PENDING_SHRINK
    assert led.leader.maximal_isr == {1, 2}, "who leaves still counts"
    assert not led.append(1).high_watermark_moved
    assert led.leader.acks_verdict(10, 5) is AcksVerdict.WAITING
    step = led.accept(change)
    assert step.high_watermark_moved
    assert led.leader.acks_verdict(10, 5) is AcksVerdict.DONE
    (event,) = step.events
    assert event.kind == "isr-shrunk"
    assert "broker 2 is at 5 of 10" in str(event.detail["reason"])


def test_isr_shrink_sends_broker_epochs_of_the_last_fetches():
    led = Led(end=10)
    led.fetch(3, 10)
    led.append(1)
    led.wait(LAG_MS)
    led.fetch(3, 11)
    led.wait(1)
    assert led.shrink().new_isr == ((1, 101), (3, 103))
    led = Led(end=10)
    led.wait(LAG_MS + 1)
    led.fetch(3, 10, epoch=-1)
    assert led.shrink().new_isr == ((1, 101), (3, -1))


def test_single_in_flight_alter_isr():
    led, change = _expanding()
    assert led.fetch(3, 10).send is None
    led.wait(LAG_MS + 1)
    assert led.leader.check_isr(led.now_ms) is NOTHING
    led.accept(change)
    assert led.fetch(3, 10).send is not None


# --- the table ---


def test_isr_state_table_starts_changes_only_from_committed():
    started = {IsrTrigger.EXPAND, IsrTrigger.SHRINK}
    for state, trigger in product(IsrState, IsrTrigger):
        pending = state is not IsrState.COMMITTED
        allowed = trigger not in started if pending else trigger in {*started, IsrTrigger.METADATA}
        assert ((state, trigger) in ISR_TRANSITIONS) == allowed, (state, trigger)


# --- answers ---


@pytest.mark.parametrize("error", [Errors.INELIGIBLE_REPLICA, Errors.OPERATION_NOT_ATTEMPTED])
def test_isr_not_expanded_if_update_fails(error):
    led, change = _expanding()
    step = led.answer(change, error)
    assert step.send is None
    assert led.leader.state is IsrState.COMMITTED
    assert led.leader.maximal_isr == {1}
    assert led.append(0) is NOTHING
    assert step.events[0].kind == "isr-update-failed"
    assert led.fetch(2, 10).send is not None, "the next try comes with the next fetch"


@pytest.mark.parametrize(
    "error",
    [
        Errors.FENCED_LEADER_EPOCH,
        Errors.INVALID_UPDATE_VERSION,
        Errors.UNKNOWN_TOPIC_OR_PARTITION,
        Errors.UNKNOWN_TOPIC_ID,
        Errors.INVALID_REQUEST,
        Errors.NEW_LEADER_ELECTED,
    ],
)
def test_invalid_alter_partition_requests_are_not_retried(error):
    led, change = _expanding()
    assert led.answer(change, error).send is None
    assert led.leader.state is IsrState.PENDING_EXPAND
    assert led.leader.maximal_isr == {1, 2}
    led.become(registration(isr=[1], partition_epoch=11))
    assert led.leader.state is IsrState.COMMITTED


@pytest.mark.parametrize("error", [Errors.NOT_CONTROLLER, -1, 7])
def test_partition_should_retry_alter_partition_request(error):
    """Errors without a rule (NOT_CONTROLLER: KAFKA-14154) resend the same change."""
    led, change = _expanding()
    assert led.answer(change, error).send is change
    assert led.accept(change).isr_changed


def test_alter_partition_errors_with_a_rule_are_all_tested():
    tested = {"FENCED_LEADER_EPOCH", "INVALID_UPDATE_VERSION", "UNKNOWN_TOPIC_OR_PARTITION"}
    tested |= {"UNKNOWN_TOPIC_ID", "INVALID_REQUEST", "NEW_LEADER_ELECTED"}
    tested |= {"INELIGIBLE_REPLICA", "OPERATION_NOT_ATTEMPTED"}
    assert {Errors(code).name for code in ALTER_PARTITION_ERRORS} == tested


def test_alter_partition_response_of_other_or_older_epoch_is_ignored():
    led, change = _expanding()
    assert led.answer(change, AlteredPartition(6, 12, (1, 2))) is NOTHING
    assert led.answer(change, AlteredPartition(5, 9, (1, 2))) is NOTHING
    assert led.leader.state is IsrState.PENDING_EXPAND


def test_alter_partition_response_with_same_partition_epoch_ends_the_change():
    led, change = _expanding()
    led.accept(change, partition_epoch=10)
    assert led.leader.state is IsrState.COMMITTED


def test_alter_isr_leader_and_isr_race():
    """Newer metadata replaces the pending change; the late response is ignored."""
    led, change = _expanding()
    led.become(registration(isr=[1, 3], partition_epoch=11))
    assert led.leader.state is IsrState.COMMITTED
    assert led.leader.isr == (1, 3)
    for answer in (AlteredPartition(5, 12, (1, 2)), Errors.NOT_CONTROLLER, 107):
        assert led.answer(change, answer) is NOTHING
    assert led.leader.isr == (1, 3)


def test_metadata_with_the_pending_isr_report_its_reason():
    led, change = _expanding()
    step = led.become(registration(isr=[1, 2], partition_epoch=11))
    assert step.events[0].detail["reason"] == change.reason


def test_metadata_of_known_partition_epoch_keep_pending_isr_change():
    """A change stays pending if the metadata of an earlier change arrives late.

    If the leader dropped the pending change, the high watermark could pass a replica that the
    controller is adding.
    """
    led, first = _expanding()
    led.accept(first)
    led.fetch(2, 10)
    second = led.fetch(3, 10).send
    assert second is not None
    assert led.become(registration(isr=[1, 2], partition_epoch=11)) is NOTHING
    assert led.leader.pending is second
    led.append(5)
    led.wait(LAG_MS + 1)
    led.fetch(2, 15)
    assert led.leader.high_watermark == 10, "broker 3 may be a member"


def test_isr_shrink_by_the_controller_is_reported_with_broker_state():
    led = Led()
    led.knows(broker(3, fenced=True))
    step = led.become(registration(isr=[1, 2], partition_epoch=11))
    assert step.isr_changed
    (event,) = step.events
    assert (event.kind, event.detail["reason"]) == ("isr-shrunk", "broker 3 is fenced")


# --- the queue to the controller ---


def _change(index: int = 0) -> IsrChange:
    return IsrChange("orders", TOPIC_ID, index, 5, 10, ((1, 101),), (), (2,), "it lags")


def _accepted(change: IsrChange) -> dict[tuple[UUID, int], int | AlteredPartition]:
    answer = AlteredPartition(5, 11, (1,))
    return {(change.topic_id, change.index): answer}


def test_single_batch():
    queue = AlterPartitions(view())
    first, second, third = _change(0), _change(1), _change(2)
    assert queue.submit(first)
    request = queue.next_request(0)
    assert request is not None
    assert (request.broker_id, request.broker_epoch, request.changes) == (1, 101, (first,))
    assert queue.submit(second)
    assert queue.submit(third)
    assert queue.next_request(0) is None, "one in flight"
    assert queue.on_answer(0, _accepted(first), 0) == ((first, AlteredPartition(5, 11, (1,))),)
    request = queue.next_request(0)
    assert request is not None
    assert request.changes == (second, third)


def test_overwrite_within_batch():
    queue = AlterPartitions(view())
    change = _change()
    assert queue.submit(change)
    assert not queue.submit(_change())
    queue.next_request(0)
    queue.on_answer(0, _accepted(change), 0)
    assert queue.submit(_change())


def test_submit_from_callback():
    """KAFKA-14010: the answered change is no longer pending when its callback submits a change."""
    queue = AlterPartitions(view())
    change = _change()
    queue.submit(change)
    queue.next_request(0)
    for answered, error in queue.on_answer(0, {(TOPIC_ID, 0): Errors.NOT_CONTROLLER}, 0):
        assert error == Errors.NOT_CONTROLLER
        assert queue.submit(answered)
    assert queue.next_request(0) is not None


@pytest.mark.parametrize(
    "error", [Errors.STALE_BROKER_EPOCH, Errors.NETWORK_EXCEPTION, Errors.NOT_CONTROLLER, -1, 31]
)
def test_retry_on_top_level_error(error):
    known = view()
    queue = AlterPartitions(known)
    change = _change()
    queue.submit(change)
    queue.next_request(1_000)
    assert queue.on_answer(error, {}, 1_000) == ()
    assert queue.retry_at_ms == 1_000 + RETRY_MS
    assert queue.next_request(1_000 + RETRY_MS - 1) is None
    known.broker_epoch = 500
    request = queue.next_request(1_000 + RETRY_MS)
    assert request is not None
    assert (request.broker_epoch, request.changes) == (500, (change,)), "the epoch of the moment"


def test_partition_missing_in_response():
    queue = AlterPartitions(view())
    first, second = _change(0), _change(1)
    queue.submit(first)
    queue.submit(second)
    queue.next_request(0)
    assert [change for change, _ in queue.on_answer(0, _accepted(second), 0)] == [second]
    request = queue.next_request(0)
    assert request is not None
    assert request.changes == (first,)


def test_alter_partition_response_without_request_is_ignored():
    queue = AlterPartitions(view())
    assert queue.on_answer(0, _accepted(_change()), 0) == ()
    assert len(queue) == 0
