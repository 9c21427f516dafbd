"""Scenarios of other brokers' bugs; test_epochs has the bugs near the last epoch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from fencepost.txn.commands import EndTxn, EndTxnResult, InitProducerId, InitProducerIdResult
from fencepost.txn.epochs import ProducerIdentity
from fencepost.txn.errors import (
    ConcurrentTransactionsError,
    CoordinatorUnloadedError,
    InvalidTransactionStateError,
    ProducerFencedError,
)
from tests.unit.txn.driver import TIMEOUT_MS, AppendFailedError, B, Driver, S, T, metadata


@pytest.mark.parametrize("late_by", [1, 2, 5])
@pytest.mark.parametrize("commit", [True, False])
def test_kafka_17754_delayed_tv2_end_is_fenced(
    shard: Callable[..., Driver], late_by: int, commit: bool
) -> None:
    driver = shard()
    first = driver.started()
    identity = driver.transact(first)
    for _ in range(late_by - 1):
        identity = driver.transact(identity)
    driver.begin(identity)
    before = driver.machine.digest()
    assert type(driver.end(first, commit=commit)) is ProducerFencedError
    assert driver.machine.digest() == before
    assert driver.state is S.ONGOING


def test_kafka_17754_delayed_tv1_end_commits_the_next_transaction(
    shard: Callable[..., Driver],
) -> None:
    driver = shard(transaction_version=0)
    identity = driver.started()
    driver.transact(identity, commit=True, tv=0)
    driver.begin(identity, tv=0)
    assert driver.end(identity, commit=True, tv=0) == EndTxnResult(*identity)
    assert driver.state is S.COMPLETE_COMMIT


@pytest.mark.parametrize("tv", [0, 2])
@pytest.mark.parametrize("cause", ["init", "timeout"])
def test_kafka_9666_failed_append_of_fence_leaves_epoch_unchanged(
    shard: Callable[..., Driver], tv: int, cause: str
) -> None:
    driver = shard(transaction_version=tv)
    driver.place(metadata(S.ONGOING, tv=tv))
    for _ in range(3):
        driver.fail_append = True
        fence = driver.init if cause == "init" else partial(driver.advance, TIMEOUT_MS + 1)
        with pytest.raises(AppendFailedError):
            fence()
        assert driver.stored == (500, 5)
        assert driver.state is S.ONGOING
    # Waiting clients get an error after which they look up the coordinator again.
    if cause == "init":
        assert {type(answer) for answer in driver.replies.values()} == {CoordinatorUnloadedError}
    driver.fail_append = False
    assert driver.init() == InitProducerIdResult(500, 7)


def test_kafka_9666_fence_written_before_reload_is_not_repeated(
    shard: Callable[..., Driver],
) -> None:
    driver = shard(hold=True, transaction_version=0)
    driver.place(metadata(S.ONGOING, tv=0))
    driver.submit(InitProducerId(T, TIMEOUT_MS))
    driver.reload()
    assert driver.stored == (500, 6)
    driver.write_markers()
    assert driver.init() == InitProducerIdResult(500, 7)
    assert driver.orders[-1].stamp.producer_epoch == 6


@pytest.mark.parametrize("commit", [True, False])
def test_kafka_19999_markers_after_reload_are_the_same_as_before(
    shard: Callable[..., Driver], commit: bool
) -> None:
    driver = shard(hold=True)
    identity = driver.started()
    driver.begin(identity)
    driver.ended(identity, commit=commit)
    first = driver.held[-1]
    driver.reload()
    assert driver.held == [first]
    driver.write_markers()
    assert driver.state is (S.COMPLETE_COMMIT if commit else S.COMPLETE_ABORT)


def test_redpanda_21340_repeated_commit_gets_the_same_response(
    shard: Callable[..., Driver],
) -> None:
    driver = shard()
    identity = driver.started()
    driver.begin(identity)
    after = driver.ended(identity, commit=True)
    for _ in range(5):
        assert driver.ended(identity, commit=True) == after
    assert driver.transact(after) == (1000, 2)


def test_ydb_51053_commit_without_partitions_is_refused_abort_accepted(
    shard: Callable[..., Driver],
) -> None:
    driver = shard()
    identity = driver.started()
    assert type(driver.end(identity, commit=True)) is InvalidTransactionStateError
    assert driver.ended(identity, commit=False) == (1000, 1)


def test_franz_go_init_during_pending_transaction_is_concurrent_transactions(
    shard: Callable[..., Driver],
) -> None:
    driver = shard(hold=True)
    identity = driver.started()
    driver.begin(identity)
    driver.submit(EndTxn(T, *identity, True, 2))
    for _ in range(3):
        assert type(driver.init()) is ConcurrentTransactionsError
    driver.write_markers()
    assert driver.init() == InitProducerIdResult(1000, 2)
    assert type(driver.add(ProducerIdentity(1000, 1), B)) is ProducerFencedError
