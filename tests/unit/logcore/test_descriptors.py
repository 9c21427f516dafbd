"""At the limit of open files, operations are refused without other damage."""

from __future__ import annotations

import errno
import gc
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from fencepost.logcore.errors import NoSpaceError, StorageError
from fencepost.logcore.fs import OsFileSystem, handle_limit, held_handles
from fencepost.logcore.index import ALLOCATION_BYTES
from fencepost.logcore.partition import Partition
from fencepost.logcore.reading import Isolation
from tests.support.descriptors import free_descriptors
from tests.support.faults import FaultyDisk
from tests.support.partitions import fetch_bytes
from tests.unit.logcore.partition_driver import (
    T0,
    append,
    client_batch,
    config,
    marker,
    open_partition,
    state_of,
)

ALL = 0, 1 << 30, Isolation.READ_UNCOMMITTED


def test_partition_opens_at_the_descriptor_limit_and_is_refused_past_it(tmp_path: Path) -> None:
    with free_descriptors(2):
        # A partition keeps a descriptor for its log, and briefly uses another descriptor for small
        # files.
        first = open_partition(tmp_path, name="first")
        append(first)
        second = open_partition(tmp_path, name="second")
        with pytest.raises(StorageError, match=r"third-0 can't be opened.*Too many open files"):
            open_partition(tmp_path, name="third")
        assert first.offline is None
        assert fetch_bytes(first, *ALL).records
        append(first)
        second.close()
        third = open_partition(tmp_path, name="third")
        with pytest.raises(NoSpaceError, match="Too many open files"):
            append(third)
    append(third)
    third.close()
    first.close()


def test_logs_at_their_descriptor_limit_leave_the_reserve_for_connections(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()  # otherwise leaked files of other tests might be closed at any moment
    # A quarter is the reserve, in which all descriptors of other tests must fit. The lowest free
    # descriptor is not their number: there may be open ones above it.
    highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (4 * (highest + 8), hard))
    small = config(segment_bytes=200)
    opened: list[Partition] = []
    try:
        limit, reserve = handle_limit()
        while held_handles() < limit - reserve:
            opened.append(open_partition(tmp_path, config=small, name=f"t{len(opened)}"))
        refusal = f"{reserve} are for connections"
        with pytest.raises(StorageError, match=rf"can't be opened.*{refusal}"):
            open_partition(tmp_path, config=small, name="past-it")
        first, second = opened[:2]
        while first.log_end_offset < 2:
            append(first)
        with pytest.raises(NoSpaceError, match=refusal):
            append(first)
        assert first.offline is None
        # Briefly opened files may use the reserve.
        first.flushes.run(T0)
        append(second)
        assert fetch_bytes(second, *ALL).records
        opened.pop().close()
        append(first)
        assert held_handles() == limit - reserve
        with pytest.raises(StorageError, match=refusal):
            open_partition(tmp_path, config=small, name="past-it")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for partition in opened:
            partition.close()


def test_map_counts_as_a_descriptor_until_it_is_closed_or_collected(tmp_path: Path) -> None:
    fs, held = OsFileSystem(), held_handles()
    handle = fs.open_long_lived(str(tmp_path / "file"), create=True)
    fs.truncate(handle, 4096)
    closed, dropped = fs.map(handle, 4096), fs.map(handle, 4096)
    assert held_handles() == held + 3
    closed.close()
    closed.close()
    assert held_handles() == held + 2
    del dropped
    assert held_handles() == held + 1
    fs.close(handle)
    assert held_handles() == held


def test_append_without_descriptors_is_refused_and_the_next_is_accepted(tmp_path: Path) -> None:
    partition = open_partition(tmp_path, config=config(index_interval_bytes=1))
    entries = ALLOCATION_BYTES // 12 * 2
    appended = 0
    append(partition)
    # The indexes are not mapped yet, and appending the second batch needs them.
    with free_descriptors(0), pytest.raises(NoSpaceError, match="Too many open files"):
        append(partition)
    assert partition.offline is None
    for _ in range(entries):
        append(partition)
    while appended < entries:
        with free_descriptors(0, collects=False):
            try:
                append(partition)
                appended += 1
                continue
            except NoSpaceError:
                pass
        append(partition)
        appended += 1
    assert partition.offline is None
    end = partition.log_end_offset
    assert end == 1 + 2 * entries
    read = fetch_bytes(partition, *ALL).records
    assert len(read) == end * len(client_batch(1, timestamp_ms=T0))
    partition.close()
    assert open_partition(tmp_path, clean=False).log_end_offset == end


def test_append_and_fetch_are_refused_if_no_file_can_be_mapped(tmp_path: Path) -> None:
    large = config(index_interval_bytes=1, segment_index_bytes=1 << 30)
    partition = open_partition(tmp_path, config=large)
    append(partition, 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 29), hard))
    try:
        for refused in (
            lambda: append(partition),
            # The log remembers where the last appended batch begins, but not the batch's records.
            lambda: fetch_bytes(partition, 1, *ALL[1:]),
        ):
            with pytest.raises(NoSpaceError, match="No further file can be mapped"):
                refused()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert fetch_bytes(partition, *ALL).records
    append(partition)
    assert (partition.offline, partition.log_end_offset) == (None, 3)
    partition.close()


# --- the limit is reached at each operation in turn ---


class CrampedDisk(FaultyDisk):
    """A disk that refuses to open files, from its n-th operation until :meth:`relieve`.

    Opens, maps and writes count as operations. If the n-th operation is a write, it fails with
    ENOSPC.
    """

    def __init__(self, moment: int) -> None:
        super().__init__()
        self._left = moment
        self._is_cramped = False
        self.has_refused = False
        self.before = self._count

    def relieve(self) -> None:
        """End the shortage."""
        self._is_cramped, self._left = False, 0

    def _count(self, kind: str, _path: str) -> None:
        if kind not in {"open", "map", "write"}:
            return
        self._left -= 1
        if self._left == 0:
            self.has_refused = self._is_cramped = True
            if kind == "write":
                raise OSError(errno.ENOSPC, "No space left on device")
        if self._is_cramped and kind != "write":
            raise OSError(errno.EMFILE, "Too many open files")


def crowded_life(root: Path, disk: CrampedDisk) -> Partition:
    """Cause rolls, aborted transactions and index growth, and retry refused operations."""
    small = config(segment_bytes=900, index_interval_bytes=1)
    partition = open_partition(root, config=small, fs=disk)

    def insist(call: Callable[[], object]) -> None:
        try:
            call()
        except NoSpaceError:
            disk.relieve()
            call()

    for turn in range(9):
        insist(lambda at=turn: append(partition, producer_id=1, sequence=at))
        insist(lambda at=turn: append(partition, producer_id=2, sequence=at, transactional=True))
        insist(lambda at=turn: marker(partition, 2, commit=at % 3 == 0))
        insist(lambda: fetch_bytes(partition, *ALL))
    return partition


def files_of(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (root / "orders-0").iterdir()}


def test_descriptor_shortage_at_any_operation_loses_nothing(tmp_path: Path) -> None:
    undisturbed = crowded_life(tmp_path / "whole", CrampedDisk(0))
    state = state_of(undisturbed)
    undisturbed.close()
    files = files_of(tmp_path / "whole")
    assert sum(name.endswith(".txnindex") for name in files) > 2
    moment, has_refused = 2, True  # opening the partition itself is refused
    while has_refused:
        root, disk = tmp_path / str(moment), CrampedDisk(moment)
        partition = crowded_life(root, disk)
        has_refused = disk.has_refused
        disk.relieve()
        assert partition.offline is None, moment
        assert state_of(partition) == state, moment
        partition.close()
        assert files_of(root) == files, moment
        moment += 1
    assert moment > 60
