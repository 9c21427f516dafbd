"""A fetcher: the order of partitions, one request in flight, the fetch session.

Tests with Kafka's names are cases of ``FetchSessionHandlerTest`` and ``AbstractFetcherThreadTest``.
"""

from __future__ import annotations

import pytest

from fencepost.cluster.errors import Errors
from fencepost.cluster.fetcher import FetchRequest, FetchResponse, LeaderFetcher, fetcher_id
from fencepost.cluster.follower import FetchState, PartitionFollower, PartitionResponse
from fencepost.coordinator.runtime.key_partition import java_string_hash
from tests.unit.cluster.replicas import TOPIC_ID, ListLog, registration

NOW = 5_000
SESSION = 77


class Fetching:
    """Partitions of one topic, fetched from broker 1."""

    def __init__(self, count: int = 2) -> None:
        self.fetcher = LeaderFetcher(1)
        self.logs: list[ListLog] = []
        for _ in range(count):
            self.add()

    def add(self) -> PartitionFollower:
        log, index = ListLog(), len(self.logs)
        self.logs.append(log)
        follower = PartitionFollower("orders", TOPIC_ID, index, log)
        follower.become_follower(registration())
        self.fetcher.add(follower)
        return follower

    def ask(self) -> FetchRequest:
        request = self.fetcher.next_request(NOW)
        assert request is not None
        return request

    def get(self, records: dict[int, int] | None = None, *, session: int = SESSION) -> None:
        """Deliver a response with these counts of records; a full response has every partition."""
        request, counts = self.fetcher.in_flight, dict(records or {})
        assert request is not None
        if request.is_full:
            counts = {
                partition.index: counts.get(partition.index, 0) for partition in request.partitions
            }
        parts = {
            (TOPIC_ID, index): PartitionResponse(0, 0, 0, None, [5] * count, count)
            for index, count in counts.items()
        }
        for result in self.fetcher.on_answer(FetchResponse(0, session, parts), NOW):
            if result.step.append_up_to_epoch is not None:
                self.logs[result.sent.index].append(*result.answer.records)
                result.follower.on_appended()


def _indexes(request: FetchRequest) -> list[int]:
    return [partition.index for partition in request.partitions]


def test_incrementals():
    fetching = Fetching()
    request = fetching.ask()
    assert (request.session_id, request.session_epoch, request.is_full) == (0, 0, True)
    assert _indexes(request) == [0, 1]
    fetching.get()
    request = fetching.ask()
    assert (request.session_id, request.session_epoch, request.is_full) == (SESSION, 1, False)
    assert (_indexes(request), request.forgotten) == ([], ()), "nothing has changed"
    fetching.get({1: 3})
    request = fetching.ask()
    assert (request.session_epoch, _indexes(request)) == (2, [1])
    assert request.partitions[0].fetch_offset == 3


def test_sessionless():
    fetching = Fetching()
    fetching.ask()
    fetching.get(session=0)
    request = fetching.ask()
    assert (request.session_id, request.session_epoch, _indexes(request)) == (0, 0, [0, 1])


def test_incremental_partition_removal():
    fetching = Fetching(3)
    fetching.ask()
    fetching.get()
    fetching.fetcher.remove((TOPIC_ID, 1))
    fetching.add()
    request = fetching.ask()
    assert (_indexes(request), request.forgotten) == ([3], ((TOPIC_ID, 1),))
    fetching.get()
    assert fetching.ask().forgotten == ()


def test_fetcher_forgets_last_partition_before_it_stops_fetching():
    fetching = Fetching(1)
    fetching.ask()
    fetching.get()
    fetching.fetcher.remove((TOPIC_ID, 0))
    assert fetching.ask().forgotten == ((TOPIC_ID, 0),)
    fetching.get()
    assert fetching.fetcher.next_request(NOW) is None


def test_fetcher_has_at_most_one_request_in_flight():
    fetching = Fetching()
    fetching.ask()
    assert fetching.fetcher.next_request(NOW) is None
    fetching.get()
    fetching.ask()


def test_fetcher_without_partitions_sends_no_request():
    assert LeaderFetcher(1).next_request(NOW) is None
    assert LeaderFetcher(1).wake_at() is None


def test_partition_that_got_records_moves_to_the_end_of_the_next_fetch():
    fetching = Fetching(3)
    fetching.ask()
    fetching.get({0: 5}, session=0)
    assert _indexes(fetching.ask()) == [1, 2, 0]


@pytest.mark.parametrize(
    ("error", "session_id"),
    [(Errors.FETCH_SESSION_ID_NOT_FOUND, 0), (Errors.INVALID_FETCH_SESSION_EPOCH, SESSION)],
)
def test_top_level_error_resets_metadata(error, session_id):
    """The leader may still have the old session, which the request for a new session closes."""
    fetching = Fetching()
    fetching.ask()
    fetching.get()
    fetching.ask()
    assert fetching.fetcher.on_answer(FetchResponse(error), NOW) == ()
    request = fetching.ask()
    assert (request.session_id, request.session_epoch, request.is_full) == (session_id, 0, True)
    assert _indexes(request) == [0, 1]


@pytest.mark.parametrize("error", [Errors.FETCH_SESSION_TOPIC_ID_ERROR, -1])
def test_other_top_level_error_delays_all_partitions(error):
    fetching = Fetching()
    fetching.ask()
    fetching.fetcher.on_answer(FetchResponse(error), NOW)
    assert fetching.fetcher.next_request(NOW) is None
    assert fetching.fetcher.wake_at() == NOW + 1_000
    assert fetching.fetcher.next_request(NOW + 1_000) is not None


def test_should_poll_indefinitely_if_leader_returns_any_exception():
    fetching = Fetching()
    fetching.ask()
    fetching.get()
    fetching.ask()
    fetching.fetcher.on_failure(NOW)
    assert fetching.fetcher.next_request(NOW + 999) is None
    request = fetching.fetcher.next_request(NOW + 1_000)
    assert request is not None
    assert (request.session_id, request.session_epoch) == (SESSION, 0)


@pytest.mark.parametrize("parts", [{}, {0: 0}, {0: 0, 1: 0, 2: 0}])
def test_verify_full_fetch_response_partitions(parts):
    """A full response must have exactly the requested partitions; other responses are dropped."""
    fetching = Fetching(2)
    fetching.ask()
    told = {(TOPIC_ID, index): PartitionResponse() for index in parts}
    assert fetching.fetcher.on_answer(FetchResponse(0, SESSION, told), NOW) == ()
    assert fetching.fetcher.next_request(NOW) is None
    request = fetching.fetcher.next_request(NOW + 1_000)
    assert request is not None
    assert (request.session_id, request.is_full) == (0, True)


def test_incremental_response_with_unknown_partition_is_dropped():
    fetching = Fetching(1)
    fetching.ask()
    fetching.get()
    fetching.ask()
    told = {(TOPIC_ID, 9): PartitionResponse()}
    assert fetching.fetcher.on_answer(FetchResponse(0, SESSION, told), NOW) == ()
    request = fetching.fetcher.next_request(NOW + 1_000)
    assert request is not None
    assert request.is_full


def test_fetch_session_closed_by_the_leader_starts_again_with_a_full_fetch():
    fetching = Fetching()
    fetching.ask()
    fetching.get()
    fetching.ask()
    fetching.get({0: 1}, session=0)
    assert fetching.logs[0].log_end_offset == 1, "the answer itself counts"
    assert fetching.ask().is_full


def test_delayed_partition_is_forgotten_while_others_are_fetched():
    fetching = Fetching(2)
    fetching.ask()
    parts = {
        (TOPIC_ID, 0): PartitionResponse(Errors.NOT_LEADER_OR_FOLLOWER),
        (TOPIC_ID, 1): PartitionResponse(),
    }
    fetching.fetcher.on_answer(FetchResponse(0, SESSION, parts), NOW)
    request = fetching.ask()
    assert (_indexes(request), request.forgotten) == ([], ((TOPIC_ID, 0),))
    assert fetching.fetcher.wake_at() == NOW + 1_000


def test_consumer_lag_removed_with_partition():
    """The partition was removed while its response was in flight."""
    fetching = Fetching(2)
    fetching.ask()
    gone = fetching.fetcher.remove((TOPIC_ID, 0))
    assert gone is not None
    gone.stop()
    fetching.get({0: 5, 1: 5})
    assert [log.log_end_offset for log in fetching.logs] == [0, 5]
    assert gone.state is FetchState.STOPPED


def test_build_fetch_omits_throttled_partition_that_lags():
    fetching = Fetching(2)
    fetching.ask()
    fetching.get(session=0)
    behind = fetching.fetcher.followers[1]
    behind.lag = 5
    request = fetching.fetcher.next_request(NOW, lambda follower: True)
    assert request is not None
    assert _indexes(request) == [0], "who is in sync is never throttled"


def test_fetch_session_epoch_wraps_to_one():
    fetching = Fetching(1)
    fetching.ask()
    fetching.get()
    fetching.fetcher.session.epoch = 2**31 - 1
    fetching.ask()
    fetching.get()
    assert fetching.ask().session_epoch == 1


@pytest.mark.parametrize(
    ("topic", "index", "fetchers", "expected"),
    [("orders", 0, 1, 0), ("orders", 0, 4, None), ("a", 3, 7, (31 * 97 + 3) % 7)],
)
def test_fetcher_id_is_kafkas_hash_of_topic_and_partition(topic, index, fetchers, expected):
    known = java_string_hash(topic)
    found = fetcher_id(known, index, fetchers)
    assert 0 <= found < fetchers
    if expected is not None:
        assert found == expected
    value = (31 * known + index + 2**31) % 2**32 - 2**31
    assert found == (0 if value == -(2**31) else abs(value)) % fetchers
