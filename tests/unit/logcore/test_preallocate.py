"""``preallocate``: a new segment's file has its full size until the segment is sealed."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from fencepost.logcore.config import LogConfig
from fencepost.logcore.errors import NoSpaceError
from fencepost.logcore.fs import OsFileSystem, is_blank
from fencepost.logcore.partition import Partition
from tests.support.partitions import append_batch
from tests.unit.logcore.partition_driver import T0, client_batch, open_partition

SIZE = 1 << 20
CONFIG = LogConfig(segment_bytes=SIZE, preallocate=True)
FS = OsFileSystem()


def put(partition: Partition, size: int = 1_000) -> None:
    append_batch(partition, client_batch(size=size), now_ms=T0)


def logs(root: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted((root / "orders-0").glob("*.log"))}


def name(offset: int) -> str:
    return f"{offset:020d}.log"


def test_only_the_active_segment_has_its_full_size(tmp_path: Path) -> None:
    partition = open_partition(tmp_path, config=CONFIG)
    assert logs(tmp_path) == {name(0): SIZE}
    put(partition, SIZE // 2)
    first = partition.log.size_bytes
    assert logs(tmp_path) == {name(0): SIZE}
    assert SIZE // 2 < first < SIZE // 2 + 200
    put(partition, SIZE // 2)
    assert logs(tmp_path) == {name(0): first, name(1): SIZE}
    assert partition.log.size_bytes == 2 * first
    partition.close()
    assert logs(tmp_path) == {name(0): first, name(1): first}
    # An existing file keeps its size.
    open_partition(tmp_path, config=CONFIG)
    assert logs(tmp_path) == {name(0): first, name(1): first}


def test_segment_file_grows_without_preallocation(tmp_path: Path) -> None:
    partition = open_partition(tmp_path, config=replace(CONFIG, preallocate=False))
    assert logs(tmp_path) == {name(0): 0}
    put(partition)
    assert logs(tmp_path) == {name(0): partition.log.size_bytes}
    partition.log.config = CONFIG
    put(partition, SIZE - 1_000)  # the next segment is preallocated
    assert logs(tmp_path)[name(1)] == SIZE


@pytest.mark.parametrize("batches", [0, 1, 40])
def test_recovery_trims_preallocated_zeros_without_a_report(tmp_path: Path, batches: int) -> None:
    killed = open_partition(tmp_path, config=CONFIG)
    for _ in range(batches):
        put(killed)
    size = killed.log.size_bytes
    again = open_partition(tmp_path, config=CONFIG, clean=False)
    assert again.log_end_offset == batches
    assert logs(tmp_path) == {name(0): size}
    assert again.recovery is not None
    assert (again.recovery.reason, again.recovery.truncated_bytes) == ("", 0)
    put(again)
    assert [header.base_offset for header, _ in again.reader.read_all()] == list(range(batches + 1))


def test_torn_batch_before_preallocated_zeros_is_truncated_and_reported(tmp_path: Path) -> None:
    killed = open_partition(tmp_path, config=CONFIG)
    put(killed)
    end = killed.log.size_bytes
    with (tmp_path / "orders-0" / name(0)).open("r+b") as file:
        file.seek(end)
        file.write(client_batch(size=500)[:300])
    again = open_partition(tmp_path, config=CONFIG, clean=False)
    assert again.log_end_offset == 1
    assert again.recovery is not None
    assert again.recovery.reason
    assert not again.recovery.valid_data_removed
    assert logs(tmp_path) == {name(0): end}


def test_zeros_without_preallocation_are_truncated_and_reported(tmp_path: Path) -> None:
    killed = open_partition(tmp_path, config=CONFIG)
    put(killed)
    size = killed.log.size_bytes
    plain = replace(CONFIG, preallocate=False)
    again = open_partition(tmp_path, config=plain, clean=False)
    assert logs(tmp_path) == {name(0): size}
    assert again.recovery is not None
    assert again.recovery.truncated_bytes == SIZE - size


def test_zeros_after_a_clean_shutdown_are_trimmed_at_the_next_start(tmp_path: Path) -> None:
    """After a clean shutdown, only the end of the log is checked, where the file is trimmed."""
    partition = open_partition(tmp_path, config=CONFIG)
    put(partition)
    partition.close()
    size = logs(tmp_path)[name(0)]
    with (tmp_path / "orders-0" / name(0)).open("r+b") as file:
        file.truncate(SIZE)
    again = open_partition(tmp_path, config=CONFIG, clean=True)
    assert (again.log_end_offset, again.log.size_bytes) == (1, size)


def test_append_is_refused_if_the_next_segment_cannot_be_allocated(tmp_path: Path) -> None:
    class Small(OsFileSystem):
        limit = 1 << 60

        def truncate(self, handle: int, size: int) -> None:
            if size > self.limit:
                raise OSError(errno.EFBIG, "File too large")
            super().truncate(handle, size)

    fs = Small()
    small = replace(CONFIG, segment_index_bytes=4096)  # only the log exceeds the limit
    partition = open_partition(tmp_path, config=small, fs=fs)
    put(partition, SIZE // 2)
    fs.limit = SIZE - 1
    for _ in range(3):
        with pytest.raises(NoSpaceError):
            put(partition, SIZE // 2)
    fs.limit = SIZE
    put(partition, SIZE // 2)
    assert [header.base_offset for header, _ in partition.reader.read_all()] == [0, 1]


def test_is_blank_requires_zeros_up_to_the_end_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" + bytes(200_000))
    handle = FS.open(str(path))
    assert not is_blank(FS, handle, 0)
    assert is_blank(FS, handle, 1)
    FS.truncate(handle, 1 << 30)
    assert is_blank(FS, handle, 1)
    FS.write(handle, [b"y"], (1 << 30) - 1)
    assert not is_blank(FS, handle, 1)
    assert is_blank(FS, handle, 1 << 30)
    FS.close(handle)
