from __future__ import annotations

import pytest

from fencepost.logcore.machine import InvariantViolation
from fencepost.txn.commands import AddPartitions, EndTxn, InitProducerId
from fencepost.txn.epochs import LAST_CLIENT_EPOCH
from fencepost.txn.errors import ProducerIdsUnavailableError
from fencepost.txn.ids import BlockProducerIds, ProducerIdBlock, needs_producer_id


def reserved(*blocks: ProducerIdBlock) -> BlockProducerIds:
    ids = BlockProducerIds()
    for block in blocks:
        ids.add(block)
    return ids


def test_producer_ids_are_taken_from_blocks_in_order() -> None:
    ids = reserved(ProducerIdBlock(0, 3), ProducerIdBlock(10, 2))
    assert ids.remaining == 5
    assert [ids.next_id() for _ in range(5)] == [0, 1, 2, 10, 11]
    assert ids.remaining == 0


def test_taking_producer_id_without_block_is_unavailable() -> None:
    ids = reserved()
    for _ in range(2):
        with pytest.raises(ProducerIdsUnavailableError):
            ids.next_id()
    ids.add(ProducerIdBlock(7, 1))
    assert ids.next_id() == 7
    with pytest.raises(ProducerIdsUnavailableError):
        ids.next_id()


@pytest.mark.parametrize(
    "second", [ProducerIdBlock(9, 10), ProducerIdBlock(0, 10), ProducerIdBlock(20, 0)]
)
def test_overlapping_or_empty_block_violates_invariant(second: ProducerIdBlock) -> None:
    ids = reserved(ProducerIdBlock(0, 10))
    with pytest.raises(InvariantViolation):
        ids.add(second)


def test_negative_producer_id_block_violates_invariant() -> None:
    with pytest.raises(InvariantViolation):
        reserved(ProducerIdBlock(-5, 10))


def test_producer_ids_are_low_at_the_last_tenth_of_the_block() -> None:
    ids = reserved()
    assert ids.is_low
    ids.add(ProducerIdBlock(0, 10))
    for _ in range(8):
        ids.next_id()
        assert not ids.is_low
    ids.next_id()
    assert ids.is_low
    ids.add(ProducerIdBlock(10, 10))
    assert not ids.is_low
    assert [ids.next_id() for _ in range(11)] == list(range(9, 20))


def test_producer_id_block_beyond_int64_is_refused() -> None:
    top = 2**63 - 1
    ids = reserved(ProducerIdBlock(top, 1))
    with pytest.raises(ProducerIdsUnavailableError):
        ids.add(ProducerIdBlock(top + 1, 1))
    assert ids.next_id() == top


@pytest.mark.parametrize(
    ("command", "draws"),
    [
        (InitProducerId("t", 1_000), True),
        (EndTxn("t", 0, LAST_CLIENT_EPOCH, commit=True), True),
        (EndTxn("t", 0, LAST_CLIENT_EPOCH - 1, commit=True), False),
        (AddPartitions("t", 0, LAST_CLIENT_EPOCH, ()), False),
    ],
)
def test_init_and_end_at_last_epoch_need_producer_id(command: object, draws: bool) -> None:
    assert needs_producer_id(command) is draws
