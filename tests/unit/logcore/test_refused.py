"""The first batches of a producer are appended in order, even if some are refused at first."""

from __future__ import annotations

import tempfile
from collections import deque
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost.logcore.batch import parse_header
from fencepost.logcore.errors import (
    InvalidTxnStateError,
    LogError,
    NoSpaceError,
    OutOfOrderSequenceError,
    TooManyProducersError,
)
from fencepost.logcore.partition import Partition
from fencepost.logcore.producer_limit import ProducerLimit
from fencepost.logcore.refused import MAX_REFUSED_PRODUCERS, RefusedSequences
from tests.support.faults import FaultyDisk
from tests.support.partitions import append_batch
from tests.unit.logcore.partition_driver import (
    T0,
    append,
    client_batch,
    marker,
    open_partition,
    read_log,
)

PID = 7
IN_FLIGHT = 5
BATCHES = 12


def sequences(partition: Partition) -> list[int]:
    headers = [parse_header(batch) for _, batch in read_log(partition)]
    return [header.base_sequence for header in headers if not header.is_control]


@pytest.mark.parametrize("transactional", [True, False])
def test_batch_after_one_refused_for_lack_of_space_is_out_of_order(
    tmp_path: Path, transactional: bool
) -> None:
    disk = FaultyDisk()
    partition = open_partition(tmp_path, fs=disk)
    disk.is_full = True
    with pytest.raises(NoSpaceError):
        append(partition, producer_id=PID, sequence=0, transactional=transactional)
    disk.is_full = False
    with pytest.raises(OutOfOrderSequenceError):
        append(partition, producer_id=PID, sequence=1, transactional=transactional)
    for sequence in (0, 1):
        append(partition, producer_id=PID, sequence=sequence, transactional=transactional)
    assert sequences(partition) == [0, 1]


def test_batch_after_an_unverified_one_is_out_of_order(tmp_path: Path) -> None:
    partition = open_partition(tmp_path)
    first = client_batch(producer_id=PID, sequence=3, transactional=True)
    partition.producers.note_refused_bytes(first)
    with pytest.raises(InvalidTxnStateError):
        append_batch(partition, first, now_ms=T0)
    with pytest.raises(OutOfOrderSequenceError):
        append(partition, producer_id=PID, sequence=4, transactional=True)
    # A batch with an even lower sequence then counts as the producer's first batch.
    append(partition, producer_id=PID, sequence=2, transactional=True)
    append(partition, producer_id=PID, sequence=3, transactional=True)


def test_batch_after_one_refused_by_the_producer_limit_is_out_of_order(tmp_path: Path) -> None:
    partition = open_partition(tmp_path, producer_limit=ProducerLimit(1))
    append(partition, producer_id=1, transactional=True)
    with pytest.raises(TooManyProducersError):
        append(partition, producer_id=PID, sequence=0)
    marker(partition, 1, commit=True)
    with pytest.raises(OutOfOrderSequenceError):
        append(partition, producer_id=PID, sequence=1)
    append(partition, producer_id=PID, sequence=0)


@pytest.mark.parametrize("committed", [0, 1, 2])
def test_batch_after_a_truncated_uncommitted_one_is_out_of_order(
    tmp_path: Path, committed: int
) -> None:
    """A leader appends, truncates as a follower, and leads again. Then an old batch arrives."""
    partition = open_partition(tmp_path, is_replica=True, is_replicated=True)
    for sequence in (0, 1):
        append(partition, producer_id=PID, sequence=sequence)
    partition.replica.move_high_watermark(committed)
    partition.replica.truncate_to(0)
    if committed:
        # The batches were acknowledged, so the client continues with the next sequence.
        append(partition, producer_id=PID, sequence=2)
        return
    with pytest.raises(OutOfOrderSequenceError):
        append(partition, producer_id=PID, sequence=1)
    for sequence in (0, 1):
        append(partition, producer_id=PID, sequence=sequence)
    assert sequences(partition) == [0, 1]


def test_refused_batch_with_a_wrong_crc_is_not_remembered(tmp_path: Path) -> None:
    partition = open_partition(tmp_path)
    torn = bytearray(client_batch(producer_id=PID, sequence=0, transactional=True))
    torn[-1] ^= 1
    for data in (bytes(torn), bytes(torn[:30]), b""):
        partition.producers.note_refused_bytes(data)
    append(partition, producer_id=PID, sequence=5, transactional=True)


def test_new_epoch_or_marker_forgets_refused_sequences(tmp_path: Path) -> None:
    partition = open_partition(tmp_path)
    partition.producers.note_refused_bytes(
        client_batch(producer_id=1, sequence=2, transactional=True)
    )
    append(partition, producer_id=1, epoch=1, sequence=9, transactional=True)
    partition.producers.note_refused_bytes(
        client_batch(producer_id=2, sequence=2, transactional=True)
    )
    marker(partition, 2, commit=False)
    append(partition, producer_id=2, sequence=0, transactional=True)


def test_lowest_refused_sequence_of_the_latest_epoch_is_remembered() -> None:
    refused = RefusedSequences()
    for epoch, sequence in ((1, 5), (1, 3), (1, 4), (0, 0)):
        refused.note(PID, epoch, sequence)
    assert [refused.lowest(PID, epoch) for epoch in (0, 1, 2)] == [None, 3, None]
    refused.note(PID, 2, 8)
    assert [refused.lowest(PID, epoch) for epoch in (1, 2)] == [None, 8]
    refused.forget(PID)
    assert refused.lowest(PID, 2) is None


def test_refused_producers_are_remembered_up_to_the_limit() -> None:
    refused = RefusedSequences()
    for producer_id in range(MAX_REFUSED_PRODUCERS):
        refused.note(producer_id, 0, 0)
    refused.note(0, 1, 7)
    assert (len(refused), refused.lowest(0, 1)) == (MAX_REFUSED_PRODUCERS, 7)
    refused.note(MAX_REFUSED_PRODUCERS, 0, 0)
    assert len(refused) == MAX_REFUSED_PRODUCERS
    assert [refused.lowest(0, 1), refused.lowest(1, 0)] == [None, 0]


FAULTS = st.lists(st.sampled_from(["", "full", "not verified", "refused"]), max_size=40)


@given(faults=FAULTS, transactional=st.booleans())
def test_retries_of_refused_batches_are_written_in_order(
    faults: list[str], transactional: bool
) -> None:
    """Five batches are in flight; the client resends a refused batch and all later batches."""
    disk, left = FaultyDisk(), deque(faults)
    with tempfile.TemporaryDirectory() as root:
        partition = open_partition(Path(root), fs=disk)
        waiting = list(range(BATCHES))
        for _ in range(len(faults) + 2 * BATCHES):
            for sequence in waiting[:IN_FLIGHT]:
                data = client_batch(producer_id=PID, sequence=sequence, transactional=transactional)
                fault = left.popleft() if left else ""
                disk.is_full = fault == "full"
                try:
                    if fault == "refused":
                        partition.producers.note_refused_bytes(data)
                        continue
                    verified = fault != "not verified"
                    append_batch(partition, data, now_ms=T0, transaction_verified=verified)
                except LogError:
                    continue
                waiting.remove(sequence)
        assert not waiting
        assert sequences(partition) == list(range(BATCHES))
        partition.close()
