from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from fencepost.logcore.machine import InvariantViolation
from fencepost.txn import state
from fencepost.txn.commands import EndTxnResult, ExpireTransactionalIds
from fencepost.txn.epochs import ProducerIdentity
from fencepost.txn.records import DecodedRecord, decode, encode, tombstone
from fencepost.txn.state import TRANSITIONS, TransactionState
from tests.unit.txn.driver import START_MS, TIMEOUT_MS, Driver, S, metadata

Step = tuple[TransactionState, TransactionState]
LEGAL = sorted(TRANSITIONS)
ILLEGAL = sorted(set(product(S, S)) - set(LEGAL))


def _rest(driver: Driver, where: TransactionState) -> ProducerIdentity:
    """Bring the transactional id into a state that has no open transaction."""
    identity = driver.started()
    if where is S.EMPTY:
        return identity
    return driver.transact(identity, commit=where is S.COMPLETE_COMMIT)


def _claim(where: TransactionState) -> Callable[[Driver], object]:
    return lambda driver: driver.started() if _rest(driver, where) else None


def _begin(where: TransactionState) -> Callable[[Driver], object]:
    return lambda driver: driver.begin(_rest(driver, where))


def _abort_nothing(where: TransactionState) -> Callable[[Driver], object]:
    return lambda driver: driver.ended(_rest(driver, where), commit=False)


def _expire(where: TransactionState) -> Callable[[Driver], object]:
    def run(driver: Driver) -> None:
        _rest(driver, where)
        driver.now_ms += driver.limits.transactional_id_expiration_ms
        driver.ask(ExpireTransactionalIds())

    return run


def _end(commit: bool) -> Callable[[Driver], object]:
    return lambda driver: driver.transact(driver.started(), commit=commit)


def _fence(driver: Driver) -> None:
    driver.begin(driver.started())
    driver.advance(TIMEOUT_MS + 1)


def _add_twice(driver: Driver) -> None:
    identity = driver.started()
    driver.begin(identity, ("a", 0))
    driver.begin(identity, ("a", 1))


REACHED_BY: dict[Step, Callable[[Driver], object]] = {
    **{(old, S.EMPTY): _claim(old) for old in state.AT_REST},
    **{(old, S.ONGOING): _begin(old) for old in state.AT_REST},
    **{(old, S.PREPARE_ABORT): _abort_nothing(old) for old in state.AT_REST},
    **{(old, S.DEAD): _expire(old) for old in state.AT_REST},
    (S.ONGOING, S.ONGOING): _add_twice,
    (S.ONGOING, S.PREPARE_COMMIT): _end(commit=True),
    (S.PREPARE_COMMIT, S.COMPLETE_COMMIT): _end(commit=True),
    (S.ONGOING, S.PREPARE_ABORT): _end(commit=False),
    (S.PREPARE_ABORT, S.COMPLETE_ABORT): _end(commit=False),
    (S.ONGOING, S.PREPARE_EPOCH_FENCE): _fence,
    (S.PREPARE_EPOCH_FENCE, S.PREPARE_ABORT): _fence,
}


def test_legal_transitions_all_have_a_scenario() -> None:
    assert sorted(REACHED_BY) == LEGAL


@pytest.mark.parametrize("step", LEGAL, ids=lambda step: f"{step[0].name}-{step[1].name}")
def test_scenario_reaches_its_transition(
    step: Step, shard: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: set[Step] = set()
    require_legal = state.require_legal

    def watch(old: TransactionState, new: TransactionState) -> None:
        require_legal(old, new)
        taken.add((old, new))

    monkeypatch.setattr(state, "require_legal", watch)
    REACHED_BY[step](shard())
    assert step in taken


@pytest.mark.parametrize("step", ILLEGAL, ids=lambda step: f"{step[0].name}-{step[1].name}")
def test_unlisted_transition_raises(step: Step) -> None:
    with pytest.raises(InvariantViolation):
        state.require_legal(*step)


DURABLE = [txn_state for txn_state in S if txn_state <= S.COMPLETE_ABORT]


@pytest.mark.parametrize(
    "step",
    [step for step in ILLEGAL if step[0] in DURABLE and step[1] in DURABLE],
    ids=lambda step: f"{step[0].name}-{step[1].name}",
)
def test_replay_of_unlisted_transition_raises(step: Step) -> None:
    driver = Driver(hold=True)
    driver.place(metadata(step[0]))
    with pytest.raises(InvariantViolation):
        driver.machine.replay(encode("orders-1", metadata(step[1]), 2), 9, START_MS, None)


@pytest.mark.parametrize("where", [S.ONGOING, S.PREPARE_COMMIT, S.PREPARE_ABORT])
def test_replay_of_tombstone_during_transaction_raises(where: TransactionState) -> None:
    driver = Driver(hold=True)
    driver.place(metadata(where))
    with pytest.raises(InvariantViolation):
        driver.machine.replay(tombstone("orders-1"), 9, START_MS, None)


@pytest.mark.parametrize("where", [txn_state for txn_state in DURABLE if txn_state is not S.EMPTY])
def test_replay_of_first_record_not_in_state_empty_raises(where: TransactionState) -> None:
    with pytest.raises(InvariantViolation):
        Driver().machine.replay(encode("orders-1", metadata(where), 2), 0, START_MS, None)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param(
            metadata(S.EMPTY),
            metadata(S.EMPTY, identity=ProducerIdentity(500, 7)),
            id="skips an epoch",
        ),
        pytest.param(
            metadata(S.EMPTY),
            metadata(S.EMPTY, identity=ProducerIdentity(500, 4)),
            id="epoch goes back",
        ),
        pytest.param(
            metadata(S.EMPTY),
            metadata(S.EMPTY, identity=ProducerIdentity(501, 0)),
            id="id left too early",
        ),
        pytest.param(metadata(S.ONGOING), metadata(S.ONGOING, partitions=()), id="partition lost"),
        pytest.param(
            metadata(S.EMPTY), metadata(S.ONGOING, timeout_ms=1), id="timeout changed underway"
        ),
        pytest.param(
            metadata(S.EMPTY),
            metadata(S.ONGOING, identity=ProducerIdentity(500, 6)),
            id="begin bumps",
        ),
        pytest.param(metadata(S.ONGOING), metadata(S.PREPARE_COMMIT), id="TV2 end without bump"),
        pytest.param(
            metadata(S.ONGOING),
            metadata(S.PREPARE_COMMIT, identity=ProducerIdentity(500, 6), next_id=501),
            id="rotates too early",
        ),
        pytest.param(
            metadata(S.ONGOING, identity=ProducerIdentity(500, 32_766)),
            metadata(S.PREPARE_COMMIT, identity=ProducerIdentity(500, 32_767)),
            id="does not rotate",
        ),
        pytest.param(
            metadata(S.ONGOING),
            metadata(S.PREPARE_COMMIT, identity=ProducerIdentity(500, 6), tv=0),
            id="TV1 commit bumps",
        ),
        pytest.param(
            metadata(S.ONGOING),
            metadata(S.PREPARE_ABORT, identity=ProducerIdentity(500, 6), partitions=[("z", 0)]),
            id="partitions exchanged",
        ),
        pytest.param(
            metadata(S.PREPARE_COMMIT, next_id=501, identity=ProducerIdentity(500, 32_767)),
            metadata(S.COMPLETE_COMMIT, identity=ProducerIdentity(500, 32_767)),
            id="promised id forgotten",
        ),
    ],
)
def test_inconsistent_metadata_change_raises(
    old: state.TransactionMetadata, new: state.TransactionMetadata
) -> None:
    with pytest.raises(InvariantViolation):
        state.check_step(old, new)


def test_tv1_abort_in_state_empty_raises() -> None:
    with pytest.raises(InvariantViolation):
        state.prepared(
            metadata(S.EMPTY),
            commit=False,
            client_transaction_version=0,
            next_producer_id=-1,
            now_ms=START_MS,
        )


def test_epoch_fence_and_dead_are_never_written(shard: Callable[..., Driver]) -> None:
    driver = shard()
    _fence(driver)
    driver.now_ms += driver.limits.transactional_id_expiration_ms
    driver.ask(ExpireTransactionalIds())
    written = [decode(record) for record in driver.log]
    assert [record.txn.state if record and record.txn else None for record in written] == [
        S.EMPTY,
        S.ONGOING,
        S.PREPARE_ABORT,
        S.COMPLETE_ABORT,
        None,
    ]
    assert isinstance(written[-1], DecodedRecord)


def test_states_have_kafkas_names() -> None:
    assert [txn_state.kafka_name for txn_state in S] == [
        "Empty",
        "Ongoing",
        "PrepareCommit",
        "PrepareAbort",
        "CompleteCommit",
        "CompleteAbort",
        "Dead",
        "PrepareEpochFence",
    ]


@pytest.mark.parametrize("tv", [0, 2])
@pytest.mark.parametrize("commit", [True, False])
def test_transactions_end_with_markers_and_expected_epoch(
    shard: Callable[..., Driver], tv: int, commit: bool
) -> None:
    driver = shard(transaction_version=tv)
    identity = driver.started()
    assert identity == (1000, 0)
    for number in range(1, 4):
        driver.begin(identity, ("a", 0), ("b", 3), tv=tv)
        assert driver.state is S.ONGOING
        result = driver.end(identity, commit=commit, tv=tv)
        identity = ProducerIdentity(1000, number if tv == 2 else 0)
        assert result == EndTxnResult(*identity)
        assert driver.state is (S.COMPLETE_COMMIT if commit else S.COMPLETE_ABORT)
        assert driver.orders[-1].stamp.producer_epoch == identity.epoch
        assert driver.orders[-1].partitions == (("a", 0), ("b", 3))
        assert driver.orders[-1].commit is commit
        assert driver.orders[-1].coordinator_epoch == 7
        assert driver.orders[-1].transaction_version == tv
    assert not driver.timers
