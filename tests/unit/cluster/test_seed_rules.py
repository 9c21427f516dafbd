"""The rules of replication as they were first told, and what Kafka has made of them since."""

from __future__ import annotations

from fencepost.cluster.isr import IsrState
from fencepost.cluster.leader import AcksVerdict
from tests.unit.cluster.replicas import LAG_MS, Led, registration
from tests.unit.cluster.trio import Trio

A, B, C = 1, 2, 3


def test_a_fetch_tells_the_followers_end_and_brings_the_high_watermark_of_before_it():
    """First the leader reads, then it notes the follower's LEO, then it answers."""
    trio = Trio(members=(A, B))
    trio.produce(A, "m")
    leader, follower = trio.nodes[A], trio.nodes[B]
    trio.round_trip(B)
    assert leader.leader.replicas[B].log_end_offset == 0
    assert (follower.log.log_end_offset, follower.log.high_watermark) == (1, 0)
    trio.round_trip(B)
    assert (leader.leader.replicas[B].log_end_offset, leader.log.high_watermark) == (1, 1)
    assert follower.log.high_watermark == 0, "it hears of it one round later"
    trio.round_trip(B)
    assert follower.log.high_watermark == 1


def test_the_high_watermark_is_the_smallest_end_of_the_isr():
    led = Led()
    led.append(9)
    led.fetch(2, 4)
    led.fetch(3, 6)
    assert led.leader.high_watermark == 4
    today = Led(registration(isr=[1]), min_isr=2)
    today.append(9)
    assert today.leader.high_watermark == 0, "today: not below min.insync.replicas"


def test_acks_are_held_until_enough_followers_have_the_record():
    trio = Trio(min_isr=2)
    write = trio.produce(A)
    assert write is not None
    trio.round_trip(B, B)
    assert write.verdict is AcksVerdict.WAITING, "min.insync.replicas is no quorum: all of the ISR"
    trio.round_trip(C, C)
    assert write.verdict is AcksVerdict.DONE
    trio.change(isr=(A,))
    trio.settle()
    assert trio.produce(A) is None, "too few members: refused"


def test_a_burst_throws_nobody_out():
    """By messages (``replica.lag.max.messages``) it would have; by time it does not."""
    led = Led(end=10)
    for one in (2, 3):
        led.fetch(one, 10)
    led.append(1_000_000)
    led.wait(LAG_MS)
    led.leader.check_isr(led.now_ms)
    assert led.leader.state is IsrState.COMMITTED
    led.wait(1)
    assert led.shrink().leaves == (2, 3), "slow, stuck or gone: not caught up for so long"


def test_a_follower_outside_comes_back_at_the_high_watermark():
    trio = Trio()
    trio.change(isr=(A, B))
    trio.settle()
    for number in range(6):
        trio.produce(A, number)
    for _ in range(3):
        trio.round_trip(B)
    leader = trio.nodes[A].leader
    assert leader.high_watermark == 4
    trio.round_trip(C, C, C)
    assert leader.pending is not None
    assert (leader.pending.joins, leader.log_end_offset) == ((C,), 6)


def test_a_change_of_the_isr_is_known_to_all_once_the_controller_has_it():
    """Once a znode that the controller watched; since 2.7 AlterPartition."""
    trio = Trio()
    trio.change(isr=(A, B))
    trio.settle()
    trio.round_trip(C)
    trio.alter_now(A)
    assert trio.registration.isr == (A, B, C)
    assert trio.nodes[A].leader.isr == (A, B, C)
    trio.settle()
    assert trio.nodes[B].view.brokers == trio.nodes[C].view.brokers


def test_without_leader_epochs_a_restart_at_the_wrong_moment_lost_records():
    """What KIP-101 mended, in both directions: test_replication_bugs has the sequences; here the
    cut itself: not at the high watermark, but where the epoch ended."""
    trio = Trio(members=(A, B))
    for number in range(2):
        trio.produce(A, number)
    trio.round_trip(B)
    assert trio.nodes[B].log.high_watermark == 0
    trio.nodes[B].restart(0)
    trio.nodes[B].apply(9)
    trio.round_trip(B)
    assert trio.nodes[B].log.log_end_offset == 2
