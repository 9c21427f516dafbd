from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost.logcore.machine import InvariantViolation, ProducerStamp
from fencepost.txn import epochs
from fencepost.txn.commands import EndTxnResult, InitProducerIdResult
from fencepost.txn.epochs import EpochClaim, EpochRelation, ProducerIdentity
from fencepost.txn.errors import (
    ConcurrentTransactionsError,
    InvalidProducerIdMappingError,
    InvalidTransactionStateError,
    ProducerFencedError,
)
from tests.unit.txn.driver import TIMEOUT_MS, A, Driver, S, metadata

OLD = ProducerIdentity(500, 32_766)


def test_epoch_bump_beyond_int16_raises() -> None:
    assert epochs.bump(-1) == 0
    assert epochs.bump(32_766) == 32_767
    for epoch in (-2, 32_767):
        with pytest.raises(InvariantViolation):
            epochs.bump(epoch)
    assert epochs.bump_to_fence(32_766) == epochs.bump_to_fence(32_767) == 32_767


@pytest.mark.parametrize(("epoch", "used_up"), [(32_765, False), (32_766, True), (32_767, True)])
def test_epoch_is_exhausted_from_32766(epoch: int, used_up: bool) -> None:
    assert epochs.is_exhausted(epoch) is used_up


@pytest.mark.parametrize(
    ("request_", "stored", "previous", "tv1", "tv2"),
    [
        ((5, 3), (5, 3), 5, EpochRelation.CURRENT, EpochRelation.CURRENT),
        ((5, 2), (5, 3), 5, EpochRelation.FENCED, EpochRelation.RETRY),
        ((5, 1), (5, 3), 5, EpochRelation.FENCED, EpochRelation.FENCED),
        ((5, 4), (5, 3), 5, EpochRelation.FENCED, EpochRelation.FENCED),
        ((5, 32_766), (5, 32_767), 5, EpochRelation.FENCED, EpochRelation.RETRY),
        ((4, 32_766), (5, 0), 4, EpochRelation.OTHER_ID, EpochRelation.RETRY),
        ((4, 32_766), (5, 1), 4, EpochRelation.OTHER_ID, EpochRelation.OTHER_ID),
        ((4, 32_765), (5, 0), 4, EpochRelation.OTHER_ID, EpochRelation.OTHER_ID),
        ((3, 32_766), (5, 0), 4, EpochRelation.OTHER_ID, EpochRelation.OTHER_ID),
        ((4, 3), (5, 3), 4, EpochRelation.OTHER_ID, EpochRelation.OTHER_ID),
        ((4, 2), (5, 3), 4, EpochRelation.OTHER_ID, EpochRelation.OTHER_ID),
        ((5, 32_766), (5, 0), 5, EpochRelation.FENCED, EpochRelation.FENCED),
    ],
)
def test_request_epoch_relation_to_stored_epoch_for_tv1_and_tv2(
    request_: tuple[int, int],
    stored: tuple[int, int],
    previous: int,
    tv1: EpochRelation,
    tv2: EpochRelation,
) -> None:
    assert epochs.relate_tv1(ProducerIdentity(*request_), ProducerIdentity(*stored)) is tv1
    assert (
        epochs.relate_tv2(ProducerIdentity(*request_), ProducerIdentity(*stored), previous) is tv2
    )


@pytest.mark.parametrize(
    ("given_", "stored", "last", "verdict"),
    [
        (None, (5, -1), None, EpochClaim.BUMP),
        ((9, 9), (5, -1), None, EpochClaim.BUMP),
        (None, (5, 3), None, EpochClaim.BUMP),
        (None, (5, 3), (5, 2), EpochClaim.BUMP),
        (None, (5, 32_766), None, EpochClaim.ROTATE),
        (None, (5, 32_767), None, EpochClaim.ROTATE),
        ((5, 32_766), (5, 32_766), None, EpochClaim.ROTATE),
        ((5, 3), (5, 3), None, EpochClaim.BUMP),
        ((5, 2), (5, 3), (5, 2), EpochClaim.REPEAT),
        ((5, 2), (5, 3), None, EpochClaim.FENCED),
        ((5, 2), (5, 3), (5, 1), EpochClaim.FENCED),
        ((4, 32_766), (5, 0), (4, 32_766), EpochClaim.REPEAT),
        ((4, 32_766), (5, 0), None, EpochClaim.FENCED),
        ((5, 32_765), (5, 32_766), (5, 32_765), EpochClaim.REPEAT),
        ((5, 32_765), (5, 32_766), None, EpochClaim.FENCED),
        # The previous producer id with the current producer id's epoch is not the owner.
        ((4, 32_766), (5, 32_766), (5, 32_765), EpochClaim.FENCED),
    ],
)
def test_init_producer_id_claim_is_bump_rotate_repeat_or_fenced(
    given_: tuple[int, int] | None,
    stored: tuple[int, int],
    last: tuple[int, int] | None,
    verdict: EpochClaim,
) -> None:
    found = epochs.claim(
        ProducerIdentity(*given_) if given_ else None,
        ProducerIdentity(*stored),
        ProducerIdentity(*last) if last else None,
    )
    assert found is verdict


@given(st.integers(-1, 32_767), st.integers(-1, 32_767))
def test_tv2_relation_is_current_for_stored_epoch_and_retry_for_previous(
    asked: int, stored: int
) -> None:
    relation = epochs.relate_tv2(ProducerIdentity(1, asked), ProducerIdentity(1, stored), 1)
    assert (relation is EpochRelation.CURRENT) == (asked == stored)
    assert (relation is EpochRelation.RETRY) == (asked == stored - 1)


# -- the last epochs, through the machine


@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("hold", [True, False])
def test_tv2_end_at_last_epoch_returns_new_producer_id(
    shard: Callable[..., Driver], commit: bool, hold: bool
) -> None:
    driver = shard(hold=hold)
    driver.place(metadata(S.ONGOING, identity=OLD, partitions=[A]))
    answer = driver.end(OLD, commit=commit)
    assert answer == EndTxnResult(1000, 0)
    order = driver.orders[-1]
    assert (order.stamp.producer_id, order.stamp.producer_epoch) == (500, 32_767)
    if hold:
        txn = driver.txn()
        assert (txn.identity, txn.next_producer_id) == ((500, 32_767), 1000)
        for identity in (OLD, ProducerIdentity(1000, 0), ProducerIdentity(500, 32_767)):
            assert type(driver.end(identity, commit=commit)) is ConcurrentTransactionsError
            assert type(driver.add(identity)) is ConcurrentTransactionsError
        driver.reload()
        driver.write_markers()
    txn = driver.txn()
    assert (txn.identity, txn.previous_producer_id, txn.next_producer_id) == ((1000, 0), 500, -1)
    # A retry after a lost response gets the same result; a request for the other outcome is
    # refused.
    assert driver.end(OLD, commit=commit) == answer
    assert type(driver.end(OLD, commit=not commit)) is InvalidTransactionStateError
    driver.begin(ProducerIdentity(1000, 0))
    driver.ended(ProducerIdentity(1000, 0), commit=True)
    driver.write_markers()


@pytest.mark.parametrize("commit", [True, False])
def test_kafka_20310_end_retried_after_epoch_overflow_and_reload_is_recognized(
    shard: Callable[..., Driver], commit: bool
) -> None:
    """The records in the log contain the previous producer id."""
    driver = shard()
    driver.place(metadata(S.ONGOING, identity=OLD))
    answer = driver.ended(OLD, commit=commit)
    driver.reload()
    assert driver.ended(OLD, commit=commit) == answer == (1000, 0)


@pytest.mark.parametrize("start", range(32_763, 32_768))
@pytest.mark.parametrize("tv", [0, 2])
def test_kafka_18660_transactions_across_epoch_exhaustion_rotate_producer_id(
    shard: Callable[..., Driver], tv: int, start: int
) -> None:
    driver = shard(transaction_version=tv)
    driver.place(metadata(S.COMPLETE_COMMIT, identity=ProducerIdentity(500, start), tv=tv))
    identity = driver.started()
    seen = [identity]
    for number in range(10):
        driver.begin(identity, tv=tv)
        following = driver.ended(identity, commit=number % 3 != 0, tv=tv)
        if tv == 0:
            assert following == identity
        else:
            expected = (
                ProducerIdentity(1000, 0)
                if identity.epoch == 32_766
                else ProducerIdentity(identity[0], identity[1] + 1)
            )
            assert following == expected
        assert driver.stored == following
        assert 0 <= following.epoch <= 32_766
        identity = following
        seen.append(identity)
        if number % 4 == 3:
            driver.reload()
    assert len(set(seen)) == (11 if tv == 2 else 1)


@pytest.mark.parametrize("epoch", range(32_763, 32_768))
@pytest.mark.parametrize("tv", [0, 2])
@pytest.mark.parametrize("cause", ["init", "timeout"])
def test_kafka_19367_fencing_near_the_last_epoch_never_overflows(
    shard: Callable[..., Driver], tv: int, epoch: int, cause: str
) -> None:
    driver = shard(transaction_version=tv)
    driver.place(metadata(S.ONGOING, identity=ProducerIdentity(500, epoch), tv=tv))
    if cause == "timeout":
        driver.advance(TIMEOUT_MS + 1)
        assert driver.state is S.COMPLETE_ABORT
        assert driver.orders[-1].stamp.producer_epoch == min(epoch + 1, 32_767)
    identity = driver.started()
    assert 0 <= identity.epoch <= 32_766
    if epoch + 2 <= 32_766:
        assert identity == (500, epoch + 2)
    elif tv == 0 or epoch + 1 <= 32_766:
        assert identity == (1000, 0)
    else:
        assert identity == (1000, 1)
    for number in range(10):
        identity = driver.transact(identity, commit=number % 2 == 0, tv=tv)


def test_tv2_producer_timed_out_at_last_epoch_continues_with_new_producer_id(
    shard: Callable[..., Driver],
) -> None:
    driver = shard()
    driver.place(metadata(S.ONGOING, identity=OLD))
    driver.advance(TIMEOUT_MS + 1)
    assert driver.stored == (1000, 0)
    assert driver.end(OLD, commit=False) == EndTxnResult(1000, 0)
    for _ in range(3):
        assert driver.init(OLD) == InitProducerIdResult(1000, 0)
    driver.transact(ProducerIdentity(1000, 0))


@pytest.mark.parametrize("hold", [True, False])
def test_kafka_20090_timeout_abort_at_last_epoch_rotates_producer_id(
    shard: Callable[..., Driver], hold: bool
) -> None:
    driver = shard(hold=hold)
    driver.place(metadata(S.ONGOING, identity=OLD))
    driver.advance(TIMEOUT_MS + 1)
    if hold:
        assert driver.txn().next_producer_id == 1000
        assert type(driver.end(OLD, commit=False)) is ConcurrentTransactionsError
        driver.reload()
        assert type(driver.end(OLD, commit=False)) is ConcurrentTransactionsError
        driver.write_markers()
    assert driver.orders[-1].stamp == ProducerStamp(500, 32_767)
    assert driver.end(OLD, commit=False) == EndTxnResult(1000, 0)
    assert driver.init() == InitProducerIdResult(1000, 1)
    assert type(driver.end(OLD, commit=False)) is InvalidProducerIdMappingError
    driver.transact(ProducerIdentity(1000, 1))


@pytest.mark.parametrize("commit", [True, False])
def test_kafka_20090_open_transaction_at_highest_epoch_is_aborted_on_timeout(
    shard: Callable[..., Driver], commit: bool
) -> None:
    """A broker with KAFKA-20090 leaves this record; its producer still has the previous epoch."""
    driver = shard(hold=True)
    driver.place(metadata(S.ONGOING, identity=ProducerIdentity(500, 32_767), partitions=[A]))
    assert type(driver.end(OLD, commit=commit)) is ProducerFencedError
    driver.advance(TIMEOUT_MS + 1)
    assert driver.orders[-1].stamp == ProducerStamp(500, 32_767)
    driver.reload()
    driver.write_markers()
    assert driver.state is S.COMPLETE_ABORT
    assert driver.stored.producer_id == 1000
    driver.transact(driver.started())


def test_producer_stored_at_highest_epoch_gets_new_producer_id(
    shard: Callable[..., Driver],
) -> None:
    """A broker with KAFKA-19367 may have written such a record; this broker never does."""
    driver = shard()
    driver.place(metadata(S.PREPARE_ABORT, identity=ProducerIdentity(500, 32_767)))
    assert driver.stored == (500, 32_767)
    assert driver.init() == InitProducerIdResult(1000, 0)


def test_previous_producer_id_is_refused_after_next_transaction_began(
    shard: Callable[..., Driver],
) -> None:
    driver = shard()
    driver.place(metadata(S.ONGOING, identity=OLD))
    driver.ended(OLD, commit=True)
    driver.begin(ProducerIdentity(1000, 0))
    assert type(driver.end(OLD, commit=True)) is InvalidProducerIdMappingError
    assert type(driver.init(OLD)) is ProducerFencedError
    assert driver.state is S.ONGOING


@pytest.mark.parametrize(
    ("given_", "stored", "expected"),
    [
        ((9, 9), (5, -1), True),
        ((5, 1), (5, 3), True),
        ((4, 32_766), (5, 3), True),
        ((4, 32_767), (5, 3), True),
        ((4, 32_765), (5, 3), False),
        ((9, 32_766), (5, 3), False),
    ],
)
def test_may_continue_accepts_current_id_and_exhausted_previous_id(
    given_: tuple[int, int], stored: tuple[int, int], expected: bool
) -> None:
    assert epochs.may_continue(ProducerIdentity(*given_), ProducerIdentity(*stored), 4) is expected


@pytest.mark.parametrize("tv", [0, 2])
@pytest.mark.parametrize("commit", [True, False])
def test_end_with_highest_epoch_is_fenced(
    shard: Callable[..., Driver], tv: int, commit: bool
) -> None:
    driver = shard()
    driver.place(metadata(S.COMPLETE_ABORT, identity=ProducerIdentity(500, 32_767), tv=tv))
    answer = driver.end(ProducerIdentity(500, 32_767), commit=commit, tv=tv)
    assert type(answer) is ProducerFencedError
