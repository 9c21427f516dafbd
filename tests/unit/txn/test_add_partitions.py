from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from fencepost.txn.commands import AddPartitions, AddPartitionsResult, InitProducerId
from fencepost.txn.epochs import ProducerIdentity
from fencepost.txn.errors import (
    ConcurrentTransactionsError,
    InvalidProducerIdMappingError,
    InvalidTxnRequestError,
    ProducerFencedError,
    TooManyPartitionsError,
    TransactionAbortableError,
)
from fencepost.txn.limits import TxnLimits
from fencepost.txn.records import encode
from fencepost.txn.shard import TIMEOUT_TIMER
from fencepost.txn.state import TransactionState
from tests.unit.txn.driver import START_MS, TIMEOUT_MS, A, B, C, Driver, S, metadata

REST = [S.EMPTY, S.COMPLETE_COMMIT, S.COMPLETE_ABORT]
STORED = ProducerIdentity(500, 5)
BOTH = pytest.mark.parametrize("verify", [False, True])


@BOTH
def test_add_partitions_with_unknown_id_is_refused_and_other_epoch_fenced(
    shard: Callable[..., Driver], verify: bool
) -> None:
    driver = shard(hold=True)
    driver.place(metadata(S.ONGOING))

    def ask(identity: ProducerIdentity, transactional_id: str = "orders-1") -> type:
        return type(driver.add(identity, B, transactional_id=transactional_id, verify_only=verify))

    before = driver.machine.digest()
    assert ask(STORED, "") is InvalidTxnRequestError
    assert ask(STORED, "unknown") is InvalidProducerIdMappingError
    assert ask(ProducerIdentity(501, 5)) is InvalidProducerIdMappingError
    assert ask(ProducerIdentity(500, 4)) is ProducerFencedError
    assert ask(ProducerIdentity(500, 6)) is ProducerFencedError
    assert ask(ProducerIdentity(500, -1)) is ProducerFencedError
    assert driver.machine.digest() == before


@BOTH
@pytest.mark.parametrize("identity", [STORED, ProducerIdentity(500, 4), ProducerIdentity(501, 0)])
@pytest.mark.parametrize("where", [S.PREPARE_COMMIT, S.PREPARE_ABORT])
def test_add_partitions_during_pending_transaction_is_concurrent_transactions(
    shard: Callable[..., Driver], where: TransactionState, identity: ProducerIdentity, verify: bool
) -> None:
    driver = shard(hold=True)
    driver.place(metadata(where))
    answer = driver.add(identity, verify_only=verify)
    assert type(answer) is ConcurrentTransactionsError


@BOTH
def test_prepared_transaction_without_marker_writes_refuses_requests(
    verify: bool,
) -> None:
    driver = Driver()
    driver.place(metadata(S.ONGOING))
    ended = encode("orders-1", metadata(S.PREPARE_COMMIT, identity=ProducerIdentity(500, 6)), 2)
    driver.machine.replay(ended, len(driver.log), START_MS, None)
    assert not driver.machine.is_pending("orders-1")
    add = AddPartitions("orders-1", *ProducerIdentity(500, 6), (A,), verify_only=verify)
    for request in (add, InitProducerId("orders-1", TIMEOUT_MS)):
        with pytest.raises(ConcurrentTransactionsError):
            driver.machine.decide(1, request, START_MS)


@pytest.mark.parametrize("tv", [0, 2])
@pytest.mark.parametrize("where", REST)
def test_first_partition_begins_transaction_and_sets_timeout_timer(
    shard: Callable[..., Driver], where: TransactionState, tv: int
) -> None:
    driver = shard()
    driver.place(metadata(where, start_ms=3))
    driver.now_ms += 5
    assert driver.add(STORED, A, C, tv=tv) == AddPartitionsResult()
    assert driver.txn() == replace(
        metadata(S.ONGOING, partitions=(A, C), tv=tv, start_ms=START_MS + 5),
        last_update_ms=START_MS + 5,
    )
    assert driver.timers == {(TIMEOUT_TIMER, "orders-1"): START_MS + 5 + TIMEOUT_MS + 1}


def test_later_partitions_keep_transaction_start_and_timer(shard: Callable[..., Driver]) -> None:
    driver = shard()
    driver.place(metadata(S.EMPTY))
    driver.begin(STORED, A)
    timers = dict(driver.timers)
    driver.now_ms += 1_000
    driver.begin(STORED, B, C)
    assert driver.txn().partitions == {A, B, C}
    assert driver.txn().start_ms == START_MS
    assert driver.txn().last_update_ms == START_MS + 1_000
    assert driver.timers == timers


def test_partitions_already_in_transaction_are_not_written_again(
    shard: Callable[..., Driver],
) -> None:
    driver = shard()
    driver.place(metadata(S.ONGOING, partitions=(A, B)))
    length = len(driver.log)
    driver.begin(STORED, B)
    driver.begin(STORED, B, A)
    assert len(driver.log) == length
    driver.begin(STORED, B, C)
    assert len(driver.log) == length + 1


@pytest.mark.parametrize("where", [*REST, S.ONGOING])
def test_verification_returns_missing_partitions_and_writes_nothing(
    shard: Callable[..., Driver], where: TransactionState
) -> None:
    driver = shard()
    driver.place(metadata(where))
    before, length = driver.machine.digest(), len(driver.log)
    answer = driver.add(STORED, A, B, verify_only=True)
    missing = {B} if where is S.ONGOING else {A, B}
    assert set(answer.errors) == missing
    assert all(type(error) is TransactionAbortableError for error in answer.errors.values())
    assert (driver.machine.digest(), len(driver.log)) == (before, length)
    if where is S.ONGOING:
        assert driver.add(STORED, A, verify_only=True) == AddPartitionsResult()


def test_first_add_partitions_survives_reload(shard: Callable[..., Driver]) -> None:
    """Redpanda #6019: partitions of an open transaction were only in memory, and were lost."""
    driver = shard()
    driver.begin(driver.started(), A, B)
    driver.reload()
    assert driver.state is S.ONGOING
    assert driver.txn().partitions == {A, B}


def test_add_partitions_above_partition_limit_is_refused(shard: Callable[..., Driver]) -> None:
    driver = shard(limits=TxnLimits(max_partitions_per_transaction=3))
    identity = driver.started()
    driver.begin(identity, ("a", 0), ("a", 1), ("a", 2))
    assert type(driver.add(identity, ("a", 3))) is TooManyPartitionsError
    assert len(driver.txn().partitions) == 3
    assert driver.end(identity, commit=True).producer_epoch == 1


def test_add_partitions_with_highest_epoch_is_fenced(shard: Callable[..., Driver]) -> None:
    driver = shard()
    driver.place(metadata(S.COMPLETE_ABORT, identity=ProducerIdentity(500, 32_767)))
    assert type(driver.add(ProducerIdentity(500, 32_767))) is ProducerFencedError
