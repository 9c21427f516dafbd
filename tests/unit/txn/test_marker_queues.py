"""Every row of the table of answers to markers, and every path of a marker."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from fencepost.logcore.machine import ProducerStamp
from fencepost.txn.commands import TopicPartition, WriteMarkers
from fencepost.txn.marker_queues import (
    MAX_PARTITIONS_PER_REQUEST,
    OUTCOMES,
    CancelledMarkers,
    MarkerOutcome,
    MarkerQueues,
    NoDestination,
    Result,
    SendMarkers,
    WrittenMarkers,
)

A, B, C = ("a", 0), ("b", 0), ("b", 1)
SHARD, EPOCH = 7, 5
RETRIED = ["UNKNOWN_TOPIC_OR_PARTITION", "NOT_LEADER_OR_FOLLOWER", "NOT_ENOUGH_REPLICAS"]
RETRIED += ["NOT_ENOUGH_REPLICAS_AFTER_APPEND", "REQUEST_TIMED_OUT", "KAFKA_STORAGE_ERROR"]


class Bench:
    """Marker queues; a test changes the partitions' leaders and the coordinator epochs."""

    def __init__(self) -> None:
        self.leaders: dict[TopicPartition, int | NoDestination] = {A: 1, B: 2, C: 2}
        self.epochs = {SHARD: EPOCH, SHARD + 1: EPOCH}
        self.queues = MarkerQueues(self.leaders.__getitem__, self.epochs.get, own_id=3)
        self.results: list[Result] = []

    def add(self, request: WriteMarkers, shard: int = SHARD) -> None:
        self.queues.add(request, shard)
        self.results += self.queues.route()

    def next_requests(self) -> dict[int, SendMarkers]:
        return {send.broker_id: send for send in self.queues.next_requests()}

    def answer(self, send: SendMarkers, code: str | Mapping[TopicPartition, str] = "NONE") -> None:
        codes: dict[int, dict[TopicPartition, str]] = {}
        for marker in send.markers:
            for partition in marker.partitions:
                told = code if isinstance(code, str) else code[partition]
                codes.setdefault(marker.end.stamp.producer_id, {})[partition] = told
        self.results += self.queues.answered(send, codes)

    def retry(self) -> None:
        self.queues.retry()
        self.results += self.queues.route()

    def written(self) -> set[TopicPartition]:
        return {
            one
            for done in self.results
            if isinstance(done, WrittenMarkers)
            for one in done.partitions
        }


@pytest.fixture
def bench() -> Bench:
    return Bench()


def ending(
    name: str = "t", producer_id: int = 1, number: int = 0, epoch: int = EPOCH, *at: TopicPartition
) -> WriteMarkers:
    return WriteMarkers(
        name, ProducerStamp(producer_id, 3), True, epoch, 2, at or (A, B, C), number
    )


def partitions(send: SendMarkers) -> list[TopicPartition]:
    return [one for marker in send.markers for one in marker.partitions]


def test_own_markers_do_not_wait_for_those_under_way(bench: Bench) -> None:
    bench.leaders[A] = 3
    bench.add(ending("t", 1, 0, EPOCH, A))
    (first,) = bench.queues.next_requests()
    bench.add(ending("u", 2, 0, EPOCH, A))
    (second,) = bench.queues.next_requests()
    assert [send.broker_id for send in (first, second)] == [3, 3]
    assert [one.transactional_id for one in second.markers] == ["u"]
    bench.answer(second)
    bench.answer(first, "NOT_ENOUGH_REPLICAS")
    assert "u" not in bench.queues
    assert bench.queues.newly_waiting() == ["t"]


def test_own_markers_of_each_transaction_are_written_by_themselves(bench: Bench) -> None:
    bench.leaders[A] = bench.leaders[B] = 3
    bench.add(ending("t", 1, 0, EPOCH, A, B))
    bench.add(ending("u", 2, 0, EPOCH, A))
    next_requests = list(bench.queues.next_requests())
    assert [(send.broker_id, partitions(send)) for send in next_requests] == [(3, [A, B]), (3, [A])]


def test_the_markers_of_all_transactions_for_a_broker_go_out_with_one_request(bench: Bench) -> None:
    bench.add(ending("t", 1))
    bench.add(ending("u", 2))
    next_requests = bench.next_requests()
    assert partitions(next_requests[1]) == [A, A]
    assert partitions(next_requests[2]) == [B, C, B, C]
    assert [marker.end.stamp.producer_id for marker in next_requests[2].markers] == [1, 2]
    assert bench.next_requests() == {}, "the next one waits for the answers"
    bench.add(ending("v", 3))
    assert bench.next_requests() == {}
    bench.answer(next_requests[1])
    assert partitions(bench.next_requests()[1]) == [A]
    bench.answer(next_requests[2])
    assert bench.written() == {A, B, C}
    assert len(bench.queues) == 1


def test_a_large_transaction_goes_out_in_pieces(bench: Bench) -> None:
    many = tuple(("t", index) for index in range(MAX_PARTITIONS_PER_REQUEST + 1))
    bench.leaders.update(dict.fromkeys(many, 1))
    bench.add(ending("t", 1, 0, EPOCH, *many))
    first = bench.next_requests()[1]
    assert len(partitions(first)) == MAX_PARTITIONS_PER_REQUEST
    bench.answer(first)
    second = bench.next_requests()[1]
    assert len(partitions(second)) == 1
    bench.answer(second)
    assert bench.written() == set(many)
    assert len(bench.queues) == 0


@pytest.mark.parametrize("code", [*RETRIED, "COORDINATOR_LOAD_IN_PROGRESS", "UNKNOWN_SERVER_ERROR"])
def test_what_may_pass_is_sent_again_to_the_leader_of_then(bench: Bench, code: str) -> None:
    bench.add(ending())
    next_requests = bench.next_requests()
    bench.answer(next_requests[2], {B: code, C: "NONE"})
    assert bench.written() == {C}
    assert bench.next_requests() == {}
    bench.leaders[B] = 3
    bench.retry()
    again = bench.next_requests()
    assert partitions(again[3]) == [B]
    bench.answer(again[3])
    bench.answer(next_requests[1])
    assert bench.written() == {A, B, C}
    assert not bench.queues.unknown


@pytest.mark.parametrize("code", ["UNSUPPORTED_FOR_MESSAGE_FORMAT", "UNSUPPORTED_VERSION"])
def test_a_partition_that_knows_no_markers_is_left_out(bench: Bench, code: str) -> None:
    bench.add(ending())
    bench.answer(bench.next_requests()[2], {B: code, C: "NONE"})
    assert bench.written() == {B, C}


@pytest.mark.parametrize("code", ["INVALID_PRODUCER_EPOCH", "TRANSACTION_COORDINATOR_FENCED"])
def test_a_fenced_transaction_is_left_to_whoever_has_it(bench: Bench, code: str) -> None:
    request = ending()
    bench.add(request)
    next_requests = bench.next_requests()
    bench.answer(next_requests[2], {B: "NOT_LEADER_OR_FOLLOWER", C: code})
    assert bench.results == [CancelledMarkers(request, f"b-1: {code}")]
    bench.answer(next_requests[1])
    bench.retry()
    assert bench.next_requests() == {}
    assert bench.written() == set()
    assert len(bench.queues) == 0


def test_the_table_has_every_error_that_kafka_knows_here() -> None:
    assert {code for code, outcome in OUTCOMES.items() if outcome is MarkerOutcome.RETRY} == set(
        RETRIED
    )
    assert len(OUTCOMES) == 11


def test_a_producer_that_the_answer_leaves_out_is_sent_again(bench: Bench) -> None:
    bench.add(ending("t", 1, 0, EPOCH, A))
    bench.results += bench.queues.answered(bench.next_requests()[1], {})
    bench.retry()
    assert partitions(bench.next_requests()[1]) == [A]


def test_a_lost_connection_has_all_of_it_sent_again(bench: Bench) -> None:
    bench.add(ending())
    next_requests = bench.next_requests()
    bench.queues.failed(next_requests[2])
    assert bench.queues.unknown == 2
    bench.leaders[B] = 1
    bench.retry()
    assert partitions(bench.next_requests()[2]) == [C]
    bench.answer(next_requests[1])
    assert partitions(bench.next_requests()[1]) == [B]


def test_without_a_leader_a_marker_waits(bench: Bench) -> None:
    bench.leaders[B] = NoDestination.NO_LEADER
    bench.add(ending("t", 1, 0, EPOCH, B))
    assert bench.next_requests() == {}
    assert bench.queues.unknown == 1
    bench.retry()
    assert bench.queues.unknown == 1
    bench.leaders[B] = 2
    bench.retry()
    bench.answer(bench.next_requests()[2])
    assert bench.written() == {B}


def test_markers_of_an_unloaded_shard_wait_no_longer(bench: Bench) -> None:
    bench.leaders[B] = NoDestination.NO_LEADER
    bench.add(ending())
    assert bench.queues.unknown == 1
    bench.queues.unload(SHARD)
    assert bench.queues.unknown == 0


def test_a_deleted_partition_needs_no_marker(bench: Bench) -> None:
    bench.leaders[B] = NoDestination.NO_PARTITION
    bench.add(ending())
    assert bench.written() == {B}
    next_requests = bench.next_requests()
    bench.answer(next_requests[2], "UNKNOWN_TOPIC_OR_PARTITION")
    bench.leaders[C] = NoDestination.NO_PARTITION
    bench.retry()
    assert bench.written() == {B, C}
    bench.answer(next_requests[1])
    assert len(bench.queues) == 0


@pytest.mark.parametrize("epoch", [EPOCH + 1, None])
@pytest.mark.parametrize("how", ["answered", "failed", "queued", "waiting"])
def test_nothing_is_reported_or_sent_under_another_coordinator_epoch(
    bench: Bench, epoch: int | None, how: str
) -> None:
    bench.leaders[A] = NoDestination.NO_LEADER if how == "waiting" else 1
    bench.add(ending("t", 1, 0, EPOCH, A))
    send = bench.next_requests().get(1) if how in {"answered", "failed"} else None
    if epoch is None:
        del bench.epochs[SHARD]
    else:
        bench.epochs[SHARD] = epoch
    if how == "answered" and send is not None:
        bench.answer(send)
    elif how == "failed" and send is not None:
        bench.queues.failed(send)
    bench.leaders[A] = 1
    bench.retry()
    assert bench.next_requests() == {}
    assert bench.results == []
    assert len(bench.queues) == 0


def test_a_shard_takes_its_markers_with_it(bench: Bench) -> None:
    bench.add(ending("t", 1))
    bench.add(ending("u", 2), SHARD + 1)
    next_requests = bench.next_requests()
    bench.add(ending("v", 3))
    bench.queues.unload(SHARD)
    bench.answer(next_requests[1])
    bench.answer(next_requests[2])
    assert {one.request.transactional_id for one in bench.results} == {"u"}
    assert bench.next_requests() == {}


def test_an_answer_to_the_former_transaction_says_nothing_of_this_one(bench: Bench) -> None:
    """Under TV1 both transactions have the same producer id and epoch."""
    former, this = ending(number=1), ending(number=2)
    bench.add(former)
    next_requests = bench.next_requests()
    bench.add(this)
    bench.answer(next_requests[1])
    bench.answer(next_requests[2])
    assert bench.results == []
    again = bench.next_requests()
    bench.answer(again[1])
    bench.answer(again[2])
    assert [one.request for one in bench.results] == [this, this]
    bench.answer(next_requests[2])
    assert len(bench.results) == 2


def test_a_request_to_a_broker_that_leads_nothing_of_it_any_more_is_over(bench: Bench) -> None:
    """The broker may be dead; waiting for it would block the transaction."""
    bench.add(ending())
    next_requests = bench.next_requests()
    bench.leaders[B] = bench.leaders[C] = 3
    assert bench.queues.leaders_changed() == [2]
    assert bench.queues.route() == []
    again = bench.next_requests()
    assert partitions(again[3]) == [B, C]
    bench.answer(again[3])
    bench.answer(next_requests[2], "TRANSACTION_COORDINATOR_FENCED")  # the late answer
    bench.answer(next_requests[1])
    assert bench.written() == {A, B, C}
    assert all(isinstance(one, WrittenMarkers) for one in bench.results)


def test_what_is_queued_follows_its_leader(bench: Bench) -> None:
    bench.add(ending("t", 1))
    next_requests = bench.next_requests()
    bench.add(ending("u", 2))
    bench.leaders[B] = 1
    assert bench.queues.leaders_changed() == []
    assert bench.queues.route() == []
    bench.answer(next_requests[1])
    bench.answer(next_requests[2])
    later = bench.next_requests()
    assert partitions(later[1]) == [A, B]
    assert partitions(later[2]) == [C]
