"""Failures after which a transaction is aborted, the producer is replaced, or the pipeline ends."""

from __future__ import annotations

import pytest
from aiokafka import errors as kafka

from fencepost.client.client import ApiError, BrokerUnreachable
from fencepost.pipelines.failures import (
    Action,
    DataLostError,
    FencedTooOftenError,
    GaveUpError,
    HandlerError,
    Patience,
    RebalancedError,
    RetryBatch,
    RetryPolicy,
    classify,
    is_fence,
)


def wrapped(inner: Exception) -> Exception:
    """Wrap an exception as aiokafka does when the exception ends its sender."""
    error: Exception = kafka.KafkaError("Unexpected error during batch delivery")
    error.__cause__ = inner
    return error


AGAIN, REOPEN, STOP = Action.AGAIN, Action.REOPEN, Action.STOP


@pytest.mark.parametrize(
    ("error", "action"),
    [
        (RebalancedError(), AGAIN),
        (RetryBatch(), AGAIN),
        (ApiError(22, "TxnOffsetCommit"), AGAIN),  # ILLEGAL_GENERATION
        (ApiError(25, "TxnOffsetCommit"), AGAIN),  # UNKNOWN_MEMBER_ID
        (ApiError(27, "TxnOffsetCommit"), AGAIN),  # REBALANCE_IN_PROGRESS
        (ApiError(120, "TxnOffsetCommit"), AGAIN),  # TRANSACTION_ABORTABLE
        (ApiError(47, "AddOffsetsToTxn"), REOPEN),  # INVALID_PRODUCER_EPOCH
        (ApiError(90, "AddOffsetsToTxn"), REOPEN),  # PRODUCER_FENCED
        (ApiError(49, "AddOffsetsToTxn"), REOPEN),  # INVALID_PRODUCER_ID_MAPPING
        (ApiError(15, "FindCoordinator"), REOPEN),  # COORDINATOR_NOT_AVAILABLE
        (ApiError(82, "TxnOffsetCommit"), STOP),  # FENCED_INSTANCE_ID
        (ApiError(30, "TxnOffsetCommit"), STOP),  # GROUP_AUTHORIZATION_FAILED
        (ApiError(35, "TxnOffsetCommit"), STOP),  # UNSUPPORTED_VERSION
        (kafka.ProducerFenced(), REOPEN),
        (kafka.KafkaTimeoutError(), REOPEN),
        (kafka.KafkaConnectionError(), REOPEN),
        (wrapped(kafka.ProducerFenced()), REOPEN),
        (wrapped(kafka.TransactionalIdAuthorizationFailed("t")), STOP),
        (kafka.MessageSizeTooLargeError(), STOP),
        (kafka.TopicAuthorizationFailedError(), STOP),
        (BrokerUnreachable("gone"), REOPEN),
        (TimeoutError(), REOPEN),
        (ConnectionResetError(), REOPEN),
        (HandlerError("x"), STOP),
        (DataLostError("x"), STOP),
        (KeyError("a bug of ours"), STOP),
    ],
    ids=repr,
)
def test_error_is_classified_as_again_reopen_or_stop(error: Exception, action: Action) -> None:
    assert classify(error) is action


def test_wrapped_fencing_error_is_recognized() -> None:
    assert is_fence(wrapped(kafka.ProducerFenced()))
    assert is_fence(ApiError(47, "EndTxn"))
    assert not is_fence(kafka.KafkaTimeoutError())


def test_backoff_doubles_up_to_its_limit_and_resets_on_success() -> None:
    patience = Patience(RetryPolicy(backoff_ms=10, max_backoff_ms=50))
    error = TimeoutError()
    assert [patience.failed(error, 0) for _ in range(4)] == [10, 20, 40, 50]
    patience.succeeded()
    assert patience.failed(error, 0) == 10


def test_retries_end_exactly_at_give_up_ms() -> None:
    patience = Patience(RetryPolicy(give_up_ms=1_000))
    patience.failed(TimeoutError(), 0)
    patience.failed(TimeoutError(), 999)
    with pytest.raises(GaveUpError):
        patience.failed(TimeoutError(), 1_000)


def test_retries_end_after_too_many_fencings_within_the_window() -> None:
    patience = Patience(RetryPolicy(max_fences=2, fence_window_ms=100))
    for now in (0, 10, 200):
        patience.failed(kafka.ProducerFenced(), now)
        patience.succeeded()
    patience.failed(kafka.ProducerFenced(), 210)
    with pytest.raises(FencedTooOftenError):
        patience.failed(kafka.ProducerFenced(), 220)
