from __future__ import annotations

from collections.abc import Callable

import pytest

from fencepost.txn.commands import InitProducerIdResult
from fencepost.txn.epochs import ProducerIdentity
from fencepost.txn.errors import (
    ConcurrentTransactionsError,
    InvalidTransactionStateError,
    ProducerFencedError,
)
from fencepost.txn.shard import TIMEOUT_TIMER
from tests.unit.txn.driver import START_MS, TIMEOUT_MS, Driver, S, T, metadata

KEY = (TIMEOUT_TIMER, T)


@pytest.mark.parametrize("tv", [0, 1, 2])
def test_open_transaction_is_aborted_one_ms_after_its_timeout(
    shard: Callable[..., Driver], tv: int
) -> None:
    driver = shard(transaction_version=tv)
    identity = driver.started()
    driver.begin(identity, tv=2 if tv == 2 else 0)
    driver.advance(TIMEOUT_MS)
    assert driver.state is S.ONGOING
    driver.advance(1)
    assert driver.state is S.COMPLETE_ABORT
    assert driver.stored == (1000, 1)
    assert driver.orders[-1].stamp.producer_epoch == 1
    assert driver.orders[-1].transaction_version == (2 if tv == 2 else 0)
    assert not driver.timers
    by_kind = {event.kind: event for event in driver.events}
    assert by_kind["transaction-timed-out"].detail["open_ms"] == TIMEOUT_MS + 1
    assert by_kind["producer-fenced"].detail["cause"] == "timeout"
    assert by_kind["transaction-aborted"].detail["cause"] == "timeout"
    assert by_kind["transaction-aborted"].detail["state"] == "Ongoing"
    assert type(driver.add(identity)) is ProducerFencedError


def test_kafka_17754_tv1_producer_is_fenced_by_timeout(shard: Callable[..., Driver]) -> None:
    driver = shard(transaction_version=1)
    identity = driver.started()
    driver.begin(identity, tv=0)
    driver.advance(TIMEOUT_MS + 1)
    for commit in (True, False):
        assert type(driver.end(identity, commit=commit, tv=0)) is ProducerFencedError
    assert type(driver.init(identity)) is ProducerFencedError


def test_tv2_producer_continues_after_timeout_abort(shard: Callable[..., Driver]) -> None:
    driver = shard()
    identity = driver.started()
    driver.begin(identity)
    driver.advance(TIMEOUT_MS + 1)
    assert type(driver.end(identity, commit=True)) is InvalidTransactionStateError
    assert driver.ended(identity, commit=False) == (1000, 1)
    assert driver.init(identity) == InitProducerIdResult(1000, 1)
    driver.transact(ProducerIdentity(1000, 1))


def test_timeout_starts_again_with_each_transaction(shard: Callable[..., Driver]) -> None:
    driver = shard()
    identity = driver.started()
    driver.begin(identity)
    driver.advance(TIMEOUT_MS - 1)
    identity = driver.ended(identity, commit=True)
    driver.begin(identity)
    driver.advance(TIMEOUT_MS)
    assert driver.state is S.ONGOING
    driver.advance(1)
    assert driver.state is S.COMPLETE_ABORT


def test_timeout_does_not_start_again_after_reload(
    shard: Callable[..., Driver],
) -> None:
    driver = shard()
    driver.begin(driver.started())
    driver.advance(TIMEOUT_MS - 10)
    driver.reload()
    assert driver.timers == {KEY: START_MS + TIMEOUT_MS + 1}
    driver.advance(11)
    assert driver.state is S.COMPLETE_ABORT


def test_transaction_timed_out_before_reload_is_aborted_after_it(
    shard: Callable[..., Driver],
) -> None:
    driver = shard()
    driver.begin(driver.started())
    driver.now_ms += 10 * TIMEOUT_MS
    driver.reload()
    driver.advance(0)
    assert driver.state is S.COMPLETE_ABORT


@pytest.mark.parametrize(
    "where", [state for state in S if state <= S.COMPLETE_ABORT and state != S.ONGOING]
)
def test_timeout_timer_without_open_transaction_does_nothing(
    shard: Callable[..., Driver], where: S
) -> None:
    driver = shard(hold=True)
    driver.place(metadata(where))
    decision = driver.machine.fire(KEY, START_MS + 10 * TIMEOUT_MS)
    assert decision == type(decision)()


@pytest.mark.parametrize("key", [(TIMEOUT_TIMER, "unknown"), ("other", T), "x", (TIMEOUT_TIMER,)])
def test_unknown_timer_does_nothing(shard: Callable[..., Driver], key: object) -> None:
    driver = shard()
    driver.begin(driver.started())
    decision = driver.machine.fire(key, START_MS + 10 * TIMEOUT_MS)
    assert decision == type(decision)()


def test_timeout_timer_that_fires_early_is_set_again(shard: Callable[..., Driver]) -> None:
    driver = shard()
    driver.begin(driver.started())
    decision = driver.machine.fire(KEY, START_MS)
    assert not decision.records
    assert decision.timers[0].deadline_ms == START_MS + TIMEOUT_MS + 1


def test_timeout_does_not_abort_prepared_transaction(shard: Callable[..., Driver]) -> None:
    driver = shard(hold=True)
    identity = driver.started()
    driver.begin(identity)
    driver.ended(identity, commit=True)
    driver.advance(10 * TIMEOUT_MS)
    assert driver.state is S.PREPARE_COMMIT
    assert type(driver.init()) is ConcurrentTransactionsError
    driver.write_markers()
    assert driver.state is S.COMPLETE_COMMIT


def test_timeout_abort_without_producer_ids_is_retried(shard: Callable[..., Driver]) -> None:
    driver = shard()
    driver.place(metadata(S.ONGOING, identity=ProducerIdentity(500, 32_766)))
    driver.ids.available = False
    driver.advance(TIMEOUT_MS + 1)
    assert driver.state is S.ONGOING
    assert driver.kinds()[-1] == "timeout-postponed"
    assert driver.reservations == 1
    driver.ids.available = True
    driver.advance(driver.limits.retry_backoff_ms)
    assert driver.state is S.COMPLETE_ABORT
    assert driver.stored == (1000, 0)
