"""Scenarios of known replication bugs on three brokers, A, B and C.

Each bug was found in Apache Kafka's code or in the specification of a KIP; the tests state the
correct behaviour.
"""

from __future__ import annotations

from fencepost.cluster.errors import Errors
from fencepost.cluster.follower import FetchState
from fencepost.cluster.leader import AcksVerdict
from tests.unit.cluster.replicas import LAG_MS, registration
from tests.unit.cluster.test_specification import strong_isr
from tests.unit.cluster.trio import Trio

A, B, C, D = 1, 2, 3, 4


def _trio(members: tuple[int, ...] = (A, B, C), min_isr: int = 1) -> Trio:
    return Trio(min_isr=min_isr, members=members)


def _values(trio: Trio, broker_id: int) -> list[object]:
    return [value for _, value in trio.nodes[broker_id].log.records]


def _restart(trio: Trio, broker_id: int, high_watermark: int = 0) -> None:
    trio.register(broker_id)
    trio.nodes[broker_id].restart(high_watermark)


def test_kip_101_restart_does_not_truncate_to_the_high_watermark():
    trio = _trio((A, B))
    trio.produce(A, "m1")
    trio.round_trip(B, B)
    write = trio.produce(A, "m2")
    trio.round_trip(B)
    assert trio.nodes[B].log.high_watermark == 1
    trio.round_trip(B)
    assert write is not None
    assert write.verdict is AcksVerdict.DONE
    _restart(trio, B, high_watermark=1)
    trio.unfence(B)
    trio.settle()
    assert _values(trio, B) == ["m1", "m2"], "only epochs cut"
    trio.change(isr=(A, B))
    trio.fence(A)
    trio.settle()
    assert trio.registration.leader == B
    assert _values(trio, B) == ["m1", "m2"]


def test_kip_101_divergence_at_the_same_offset_is_truncated():
    """Both brokers lose power. B, which has only m1, leads first and appends m3 where A has m2."""
    trio = _trio((A, B))
    trio.produce(A, "m1")
    trio.round_trip(B)
    trio.produce(A, "m2")
    trio.registration = registration((A, B), isr=[B], leader=A, leader_epoch=0, partition_epoch=5)
    trio.change(leader=B)
    trio.nodes[A].restart(1)
    trio.nodes[B].restart(1)
    trio.settle()
    trio.nodes[A].follower.stop()
    trio.produce(B, "m3")
    assert trio.nodes[A].log.log_end_offset == trio.nodes[B].log.log_end_offset
    trio.nodes[A].do(trio.nodes[A].follower.resume())
    for _ in range(3):
        trio.round_trip(A)
    assert _values(trio, A) == _values(trio, B) == ["m1", "m3"]


def test_kip_279_logs_converge_after_fast_failovers():
    """A leads epochs 0 and 2, B leads epoch 1. A has no epoch 1, so B truncates to epoch 0."""
    trio = _trio((A, B))
    for number in range(10):
        trio.produce(A, number)
    for _ in range(6):
        trio.round_trip(B)
    trio.change(leader=B)
    trio.nodes[B].apply(9)
    trio.produce(B, "lost with B")
    trio.change(leader=A, isr=(A,))
    trio.nodes[A].apply(9)
    for value in "abc":
        trio.produce(A, value)
    trio.nodes[B].restart(8)
    trio.nodes[B].apply(9)
    for _ in range(6):
        trio.round_trip(B)
    assert _values(trio, B) == _values(trio, A) == [*range(10), "a", "b", "c"]


def test_kafka_7128_replica_joins_isr_only_at_leader_epoch_start_offset():
    trio = _trio((A, B, C, D))
    for number in range(10):
        trio.produce(A, number)
    trio.change(isr=(A, B, D))
    trio.settle()
    trio.now_ms += LAG_MS + 1
    for _ in range(6):
        trio.round_trip(B, D)
    assert trio.nodes[A].log.high_watermark == 10, "C is not a member"
    trio.fence(A)
    trio.nodes[B].log.high_watermark = 2
    trio.settle()
    leader = trio.nodes[B].leader
    assert (leader.high_watermark, leader.epoch_start_offset) == (2, 10)
    for end in (0, 2, 4, 6, 8):
        trio.round_trip(C)
        assert leader.replicas[C].log_end_offset == end
        assert leader.pending is None, "all below 10 may be committed"
    trio.round_trip(C)
    assert leader.pending is not None


def test_kafka_14704_diverging_response_does_not_move_high_watermark():
    trio = _trio()
    for number in range(12):
        trio.produce(A, number)
    for _ in range(5):
        trio.round_trip(B, C)
    high = trio.nodes[B].log.high_watermark
    for number in range(3):
        trio.produce(A, f"only A {number}")
    trio.nodes[A].log.high_watermark = 5
    trio.change(leader=B)
    trio.settle()
    trio.produce(B, "new")
    sent = trio.fetch(A)
    assert sent is not None
    trio.deliver(sent)
    trio.deliver(trio.messages[-1])
    end = trio.nodes[A].log.log_end_offset
    assert end == trio.nodes[B].leader.epoch_start_offset
    assert trio.nodes[A].log.high_watermark == 5
    assert high >= 5


def test_kafka_13141_diverging_fetch_does_not_advance_high_watermark():
    trio = _trio((A, B))
    trio.produce(A, "both")
    trio.round_trip(B, B)
    trio.produce(A, "only A")
    trio.produce(A, "only A")
    trio.change(leader=B)
    trio.settle()
    for number in range(3):
        trio.produce(B, number)
    message = trio.fetch(A)
    assert message is not None
    trio.deliver(message)
    assert trio.nodes[B].log.high_watermark == 0
    trio.deliver(trio.messages[-1])
    for _ in range(3):
        trio.round_trip(A)
    assert trio.nodes[B].log.high_watermark == 4
    strong_isr(trio)


def test_follower_high_watermark_falls_after_failover_without_truncation():
    """B becomes leader with a lower high watermark than C has learned from the former leader."""
    trio = _trio()
    for number in range(4):
        trio.produce(A, number)
    trio.round_trip(B, B, B)
    trio.round_trip(C, C, C, C)
    heard = {node_id: trio.nodes[node_id].log.high_watermark for node_id in (A, B, C)}
    assert heard == {A: 4, B: 0, C: 4}
    trio.fence(A)
    trio.settle()
    leader = trio.nodes[B].leader
    assert leader.high_watermark == 0
    assert not leader.offsets_are_settled, "clients hear OFFSET_NOT_AVAILABLE"
    trio.round_trip(C)
    assert trio.nodes[C].log.high_watermark == 0, "it goes down"
    assert trio.nodes[C].log.log_end_offset == 4, "and cuts nothing"
    trio.round_trip(C)
    assert leader.offsets_are_settled
    assert trio.nodes[C].log.high_watermark == 4


def test_kafka_13091_isr_shrink_completes_waiting_acks_all():
    trio = _trio((A, B))
    trio.produce(A)
    trio.round_trip(B, B)
    write = trio.produce(A)
    trio.now_ms += LAG_MS + 1
    leader = trio.nodes[A]
    leader.take(leader.leader.check_isr(trio.now_ms))
    assert write is not None
    assert write.verdict is AcksVerdict.WAITING
    trio.alter_now(A)
    assert trio.registration.isr == (A,)
    assert (leader.log.high_watermark, write.verdict) == (2, AcksVerdict.DONE)


def test_kafka_15583_no_commit_below_min_isr():
    trio = _trio((A, B), min_isr=2)
    trio.produce(A)
    trio.round_trip(B, B)
    waiting, passed = trio.produce(A, "waits"), trio.writes[0]
    trio.now_ms += LAG_MS + 1
    leader = trio.nodes[A]
    leader.take(leader.leader.check_isr(trio.now_ms))
    trio.alter_now(A)
    assert trio.registration.isr == (A,)
    assert waiting is not None
    assert (waiting.verdict, leader.log.high_watermark) == (AcksVerdict.WAITING, 1)
    assert passed.verdict is AcksVerdict.DONE
    assert trio.produce(A) is None, "NOT_ENOUGH_REPLICAS"
    trio.round_trip(B, B)
    trio.alter_now(A)
    trio.round_trip(B)
    assert waiting.verdict is AcksVerdict.DONE


def test_kafka_13916_fenced_replica_is_not_proposed_for_the_isr():
    trio = _trio((A, B))
    trio.produce(A)
    trio.fence(B)
    trio.nodes[A].apply(9)
    for _ in range(5):
        trio.round_trip(B)
    assert trio.propose(A) is None
    trio.unfence(B)
    trio.settle()
    trio.round_trip(B)
    trio.alter_now(A)
    assert trio.registration.isr == (A, B)


def test_isr_expansion_by_replica_fenced_meanwhile_is_rejected():
    trio = _trio((A, B))
    trio.change(isr=(A,))
    trio.settle()
    trio.fence(B)
    trio.round_trip(B)
    leader = trio.nodes[A].leader
    assert leader.pending is not None
    trio.alter_now(A)
    assert trio.registration.isr == (A,)
    assert (leader.pending, leader.isr) == (None, (A,)), "back to what is committed"


def test_kip_903_late_fetch_of_former_incarnation_does_not_expand_isr():
    """B restarts with an empty disk. Its late fetch must not add the new incarnation to the ISR."""
    trio = _trio((A, B))
    for number in range(2):
        trio.produce(A, number)
    trio.round_trip(B)
    late = trio.fetch(B)
    assert late is not None
    trio.register(B)
    trio.nodes[B].log.cut(0)
    trio.nodes[B].restart(0)
    trio.unfence(B)
    trio.settle()
    trio.deliver(late)
    leader = trio.nodes[A].leader
    assert leader.pending is None
    assert leader.isr == (A,)
    trio.round_trip(B, B)
    assert leader.pending is not None
    assert dict(leader.pending.new_isr)[B] == trio.brokers[B].epoch


def test_kafka_15221_isr_expansion_has_the_broker_epoch_of_the_fetch():
    """AlterPartition has the broker epoch of the fetch, even if the metadata has a newer epoch."""
    trio = _trio((A, B))
    trio.change(isr=(A,))
    trio.settle()
    trio.produce(A)
    trio.round_trip(B, B)
    pending = trio.nodes[A].leader.pending
    assert pending is not None
    trio.register(B)
    trio.unfence(B)
    trio.nodes[A].apply(9)
    assert dict(pending.new_isr)[B] == 102
    trio.alter_now(A)
    assert trio.registration.isr == (A,), "INELIGIBLE_REPLICA"


def test_kafka_12686_response_from_before_the_election_is_ignored():
    trio = _trio()
    trio.produce(A)
    trio.round_trip(B, B)
    trio.now_ms += LAG_MS + 1
    trio.round_trip(B)
    leader = trio.nodes[A]
    leader.take(leader.leader.check_isr(trio.now_ms))
    message = trio.propose(A)
    assert message is not None
    trio.deliver(message)
    trio.change(leader=A)
    trio.nodes[A].apply(9)
    known = leader.leader.partition_epoch
    trio.deliver(trio.messages[-1])
    assert (leader.leader.leader_epoch, leader.leader.partition_epoch) == (1, known)


def test_isr_change_with_lost_response_is_pending_until_metadata_arrive():
    """The retry has an old partition epoch, because the first request took effect."""
    trio = _trio((A, B))
    trio.change(isr=(A,))
    trio.settle()
    trio.round_trip(B)
    message = trio.propose(A)
    assert message is not None
    trio.deliver(message)
    trio.drop(trio.messages[-1])
    assert trio.registration.isr == (A, B)
    trio.now_ms += 50
    trio.alter_now(A)
    leader = trio.nodes[A].leader
    assert leader.pending is not None, "INVALID_UPDATE_VERSION says nothing of the change"
    assert leader.maximal_isr == {A, B}
    trio.settle()
    assert (leader.pending, leader.isr) == (None, (A, B))


def test_kafka_14154_not_controller_error_is_retried():
    trio = _trio((A, B))
    trio.change(isr=(A,))
    trio.settle()
    trio.round_trip(B)
    change = trio.nodes[A].leader.pending
    assert change is not None
    trio.nodes[A].altered(change, Errors.NOT_CONTROLLER)
    assert trio.nodes[A].leader.pending is change
    trio.alter_now(A)
    assert trio.registration.isr == (A, B)


def test_pending_isr_expansion_delays_acks_all_until_it_is_rejected():
    trio = _trio((A, B))
    trio.change(isr=(A,))
    trio.settle()
    trio.round_trip(B)
    write = trio.produce(A)
    trio.now_ms += LAG_MS + 1
    leader = trio.nodes[A]
    leader.take(leader.leader.reconsider(trio.now_ms))
    assert write is not None
    assert write.verdict is AcksVerdict.WAITING
    trio.fence(B)
    trio.alter_now(A)
    leader.take(leader.leader.reconsider(trio.now_ms))
    assert write.verdict is AcksVerdict.DONE


def test_pending_isr_expansion_survives_metadata_of_known_partition_epoch():
    """The metadata of the first of two expansions arrives after the second expansion was sent.

    If the leader dropped the second expansion, it would commit records that C, an ISR member,
    lacks.
    """
    trio = _trio()
    trio.change(isr=(A,))
    trio.settle()
    trio.produce(A)
    trio.round_trip(B, B)
    trio.alter_now(A)
    trio.round_trip(C, C)
    message = trio.propose(A)
    assert message is not None
    trio.deliver(message)
    assert trio.registration.isr == (A, B, C)
    trio.nodes[A].apply(1)
    trio.produce(A)
    trio.now_ms += LAG_MS + 1
    trio.round_trip(B, B)
    strong_isr(trio)
    assert trio.nodes[A].log.high_watermark == 1


def test_kafka_13837_added_replica_unknown_to_the_leader_retries_fetch():
    trio = _trio((A, B))
    trio.produce(A)
    trio.registration = registration(
        (A, B, D), isr=[A, B], leader_epoch=0, partition_epoch=1, adding=[D]
    )
    trio.images.append((trio.registration, dict(trio.brokers)))
    trio.nodes[D].apply(99)
    trio.round_trip(D)
    assert trio.nodes[D].follower.state is FetchState.DELAYED
    trio.nodes[A].apply(99)
    trio.now_ms += 1_000
    trio.round_trip(D, D)
    trio.alter_now(A)
    assert trio.registration.isr == (A, B, D)


def test_kafka_13972_replica_of_cancelled_reassignment_stops_fetching():
    """Cancelling a reassignment bumps no leader epoch, but the added broker stops fetching."""
    trio = _trio((A, B))
    trio.produce(A)
    for replicas in ((A, B, D), (A, B)):
        trio.change(replicas=replicas)
        trio.settle()
        is_there = D in replicas
        assert (trio.nodes[D].follower.state is FetchState.FETCHING) == is_there
        assert (D in trio.nodes[A].leader.replicas) == is_there


def test_kafka_14296_broker_in_controlled_shutdown_does_not_rejoin_isr():
    trio = _trio((A, B))
    trio.produce(A)
    trio.round_trip(B, B)
    leaving = trio.brokers[A]
    trio.brokers[A] = type(leaving)(
        **{name: getattr(leaving, name) for name in leaving.__slots__}
        | {"in_controlled_shutdown": True}
    )
    trio.change(isr=(B,), leader=B)
    trio.settle()
    assert not trio.nodes[A].is_leader
    trio.produce(B)
    for _ in range(4):
        trio.round_trip(A)
    assert trio.nodes[A].log.log_end_offset == 2
    assert trio.propose(B) is None


def test_flapping_isr_bumps_partition_epoch_and_keeps_leader_epoch():
    """A fetch every 35 s bumps the partition epoch twice, but never the leader epoch."""
    trio = _trio((A, B))
    leader = trio.nodes[A]
    for turn in range(5):
        write = trio.produce(A, turn)
        trio.now_ms += LAG_MS + 5_000
        leader.take(leader.leader.check_isr(trio.now_ms))
        trio.alter_now(A)
        assert trio.registration.isr == (A,)
        assert write is not None
        assert write.verdict is AcksVerdict.DONE
        trio.round_trip(B, B)
        trio.alter_now(A)
        assert trio.registration.isr == (A, B)
        strong_isr(trio)
    assert (trio.registration.leader_epoch, trio.registration.partition_epoch) == (0, 10)


def test_kafka_18723_response_delayed_over_an_election_is_dropped():
    trio = _trio((A, B))
    trio.produce(A, "old")
    request = trio.fetch(B)
    assert request is not None
    trio.change(leader=A)
    trio.produce(A, "of the old epoch still")
    trio.deliver(request)
    trio.nodes[A].apply(9)
    trio.produce(A, "of the new epoch")
    trio.nodes[B].apply(9)
    trio.deliver(trio.messages[-1])
    assert trio.nodes[B].log.log_end_offset == 0
    for _ in range(3):
        trio.round_trip(B)
    assert trio.nodes[B].log.records == trio.nodes[A].log.records
