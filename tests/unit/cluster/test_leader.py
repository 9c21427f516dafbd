"""A leader's rules: followers' fetches, both watermarks, acks=all, elections.

Tests with Kafka's names are cases of ``PartitionTest`` and ``ReplicaTest``.
"""

from __future__ import annotations

import pytest

from fencepost.cluster.errors import NotLeaderOrFollowerError, UnknownReplicaError
from fencepost.cluster.isr import NEVER_MS, UNKNOWN_OFFSET
from fencepost.cluster.leader import NOTHING, AcksVerdict
from tests.unit.cluster.replicas import LAG_MS, Led, broker, registration

# --- becoming leader ---


def test_make_leader_updates_epoch_cache():
    led = Led(registration(leader_epoch=7), end=40, high=30)
    assert led.first.epoch_entry == (7, 40)
    assert led.first.is_new_leader
    assert (led.leader.epoch_start_offset, led.leader.high_watermark) == (40, 30)
    assert not led.leader.offsets_are_settled


def test_sole_replica_commits_at_once():
    led = Led(registration([1]), end=40, high=30)
    assert led.first.high_watermark_moved
    assert led.leader.high_watermark == 40
    assert led.leader.offsets_are_settled


def test_ignore_leader_partition_state_change_with_older_partition_epoch():
    led = Led(registration(partition_epoch=10), end=5)
    assert led.become(registration(partition_epoch=9, leader_epoch=4, isr=[1])) is NOTHING
    assert led.leader.isr == (1, 2, 3)


def test_do_not_update_epoch_start_offset_if_leader_epoch_is_not_bumped():
    led = Led(end=5)
    led.append(5)
    step = led.become(registration(partition_epoch=11, isr=[1, 2]))
    assert step.epoch_entry is None
    assert led.leader.epoch_start_offset == 5
    assert led.leader.isr == (1, 2)


def test_do_not_reset_replica_state_if_leader_epoch_is_not_bumped():
    led = Led(end=5)
    led.fetch(2, 5)
    before = led.leader.replicas[2].last_caught_up_ms
    led.wait(100)
    led.become(registration(partition_epoch=11))
    state = led.leader.replicas[2]
    assert (state.log_end_offset, state.last_caught_up_ms) == (5, before)


def test_leader_reelected_after_other_leaders_forgets_follower_offsets():
    """Followers may have truncated their logs, so earlier fetch offsets must not count."""
    led = Led(registration([1, 2], leader_epoch=5))
    led.append(3)
    led.fetch(2, 3)
    assert led.leader.high_watermark == 3
    led.append(2)
    led.fetch(2, 4)
    assert led.leader.high_watermark == 4
    led.become(registration([1, 2], leader_epoch=6, partition_epoch=11), high=4)
    assert led.leader.replicas[2].log_end_offset == 4, "nobody has led in between"
    step = led.become(registration([1, 2], leader_epoch=8, partition_epoch=13), high=4)
    assert step.is_new_leader
    assert step.epoch_entry == (8, 5)
    assert led.leader.replicas[2].log_end_offset == UNKNOWN_OFFSET
    assert led.leader.acks_verdict(4, 6) is AcksVerdict.NOT_LEADER_OR_FOLLOWER


def test_reset_replica_state_when_new_leader_is_elected():
    led = Led(registration(isr=[1, 2]), end=5)
    in_isr, outside = led.leader.replicas[2], led.leader.replicas[3]
    for state in (in_isr, outside):
        assert (state.log_end_offset, state.log_start_offset) == (UNKNOWN_OFFSET, UNKNOWN_OFFSET)
        assert state.broker_epoch is None
    assert in_isr.last_caught_up_ms == led.now_ms
    assert outside.last_caught_up_ms == NEVER_MS


def test_reset_replica_state_when_leader_is_reelected():
    led = Led(registration(isr=[1, 2]), end=5)
    led.fetch(2, 5)
    led.fetch(3, 2)
    led.append(5)
    led.wait(1_000)
    step = led.become(registration(isr=[1, 2], leader_epoch=6, partition_epoch=11))
    assert step.epoch_entry == (6, 10)
    assert not step.is_new_leader
    in_isr, outside = led.leader.replicas[2], led.leader.replicas[3]
    assert (in_isr.log_end_offset, outside.log_end_offset) == (5, 2), "it knows where they are"
    assert in_isr.last_caught_up_ms == in_isr.last_fetch_ms == led.now_ms
    assert outside.last_caught_up_ms == outside.last_fetch_ms == NEVER_MS
    assert in_isr.last_fetch_leader_log_end_offset == 10
    led.leader.update_follower_fetch_state(3, 103, 9, 0, 12, led.now_ms)
    assert outside.last_caught_up_ms == NEVER_MS, "below the start of the epoch"


def test_update_assignment_and_isr():
    led = Led(registration([1, 2, 3]), end=5)
    led.fetch(2, 5)
    led.become(registration([1, 2, 4], isr=[1, 2], partition_epoch=11, adding=[4]))
    assert sorted(led.leader.replicas) == [2, 4]
    assert led.leader.replicas[2].log_end_offset == 5
    assert led.leader.is_reassigning


def test_follower_should_not_have_any_remote_replica_states():
    led = Led(end=5)
    led.fetch(2, 5)
    assert led.leader.resign(registration(leader=2, leader_epoch=6, partition_epoch=11))
    assert (led.leader.replicas, led.leader.isr, led.leader.is_leader) == ({}, (), False)
    assert led.append(1) is NOTHING
    assert led.leader.check_isr(led.now_ms) is NOTHING


def test_ignore_follower_partition_state_change_with_older_partition_epoch():
    led = Led(registration(partition_epoch=10))
    assert not led.leader.resign(registration(leader=2, leader_epoch=4, partition_epoch=9))
    assert led.leader.is_leader


# --- followers' fetches ---


def test_fetch_from_unrecognized_follower():
    led = Led(registration([1, 2]))
    with pytest.raises(UnknownReplicaError):
        led.fetch(3, 0)
    led.become(registration([1, 2, 3], isr=[1, 2], partition_epoch=11, adding=[3]))
    led.fetch(3, 0)


def test_follower_fetch_from_former_leader_is_refused():
    led = Led()
    led.leader.resign()
    with pytest.raises(NotLeaderOrFollowerError):
        led.fetch(2, 0)


def test_fence_follower_fetch_with_stale_broker_epoch():
    led = Led(end=5)
    with pytest.raises(NotLeaderOrFollowerError):
        led.fetch(2, 5, epoch=101)
    assert led.leader.replicas[2].log_end_offset == UNKNOWN_OFFSET
    led.fetch(2, 4, epoch=-1)
    led.fetch(2, 5, epoch=103)  # the metadata of its new incarnation has not arrived yet
    assert led.leader.replicas[2].log_end_offset == 5


def test_update_follower_fetch_state():
    led = Led(end=6)
    led.fetch(2, 6, start=3)
    state = led.leader.replicas[2]
    assert (state.log_end_offset, state.log_start_offset) == (6, 3)
    assert (state.broker_epoch, state.last_caught_up_ms) == (102, led.now_ms)


def test_follower_at_end_of_previous_fetch_was_caught_up_at_that_fetch():
    """At a high rate, each fetch only reaches the end that the log had at the previous fetch."""
    led = Led(end=10)
    led.fetch(2, 10)
    first = led.now_ms
    led.append(5)
    led.wait(500)
    led.fetch(2, 10)
    second = led.now_ms
    assert led.leader.replicas[2].last_caught_up_ms == first
    led.append(5)
    led.wait(500)
    led.fetch(2, 15)
    assert led.leader.replicas[2].last_caught_up_ms == second


def test_kafka_13141_diverging_fetch_does_not_update_follower_offset():
    """KAFKA-13141."""
    led = Led(registration([1, 2]), end=10, high=10)
    led.append(10)
    assert led.fetch(2, 15, diverging=True) is NOTHING
    assert led.leader.replicas[2].log_end_offset == UNKNOWN_OFFSET
    assert led.leader.high_watermark == 10


# --- the high watermark ---


def test_high_watermark_is_the_lowest_log_end_offset_of_the_isr():
    led = Led()
    led.append(10)
    assert led.leader.high_watermark == 0, "nobody has told where he is"
    led.fetch(2, 10)
    assert led.leader.high_watermark == 0
    assert led.fetch(3, 7).high_watermark_moved
    assert led.leader.high_watermark == 7
    assert not led.fetch(2, 10).high_watermark_moved


def test_high_watermark_of_the_leader_never_falls():
    led = Led(registration([1, 2]), end=10, high=8)
    led.fetch(2, 5)
    assert led.leader.high_watermark == 8
    led.fetch(2, 9)
    assert led.leader.high_watermark == 9


def test_high_watermark_waits_for_caught_up_replica_outside_of_isr():
    """If the ISR has one member, a follower could otherwise never reach the high watermark."""
    led = Led(registration(isr=[1]), end=10, high=10)
    led.fetch(2, 4)
    assert led.append(1).high_watermark_moved, "it was never caught up"
    led.fetch(2, 11)
    assert not led.append(5).high_watermark_moved
    assert led.leader.high_watermark == 11
    led.wait(LAG_MS)
    assert not led.append(1).high_watermark_moved
    led.wait(1)
    led.answer(led.leader.pending, 107)
    assert led.append(1).high_watermark_moved


@pytest.mark.parametrize("now", [broker(2, fenced=True), broker(2, leaving=True)])
def test_high_watermark_increases_with_fenced_or_shutdown_follower(now):
    led = Led(registration(isr=[1]), end=10, high=10)
    led.knows(now)
    led.fetch(2, 10)
    assert led.append(5).high_watermark_moved
    assert led.leader.high_watermark == 15


def test_high_watermark_advance_should_not_advance_when_under_min_isr():
    """KAFKA-15583, KIP-966."""
    led = Led(registration(isr=[1]), end=10, high=10, min_isr=2)
    assert not led.append(5).high_watermark_moved
    assert led.leader.high_watermark == 10
    change = led.fetch(2, 15).send
    assert not led.fetch(2, 15).high_watermark_moved, "the addition is not committed"
    assert led.accept(change).high_watermark_moved
    assert led.leader.high_watermark == 15


def test_lowered_min_isr_advances_the_high_watermark():
    led = Led(registration(isr=[1]), end=10, high=10, min_isr=2)
    led.append(5)
    led.leader.min_insync_replicas = 1
    assert led.leader.reconsider(led.now_ms).high_watermark_moved
    assert led.leader.reconsider(led.now_ms) is NOTHING


# --- the low watermark ---


def test_low_watermark_is_the_lowest_log_start_offset_of_live_replicas():
    led = Led(end=10)
    assert led.leader.low_watermark == -1
    led.fetch(2, 10, start=0)
    assert not led.leader.log_start_moved(5).low_watermark_moved
    assert led.fetch(3, 10, start=4).low_watermark_moved
    assert led.leader.low_watermark == 0
    assert led.fetch(2, 10, start=6).low_watermark_moved
    assert led.leader.low_watermark == 4
    led.knows(broker(3, fenced=True))
    assert led.leader.reconsider(led.now_ms).low_watermark_moved
    assert led.leader.low_watermark == 5


# --- acks=all ---


def test_acks_all_waits_for_the_high_watermark():
    led = Led(registration([1, 2]))
    led.append(10)
    assert led.leader.acks_verdict(10, 5) is AcksVerdict.WAITING
    led.fetch(2, 9)
    assert led.leader.acks_verdict(10, 5) is AcksVerdict.WAITING
    led.fetch(2, 10)
    assert led.leader.acks_verdict(10, 5) is AcksVerdict.DONE


def test_acks_all_after_isr_shrink_is_not_enough_replicas_after_append():
    led = Led(registration([1, 2]), min_isr=2)
    led.append(10)
    led.fetch(2, 10)
    led.append(5)
    led.become(registration([1, 2], isr=[1], partition_epoch=11))
    assert led.leader.acks_verdict(10, 5) is AcksVerdict.NOT_ENOUGH_REPLICAS_AFTER_APPEND
    assert led.leader.acks_verdict(15, 5) is AcksVerdict.WAITING
    assert led.leader.is_under_min_isr


def test_acks_all_from_before_loss_of_leadership_is_not_leader():
    led = Led(registration([1, 2]))
    led.append(10)
    led.become(registration([1, 2], leader_epoch=6, partition_epoch=11))
    assert led.leader.acks_verdict(10, 5) is AcksVerdict.WAITING, "without a break it does"
    led.leader.resign(registration([1, 2], leader=2, leader_epoch=7, partition_epoch=12))
    assert led.leader.acks_verdict(10, 5) is AcksVerdict.NOT_LEADER_OR_FOLLOWER
    led.become(registration([1, 2], isr=[1], leader_epoch=8, partition_epoch=13), end=12)
    assert led.leader.high_watermark == 12
    assert led.leader.acks_verdict(10, 5) is AcksVerdict.NOT_LEADER_OR_FOLLOWER
    assert led.leader.acks_verdict(12, 8) is AcksVerdict.DONE


# --- properties ---


@pytest.mark.parametrize(
    ("isr", "min_isr", "under", "at"),
    [
        ([1, 2, 3], 2, False, False),
        ([1, 2], 2, False, True),
        ([1], 2, True, False),
        ([1], 9, True, False),
        ([1, 2, 3], 9, False, True),
    ],
)
def test_is_under_min_isr_and_at_min_isr(isr, min_isr, under, at):
    led = Led(registration(isr=isr), min_isr=min_isr)
    assert led.leader.effective_min_isr == min(min_isr, 3)
    assert (led.leader.is_under_min_isr, led.leader.is_at_min_isr) == (under, at)


def test_under_replicated_partitions_correct_semantics():
    """Replicas that a reassignment is adding do not count as missing."""
    led = Led(registration([1, 2, 3], isr=[1, 2, 3]))
    assert not led.leader.is_under_replicated
    moving = registration([1, 2, 3, 4], isr=[1, 2, 3], partition_epoch=11, adding=[4])
    led.become(moving)
    assert not led.leader.is_under_replicated
    led.become(registration([1, 2, 3], isr=[1, 3], partition_epoch=12))
    assert led.leader.is_under_replicated
    led.leader.resign()
    assert not led.leader.is_under_replicated
