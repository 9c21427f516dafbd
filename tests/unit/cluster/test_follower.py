"""A follower's rules: responses, errors, truncation, offsets out of range.

Tests with Kafka's names are cases of ``AbstractFetcherThreadTest`` and
``ReplicaFetcherThreadTest``.
"""

from __future__ import annotations

from itertools import product

import pytest

from fencepost.cluster.divergence import diverging_epoch, truncation_offset
from fencepost.cluster.errors import Errors
from fencepost.cluster.follower import (
    FETCH_TRANSITIONS,
    NOTHING,
    FetchState,
    FetchTrigger,
    OffsetSpec,
    PartitionResponse,
    Truncation,
)
from fencepost.logcore.errors import OffsetOutOfRangeError
from tests.unit.cluster.replicas import Following, ListLog, registration

BACKOFF_MS = 1_000


def test_simple_fetch():
    following = Following(4, 4, leader_epoch=5)
    fetch = following.ask()
    assert (fetch.fetch_offset, fetch.last_fetched_epoch, fetch.current_leader_epoch) == (2, 4, 5)
    following.get(5, 5, high=3)
    assert following.log.log_end_offset == 4
    assert following.log.high_watermark == 3
    fetch = following.ask()
    assert (fetch.fetch_offset, fetch.last_fetched_epoch) == (4, 5)


def test_fetch_of_empty_log_has_no_last_fetched_epoch():
    fetch = Following().ask()
    assert (fetch.fetch_offset, fetch.last_fetched_epoch) == (0, -1)


def test_kafka_15510_empty_response_keeps_last_fetched_epoch():
    """KAFKA-15510."""
    following = Following(4, 4)
    following.get(high=2)
    assert following.ask().last_fetched_epoch == 4


def test_follower_high_watermark_may_fall_without_truncation():
    following = Following(4, 4, 4, high=3)
    following.get(high=1)
    assert following.log.high_watermark == 1
    assert following.log.log_end_offset == 3, "a lower high watermark cuts nothing"


def test_follower_high_watermark_stays_within_the_log():
    following = Following(4, 4)
    following.get(high=99)
    assert following.log.high_watermark == 2
    following.log.log_start_offset, following.log.records = 2, []
    following.get(4, high=0)
    assert following.log.high_watermark == 2


def test_follower_log_start_offset_follows_the_leader_up_to_high_watermark():
    following = Following(4, 4, 4, high=3)
    step = following.get(high=3, start=2)
    assert step.log_start_offset == 2
    assert following.log.log_start_offset == 2
    assert following.get(high=3, start=1) is NOTHING
    assert following.get(high=3, start=9).log_start_offset == 3, "not above the high watermark"


def test_lag_is_updated_when_no_records():
    following = Following(4, 4)
    assert not following.machine.is_in_sync
    following.get(high=7)
    assert (following.machine.lag, following.machine.is_in_sync) == (5, False)
    following.get(5, 5, 5, high=5)
    assert (following.machine.lag, following.machine.is_in_sync) == (0, True)


def test_kafka_18723_batch_of_higher_leader_epoch_is_not_appended():
    """KAFKA-18723."""
    following = Following(4, leader_epoch=5)
    following.get(5, 9, high=3)
    assert following.log.log_end_offset == 2


def test_response_of_former_leader_epoch_is_dropped():
    following = Following(4, leader_epoch=5)
    sent = following.ask()
    following.machine.become_follower(registration(leader_epoch=6, partition_epoch=11))
    assert following.get(5, 5, high=3, sent=sent) is NOTHING
    assert following.log.log_end_offset == 1


def test_response_to_fetch_from_before_truncation_is_dropped():
    """The fetch offset is the same as before, but the records below it are different."""
    following = Following(3, leader_epoch=5)
    late = following.ask()
    following.get(diverging=(2, 0), sent=late)
    following.get(5)
    assert following.ask().fetch_offset == late.fetch_offset
    assert following.get(diverging=(2, 0), sent=late) is NOTHING
    assert following.log.log_end_offset == 1


def test_response_for_another_fetch_offset_is_dropped():
    following = Following(4)
    sent = following.ask()
    following.get(5)
    assert following.get(5, sent=sent) is NOTHING
    assert following.log.log_end_offset == 2


def test_response_for_offset_other_than_log_end_fails_the_partition():
    following = Following(4)
    sent = following.ask()
    following.log.append(4)
    step = following.get(5, sent=sent)
    assert following.machine.state is FetchState.FAILED
    assert step.events[0].kind == "follower-failed"


# --- the leader ---


def test_kafka_13790_fetching_restarts_only_with_a_new_leader_epoch():
    """KAFKA-13790: neither a new partition epoch nor the same leader epoch restarts fetching."""
    following = Following(4, leader_epoch=5)
    following.get(high=9)
    sent = following.ask()
    for epoch in (11, 11, 10):
        following.machine.become_follower(
            registration(isr=[1], leader_epoch=5, partition_epoch=epoch)
        )
        assert following.machine.lag == 8, "nothing was disturbed"
        assert following.ask() == sent
    assert following.machine.partition_epoch == 11
    following.machine.become_follower(registration(leader_epoch=6, partition_epoch=12))
    assert following.machine.lag is None
    assert following.ask().current_leader_epoch == 6


def test_partition_without_leader_is_not_fetched():
    following = Following(4, leader_epoch=5)
    gone = registration(leader=-1, leader_epoch=6, partition_epoch=11)
    assert following.machine.become_follower(gone) is NOTHING
    assert following.machine.fetch(following.now_ms) is None
    following.machine.become_follower(registration(leader=3, leader_epoch=7, partition_epoch=12))
    assert following.ask().current_leader_epoch == 7


def test_new_leader_epoch_during_append_waits_for_the_append():
    following = Following(4, leader_epoch=5)
    sent = following.ask()
    answer = PartitionResponse(0, 2, 0, None, [5], 1)
    assert following.machine.on_answer(sent, answer, following.now_ms).append_up_to_epoch == 5
    later = registration(leader=3, leader_epoch=6, partition_epoch=11)
    assert following.machine.become_follower(later) is NOTHING
    assert following.machine.fetch(following.now_ms) is None
    following.log.append(5)
    assert following.machine.on_appended() is NOTHING, (
        "the former leader's high watermark is no news"
    )
    fetch = following.ask()
    assert (fetch.fetch_offset, fetch.current_leader_epoch) == (2, 6)


def test_truncate_to_high_watermark_if_log_has_no_leader_epochs():
    """Messages of formats v0 and v1 carry no leader epoch."""
    following = Following(-1, -1, -1, -1, -1, high=3)
    assert (following.log.log_end_offset, following.ask().fetch_offset) == (3, 3)
    following.log.append(-1, -1)
    step = following.machine.become_follower(registration(leader_epoch=6, partition_epoch=11))
    assert step.truncate == Truncation(3)
    assert following.machine.fetch(following.now_ms) is None
    following.do(step)
    assert following.ask().fetch_offset == 3


# --- errors ---


@pytest.mark.parametrize(
    "error",
    [
        Errors.UNKNOWN_LEADER_EPOCH,
        Errors.NOT_LEADER_OR_FOLLOWER,
        Errors.UNKNOWN_TOPIC_OR_PARTITION,
        Errors.UNKNOWN_TOPIC_ID,
        Errors.INCONSISTENT_TOPIC_ID,
        Errors.OFFSET_MOVED_TO_TIERED_STORAGE,
        Errors.KAFKA_STORAGE_ERROR,
        -1,
    ],
)
def test_partition_with_fetch_error_is_delayed(error):
    following = Following(4)
    step = following.get(error=error)
    assert step.delayed_until_ms == following.now_ms + BACKOFF_MS
    assert following.machine.fetch(following.now_ms + BACKOFF_MS - 1) is None
    assert following.machine.fetch(following.now_ms + BACKOFF_MS) is not None


def test_fenced_partition_fails_until_a_new_leader_epoch():
    following = Following(4, leader_epoch=5)
    step = following.get(error=Errors.FENCED_LEADER_EPOCH)
    assert [(event.kind, event.routine) for event in step.events] == [("follower-fenced", True)]
    assert following.machine.state is FetchState.FAILED
    following.machine.become_follower(registration(leader_epoch=5, partition_epoch=11))
    assert following.machine.state is FetchState.FAILED
    following.machine.become_follower(registration(leader_epoch=6, partition_epoch=12))
    assert following.machine.state is FetchState.FETCHING


def test_fencing_in_former_leader_epoch_only_delays_the_partition():
    following = Following(4, leader_epoch=5)
    sent = following.ask()
    following.machine.become_follower(registration(leader_epoch=6, partition_epoch=11))
    step = following.get(error=Errors.FENCED_LEADER_EPOCH, sent=sent)
    assert step.delayed_until_ms == following.now_ms + BACKOFF_MS


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (Errors.CORRUPT_MESSAGE, FetchState.DELAYED),
        (Errors.INVALID_RECORD, FetchState.DELAYED),
        (Errors.KAFKA_STORAGE_ERROR, FetchState.FAILED),
        (-1, FetchState.FAILED),
    ],
)
def test_append_error_delays_or_fails_the_partition(error, state):
    following = Following(4)
    answer = PartitionResponse(0, 2, 0, None, [5], 1)
    following.machine.on_answer(following.ask(), answer, following.now_ms)
    following.machine.append_failed(error, following.now_ms)
    assert following.machine.state is state
    following.machine.resume()
    assert following.ask().fetch_offset == 1


@pytest.mark.parametrize(("leader_start", "truncation"), [(3, Truncation(3, full=True)), (2, None)])
def test_append_out_of_range_truncates_fully_if_leader_starts_at_log_end(leader_start, truncation):
    """The leader's log starts within the last batch of the local log: delete all local records."""
    following = Following(4, 4, 4)
    answer = PartitionResponse(0, 5, leader_start, None, [5], 1)
    following.machine.on_answer(following.ask(), answer, following.now_ms)
    step = following.machine.append_failed(Errors.OFFSET_OUT_OF_RANGE, following.now_ms)
    assert step.truncate == truncation
    assert following.machine.state is (FetchState.TRUNCATING if truncation else FetchState.DELAYED)


def test_partition_failure_during_truncation():
    following = Following(4, 4)
    following.machine.on_answer(
        following.ask(), PartitionResponse(diverging=(3, 0)), following.now_ms
    )
    following.machine.fail("the disk does not answer")
    assert following.machine.state is FetchState.FAILED
    assert following.machine.on_truncated() is NOTHING


def test_repeated_delay_keeps_its_first_deadline():
    following = Following(4)
    first = following.machine.delay(following.now_ms).delayed_until_ms
    assert following.machine.delay(following.now_ms + 500).delayed_until_ms == first


# --- truncation ---


def test_truncate_on_fetch_does_not_process_partition_data():
    """KAFKA-14704: the follower ignores the response's high watermark and log start offset."""
    following = Following(*[4] * 20, high=10)
    step = following.get(high=15, start=3, diverging=(4, 12))
    assert step.truncate == Truncation(12)
    assert step.high_watermark is None
    assert (following.log.log_end_offset, following.log.high_watermark) == (12, 10)
    assert following.log.log_start_offset == 0
    assert following.ask().fetch_offset == 12


def test_truncation_below_high_watermark_is_reported():
    following = Following(*[4] * 20, high=15)
    step = following.get(diverging=(4, 12))
    assert step.truncate == Truncation(12, below_high_watermark=True)
    assert step.events[0].detail["below_high_watermark"] == 15
    assert following.log.high_watermark == 12


def _log(*epochs: int) -> ListLog:
    log = ListLog()
    log.append(*epochs)
    return log


def _diverging(leader: ListLog, epoch: int, offset: int) -> tuple[int, int] | None:
    return diverging_epoch(leader.end_of_epoch(epoch), epoch, offset, leader.log_start_offset)


@pytest.mark.parametrize(
    ("epochs", "epoch", "end", "cut"),
    [
        ((5, 5, 5), -1, -1, 1),  # the leader has no epochs: fetch offset
        ((5, 5, 5), -1, 2, 2),  # the leader has no epochs: the smaller end offset
        ((5, 5, 5), -1, 9, 3),
        ((5, 5, 5), 5, 2, 2),  # the same epoch: the smaller end offset
        ((5, 5, 7), 5, 9, 2),
        ((5, 5, 5), 5, 9, 3),
        ((3, 5, 7), 6, 9, 2),  # the follower lacks epoch 6: its end of epoch 5
        ((3, 3, 7), 5, 1, 2),  # the follower's end of epoch 3, although the leader's is lower
        ((5, 5, 7), 3, 2, 0),  # below every local epoch
        ((5, 5), 9, 1, 1),  # above every local epoch
    ],
)
def test_should_truncate_to_offset_specified_in_epoch_offset_response(epochs, epoch, end, cut):
    assert truncation_offset(_log(*epochs), epoch, end, start=1) == cut


def test_should_fetch_leader_epoch_second_time_if_leader_replies_with_epoch_not_known_to_follower():
    """KIP-279: the follower steps down to earlier epochs until the leader has the same epoch."""
    leader = _log(0, 0, 1, 1, 4, 4)
    following = Following(0, 0, 2, 2, 3, 3, leader_epoch=4)
    asked = []
    for _ in range(5):
        fetch = following.ask()
        asked.append((fetch.fetch_offset, fetch.last_fetched_epoch))
        diverging = _diverging(leader, fetch.last_fetched_epoch, fetch.fetch_offset)
        if diverging is None:
            break
        following.get(diverging=diverging)
    assert asked == [(6, 3), (2, 0)]
    following.get(1, 1, 4, 4)
    assert following.log.records == leader.records


def test_epoch_without_records_is_removed_by_truncation():
    """A former leader began epoch 5 without a record; the new leader has no epoch 5."""
    following = Following(3, 3, leader_epoch=6)
    following.log.begin_epoch(5, 2)
    following.machine.resume()
    fetch = following.ask()
    assert fetch.last_fetched_epoch == 5
    leader = _log(3, 3, 3)
    leader.begin_epoch(6, 3)
    diverging = _diverging(leader, fetch.last_fetched_epoch, fetch.fetch_offset)
    assert diverging == (3, 3)
    following.get(diverging=diverging)
    assert (following.ask().fetch_offset, following.ask().last_fetched_epoch) == (2, 3)


@pytest.mark.parametrize(
    ("last_epoch", "offset", "answer"),
    [
        (-1, 1000, None),  # a follower without epochs never diverges
        (0, 8, None),
        (0, 1000, (0, 8)),
        (1, 8, (0, 8)),
        (2, 10, None),
        (2, 11, (2, 10)),
    ],
)
def test_fetch_beyond_end_of_its_epoch_gets_diverging_epoch(last_epoch, offset, answer):
    assert _diverging(_log(*[0] * 8, 2, 2), last_epoch, offset) == answer


def test_fetch_below_log_start_is_out_of_range_even_if_epochs_diverge():
    for epoch in (0, 1):
        with pytest.raises(OffsetOutOfRangeError):
            diverging_epoch((0, 8), epoch, 4, log_start_offset=5)
    assert diverging_epoch((0, 8), 1, 5, log_start_offset=5) == (0, 8)


@pytest.mark.parametrize("log", [_log(), _log(0, 2)])
def test_fetch_with_epoch_above_all_known_is_out_of_range(log):
    with pytest.raises(OffsetOutOfRangeError):
        _diverging(log, 99, 1)


# --- out of range ---


def test_follower_fetch_out_of_range_high():
    """The leader's log ends below the follower's after an unclean election."""
    following = Following(*[4] * 9, high=8)
    question = following.get(error=Errors.OFFSET_OUT_OF_RANGE).offset_request
    assert question is not None
    assert (question.end, question.current_leader_epoch) == (OffsetSpec.LATEST, 5)
    assert following.machine.fetch(following.now_ms) is None
    step = following.do(following.machine.on_offset(question, 5, 0, following.now_ms))
    assert step.truncate == Truncation(5, below_high_watermark=True)
    assert following.ask().fetch_offset == 5


def test_follower_fetch_out_of_range_low():
    """KAFKA-9491: restart the log and the high watermark at the leader's log start offset."""
    following = Following(4, 4, high=2)
    question = following.get(error=Errors.OFFSET_OUT_OF_RANGE).offset_request
    question = following.machine.on_offset(question, 900, 0, following.now_ms).offset_request
    assert question is not None
    assert question.end is OffsetSpec.EARLIEST
    step = following.do(following.machine.on_offset(question, 500, 0, following.now_ms))
    assert step.truncate == Truncation(500, full=True)
    log = following.log
    assert (log.log_start_offset, log.log_end_offset, log.high_watermark) == (500, 500, 500)
    fetch = following.ask()
    assert (fetch.fetch_offset, fetch.last_fetched_epoch, fetch.log_start_offset) == (500, -1, 500)
    assert following.machine.lag == 400


def test_fetch_continues_at_log_end_if_it_is_in_range_again():
    following = Following(4, 4, high=2)
    question = following.get(error=Errors.OFFSET_OUT_OF_RANGE).offset_request
    question = following.machine.on_offset(question, 7, 0, following.now_ms).offset_request
    assert following.machine.on_offset(question, 1, 0, following.now_ms) is NOTHING
    assert following.ask().fetch_offset == 2
    assert following.machine.lag == 5


def test_retry_after_unknown_leader_epoch_in_latest_offset_fetch():
    following = Following(4)
    question = following.get(error=Errors.OFFSET_OUT_OF_RANGE).offset_request
    step = following.machine.on_offset(question, -1, Errors.UNKNOWN_LEADER_EPOCH, following.now_ms)
    assert step.delayed_until_ms == following.now_ms + BACKOFF_MS
    assert following.machine.fetch(following.now_ms + BACKOFF_MS) is not None


def test_fenced_offset_reset_after_out_of_range():
    following = Following(4)
    question = following.get(error=Errors.OFFSET_OUT_OF_RANGE).offset_request
    following.machine.on_offset(question, -1, Errors.FENCED_LEADER_EPOCH, following.now_ms)
    assert following.machine.state is FetchState.FAILED


def test_offset_listed_for_former_leader_epoch_is_ignored():
    following = Following(*[4] * 9)
    question = following.get(error=Errors.OFFSET_OUT_OF_RANGE).offset_request
    following.machine.become_follower(registration(leader=3, leader_epoch=6, partition_epoch=11))
    assert following.machine.on_offset(question, 0, 0, following.now_ms) is NOTHING
    assert following.log.log_end_offset == 9


# --- the table ---


def test_fetch_state_table_covers_stop_start_and_failure():
    """Fetching can stop in every state, and restart in all but APPENDING and TRUNCATING."""
    busy = {FetchState.APPENDING, FetchState.TRUNCATING}
    for state in FetchState:
        known = {trigger for origin, trigger in FETCH_TRANSITIONS if origin is state}
        assert FetchTrigger.STOP in known
        assert (FetchTrigger.START in known) == (state not in busy)
        assert (FetchTrigger.FAIL in known) == (state is not FetchState.STOPPED)
    reached = set(FETCH_TRANSITIONS.values())
    assert reached == set(FetchState)
    only_fetching = {FetchTrigger.RECORDS, FetchTrigger.OUT_OF_RANGE}
    for state, trigger in product(FetchState, only_fetching):
        assert ((state, trigger) in FETCH_TRANSITIONS) == (state is FetchState.FETCHING)
