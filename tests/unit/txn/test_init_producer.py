from __future__ import annotations

from collections.abc import Callable

import pytest

from fencepost.logcore.budget import Budget
from fencepost.txn.commands import InitProducerId, InitProducerIdResult
from fencepost.txn.epochs import ProducerIdentity
from fencepost.txn.errors import (
    ConcurrentTransactionsError,
    CoordinatorUnloadedError,
    InvalidTransactionTimeoutError,
    InvalidTxnRequestError,
    KeepPreparedUnsupportedError,
    ProducerFencedError,
    ProducerIdsUnavailableError,
    TooManyTransactionalIdsError,
    TwoPhaseCommitDisabledError,
)
from fencepost.txn.limits import TxnLimits
from fencepost.txn.shard import PARK_TIMER
from fencepost.txn.state import TransactionState, memory_bytes
from tests.unit.txn.driver import START_MS, TIMEOUT_MS, A, Driver, S, T, metadata

REST = [S.EMPTY, S.COMPLETE_COMMIT, S.COMPLETE_ABORT]
MAX = TxnLimits().max_transaction_timeout_ms


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (InitProducerId("", 1), InvalidTxnRequestError),
        (InitProducerId("x" * 32_768, 1), InvalidTxnRequestError),
        (InitProducerId("é" * 16_384, 1), InvalidTxnRequestError),
        (InitProducerId(T, 1, producer_id=5), InvalidTxnRequestError),
        (InitProducerId(T, 1, producer_epoch=5), InvalidTxnRequestError),
        (InitProducerId(T, 1, enable_2pc=True), TwoPhaseCommitDisabledError),
        (InitProducerId(T, 1, keep_prepared=True), KeepPreparedUnsupportedError),
        (InitProducerId(T, 0), InvalidTransactionTimeoutError),
        (InitProducerId(T, -1), InvalidTransactionTimeoutError),
        (InitProducerId(T, MAX + 1), InvalidTransactionTimeoutError),
    ],
)
def test_init_producer_id_with_invalid_fields_is_refused(
    shard: Callable[..., Driver], command: InitProducerId, error: type[Exception]
) -> None:
    driver = shard()
    assert type(driver.ask(command)) is error
    assert not driver.log


@pytest.mark.parametrize("timeout_ms", [1, MAX])
def test_transaction_timeout_at_the_limit_is_accepted(
    shard: Callable[..., Driver], timeout_ms: int
) -> None:
    driver = shard()
    driver.started(timeout_ms=timeout_ms)
    assert driver.txn().timeout_ms == timeout_ms


def test_transactional_id_of_maximum_length_is_accepted(shard: Callable[..., Driver]) -> None:
    driver = shard()
    driver.started(transactional_id="x" * 32_767)
    driver.reload()
    assert driver.txn("x" * 32_767).state is S.EMPTY


def test_two_phase_commit_transaction_has_no_timeout(shard: Callable[..., Driver]) -> None:
    driver = shard(limits=TxnLimits(two_phase_commit_enable=True))
    identity = driver.started(enable_2pc=True, timeout_ms=0)
    assert driver.txn().timeout_ms == 2**31 - 1
    driver.begin(identity)
    assert not driver.timers
    driver.advance(10**12)
    assert driver.state is S.ONGOING


def test_unknown_transactional_id_gets_new_producer_id(shard: Callable[..., Driver]) -> None:
    driver = shard()
    assert driver.init() == InitProducerIdResult(1000, 0, -1, -1)
    assert driver.init(transactional_id="other") == InitProducerIdResult(1001, 0)
    assert driver.txn() == metadata(
        S.EMPTY, identity=ProducerIdentity(1000, 0), previous=1000, tv=0, timeout_ms=TIMEOUT_MS
    )


def test_unknown_transactional_id_with_producer_id_gets_new_producer_id(
    shard: Callable[..., Driver],
) -> None:
    driver = shard()
    assert driver.init(ProducerIdentity(77, 12)) == InitProducerIdResult(1000, 0)


def test_new_transactional_id_without_producer_ids_is_refused(shard: Callable[..., Driver]) -> None:
    driver = shard()
    driver.ids.available = False
    assert type(driver.init()) is ProducerIdsUnavailableError
    assert not driver.log
    driver.ids.available = True
    assert driver.init() == InitProducerIdResult(1000, 0)


@pytest.mark.parametrize("where", REST)
def test_init_without_producer_id_bumps_epoch(
    shard: Callable[..., Driver], where: TransactionState
) -> None:
    driver = shard()
    driver.place(metadata(where))
    assert driver.init(timeout_ms=7) == InitProducerIdResult(500, 6)
    assert driver.state is S.EMPTY
    assert driver.txn().timeout_ms == 7
    assert driver.txn().start_ms == -1
    assert driver.events[-1].kind == "epoch-bumped"
    assert driver.events[-1].detail["cause"] == "InitProducerId"


@pytest.mark.parametrize("where", REST)
def test_init_with_current_epoch_bumps_it_and_may_be_repeated(
    shard: Callable[..., Driver], where: TransactionState
) -> None:
    driver = shard()
    driver.place(metadata(where))
    for _ in range(3):
        assert driver.init(ProducerIdentity(500, 5)) == InitProducerIdResult(500, 6)
    assert driver.init(ProducerIdentity(500, 6)) == InitProducerIdResult(500, 7)
    assert type(driver.init(ProducerIdentity(500, 5))) is ProducerFencedError


def test_repeated_init_after_reload_is_fenced_as_in_kafka(shard: Callable[..., Driver]) -> None:
    driver = shard()
    driver.place(metadata(S.EMPTY))
    driver.init(ProducerIdentity(500, 5))
    driver.reload()
    assert type(driver.init(ProducerIdentity(500, 5))) is ProducerFencedError


@pytest.mark.parametrize("where", REST)
@pytest.mark.parametrize(
    "given",
    [
        ProducerIdentity(500, 4),
        ProducerIdentity(500, 6),
        ProducerIdentity(501, 5),
        ProducerIdentity(499, 32_766),
        ProducerIdentity(77, 0),
    ],
)
def test_init_with_other_producer_id_or_epoch_is_fenced(
    shard: Callable[..., Driver], where: TransactionState, given: ProducerIdentity
) -> None:
    driver = shard()
    driver.place(metadata(where, previous=499))
    before = driver.machine.digest()
    assert type(driver.init(given)) is ProducerFencedError
    assert driver.machine.digest() == before
    assert driver.events[-1].kind == "producer-refused"


def test_init_cannot_be_repeated_after_another_producers_init(shard: Callable[..., Driver]) -> None:
    driver = shard()
    driver.place(metadata(S.EMPTY))
    driver.init(ProducerIdentity(500, 5))
    driver.init()
    assert type(driver.init(ProducerIdentity(500, 5))) is ProducerFencedError


@pytest.mark.parametrize("where", REST)
@pytest.mark.parametrize("epoch", [32_766, 32_767])
def test_init_at_last_epoch_returns_new_producer_id(
    shard: Callable[..., Driver], where: TransactionState, epoch: int
) -> None:
    driver = shard()
    driver.place(metadata(where, identity=ProducerIdentity(500, epoch)))
    assert driver.init() == InitProducerIdResult(1000, 0)
    assert driver.txn().previous_producer_id == 500
    assert driver.events[-1].kind == "producer-id-rotated"


def test_repeated_init_at_last_epoch_gets_the_same_producer_id(
    shard: Callable[..., Driver],
) -> None:
    driver = shard()
    driver.place(metadata(S.EMPTY, identity=ProducerIdentity(500, 32_766)))
    for _ in range(3):
        assert driver.init(ProducerIdentity(500, 32_766)) == InitProducerIdResult(1000, 0)
    assert driver.init() == InitProducerIdResult(1000, 1)
    assert type(driver.init(ProducerIdentity(500, 32_766))) is ProducerFencedError


def test_init_after_rotation_for_another_producer_is_fenced(
    shard: Callable[..., Driver],
) -> None:
    driver = shard()
    driver.place(metadata(S.EMPTY, identity=ProducerIdentity(500, 32_766)))
    assert driver.init() == InitProducerIdResult(1000, 0)
    assert type(driver.init(ProducerIdentity(500, 32_766))) is ProducerFencedError


def test_init_with_other_epoch_at_last_epoch_is_fenced(shard: Callable[..., Driver]) -> None:
    driver = shard()
    driver.place(metadata(S.EMPTY, identity=ProducerIdentity(500, 32_766)))
    assert type(driver.init(ProducerIdentity(500, 32_765))) is ProducerFencedError


def test_rotation_without_producer_ids_changes_nothing(shard: Callable[..., Driver]) -> None:
    driver = shard()
    driver.place(metadata(S.EMPTY, identity=ProducerIdentity(500, 32_766)))
    driver.ids.available = False
    assert type(driver.init()) is ProducerIdsUnavailableError
    assert driver.stored == (500, 32_766)


@pytest.mark.parametrize("where", [S.PREPARE_COMMIT, S.PREPARE_ABORT])
def test_init_during_pending_transaction_is_concurrent_transactions(
    shard: Callable[..., Driver], where: TransactionState
) -> None:
    driver = shard(hold=True)
    driver.place(metadata(where))
    assert type(driver.init()) is ConcurrentTransactionsError
    assert type(driver.init(ProducerIdentity(500, 5))) is ConcurrentTransactionsError
    # The check for a pending state comes first, so a request with an invalid identity waits too.
    assert type(driver.init(ProducerIdentity(77, 0))) is ConcurrentTransactionsError
    driver.write_markers()
    assert driver.init() == InitProducerIdResult(500, 6)


@pytest.mark.parametrize(("tv", "fenced", "granted"), [(0, 1, 2), (1, 1, 2), (2, 1, 2)])
def test_init_during_open_transaction_aborts_it_and_fences_producer(
    shard: Callable[..., Driver], tv: int, fenced: int, granted: int
) -> None:
    driver = shard(transaction_version=tv)
    identity = driver.started()
    driver.begin(identity, tv=min(tv, 2) if tv == 2 else 0)
    assert driver.init() == InitProducerIdResult(1000, granted)
    assert driver.orders[-1].stamp.producer_epoch == fenced
    assert not driver.orders[-1].commit
    assert driver.state is S.EMPTY
    assert not driver.timers
    assert {"producer-fenced", "transaction-aborted", "epoch-bumped"} <= set(driver.kinds())
    assert type(driver.add(identity)) is ProducerFencedError
    assert type(driver.end(identity, commit=True)) is ProducerFencedError


def test_init_that_aborts_a_transaction_waits_for_its_markers(shard: Callable[..., Driver]) -> None:
    driver = shard(hold=True)
    driver.begin(driver.started())
    first = driver.submit(InitProducerId(T, TIMEOUT_MS))
    assert first not in driver.replies
    assert driver.state is S.PREPARE_ABORT
    second = driver.submit(InitProducerId(T, TIMEOUT_MS))
    assert type(driver.replies[second]) is ConcurrentTransactionsError
    driver.write_markers()
    assert driver.replies[first] == InitProducerIdResult(1000, 2)
    assert driver.init() == InitProducerIdResult(1000, 3)


def test_init_waiting_for_markers_is_answered_when_shard_unloads(
    shard: Callable[..., Driver],
) -> None:
    driver = shard(hold=True)
    driver.begin(driver.started())
    waiting = driver.submit(InitProducerId(T, TIMEOUT_MS))
    driver.reload()
    assert type(driver.replies[waiting]) is CoordinatorUnloadedError
    driver.write_markers()
    assert driver.init() == InitProducerIdResult(1000, 2)


def test_init_waiting_for_markers_times_out(shard: Callable[..., Driver]) -> None:
    driver = shard(hold=True, limits=TxnLimits(max_park_ms=500))
    driver.begin(driver.started())
    waiting = driver.submit(InitProducerId(T, TIMEOUT_MS))
    driver.advance(499)
    assert waiting not in driver.replies
    driver.advance(1)
    assert type(driver.replies[waiting]) is ConcurrentTransactionsError
    driver.write_markers()
    assert driver.stored == (1000, 1)
    assert driver.init() == InitProducerIdResult(1000, 2)


def test_init_answered_after_markers_leaves_no_timer(shard: Callable[..., Driver]) -> None:
    driver = shard(hold=True)
    driver.begin(driver.started())
    driver.submit(InitProducerId(T, TIMEOUT_MS))
    assert set(driver.timers) == {(PARK_TIMER, T)}
    driver.write_markers()
    assert not driver.timers
    decision = driver.machine.fire((PARK_TIMER, T), driver.now_ms)
    assert decision == type(decision)()


def test_init_requests_waiting_for_markers_are_limited(shard: Callable[..., Driver]) -> None:
    driver = shard(hold=True, limits=TxnLimits(max_parked_requests=2))
    tokens = []
    for name in ("one", "two", "three"):
        identity = driver.started(transactional_id=name)
        driver.add(identity, A, transactional_id=name)
        tokens.append(driver.submit(InitProducerId(name, TIMEOUT_MS)))
    assert [token in driver.replies for token in tokens] == [False, False, True]
    assert type(driver.replies[tokens[2]]) is ConcurrentTransactionsError
    driver.write_markers()
    assert driver.replies[tokens[1]] == InitProducerIdResult(1001, 2)
    assert driver.txn("three").state is S.COMPLETE_ABORT
    assert driver.init(transactional_id="three") == InitProducerIdResult(1002, 2)


def test_init_without_producer_ids_completes_the_abort_and_fails(
    shard: Callable[..., Driver],
) -> None:
    driver = shard(hold=True, transaction_version=0)
    driver.place(metadata(S.ONGOING, identity=ProducerIdentity(500, 32_765), tv=0))
    token = driver.submit(InitProducerId(T, TIMEOUT_MS))
    driver.ids.available = False
    driver.write_markers()
    assert type(driver.replies[token]) is ProducerIdsUnavailableError
    assert driver.state is S.COMPLETE_ABORT


@pytest.mark.parametrize(("tv", "answer"), [(0, ProducerFencedError), (2, InitProducerIdResult)])
def test_init_by_owner_of_open_transaction_is_fenced_only_with_tv1(
    shard: Callable[..., Driver], tv: int, answer: type
) -> None:
    """Kafka's client retries so after CONCURRENT_TRANSACTIONS; only TV1 fences the client."""
    driver = shard(transaction_version=tv)
    driver.place(metadata(S.ONGOING, tv=tv))
    assert type(driver.init(ProducerIdentity(500, 5))) is answer
    assert driver.stored == (500, 6)


@pytest.mark.parametrize(
    "given", [ProducerIdentity(500, 4), ProducerIdentity(499, 32_766), ProducerIdentity(77, 1)]
)
def test_init_by_fenced_producer_does_not_abort_open_transaction(
    shard: Callable[..., Driver], given: ProducerIdentity
) -> None:
    driver = shard()
    driver.place(metadata(S.ONGOING, previous=499))
    assert type(driver.init(given)) is ProducerFencedError
    assert driver.state is S.ONGOING
    assert driver.end(ProducerIdentity(500, 5), commit=True).producer_epoch == 6


def test_transactional_ids_of_all_shards_share_one_memory_budget(
    shard: Callable[..., Driver],
) -> None:
    room = sum(map(memory_bytes, ("one", "two", "three"))) - 1
    budget = Budget("fencepost.transactional.ids.max.bytes", room)
    driver, other = shard(budget=budget), shard(budget=budget)
    driver.started(transactional_id="one")
    other.started(transactional_id="two")
    taken = driver.ids.next
    assert type(driver.init(transactional_id="three")) is TooManyTransactionalIdsError
    assert driver.ids.next == taken
    driver.replies.clear()  # an error refers to the machine that raised it
    driver.reload()
    other.reload()
    assert budget.used == sum(map(memory_bytes, ("one", "two")))
    driver.started(transactional_id="one")
    assert driver.now_ms == START_MS
