"""Every kind of response to a marker, and every path of a marker through the queues."""

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
        self.results += self.queues.on_answer(send, codes)

    def retry(self) -> None:
        self.queues.retry()
        self.results += self.queues.route()

    def written(self) -> set[TopicPartition]:
        return {
            partition
            for done in self.results
            if isinstance(done, WrittenMarkers)
            for partition in done.partitions
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
    return [partition for marker in send.markers for partition in marker.partitions]


def test_local_markers_are_sent_while_others_are_in_flight(bench: Bench) -> None:
    bench.leaders[A] = 3
    bench.add(ending("t", 1, 0, EPOCH, A))
    (first,) = bench.queues.next_requests()
    bench.add(ending("u", 2, 0, EPOCH, A))
    (second,) = bench.queues.next_requests()
    assert [send.broker_id for send in (first, second)] == [3, 3]
    assert [marker.transactional_id for marker in second.markers] == ["u"]
    bench.answer(second)
    bench.answer(first, "NOT_ENOUGH_REPLICAS")
    assert "u" not in bench.queues
    assert bench.queues.newly_waiting() == ["t"]


def test_local_markers_of_each_transaction_are_written_separately(bench: Bench) -> None:
    bench.leaders[A] = bench.leaders[B] = 3
    bench.add(ending("t", 1, 0, EPOCH, A, B))
    bench.add(ending("u", 2, 0, EPOCH, A))
    next_requests = list(bench.queues.next_requests())
    assert [(send.broker_id, partitions(send)) for send in next_requests] == [(3, [A, B]), (3, [A])]


def test_markers_of_all_transactions_for_a_broker_share_one_request(bench: Bench) -> None:
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


def test_markers_above_partition_limit_are_split_into_requests(bench: Bench) -> None:
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
def test_marker_with_retriable_error_is_resent_to_the_new_leader(bench: Bench, code: str) -> None:
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
def test_marker_with_unsupported_error_counts_as_written(bench: Bench, code: str) -> None:
    bench.add(ending())
    bench.answer(bench.next_requests()[2], {B: code, C: "NONE"})
    assert bench.written() == {B, C}


@pytest.mark.parametrize("code", ["INVALID_PRODUCER_EPOCH", "TRANSACTION_COORDINATOR_FENCED"])
def test_fenced_marker_cancels_the_markers_of_its_transaction(bench: Bench, code: str) -> None:
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


def test_outcome_table_has_every_marker_error_of_kafka() -> None:
    assert {code for code, outcome in OUTCOMES.items() if outcome is MarkerOutcome.RETRY} == set(
        RETRIED
    )
    assert len(OUTCOMES) == 11


def test_marker_missing_from_response_is_resent(bench: Bench) -> None:
    bench.add(ending("t", 1, 0, EPOCH, A))
    bench.results += bench.queues.on_answer(bench.next_requests()[1], {})
    bench.retry()
    assert partitions(bench.next_requests()[1]) == [A]


def test_markers_of_failed_request_are_resent(bench: Bench) -> None:
    bench.add(ending())
    next_requests = bench.next_requests()
    bench.queues.on_failure(next_requests[2])
    assert bench.queues.unknown == 2
    bench.leaders[B] = 1
    bench.retry()
    assert partitions(bench.next_requests()[2]) == [C]
    bench.answer(next_requests[1])
    assert partitions(bench.next_requests()[1]) == [B]


def test_marker_without_partition_leader_waits_until_one_is_elected(bench: Bench) -> None:
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


def test_markers_of_unloaded_shard_no_longer_wait_for_leader(bench: Bench) -> None:
    bench.leaders[B] = NoDestination.NO_LEADER
    bench.add(ending())
    assert bench.queues.unknown == 1
    bench.queues.unload(SHARD)
    assert bench.queues.unknown == 0


def test_marker_of_deleted_partition_counts_as_written(bench: Bench) -> None:
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
def test_markers_of_former_coordinator_epoch_are_neither_sent_nor_reported(
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
        bench.queues.on_failure(send)
    bench.leaders[A] = 1
    bench.retry()
    assert bench.next_requests() == {}
    assert bench.results == []
    assert len(bench.queues) == 0


def test_unloaded_shard_drops_its_queued_and_in_flight_markers(bench: Bench) -> None:
    bench.add(ending("t", 1))
    bench.add(ending("u", 2), SHARD + 1)
    next_requests = bench.next_requests()
    bench.add(ending("v", 3))
    bench.queues.unload(SHARD)
    bench.answer(next_requests[1])
    bench.answer(next_requests[2])
    assert {result.request.transactional_id for result in bench.results} == {"u"}
    assert bench.next_requests() == {}


def test_response_to_former_transaction_does_not_complete_the_next_one(bench: Bench) -> None:
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
    assert [result.request for result in bench.results] == [this, this]
    bench.answer(next_requests[2])
    assert len(bench.results) == 2


def test_markers_in_flight_to_former_leader_are_resent_to_the_new_one(bench: Bench) -> None:
    """The former leader may be dead; waiting for its response would block the transaction."""
    bench.add(ending())
    next_requests = bench.next_requests()
    bench.leaders[B] = bench.leaders[C] = 3
    assert bench.queues.leaders_changed() == [2]
    assert bench.queues.route() == []
    again = bench.next_requests()
    assert partitions(again[3]) == [B, C]
    bench.answer(again[3])
    bench.answer(next_requests[2], "TRANSACTION_COORDINATOR_FENCED")  # the late response
    bench.answer(next_requests[1])
    assert bench.written() == {A, B, C}
    assert all(isinstance(result, WrittenMarkers) for result in bench.results)


def test_queued_markers_move_to_the_new_leader(bench: Bench) -> None:
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
