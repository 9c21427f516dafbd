from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from fencepost.txn.commands import EndTxn, EndTxnResult
from fencepost.txn.end_txn import TV1_TABLE, TV2_TABLE, EndTxnVerdict, relate, verdict
from fencepost.txn.epochs import EpochRelation, ProducerIdentity
from fencepost.txn.errors import (
    ConcurrentTransactionsError,
    InvalidProducerIdMappingError,
    InvalidTransactionStateError,
    InvalidTxnRequestError,
    ProducerFencedError,
    ProducerIdsUnavailableError,
)
from fencepost.txn.machine import TxnMachine
from fencepost.txn.records import encode
from fencepost.txn.state import TransactionState
from tests.unit.txn.driver import A, Driver, S, T, metadata

STORED = ProducerIdentity(500, 5)
DURABLE = [state for state in S if state <= S.COMPLETE_ABORT]
END, DONE, WAIT, ILLEGAL, FENCED = EndTxnVerdict
ANSWERS = {
    END: EndTxnResult,
    DONE: EndTxnResult,
    WAIT: ConcurrentTransactionsError,
    ILLEGAL: InvalidTransactionStateError,
    FENCED: ProducerFencedError,
}

# Rows and columns as in Kafka's documentation: commit current, commit retry, abort current,
# abort retry.
TV2_ROWS = {
    S.ONGOING: (END, FENCED, END, FENCED),
    S.PREPARE_COMMIT: (FENCED, WAIT, FENCED, ILLEGAL),
    S.PREPARE_ABORT: (FENCED, ILLEGAL, FENCED, WAIT),
    S.COMPLETE_COMMIT: (ILLEGAL, DONE, END, ILLEGAL),
    S.COMPLETE_ABORT: (ILLEGAL, ILLEGAL, END, DONE),
    S.EMPTY: (ILLEGAL, FENCED, END, FENCED),
}
TV1_ROWS = {
    S.ONGOING: (END, END),
    S.PREPARE_COMMIT: (WAIT, ILLEGAL),
    S.PREPARE_ABORT: (ILLEGAL, WAIT),
    S.COMPLETE_COMMIT: (DONE, ILLEGAL),
    S.COMPLETE_ABORT: (ILLEGAL, DONE),
    S.EMPTY: (ILLEGAL, ILLEGAL),
}
COLUMNS = list(product((True, False), (0, -1)))
TV2_CELLS = [
    (where, commit, behind, TV2_ROWS[where][column])
    for where in TV2_ROWS
    for column, (commit, behind) in enumerate(COLUMNS)
]
TV1_CELLS = [
    (where, commit, TV1_ROWS[where][not commit]) for where in TV1_ROWS for commit in (True, False)
]


def _placed(shard: Callable[..., Driver], where: TransactionState, tv: int) -> Driver:
    """Return a shard with an id in this state; the driver holds its markers, if any."""
    driver = shard(hold=True)
    driver.place(metadata(where, identity=STORED, tv=tv))
    return driver


def test_verdict_tables_cover_every_state_outcome_and_relation() -> None:
    assert set(TV1_TABLE) == set(product(DURABLE, (True, False)))
    relations = (EpochRelation.CURRENT, EpochRelation.RETRY)
    assert set(TV2_TABLE) == set(product(DURABLE, (True, False), relations))
    assert set(TV1_TABLE.values()) | set(TV2_TABLE.values()) == set(EndTxnVerdict)


@pytest.mark.parametrize(("where", "commit", "behind", "expected"), TV2_CELLS)
def test_tv2_end_gets_the_verdict_of_kafkas_table(
    shard: Callable[..., Driver],
    where: TransactionState,
    commit: bool,
    behind: int,
    expected: EndTxnVerdict,
) -> None:
    request = EndTxn("orders-1", 500, 5 + behind, commit, 2)
    assert _verdict(where, request) is expected
    _check_cell(_placed(shard, where, 2), request, expected, bumped=ProducerIdentity(500, 6))


@pytest.mark.parametrize(("where", "commit", "expected"), TV1_CELLS)
def test_tv1_end_gets_the_verdict_of_kafkas_table(
    shard: Callable[..., Driver], where: TransactionState, commit: bool, expected: EndTxnVerdict
) -> None:
    request = EndTxn("orders-1", *STORED, commit, 0)
    assert _verdict(where, request) is expected
    _check_cell(_placed(shard, where, 0), request, expected, bumped=STORED)


def _verdict(where: TransactionState, request: EndTxn) -> EndTxnVerdict:
    version = request.client_transaction_version
    txn = metadata(where, identity=STORED, tv=version)
    sender = ProducerIdentity(request.producer_id, request.producer_epoch)
    relation = relate(sender, txn, version)
    return verdict(where, commit=request.commit, relation=relation, transaction_version=version)


def _check_cell(
    driver: Driver, request: EndTxn, expected: EndTxnVerdict, bumped: ProducerIdentity
) -> None:
    before, log = driver.machine.digest(), len(driver.log)
    if driver.machine.is_pending("orders-1"):
        expected = WAIT  # for any request, because each prepared transaction is being completed
    answer = driver.ask(request)
    assert type(answer) is ANSWERS[expected]
    if expected is END:
        assert answer == EndTxnResult(*bumped)
        assert driver.state is (S.PREPARE_COMMIT if request.commit else S.PREPARE_ABORT)
        assert driver.stored == bumped
        assert driver.txn().client_transaction_version == request.client_transaction_version
        driver.write_markers()
        assert driver.state is (S.COMPLETE_COMMIT if request.commit else S.COMPLETE_ABORT)
        assert driver.stored == bumped
        return
    assert (driver.machine.digest(), len(driver.log)) == (before, log)
    if expected is DONE:
        assert answer == EndTxnResult(*STORED)


@pytest.mark.parametrize("tv", [0, 2])
@pytest.mark.parametrize("where", DURABLE)
@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("epoch", [3, 6, 32_767, -1])
def test_end_with_other_epoch_is_fenced(
    shard: Callable[..., Driver], where: TransactionState, tv: int, commit: bool, epoch: int
) -> None:
    assert _verdict(where, EndTxn("orders-1", 500, epoch, commit, tv)) is FENCED
    driver = _placed(shard, where, tv)
    before = driver.machine.digest()
    answer = driver.end(ProducerIdentity(500, epoch), commit=commit, tv=tv)
    assert driver.machine.digest() == before
    if tv == 2 and driver.machine.is_pending("orders-1"):
        assert type(answer) is ConcurrentTransactionsError
    else:
        assert type(answer) is ProducerFencedError
        assert driver.kinds()[-1] == "producer-refused"


@pytest.mark.parametrize("tv", [0, 2])
@pytest.mark.parametrize("where", DURABLE)
def test_end_with_other_producer_id_is_invalid_mapping(
    shard: Callable[..., Driver], where: TransactionState, tv: int
) -> None:
    other = ProducerIdentity(501, 5)
    assert relate(other, metadata(where, identity=STORED, tv=tv), tv) is EpochRelation.OTHER_ID
    driver = _placed(shard, where, tv)
    answer = driver.end(other, commit=True, tv=tv)
    if tv == 2 and driver.machine.is_pending("orders-1"):
        assert type(answer) is ConcurrentTransactionsError
    else:
        assert type(answer) is InvalidProducerIdMappingError
    answer = driver.end(STORED, commit=True, tv=tv, transactional_id="unknown")
    assert type(answer) is InvalidProducerIdMappingError


@pytest.mark.parametrize("tv", [0, 2])
def test_end_with_empty_transactional_id_is_invalid_request(
    shard: Callable[..., Driver], tv: int
) -> None:
    answer = shard().end(STORED, commit=True, tv=tv, transactional_id="")
    assert type(answer) is InvalidTxnRequestError


@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize(
    "given", [ProducerIdentity(1000, 0), ProducerIdentity(1000, 1), ProducerIdentity(77, 3)]
)
def test_tv2_end_during_pending_transaction_is_refused_before_epoch_check(
    shard: Callable[..., Driver], commit: bool, given: ProducerIdentity
) -> None:
    driver = shard(hold=True)
    identity = driver.started()
    driver.begin(identity)
    driver.ended(identity, commit=True)
    assert type(driver.end(given, commit=commit)) is ConcurrentTransactionsError


@pytest.mark.parametrize("commit", [True, False])
def test_tv1_end_during_pending_transaction_is_refused_after_epoch_check(
    shard: Callable[..., Driver], commit: bool
) -> None:
    driver = shard(hold=True)
    identity = driver.started()
    driver.begin(identity, tv=0)
    driver.ended(identity, commit=True, tv=0)
    assert type(driver.end(identity, commit=commit, tv=0)) is ConcurrentTransactionsError
    assert type(driver.end(ProducerIdentity(1000, 7), commit=commit, tv=0)) is ProducerFencedError
    assert (
        type(driver.end(ProducerIdentity(7, 0), commit=commit, tv=0))
        is InvalidProducerIdMappingError
    )


@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("tv", [0, 2])
def test_repeated_end_gets_the_same_response(
    shard: Callable[..., Driver], tv: int, commit: bool
) -> None:
    driver = shard(transaction_version=tv)
    identity = driver.started()
    driver.begin(identity, tv=tv)
    first = driver.end(identity, commit=commit, tv=tv)
    before = driver.machine.digest()
    for _ in range(3):
        assert driver.end(identity, commit=commit, tv=tv) == first
        driver.reload()
    assert driver.machine.digest() == before
    assert type(driver.end(identity, commit=not commit, tv=tv)) is InvalidTransactionStateError


def test_request_version_decides_between_tv1_and_tv2_end(shard: Callable[..., Driver]) -> None:
    driver = shard(transaction_version=2)
    identity = driver.started()
    driver.begin(identity, tv=0)
    assert driver.ended(identity, commit=True, tv=0) == identity
    assert driver.orders[-1].transaction_version == 0
    driver.begin(identity, tv=2)
    assert driver.ended(identity, commit=True, tv=2) == (1000, 1)
    assert driver.orders[-1].transaction_version == 2


def test_tv2_end_in_tv1_cluster_bumps_epoch(shard: Callable[..., Driver]) -> None:
    driver = shard(transaction_version=0)
    identity = driver.started()
    driver.begin(identity, tv=2)
    assert driver.ended(identity, commit=True, tv=2) == (1000, 1)


@pytest.mark.parametrize("where", [S.EMPTY, S.COMPLETE_COMMIT, S.COMPLETE_ABORT])
def test_tv2_abort_without_partitions_completes_without_markers(
    shard: Callable[..., Driver], where: TransactionState
) -> None:
    driver = shard(hold=True)
    driver.place(metadata(where, identity=STORED))
    driver.now_ms += 11
    assert driver.ended(STORED, commit=False) == (500, 6)
    assert driver.orders[-1].partitions == ()
    assert driver.txn().start_ms == driver.now_ms
    driver.write_markers()
    assert driver.state is S.COMPLETE_ABORT
    assert driver.ended(ProducerIdentity(500, 6), commit=False) == (500, 7)
    driver.write_markers()


def test_tv2_end_by_producer_fenced_before_tv1_commit_is_fenced(
    shard: Callable[..., Driver],
) -> None:
    """The request's epoch is one below the TV1 commit's: Kafka mistakes it for a TV2 retry."""
    driver = shard()
    zombie = driver.started()
    driver.begin(zombie, tv=0)
    driver.transaction_version = 0
    successor = driver.started()
    driver.begin(successor, tv=0)
    driver.ended(successor, commit=True, tv=0)
    behind = ProducerIdentity(successor.producer_id, successor.epoch - 1)
    assert type(driver.end(behind, commit=True, tv=2)) is ProducerFencedError
    assert type(driver.end(zombie, commit=True, tv=2)) is ProducerFencedError


def test_end_at_last_epoch_without_new_producer_id_is_refused(shard: Callable[..., Driver]) -> None:
    driver = shard()
    driver.place(metadata(S.ONGOING, identity=ProducerIdentity(500, 32_766)))
    before = driver.machine.digest()
    driver.ids.available = False
    answer = driver.end(ProducerIdentity(500, 32_766), commit=True)
    assert type(answer) is ProducerIdsUnavailableError
    assert driver.machine.digest() == before
    driver.ids.available = True
    assert driver.ended(ProducerIdentity(500, 32_766), commit=True) == (1000, 0)


def test_end_decision_has_prepare_record_markers_and_reply() -> None:
    driver = Driver(hold=True)
    identity = driver.started()
    driver.begin(identity, A)
    decision = driver.machine.decide(99, EndTxn("orders-1", *identity, True, 2), driver.now_ms)
    assert len(decision.records) == len(decision.effects) == len(decision.replies) == 1
    assert driver.state is S.ONGOING


def test_end_during_decision_not_yet_replayed_is_concurrent_transactions() -> None:
    driver = Driver(hold=True)
    identity = driver.started()
    driver.begin(identity, A)
    driver.machine.decide(99, EndTxn("orders-1", *identity, True, 2), driver.now_ms)
    with pytest.raises(ConcurrentTransactionsError):
        driver.machine.decide(100, EndTxn("orders-1", *identity, False, 2), driver.now_ms)


def test_command_before_loading_or_after_unloading_is_refused() -> None:
    driver = Driver()
    machine = TxnMachine(driver.limits, driver.ids, 7, lambda: 2)
    machine.replay(encode("orders-1", metadata(S.ONGOING), 2), 0, 0, None)
    for each in (machine, driver.machine):
        each.on_unloaded()
        with pytest.raises(Exception, match="does not serve"):
            each.decide(1, EndTxn("orders-1", 500, 5, True, 2), 0)


def test_commit_by_operator_is_not_a_routine_event(shard: Callable[..., Driver]) -> None:
    driver = shard()
    second = driver.transact(driver.started())
    (event,) = (noted for noted in driver.events if noted.kind == "transaction-committed")
    assert event.routine, "the history has it only with fencepost.history.commits"
    driver.begin(second)
    driver.ask(EndTxn(T, *second, commit=True, client_transaction_version=2, by_operator=True))
    (_, event) = (noted for noted in driver.events if noted.kind == "transaction-committed")
    assert not event.routine
    assert (event.detail["producer_id"], event.detail["producer_epoch"]) == second
