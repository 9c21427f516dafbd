from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from fencepost.txn.commands import (
    DescribeTransaction,
    DescribeTransactionResult,
    ExpireTransactionalIds,
    ExpireTransactionalIdsResult,
    ListedTransaction,
    ListTransactions,
)
from fencepost.txn.epochs import ProducerIdentity
from fencepost.txn.errors import (
    InvalidProducerIdMappingError,
    InvalidTxnRequestError,
    TransactionalIdNotFoundError,
)
from fencepost.txn.limits import TxnLimits
from fencepost.txn.state import TransactionState
from tests.unit.txn.driver import START_MS, TIMEOUT_MS, A, B, Driver, S, T, metadata


@pytest.fixture
def three(shard: Callable[..., Driver]) -> Driver:
    driver = shard(hold=True)
    driver.place(metadata(S.EMPTY, identity=ProducerIdentity(1, 0)), "orders-a")
    driver.place(metadata(S.ONGOING, identity=ProducerIdentity(2, 0)), "orders-b")
    driver.place(metadata(S.PREPARE_COMMIT, identity=ProducerIdentity(3, 0)), "payments")
    return driver


def _names(driver: Driver, command: ListTransactions) -> list[str]:
    answer = driver.ask(command)
    return [
        transaction.transactional_id
        for transaction in answer.transactions
        if transaction is not None
    ]


def test_list_transactions_returns_id_producer_id_and_state(three: Driver) -> None:
    answer = three.ask(ListTransactions())
    assert tuple(answer.transactions) == (
        ListedTransaction("orders-a", 1, "Empty"),
        ListedTransaction("orders-b", 2, "Ongoing"),
        ListedTransaction("payments", 3, "PrepareCommit"),
    )
    assert answer.unknown_states == ()


def test_list_transactions_filters_by_state_and_producer_id(three: Driver) -> None:
    assert _names(three, ListTransactions(states=("Ongoing", "Empty"))) == ["orders-a", "orders-b"]
    assert _names(three, ListTransactions(producer_ids=(2, 3, 9))) == ["orders-b", "payments"]
    assert _names(three, ListTransactions(states=("Ongoing",), producer_ids=(3,))) == []


def test_list_transactions_reports_unknown_state_filters_that_match_nothing(three: Driver) -> None:
    answer = three.ask(ListTransactions(states=("Nonsense", "Ongoing")))
    assert answer.unknown_states == ("Nonsense",)
    assert len(list(filter(None, answer.transactions))) == 1
    assert _names(three, ListTransactions(states=("Nonsense",))) == []


def test_list_transactions_matches_durations_above_the_filter_only(three: Driver) -> None:
    three.now_ms = START_MS + 100
    # As in Kafka, an id that never began a transaction matches every duration.
    assert _names(three, ListTransactions(min_duration_ms=99)) == [
        "orders-a",
        "orders-b",
        "payments",
    ]
    assert _names(three, ListTransactions(min_duration_ms=100)) == ["orders-a"]
    assert len(_names(three, ListTransactions(min_duration_ms=-1))) == 3


def test_list_transactions_excludes_ids_created_after_the_request(three: Driver) -> None:
    answer = three.ask(ListTransactions())
    three.started(transactional_id="late")
    assert len(list(answer.transactions)) == 3


def test_describe_transactions_returns_state_or_refuses_unknown_id(
    shard: Callable[..., Driver],
) -> None:
    driver = shard()
    driver.place(metadata(S.ONGOING, partitions=(B, A)))
    assert driver.ask(DescribeTransaction(T)) == DescribeTransactionResult(
        T, "Ongoing", 500, 5, TIMEOUT_MS, START_MS, (A, B)
    )
    assert type(driver.ask(DescribeTransaction("unknown"))) is TransactionalIdNotFoundError
    assert type(driver.ask(DescribeTransaction(""))) is InvalidTxnRequestError


def test_describe_transactions_in_state_empty_has_no_start_time(
    shard: Callable[..., Driver],
) -> None:
    driver = shard()
    driver.started()
    answer = driver.ask(DescribeTransaction(T))
    assert (answer.state, answer.start_time_ms, answer.partitions) == ("Empty", -1, ())


@pytest.mark.parametrize("where", [S.EMPTY, S.COMPLETE_COMMIT, S.COMPLETE_ABORT])
def test_transactional_id_without_transaction_expires(
    shard: Callable[..., Driver], where: TransactionState
) -> None:
    driver = shard(limits=TxnLimits(transactional_id_expiration_ms=1_000))
    driver.place(metadata(where))
    driver.now_ms += 999
    assert driver.ask(ExpireTransactionalIds()) == ExpireTransactionalIdsResult((), more=False)
    driver.now_ms += 1
    assert driver.ask(ExpireTransactionalIds()) == ExpireTransactionalIdsResult((T,), more=False)
    assert driver.log[-1].value is None
    assert driver.kinds()[-1] == "transactional-id-expired"
    assert len(driver.machine) == 0
    for tv in (0, 2):
        assert (
            type(driver.end(ProducerIdentity(500, 5), commit=False, tv=tv))
            is InvalidProducerIdMappingError
        )
        assert type(driver.add(ProducerIdentity(500, 5), tv=tv)) is InvalidProducerIdMappingError
    driver.reload()
    assert driver.started() == (1000, 0)


@pytest.mark.parametrize("where", [S.ONGOING, S.PREPARE_COMMIT, S.PREPARE_ABORT])
def test_transactional_id_with_open_or_pending_transaction_does_not_expire(
    shard: Callable[..., Driver], where: TransactionState
) -> None:
    driver = shard(hold=True)
    driver.place(metadata(where))
    driver.now_ms += 10 * driver.limits.transactional_id_expiration_ms
    assert driver.ask(ExpireTransactionalIds()).expired == ()


def test_expiration_sweep_stops_at_its_limit_of_expired_ids(shard: Callable[..., Driver]) -> None:
    driver = shard(limits=TxnLimits(max_sweep=2))
    for name in ("one", "two", "three"):
        driver.started(transactional_id=name)
    driver.now_ms += driver.limits.transactional_id_expiration_ms
    answers = [driver.ask(ExpireTransactionalIds()) for _ in range(3)]
    assert [(len(answer.expired), answer.more) for answer in answers] == [
        (2, True),
        (1, False),
        (0, False),
    ]


def test_expiration_sweep_stops_at_its_limit_of_checked_ids_and_resumes(
    shard: Callable[..., Driver],
) -> None:
    driver = shard(limits=TxnLimits(max_sweep_looks=2))
    names = ("one", "two", "three", "four")
    for name in names:
        driver.started(transactional_id=name)
    driver.now_ms += driver.limits.transactional_id_expiration_ms
    # A step of the sweep checks two ids, of which the first two are in use again. An id that is
    # created during this sweep ("late") is checked by the next sweep.
    identities = [driver.started(transactional_id=name) for name in names[:2]]
    assert driver.ask(ExpireTransactionalIds()) == ExpireTransactionalIdsResult((), more=True)
    driver.started(transactional_id="late")
    found = driver.ask(ExpireTransactionalIds())
    assert found == ExpireTransactionalIdsResult(("three", "four"), more=False)
    driver.now_ms += driver.limits.transactional_id_expiration_ms
    driver.add(identities[1], transactional_id="two")
    answers = [driver.ask(ExpireTransactionalIds()) for _ in range(2)]
    assert [(answer.expired, answer.more) for answer in answers] == [
        (("one",), True),
        (("late",), False),
    ]


def test_transaction_postpones_expiration_of_transactional_id(shard: Callable[..., Driver]) -> None:
    driver = shard(limits=TxnLimits(transactional_id_expiration_ms=1_000))
    identity = driver.started()
    updates = [driver.txn().last_update_ms]
    for _ in range(3):
        driver.now_ms += 999
        identity = driver.transact(identity)
        updates.append(driver.txn().last_update_ms)
        assert driver.ask(ExpireTransactionalIds()).expired == ()
    assert all(later - earlier == 999 for earlier, later in pairwise(updates))
