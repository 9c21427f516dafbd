"""The limit of open files: what is refused there, and that it is nothing else."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from partition_driver import T0, append, client_batch, config, open_partition

from logcore.errors import NoRoomError, StorageError
from logcore.index import ALLOCATION_BYTES
from logcore.partition import Isolation

ALL = 0, 1 << 30, Isolation.READ_UNCOMMITTED


@contextmanager
def free_descriptors(count: int) -> Iterator[None]:
    """This process may open ``count`` more files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = os.dup(0)
    os.close(probe)
    # Descriptors are given out from the lowest: all below the limit that are free now, are taken.
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (probe + 40 + count, hard))
    try:
        while True:
            try:
                taken.append(os.dup(0))
            except OSError:
                break
        for one in taken[len(taken) - count :]:
            os.close(one)
        del taken[len(taken) - count :]
        yield
    finally:
        for one in taken:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_partition_is_opened_at_the_limit_and_refused_past_it(tmp_path: Path) -> None:
    with free_descriptors(2):
        # One is the log's for good, one is used and given back for each small file.
        first = open_partition(tmp_path, name="first")
        append(first)
        second = open_partition(tmp_path, name="second")
        with pytest.raises(StorageError, match=r"third-0 can't be opened.*Too many open files"):
            open_partition(tmp_path, name="third")
        assert first.offline is None
        assert first.fetch(*ALL, at_least_one=True).records
        append(first)
        second.close()
        third = open_partition(tmp_path, name="third")
        with pytest.raises(NoRoomError, match="Too many open files"):
            append(third)
    append(third)
    third.close()
    first.close()


def test_an_append_without_descriptors_is_refused_and_the_next_one_taken(tmp_path: Path) -> None:
    partition = open_partition(tmp_path, config=config(index_interval_bytes=1))
    entries = ALLOCATION_BYTES // 12 * 2
    appended = 0
    append(partition)
    # The indexes are not mapped yet, and the second batch needs them.
    with free_descriptors(0), pytest.raises(NoRoomError, match="Too many open files"):
        append(partition)
    assert partition.offline is None
    for _ in range(entries):
        append(partition)
    while appended < entries:
        with free_descriptors(0):
            try:
                append(partition)
                appended += 1
                continue
            except NoRoomError:
                pass
        append(partition)
        appended += 1
    assert partition.offline is None
    end = partition.log_end_offset
    assert end == 1 + 2 * entries
    read = partition.fetch(*ALL, at_least_one=True).records
    assert len(read) == end * len(client_batch(1, timestamp_ms=T0))
    partition.close()
    assert open_partition(tmp_path, clean=False).log_end_offset == end
