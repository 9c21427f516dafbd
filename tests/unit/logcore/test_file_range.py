"""Records are sent from their file in chunks, even if the file is replaced meanwhile."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from fencepost.logcore.file_range import MIN_RANGE_BYTES, FileRange
from fencepost.logcore.partition import Partition
from fencepost.logcore.reading import Isolation
from tests.support.faults import FaultyDisk
from tests.unit.logcore.partition_driver import (
    append,
    client_batch,
    delete,
    open_partition,
    read_log,
)

ALL = 0, 1 << 30, Isolation.READ_UNCOMMITTED


def ranged(partition: Partition) -> FileRange:
    records = partition.reader.fetch(*ALL, at_least_one=True).records
    assert isinstance(records, FileRange)
    return records


def drained(records: FileRange, count: int = 100_000) -> bytes:
    pieces = []
    while len(records):
        pieces.append(records.read(count))
    return b"".join(pieces)


@pytest.fixture
def large(tmp_path: Path) -> Partition:
    partition = open_partition(tmp_path, fs=FaultyDisk())
    for _ in range(10):
        append(partition, 10, size=10_000)
    return partition


def test_file_range_yields_the_bytes_of_a_read(large: Partition) -> None:
    expected = b"".join(data for _, data in read_log(large))
    records = ranged(large)
    append(large, 10)
    assert len(records) == len(expected)
    assert drained(records) == expected
    assert not records


@pytest.mark.parametrize(
    ("size", "kind"), [(MIN_RANGE_BYTES - 1, bytes), (MIN_RANGE_BYTES, FileRange)]
)
def test_records_below_the_range_minimum_are_read_as_bytes(
    size: int, kind: type, tmp_path: Path
) -> None:
    overhead = len(client_batch(1, size=size)) - size
    partition = open_partition(tmp_path)
    append(partition, 1, size=size - overhead)
    records = partition.reader.fetch(*ALL, at_least_one=True).records
    assert isinstance(records, kind)
    assert len(records) == size


@pytest.mark.parametrize("end", [Partition.close, delete])
def test_file_of_an_unfinished_range_stays_open_after_close_or_deletion(
    large: Partition, end
) -> None:
    disk = large._fs
    expected = b"".join(data for _, data in read_log(large))
    records = ranged(large)
    first = records.read(1)
    end(large)
    assert len(disk.open_paths) == 1
    assert first + drained(records) == expected
    del records
    gc.collect()
    assert not disk.open_paths


def test_dropped_range_closes_its_file(large: Partition) -> None:
    disk = large._fs
    records = ranged(large)
    large.close()
    del records
    gc.collect()
    assert not disk.open_paths


def test_range_of_a_truncated_file_fails(large: Partition) -> None:
    records = ranged(large)
    large.truncate_to(50)
    with pytest.raises(OSError, match="shorter"):
        drained(records)
