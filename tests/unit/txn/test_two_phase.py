"""KIP-939, sentence by sentence: transactions wait for an external coordinator's decision."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fencepost.logcore.machine import DomainError
from fencepost.txn import records
from fencepost.txn.commands import (
    AddPartitions,
    DescribeTransaction,
    EndTxn,
    EndTxnResult,
    InitProducerId,
    InitProducerIdResult,
)
from fencepost.txn.epochs import ProducerIdentity
from fencepost.txn.errors import (
    ConcurrentTransactionsError,
    InvalidProducerIdMappingError,
    InvalidTransactionStateError,
    InvalidTransactionTimeoutError,
    InvalidTxnRequestError,
    KeepPreparedUnsupportedError,
    ProducerFencedError,
    TwoPhaseCommitDisabledError,
)
from fencepost.txn.limits import TWO_PHASE_COMMIT_TIMEOUT_MS, TxnLimits
from tests.unit.txn.driver import TIMEOUT_MS, A, B, Driver, S, T, metadata

YEAR_MS = 365 * 24 * 3_600_000
Make = Callable[..., Driver]


@pytest.fixture
def on(shard: Make) -> Make:
    """Return a function that makes drivers of a shard with two-phase commit enabled."""

    def make(**options: object) -> Driver:
        return shard(limits=TxnLimits(two_phase_commit_enable=True), **options)

    return make


def prepared_by(driver: Driver, *, tv: int = 2) -> ProducerIdentity:
    """Begin a two-phase transaction whose producer has crashed after writing its records."""
    identity = driver.started(enable_2pc=True, timeout_ms=0)
    driver.begin(identity, A, B, tv=tv)
    return identity


def keep(driver: Driver, *, enable_2pc: bool = True) -> tuple[ProducerIdentity, ProducerIdentity]:
    """Claim the id as a restarted producer does; return its identity and the transaction's."""
    answer = driver.init(keep_prepared=True, enable_2pc=enable_2pc)
    assert isinstance(answer, InitProducerIdResult), answer
    return (
        ProducerIdentity(answer.producer_id, answer.producer_epoch),
        ProducerIdentity(answer.ongoing_producer_id, answer.ongoing_producer_epoch),
    )


NONE = ProducerIdentity(-1, -1)


# -- the switch


def test_two_phase_commit_flags_are_refused_if_disabled(shard: Make) -> None:
    driver = shard()
    assert isinstance(driver.init(enable_2pc=True), TwoPhaseCommitDisabledError)
    assert isinstance(driver.init(keep_prepared=True), KeepPreparedUnsupportedError)
    assert not driver.log


def test_keep_prepared_without_two_phase_commit_keeps_transaction(on: Make) -> None:
    driver = on()
    identity = driver.started()
    driver.begin(identity)
    client, ongoing = keep(driver, enable_2pc=False)
    assert (client, ongoing) == (ProducerIdentity(1000, 1), ProducerIdentity(1000, 0))
    assert driver.txn().timeout_ms == TIMEOUT_MS


def test_keep_prepared_with_too_long_timeout_is_refused(on: Make) -> None:
    driver = on()
    answer = driver.init(keep_prepared=True, timeout_ms=10**9)
    assert isinstance(answer, InvalidTransactionTimeoutError)


def test_keep_prepared_with_producer_id_is_refused(on: Make) -> None:
    driver = on()
    identity = driver.started()
    driver.begin(identity)
    before = driver.machine.digest()
    assert isinstance(driver.init(identity, keep_prepared=True), InvalidTxnRequestError)
    assert driver.machine.digest() == before


# -- no timeout


@pytest.mark.parametrize("tv", [0, 2])
def test_two_phase_transaction_is_never_aborted_by_timeout(on: Make, tv: int) -> None:
    driver = on(transaction_version=tv)
    prepared_by(driver, tv=tv)
    assert driver.txn().timeout_ms == TWO_PHASE_COMMIT_TIMEOUT_MS == 2_147_483_647
    for _ in range(3):
        driver.advance(YEAR_MS)
        driver.reload()
    assert driver.state is S.ONGOING


def test_open_two_phase_transaction_has_no_timeout_after_2pc_is_disabled(shard: Make) -> None:
    driver = shard(limits=TxnLimits(two_phase_commit_enable=True))
    identity = prepared_by(driver)
    driver.limits = TxnLimits()
    driver.reload()
    driver.advance(YEAR_MS)
    assert driver.state is S.ONGOING
    assert isinstance(driver.end(identity, commit=True), EndTxnResult)


def test_kept_transaction_without_two_phase_commit_times_out(on: Make) -> None:
    driver = on()
    driver.begin(driver.started())
    client, _ = keep(driver, enable_2pc=False)
    driver.reload()
    driver.advance(TIMEOUT_MS + 1)
    assert driver.state is S.COMPLETE_ABORT
    assert isinstance(driver.end(client, commit=True), DomainError)
    assert "transaction-timed-out" in driver.kinds()


def test_keep_prepared_with_two_phase_commit_removes_timeout(on: Make) -> None:
    driver = on()
    driver.begin(driver.started())
    keep(driver)
    assert driver.timers == {}
    driver.advance(YEAR_MS)
    assert driver.state is S.ONGOING


def test_keep_prepared_without_two_phase_commit_adds_no_timeout(on: Make) -> None:
    driver = on()
    prepared_by(driver)
    keep(driver, enable_2pc=False)
    driver.advance(YEAR_MS)
    assert driver.state is S.ONGOING


# -- keeping a transaction


def test_keep_prepared_returns_ongoing_transaction_and_next_epoch(on: Make) -> None:
    driver = on()
    identity = prepared_by(driver)
    started_ms = driver.txn().start_ms
    driver.advance(5)
    client, ongoing = keep(driver)
    assert ongoing == identity
    assert client == ProducerIdentity(identity.producer_id, identity.epoch + 1)
    txn = driver.txn()
    assert (txn.state, txn.start_ms, txn.partitions) == (S.ONGOING, started_ms, {A, B})
    assert (txn.identity, txn.client_identity) == (ongoing, client)
    assert driver.orders == []


def test_only_the_last_keep_prepared_client_can_end_the_transaction(on: Make) -> None:
    driver = on()
    identity = prepared_by(driver)
    clients = []
    for _ in range(3):
        client, ongoing = keep(driver)
        assert ongoing == identity
        clients.append(client)
        driver.reload()
    assert [client.epoch for client in clients] == [1, 2, 3]
    for late in (identity, *clients[:-1]):
        for tv in (0, 2):
            assert isinstance(driver.end(late, commit=True, tv=tv), ProducerFencedError)
            assert isinstance(driver.end(late, commit=False, tv=tv), ProducerFencedError)
    assert driver.state is S.ONGOING
    assert driver.ended(clients[-1], commit=True) == ProducerIdentity(1000, 4)


def test_keep_prepared_without_transaction_returns_no_ongoing_producer_id(on: Make) -> None:
    driver = on()
    assert keep(driver) == (ProducerIdentity(1000, 0), NONE)
    assert driver.state is S.EMPTY
    assert keep(driver) == (ProducerIdentity(1000, 1), NONE)
    identity = driver.transact(ProducerIdentity(1000, 1))
    assert keep(driver) == (ProducerIdentity(1000, identity.epoch + 1), NONE)


@pytest.mark.parametrize("commit", [True, False])
def test_keep_prepared_during_completion_is_concurrent_transactions(on: Make, commit: bool) -> None:
    driver = on(hold=True)
    identity = prepared_by(driver)
    client = driver.ended(identity, commit=commit)
    assert isinstance(driver.init(keep_prepared=True), ConcurrentTransactionsError)
    driver.write_markers()
    assert keep(driver) == (ProducerIdentity(1000, client.epoch + 1), NONE)


def test_init_without_keep_prepared_aborts_two_phase_transaction(on: Make) -> None:
    driver = on()
    identity = prepared_by(driver)
    client, _ = keep(driver)
    newcomer = driver.started()
    assert newcomer.producer_id == identity.producer_id
    assert newcomer.epoch > client.epoch + 1
    assert driver.state is S.EMPTY
    assert [order.commit for order in driver.orders] == [False]
    for late in (identity, client):
        assert isinstance(driver.end(late, commit=True), ProducerFencedError)


def test_init_with_identity_from_keep_prepared_aborts_transaction(on: Make) -> None:
    driver = on()
    identity = prepared_by(driver)
    client, _ = keep(driver)
    assert isinstance(driver.init(identity), ProducerFencedError)
    assert driver.state is S.ONGOING
    assert isinstance(driver.init(client), InitProducerIdResult)
    assert driver.state is S.EMPTY


# -- requests during a kept transaction


def test_add_partitions_to_kept_transaction_is_refused(on: Make) -> None:
    driver = on()
    identity = prepared_by(driver)
    client, _ = keep(driver)
    for partition in (A, ("new", 0)):
        for verify in (False, True):
            answer = driver.add(client, partition, verify_only=verify)
            assert isinstance(answer, InvalidTransactionStateError)
            answer = driver.add(identity, partition, verify_only=verify)
            assert isinstance(answer, ProducerFencedError)
    assert isinstance(driver.add(ProducerIdentity(7, 0)), InvalidProducerIdMappingError)


@pytest.mark.parametrize("commit", [True, False])
def test_end_of_kept_transaction_marks_its_epoch_and_bumps_client_epoch(
    on: Make, commit: bool
) -> None:
    driver = on()
    identity = prepared_by(driver)
    keep(driver)
    client, _ = keep(driver)
    after = driver.ended(client, commit=commit)
    assert after == ProducerIdentity(client.producer_id, client.epoch + 1)
    (order,) = driver.orders
    assert (order.stamp.producer_id, order.stamp.producer_epoch) == (1000, identity.epoch + 1)
    assert (order.commit, order.partitions) == (commit, (A, B))
    assert driver.stored == after
    assert not driver.txn().is_kept_prepared
    driver.transact(after)


@pytest.mark.parametrize("commit", [True, False])
def test_repeated_end_of_kept_transaction_after_reload_is_confirmed(on: Make, commit: bool) -> None:
    driver = on()
    identity = prepared_by(driver)
    client, _ = keep(driver)
    after = driver.ended(client, commit=commit)
    driver.reload()
    assert driver.ended(client, commit=commit) == after
    assert isinstance(driver.end(client, commit=not commit), InvalidTransactionStateError)
    assert isinstance(driver.end(identity, commit=commit), ProducerFencedError)


def test_delayed_end_of_kept_transaction_is_fenced_in_the_next_one(on: Make) -> None:
    """The example of the KIP's patch: a commit times out, is retried, and then arrives late."""
    driver = on()
    prepared_by(driver)
    client, _ = keep(driver)
    after = driver.ended(client, commit=True)
    driver.begin(after)
    assert isinstance(driver.end(client, commit=True), ProducerFencedError)
    assert driver.state is S.ONGOING


def test_requests_during_completion_of_kept_transaction_are_concurrent(on: Make) -> None:
    driver = on(hold=True)
    prepared_by(driver)
    client, _ = keep(driver)
    after = driver.ended(client, commit=True)
    for commit in (True, False):
        assert isinstance(driver.end(client, commit=commit), ConcurrentTransactionsError)
    assert isinstance(driver.add(after), ConcurrentTransactionsError)
    driver.reload()
    driver.write_markers()
    assert driver.state is S.COMPLETE_COMMIT
    assert driver.stored == after


def test_tv1_end_of_kept_transaction_keeps_client_epoch(on: Make) -> None:
    driver = on(transaction_version=0)
    identity = prepared_by(driver, tv=0)
    client, _ = keep(driver)
    assert driver.ended(client, commit=True, tv=0) == client
    (order,) = driver.orders
    assert order.stamp.producer_epoch == identity.epoch + 1
    assert order.transaction_version == 0
    assert driver.stored == client
    assert driver.ended(client, commit=True, tv=0) == client
    driver.transact(client, tv=0)


@pytest.mark.parametrize("tv", [0, 1, 2])
def test_init_that_aborts_kept_transaction_fences_its_client(on: Make, tv: int) -> None:
    driver = on(transaction_version=tv)
    prepared_by(driver, tv=tv)
    client, _ = keep(driver)
    newcomer = driver.started()
    assert newcomer.epoch == client.epoch + 2
    assert isinstance(driver.end(client, commit=True, tv=min(tv, 2)), ProducerFencedError)


# -- the last epoch


@pytest.mark.parametrize("commit", [True, False])
def test_keep_prepared_at_last_epoch_gives_only_client_new_producer_id(
    on: Make, commit: bool
) -> None:
    driver = on()
    driver.place(metadata(S.ONGOING, identity=ProducerIdentity(500, 32_765)))
    assert keep(driver) == (ProducerIdentity(500, 32_766), ProducerIdentity(500, 32_765))
    client, ongoing = keep(driver)
    assert (client, ongoing) == (ProducerIdentity(1000, 0), ProducerIdentity(500, 32_765))
    driver.reload()
    assert isinstance(driver.end(ongoing, commit=commit), ProducerFencedError)
    assert isinstance(driver.add(ongoing), ProducerFencedError)
    assert driver.ended(client, commit=commit) == ProducerIdentity(1000, 1)
    (order,) = driver.orders
    assert (order.stamp.producer_id, order.stamp.producer_epoch) == (500, 32_766)
    assert driver.ended(client, commit=commit) == ProducerIdentity(1000, 1)


@pytest.mark.parametrize("commit", [True, False])
def test_end_of_kept_transaction_at_last_client_epoch_can_be_retried(
    on: Make, commit: bool
) -> None:
    driver = on()
    driver.place(metadata(S.ONGOING, identity=ProducerIdentity(500, 32_764)))
    keep(driver)
    client, _ = keep(driver)
    assert client == ProducerIdentity(500, 32_766)
    assert driver.ended(client, commit=commit) == ProducerIdentity(1000, 0)
    (order,) = driver.orders
    assert (order.stamp.producer_id, order.stamp.producer_epoch) == (500, 32_765)
    driver.reload()
    assert driver.ended(client, commit=commit) == ProducerIdentity(1000, 0)


def test_kept_transaction_at_last_epoch_is_marked_with_highest_epoch(on: Make) -> None:
    driver = on()
    driver.place(metadata(S.ONGOING, identity=ProducerIdentity(500, 32_766)))
    client, _ = keep(driver)
    assert client == ProducerIdentity(1000, 0)
    assert driver.ended(client, commit=True) == ProducerIdentity(1000, 1)
    assert driver.orders[-1].stamp.producer_epoch == 32_767


@pytest.mark.parametrize("tv", [0, 2])
def test_init_that_aborts_kept_transaction_at_last_epoch_fences_its_client(
    on: Make, tv: int
) -> None:
    driver = on(transaction_version=tv)
    driver.place(metadata(S.ONGOING, identity=ProducerIdentity(500, 32_765), tv=tv))
    client, _ = keep(driver)
    assert client.epoch == 32_766
    newcomer = driver.started()
    assert newcomer.producer_id >= 1000
    assert isinstance(
        driver.end(client, commit=True, tv=tv), ProducerFencedError | InvalidProducerIdMappingError
    )


# -- stored state


def test_kept_transaction_is_written_with_tag_3_also_with_tv0(on: Make) -> None:
    driver = on(transaction_version=0)
    prepared_by(driver, tv=0)
    client, ongoing = keep(driver)
    record = driver.log[-1]
    assert record.value is not None
    assert record.value[:2] == b"\0\1"
    assert record.value.endswith(bytes([3, 2, *client.epoch.to_bytes(2, "big")]))
    decoded = records.decode(record)
    assert decoded is not None
    assert decoded.txn is not None
    assert (decoded.txn.identity, decoded.txn.client_identity) == (ongoing, client)


def test_describe_kept_transaction_returns_its_producer_id_and_epoch(on: Make) -> None:
    driver = on()
    identity = prepared_by(driver)
    keep(driver)
    described = driver.ask(DescribeTransaction(T))
    assert (described.producer_id, described.producer_epoch) == identity
    assert described.transaction_timeout_ms == TWO_PHASE_COMMIT_TIMEOUT_MS


def test_kept_transaction_can_be_committed_after_crash_at_any_record(on: Make) -> None:
    """Whatever the log's last record, a restarted producer commits the kept transaction."""
    driver = on()
    prepared_by(driver)
    keep(driver)
    client, _ = keep(driver)
    driver.ended(client, commit=True)
    outcomes = []
    for length in range(1, len(driver.log) + 1):
        cut = on(log=driver.log[:length], now_ms=driver.now_ms + YEAR_MS)
        client, ongoing = keep(cut)
        if ongoing == NONE:
            outcomes.append(cut.state.name)
            continue
        assert ongoing == ProducerIdentity(1000, 0)
        cut.ended(client, commit=True)
        outcomes.append(cut.state.name)
    # The last record: none begun · begun · kept · kept again · PrepareCommit, completed by loading
    # · CompleteCommit.
    assert outcomes == ["EMPTY", *["COMPLETE_COMMIT"] * 3, "EMPTY", "EMPTY"]


def test_keep_prepared_is_in_the_history_with_both_epochs(on: Make) -> None:
    driver = on()
    prepared_by(driver)
    client, _ = keep(driver)
    event = next(event for event in driver.events if event.kind == "transaction-kept")
    assert event.subject == T
    assert event.detail["producer_epoch"] == client.epoch
    assert event.detail["former_producer_epoch"] == 0


def test_kept_transaction_does_not_affect_other_transactional_ids(on: Make) -> None:
    driver = on()
    prepared_by(driver)
    keep(driver)
    other = driver.ask(InitProducerId("other", TIMEOUT_MS))
    identity = ProducerIdentity(other.producer_id, other.producer_epoch)
    assert driver.ask(AddPartitions("other", *identity, (A,))).errors == {}
    assert isinstance(driver.ask(EndTxn("other", *identity, True, 2)), EndTxnResult)
