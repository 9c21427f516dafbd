from __future__ import annotations

import ctypes
import mmap
import os
import struct
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost.logcore.fs import OsFileSystem
from fencepost.logcore.index import (
    AbortedTxn,
    CorruptIndexError,
    MappedIndexes,
    OffsetIndex,
    TimeIndex,
    TransactionIndex,
)

FS = OsFileSystem()


def offset_index(path: Path, *, base: int = 0, max_bytes: int = 65536) -> OffsetIndex:
    return OffsetIndex(FS, str(path / "0.index"), base, max_bytes)


def time_index(path: Path, *, base: int = 0, max_bytes: int = 65536) -> TimeIndex:
    return TimeIndex(FS, str(path / "0.timeindex"), base, max_bytes)


def test_offset_index_file_has_kafkas_format(tmp_path: Path) -> None:
    index = offset_index(tmp_path, base=100)
    index.append(105, 4200)
    index.append(130, 9000)
    index.close()
    assert (tmp_path / "0.index").read_bytes() == struct.pack(">iiii", 5, 4200, 30, 9000)


def test_time_index_file_has_kafkas_format(tmp_path: Path) -> None:
    index = time_index(tmp_path, base=100)
    index.maybe_append(1_000, 105)
    index.maybe_append(1_000, 120)  # not larger, so skipped
    index.maybe_append(2_000, 130)
    index.close()
    assert (tmp_path / "0.timeindex").read_bytes() == struct.pack(">qiqi", 1000, 5, 2000, 30)


def test_live_index_is_preallocated_and_its_zero_tail_is_not_read(tmp_path: Path) -> None:
    index = offset_index(tmp_path)
    index.append(10, 5000)
    assert (tmp_path / "0.index").stat().st_size == 65536
    again = offset_index(tmp_path)
    assert again.entries == 1
    assert again.last_offset == 10
    index.close()
    assert (tmp_path / "0.index").stat().st_size == 8


def resident_bytes(path: Path, size: int) -> int:
    """Return the bytes of a file that are in the page cache (``mincore``)."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        first = ctypes.c_char.from_buffer(mapped)
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p(ctypes.addressof(first))
        failed = libc.mincore(address, ctypes.c_size_t(size), pages)
        del first
        assert not failed, os.strerror(ctypes.get_errno())
        return sum(page & 1 for page in pages) * mmap.PAGESIZE


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what is in the page cache")
def test_first_index_entry_caches_only_its_page(tmp_path: Path) -> None:
    """Read-ahead would cache up to 10 MiB of zeros for each partition in use."""
    size = 10 << 20
    index = OffsetIndex(FS, str(tmp_path / "0.index"), 0, size)
    index.append(10, 5000)
    assert resident_bytes(tmp_path / "0.index", size) == mmap.PAGESIZE
    index.append(20, 9000)
    index.lookup(15)
    assert resident_bytes(tmp_path / "0.index", size) == mmap.PAGESIZE
    index.close()


def test_zero_tail_of_a_time_index_is_not_read(tmp_path: Path) -> None:
    index = time_index(tmp_path)
    index.maybe_append(7, 3)
    again = time_index(tmp_path)
    assert (again.entries, again.last_timestamp, again.last_offset) == (1, 7, 3)


def test_empty_index_has_no_file_before_it_is_used(tmp_path: Path) -> None:
    offset_index(tmp_path)
    assert not list(tmp_path.iterdir())


def test_reopened_index_accepts_more_entries(tmp_path: Path) -> None:
    index = offset_index(tmp_path)
    index.append(10, 5000)
    index.close()
    again = offset_index(tmp_path)
    again.append(20, 10_000)
    again.close()
    assert (tmp_path / "0.index").read_bytes() == struct.pack(">iiii", 10, 5000, 20, 10_000)


@given(
    gaps=st.lists(st.integers(1, 50), max_size=3000),
    targets=st.lists(st.integers(0, 80_000), min_size=1, max_size=20),
)
def test_lookup_equals_linear_search(
    tmp_path_factory: pytest.TempPathFactory, gaps: list[int], targets: list[int]
) -> None:
    index = offset_index(tmp_path_factory.mktemp("index"), base=1000)
    entries, offset, position = [(1000, 0)], 1000, 0
    for gap in gaps:
        offset, position = offset + gap, position + 4097
        index.append(offset, position)
        entries.append((offset, position))
    for target in targets:
        expected = max(entry for entry in entries if entry[0] <= 1000 + target)
        assert index.lookup(1000 + target) == expected
        by_position = max(entry for entry in entries if entry[1] <= target * 100)
        assert index.lookup_position(target * 100) == by_position
    index.abandon()


@given(
    steps=st.lists(st.tuples(st.integers(-5, 20), st.integers(1, 9)), max_size=800),
    targets=st.lists(st.integers(0, 5000), min_size=1, max_size=20),
)
def test_time_lookup_equals_linear_search(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int]], targets: list[int]
) -> None:
    index = time_index(tmp_path_factory.mktemp("index"), base=50)
    entries, timestamp, offset = [(-1, 50)], 0, 50
    for by, gap in steps:
        timestamp, offset = max(timestamp + by, 0), offset + gap
        if timestamp > entries[-1][0]:
            entries.append((timestamp, offset))
        index.maybe_append(timestamp, offset)
    for target in targets:
        assert index.lookup(target) == max(entry for entry in entries if entry[0] <= target)
    index.abandon()


def test_truncation_removes_entries_at_the_offset_and_above(tmp_path: Path) -> None:
    index, times = offset_index(tmp_path), time_index(tmp_path)
    for at in range(1, 6):
        index.append(at * 10, at * 5000)
        times.maybe_append(at * 1000, at * 10)
    index.truncate_to(30)
    times.truncate_to(30)
    assert (index.entries, index.last_offset, index.last_position) == (2, 20, 10_000)
    assert (times.entries, times.last_timestamp, times.last_offset) == (2, 2000, 20)
    index.append(25, 12_000)
    assert index.lookup(29) == (25, 12_000)


@pytest.mark.parametrize("offset", [9, 10, -1, 1 << 31])
def test_offset_out_of_order_or_range_is_refused(tmp_path: Path, offset: int) -> None:
    index = offset_index(tmp_path)
    index.append(10, 5000)
    with pytest.raises(CorruptIndexError):
        index.append(offset, 9000)


def test_index_is_full_at_its_size_limit(tmp_path: Path) -> None:
    index, times = offset_index(tmp_path, max_bytes=30), time_index(tmp_path, max_bytes=30)
    for at in range(1, 3):
        assert not index.is_full
        index.append(at, at * 5000)
    assert not index.is_full  # 30 bytes hold three entries of 8
    index.append(3, 15_000)
    assert index.is_full
    index.append(4, 20_000)
    assert index.entries == 3
    # One entry of the time index is reserved for the roll.
    assert not times.is_full
    times.maybe_append(1, 1)
    assert times.is_full
    times.maybe_append(2, 2)
    assert times.entries == 2


ABORTED = [AbortedTxn(7, 0, 10, 11), AbortedTxn(8, 5, 20, 12), AbortedTxn(9, 12, 30, 31)]


def test_transaction_index_file_has_kafkas_format(tmp_path: Path) -> None:
    index = TransactionIndex(FS, str(tmp_path / "0.txnindex"), exists=False)
    assert not (tmp_path / "0.txnindex").exists()
    for entry in ABORTED:
        index.append(entry)
    expected = b"".join(struct.pack(">hqqqq", 0, *entry) for entry in ABORTED)
    assert (tmp_path / "0.txnindex").read_bytes() == expected
    assert len(expected) == 3 * 34
    again = TransactionIndex(FS, str(tmp_path / "0.txnindex"), exists=True)
    assert again.entries == ABORTED


def test_transaction_index_refuses_unordered_and_damaged_entries(tmp_path: Path) -> None:
    path = tmp_path / "0.txnindex"
    index = TransactionIndex(FS, str(path), exists=False)
    index.append(ABORTED[1])
    with pytest.raises(CorruptIndexError):
        index.append(ABORTED[0])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptIndexError):
        TransactionIndex(FS, str(path), exists=True).check(0)
    path.write_bytes(struct.pack(">hqqqq", 1, *ABORTED[1]))
    with pytest.raises(CorruptIndexError):
        TransactionIndex(FS, str(path), exists=True).check(0)
    path.write_bytes(struct.pack(">hqqqq", 0, *ABORTED[1]))
    TransactionIndex(FS, str(path), exists=True).check(20)
    with pytest.raises(CorruptIndexError):
        TransactionIndex(FS, str(path), exists=True).check(21)


def test_truncated_transaction_index_keeps_entries_below_the_offset(tmp_path: Path) -> None:
    path = tmp_path / "0.txnindex"
    index = TransactionIndex(FS, str(path), exists=False)
    for entry in ABORTED:
        index.append(entry)
    index.truncate_to(20)
    assert index.entries == ABORTED[:1]
    assert path.stat().st_size == 34
    index.rebuild([])
    assert not path.exists()


def test_collect_stops_once_no_transaction_begins_below_the_bound(tmp_path: Path) -> None:
    index = TransactionIndex(FS, str(tmp_path / "0.txnindex"), exists=False)
    for entry in ABORTED:
        index.append(entry)
    found: list[tuple[int, int]] = []
    assert index.collect(0, 11, found)
    assert found == [(7, 0)]
    found.clear()
    # The second transaction began below the bound, although its marker is above the bound.
    assert index.collect(0, 12, found)
    assert found == [(7, 0), (8, 5)]
    found.clear()
    assert not index.collect(21, 100, found)
    assert found == [(9, 12)]


def test_mapped_indexes_stay_within_their_limit(tmp_path: Path) -> None:
    mapped_indexes = MappedIndexes(3)
    indexes = []
    for number in range(5):
        path = f"{tmp_path}/{number}.index"
        index = OffsetIndex(OsFileSystem(), path, 0, 4096, mapped_indexes)
        for offset in range(1, 10):
            index.append(offset * 10, offset * 100)
        assert len(mapped_indexes) == 0, "what is written to is not counted"
        index.close()
        indexes.append(index)
    for _ in range(2):
        for index in indexes:
            assert index.lookup(55) == (50, 500)
            assert index.lookup_position(820) == (80, 800)
            assert len(mapped_indexes) <= 3
    for index in indexes:
        index.append(100, 1000)
    assert len(mapped_indexes) == 0
    for index in indexes:
        assert index.lookup(1000) == (100, 1000)
        index.close()
