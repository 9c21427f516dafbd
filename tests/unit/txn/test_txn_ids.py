from __future__ import annotations

import pytest

from fencepost.logcore.errors import StorageError
from fencepost.logcore.machine import InvariantViolation
from fencepost.txn.errors import ProducerIdsUnavailableError
from fencepost.txn.ids import BlockProducerIds, ProducerIdBlock


class Blocks:
    def __init__(self, *blocks: ProducerIdBlock | Exception) -> None:
        self.left = list(blocks)

    def __call__(self) -> ProducerIdBlock:
        block = self.left.pop(0)
        if isinstance(block, Exception):
            raise block
        return block


def test_ids_come_from_block_after_block() -> None:
    ids = BlockProducerIds(Blocks(ProducerIdBlock(0, 3), ProducerIdBlock(10, 2)))
    assert ids.remaining == 0
    assert [ids.take() for _ in range(5)] == [0, 1, 2, 10, 11]
    assert ids.remaining == 0


@pytest.mark.parametrize("error", [ProducerIdsUnavailableError("no"), StorageError("disk")])
def test_a_failed_reservation_is_tried_again(error: Exception) -> None:
    ids = BlockProducerIds(Blocks(error, error, ProducerIdBlock(7, 1)))
    for _ in range(2):
        with pytest.raises(ProducerIdsUnavailableError):
            ids.take()
    assert ids.take() == 7


@pytest.mark.parametrize(
    "second", [ProducerIdBlock(9, 10), ProducerIdBlock(0, 10), ProducerIdBlock(20, 0)]
)
def test_overlapping_or_empty_blocks_are_a_bug(second: ProducerIdBlock) -> None:
    ids = BlockProducerIds(Blocks(ProducerIdBlock(0, 10), second))
    for _ in range(10):
        ids.take()
    with pytest.raises(InvariantViolation):
        ids.take()


def test_negative_ids_are_a_bug() -> None:
    with pytest.raises(InvariantViolation):
        BlockProducerIds(Blocks(ProducerIdBlock(-5, 10))).take()


def test_prefetch_waits_for_the_last_tenth() -> None:
    ids = BlockProducerIds(Blocks(ProducerIdBlock(0, 10), ProducerIdBlock(10, 10)))
    ids.take()
    for _ in range(8):
        taken = ids.take()
        if taken < 8:
            assert not ids.prefetch()
    assert ids.prefetch()
    assert not ids.prefetch()
    assert ids.remaining == 11
    assert [ids.take() for _ in range(11)] == list(range(9, 20))


def test_the_last_id_is_the_highest_int64() -> None:
    top = 2**63 - 1
    ids = BlockProducerIds(Blocks(ProducerIdBlock(top, 1), ProducerIdBlock(top + 1, 1)))
    assert ids.take() == top
    with pytest.raises(ProducerIdsUnavailableError):
        ids.take()
