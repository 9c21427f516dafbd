"""``max.producer.ids``: evicted producers, producers that are never evicted, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from fencepost.logcore.errors import OutOfOrderSequenceError, TooManyProducersError
from fencepost.logcore.machine import ProducerStamp, Record
from fencepost.logcore.partition import Partition
from fencepost.logcore.producer_limit import ProducerLimit
from tests.support.partitions import append_batch
from tests.unit.logcore.partition_driver import (
    T0,
    append,
    client_batch,
    delete,
    marker,
    open_partition,
)

LIMIT = 3


def opened(root: Path, limit: ProducerLimit, name: str = "orders") -> Partition:
    return open_partition(root, name=name, producer_limit=limit)


def known(partition: Partition) -> set[int]:
    return {producer.producer_id for producer in partition.producers.view()}


def test_producer_beyond_the_limit_evicts_the_longest_idle_one(tmp_path: Path) -> None:
    limit = ProducerLimit(LIMIT)
    partition = opened(tmp_path, limit)
    for producer in (1, 2, 3):
        append(partition, producer_id=producer)
    append(partition, producer_id=1, sequence=1)
    assert known(partition) == {1, 2, 3}
    assert (limit.count, limit.forgotten) == (3, 0)
    append(partition, producer_id=4)
    assert known(partition) == {1, 3, 4}
    assert (limit.count, limit.forgotten) == (3, 1)
    # The other producers keep their state, so a retry is a duplicate and a gap is refused.
    assert append(partition, producer_id=1).duplicate
    with pytest.raises(OutOfOrderSequenceError):
        append(partition, producer_id=3, sequence=2)


def test_evicted_producer_counts_as_unknown(tmp_path: Path) -> None:
    partition = opened(tmp_path, ProducerLimit(1))
    append(partition, producer_id=1)
    append(partition, producer_id=2)
    # A retry of producer 1 is no longer a duplicate, and gaps are not detected either.
    assert not append(partition, producer_id=1).duplicate
    append(partition, producer_id=2, sequence=70)
    append(partition, producer_id=1, epoch=5, sequence=9)
    assert known(partition) == {1}


def test_evicted_producer_begins_a_version_2_transaction_with_sequence_0(tmp_path: Path) -> None:
    partition = opened(tmp_path, ProducerLimit(1))
    append(partition, producer_id=1, transactional=True)
    marker(partition, 1, epoch=1, commit=True, version=2)
    append(partition, producer_id=2)

    def begin(sequence: int) -> None:
        data = client_batch(producer_id=1, epoch=1, sequence=sequence, transactional=True)
        append_batch(partition, data, now_ms=T0, transaction_verified=True, transaction_version=2)

    with pytest.raises(OutOfOrderSequenceError):
        begin(4)
    begin(0)


def test_producer_with_an_open_transaction_is_not_evicted(tmp_path: Path) -> None:
    limit = ProducerLimit(2)
    partition = opened(tmp_path, limit)
    append(partition, producer_id=1, transactional=True)
    for producer in range(2, 20):
        append(partition, producer_id=producer)
        assert known(partition) == {1, producer}
    assert partition.last_stable_offset == 0
    marker(partition, 1, commit=True)
    assert partition.last_stable_offset == partition.log_end_offset
    # After the marker the producer is the most recent idle producer, and may be evicted.
    append(partition, producer_id=20)
    assert known(partition) == {1, 20}
    append(partition, producer_id=21)
    assert known(partition) == {20, 21}


def test_new_producer_is_refused_while_all_others_have_open_transactions(tmp_path: Path) -> None:
    limit = ProducerLimit(2)
    partition = opened(tmp_path, limit)
    for producer in (1, 2):
        append(partition, producer_id=producer, transactional=True)
    end = partition.log_end_offset
    for transactional in (False, True):
        with pytest.raises(TooManyProducersError, match=r"max\.producer\.ids"):
            append(partition, producer_id=3, transactional=transactional)
    assert partition.log_end_offset == end
    # Known producers can still append, and batches without a producer id do not count.
    append(partition, producer_id=2, sequence=1, transactional=True)
    append(partition)
    marker(partition, 1, commit=False)
    append(partition, producer_id=3, transactional=True)
    assert known(partition) == {2, 3}


def test_coordinator_records_are_accepted_beyond_the_producer_limit(tmp_path: Path) -> None:
    """Coordinators' records belong to transactions, which have their own limit."""
    limit = ProducerLimit(1)
    partition = opened(tmp_path, limit)
    for producer in (1, 2):
        partition.append_records(
            [Record(b"group", b"1")], now_ms=T0, producer=ProducerStamp(producer, 0)
        )
    assert (known(partition), limit.count) == ({1, 2}, 2)


def test_marker_is_accepted_beyond_the_producer_limit(tmp_path: Path) -> None:
    limit = ProducerLimit(1)
    partition = opened(tmp_path, limit)
    append(partition, producer_id=1, transactional=True)
    marker(partition, 2, commit=True)
    assert limit.count == 2
    marker(partition, 1, commit=True)
    append(partition, producer_id=3)
    assert known(partition) == {3}
    assert limit.count == 1


def test_partitions_share_the_producer_limit(tmp_path: Path) -> None:
    limit = ProducerLimit(LIMIT)
    one, two = opened(tmp_path, limit, "one"), opened(tmp_path, limit, "two")
    append(one, producer_id=1)
    append(two, producer_id=1)
    append(two, producer_id=2)
    append(two, producer_id=3)
    assert (known(one), known(two)) == (set(), {1, 2, 3})
    append(one, producer_id=4)
    assert (known(one), known(two)) == ({4}, {2, 3})
    assert two.producers.expire(T0 + 100, 100) == 2
    assert limit.count == 1
    append(two, producer_id=5)
    two.close()
    assert limit.count == 1
    delete(one)
    assert limit.count == 0


@pytest.mark.parametrize("clean", [True, False])
def test_restart_loads_at_most_the_producer_limit(tmp_path: Path, clean: bool) -> None:
    """Snapshot and log restore the most recent producers; the log also all open transactions."""
    partition = opened(tmp_path, ProducerLimit(100))
    append(partition, producer_id=0, transactional=True, timestamp_ms=T0)
    for producer in range(1, 9):
        append(partition, producer_id=producer, timestamp_ms=T0 + 10 - producer)
    if clean:
        partition.close()
    limit = ProducerLimit(LIMIT)
    again = open_partition(tmp_path, clean=clean, producer_limit=limit)
    assert known(again) == ({0, 1, 2} if clean else {0, 7, 8})
    assert limit.count == LIMIT
    assert again.last_stable_offset == 0


def test_open_transactions_beyond_a_lowered_limit_are_kept(tmp_path: Path) -> None:
    partition = opened(tmp_path, ProducerLimit(100))
    for producer in range(5):
        append(partition, producer_id=producer, transactional=True)
    partition.close()
    limit = ProducerLimit(LIMIT)
    again = opened(tmp_path, limit)
    assert limit.count == 5
    with pytest.raises(TooManyProducersError):
        append(again, producer_id=9)
    for producer in range(5):
        marker(again, producer, commit=True)
    append(again, producer_id=9)
    assert known(again) == {3, 4, 9}


def test_truncation_recounts_the_producers(tmp_path: Path) -> None:
    limit = ProducerLimit(LIMIT)
    partition = opened(tmp_path, limit)
    for producer in (1, 2, 3):
        append(partition, producer_id=producer)
    partition.truncate_to(1)
    assert (known(partition), limit.count) == ({1}, 1)
