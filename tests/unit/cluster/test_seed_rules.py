"""The ten basic rules of replication, and the tests of each rule.

This file tests rules about one partition. ``test_zookeeper`` (tests/oracle) tests rules about a
cluster that elects its controller with a real ZooKeeper. The list names the files of the other
tests.

1. The leader reads, then records the follower's log end offset, then returns its high watermark
   * here: test_fetch_reports_log_end_offset_and_returns_former_high_watermark
2. The high watermark is the smallest log end offset of the ISR
   * here: test_high_watermark_is_the_lowest_log_end_offset_of_the_isr
3. acks, and min.insync.replicas
   * here: test_acks_all_waits_for_every_isr_member
4. A replica leaves the ISR for lag in time, not in messages, and returns at the high watermark
   * here: test_burst_of_records_does_not_shrink_the_isr
   * here: test_follower_rejoins_the_isr_at_the_high_watermark
5. ISR changes go through a znode in ZooKeeper, since 2.7 through AlterPartition
   * here: test_isr_change_reaches_the_brokers_through_the_controller
   * tests/oracle/test_zookeeper.py:
     test_isr_written_by_a_leader_is_read_and_propagated
6. Loss and divergence without leader epochs
   * here: test_restart_below_the_high_watermark_loses_no_records
   * tests/unit/cluster/test_replication_bugs.py:
     test_kip_101_restart_does_not_truncate_to_the_high_watermark
   * tests/unit/cluster/test_replication_bugs.py:
     test_kip_101_divergence_at_the_same_offset_is_truncated
7. One controller, elected through ZooKeeper
   * tests/oracle/test_zookeeper.py: test_first_broker_is_controller_and_every_broker_is_registered
   * tests/oracle/test_zookeeper.py: test_killed_controller_is_replaced_by_another_broker
   * tests/crash/test_controller_sweep.py: test_controller_lost_at_any_step_leaves_no_open_work
8. The first assigned replica that is alive and in sync leads
   * tests/oracle/test_zookeeper.py:
     test_next_live_in_sync_replica_of_the_assignment_becomes_leader
9. A reassignment adds, copies, then removes
   * tests/unit/cluster/controller/test_reassignments.py:
     test_reassignment_ends_when_all_target_replicas_are_in_sync
   * tests/oracle/test_zookeeper.py: test_reassignment_copies_before_it_removes_replicas
10. A group rebalances when the number of partitions changes
   * tests/oracle/test_zookeeper.py: test_group_rebalances_when_its_topic_grows
   * tests/wire/test_consumer_protocol.py: test_group_rebalances_when_its_topic_grows
"""

from __future__ import annotations

import re
from pathlib import Path

from fencepost.cluster.isr import IsrState
from fencepost.cluster.leader import AcksVerdict
from tests.unit.cluster.replicas import LAG_MS, Led, registration
from tests.unit.cluster.trio import Trio

A, B, C = 1, 2, 3

ROOT = Path(__file__).parents[3]


def test_rules_name_existing_tests():
    rules = re.split(r"^\d+\. ", __doc__ or "", flags=re.MULTILINE)[1:]
    assert len(rules) == 10
    for rule in rules:
        named = re.findall(r"^   \* (\S+):\s+(test_\w+)$", rule, flags=re.MULTILINE)
        assert named, rule
        for place, test in named:
            file = Path(__file__) if place == "here" else ROOT / place
            assert f"def {test}(" in file.read_text(), (place, test)


def test_fetch_reports_log_end_offset_and_returns_former_high_watermark():
    """The leader reads, then records the follower's log end offset, then responds."""
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


def test_high_watermark_is_the_lowest_log_end_offset_of_the_isr():
    led = Led()
    led.append(9)
    led.fetch(2, 4)
    led.fetch(3, 6)
    assert led.leader.high_watermark == 4
    today = Led(registration(isr=[1]), min_isr=2)
    today.append(9)
    assert today.leader.high_watermark == 0, "today: not below min.insync.replicas"


def test_acks_all_waits_for_every_isr_member():
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


def test_burst_of_records_does_not_shrink_the_isr():
    """A limit in messages would remove the followers; ``replica.lag.time.max.ms`` does not."""
    led = Led(end=10)
    for follower in (2, 3):
        led.fetch(follower, 10)
    led.append(1_000_000)
    led.wait(LAG_MS)
    led.leader.check_isr(led.now_ms)
    assert led.leader.state is IsrState.COMMITTED
    led.wait(1)
    assert led.shrink().leaves == (2, 3), "slow, stuck or gone: not caught up for so long"


def test_follower_rejoins_the_isr_at_the_high_watermark():
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


def test_isr_change_reaches_the_brokers_through_the_controller():
    """Before Kafka 2.7, leaders wrote a znode; since then they send AlterPartition."""
    trio = Trio()
    trio.change(isr=(A, B))
    trio.settle()
    trio.round_trip(C)
    trio.alter_now(A)
    assert trio.registration.isr == (A, B, C)
    assert trio.nodes[A].leader.isr == (A, B, C)
    trio.settle()
    assert trio.nodes[B].view.brokers == trio.nodes[C].view.brokers


def test_restart_below_the_high_watermark_loses_no_records():
    """KIP-101: truncate to the end offset of the epoch, not to the high watermark.

    test_replication_bugs has the complete scenarios of KIP-101.
    """
    trio = Trio(members=(A, B))
    for number in range(2):
        trio.produce(A, number)
    trio.round_trip(B)
    assert trio.nodes[B].log.high_watermark == 0
    trio.nodes[B].restart(0)
    trio.nodes[B].apply(9)
    trio.round_trip(B)
    assert trio.nodes[B].log.log_end_offset == 2
