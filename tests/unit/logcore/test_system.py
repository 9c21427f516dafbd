"""The portable replacements of Linux's system calls have the same results as these calls."""

from __future__ import annotations

import errno
import os
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fencepost.logcore import system
from fencepost.logcore.fs import OsFileSystem
from fencepost.logcore.index import OffsetIndex

FS = OsFileSystem()
BLOCK_BYTES = 512
"""The unit of ``st_blocks``, whatever the file system's blocks are."""


@pytest.fixture
def handle(tmp_path: Path) -> Iterator[int]:
    opened = FS.open(str(tmp_path / "file"), create=True)
    yield opened
    FS.close(opened)


@pytest.mark.parametrize("allocate", [system.allocate, system._allocate])
@pytest.mark.parametrize("position", [0, 1, 4095, 4096, 10_000])
@pytest.mark.parametrize("count", [1, 4095, 4096, 4097, 30_000])
def test_allocated_bytes_keep_their_content_and_have_blocks(
    handle: int, allocate: Callable[[int, int, int], None], position: int, count: int
) -> None:
    content = random.Random(position + count).randbytes(6000)
    FS.write(handle, (content,), 0)
    allocate(handle, position, count)

    end = position + count
    told = os.fstat(handle)
    assert told.st_size == max(end, len(content))
    assert FS.read(handle, told.st_size, 0) == content.ljust(end, b"\0")
    # A file system may report allocated bytes without data as a hole, as tmpfs does.
    assert told.st_blocks * BLOCK_BYTES >= count


def test_bytes_are_read_and_written_at_their_positions(handle: int) -> None:
    assert system._write_at(handle, (b"abc", bytearray(b"def"), memoryview(b"ghi")), 5) == 9
    assert system._read_at(handle, 100, 0) == b"\0\0\0\0\0abcdefghi"
    assert system._read_at(handle, 3, 8) == b"def"
    assert system._read_at(handle, 3, 14) == b""


def test_threads_without_pread_do_not_read_at_the_position_of_each_other(handle: int) -> None:
    FS.write(handle, (b"".join(struct.pack(">I", number) for number in range(1000)),), 0)
    wrong: list[int] = []

    def read(seed: int) -> None:
        wrong.extend(
            number
            for number in random.Random(seed).choices(range(1000), k=2000)
            if system._read_at(handle, 4, number * 4) != struct.pack(">I", number)
        )

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_index_without_mmap_has_the_same_bytes_as_with_mmap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for is_mapped in (True, False):
        monkeypatch.setattr(system, "MAPS_FILES", is_mapped)
        index = OffsetIndex(FS, str(tmp_path / f"{is_mapped}.index"), 100, 8 * 50)
        for offset in range(101, 141):
            index.append(offset, offset * 7)
        assert index.lookup(120) == (120, 840)
        index.truncate_to(131)
        index.close()
        again = OffsetIndex(FS, str(tmp_path / f"{is_mapped}.index"), 100, 8 * 50)
        assert (again.entries, again.lookup(1000)) == (30, (130, 910))
        again.close()
    contents = {path.read_bytes() for path in tmp_path.iterdir()}
    assert len(contents) == 1
    assert len(contents.pop()) == 30 * 8


def test_file_bytes_outlive_their_handle(tmp_path: Path) -> None:
    opened = FS.open(str(tmp_path / "file"), create=True)
    FS.write(opened, (b"0123456789",), 0)
    content = system.FileBytes(opened)
    FS.close(opened)
    content[2:5] = b"abc"
    content.flush()
    assert (content[0:10], (tmp_path / "file").read_bytes()) == (b"01abc56789", b"01abc56789")
    content.close()
    content.close()


def test_send_file_of_0_bytes_sends_nothing(handle: int) -> None:
    """On macOS, ``sendfile`` with a count of 0 sends everything up to the end of the file."""
    FS.write(handle, (b"records",), 0)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert system._send_file(ours.fileno(), handle, 0, 0) == 0
        assert system._send_file(ours.fileno(), handle, 3, 4) == 4
        ours.close()
        assert theirs.recv(100) == b"ords"


def test_full_sync_falls_back_to_fsync_where_the_disk_refuses_it(
    handle: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def refuse(descriptor: int, command: int) -> None:
        asked.append(command)
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(system.fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(system.fcntl, "fcntl", refuse)
    monkeypatch.setattr(os, "fsync", asked.append)
    system._full_sync(handle)
    assert asked == [51, handle]


def test_unlimited_descriptor_limit_is_raised_to_the_macos_maximum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resource = system.resource
    limits = [256]

    def set_limit(which: int, wanted: tuple[int, int]) -> None:
        if wanted[0] == resource.RLIM_INFINITY:
            raise ValueError("current limit exceeds maximum limit")
        limits.append(wanted[0])

    monkeypatch.setattr(resource, "getrlimit", lambda _: (limits[-1], resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    system.raise_descriptor_limit()
    assert system.descriptor_limit() == system.MACOS_OPEN_MAX


def test_time_of_day_without_a_coarse_clock_is_close_to_that_of_linux() -> None:
    before = system.time_of_day_ns()
    told = system._real_time_of_day_ns()
    assert before - 10**9 < told < system.time_of_day_ns() + 10**9


def test_linux_uses_the_operating_system_calls_directly() -> None:
    """On its hot path the log calls the operating system directly."""
    assert (system.read_at, system.write_at) == (os.pread, os.pwritev)
    assert (system.send_file, system.sync_data) == (os.sendfile, os.fdatasync)
    assert system.allocate == os.posix_fallocate
    assert system.MAPS_FILES
    with system.private_file("secret") as path:
        assert path.startswith("/proc/self/fd/")
        assert Path(path).read_text() == "secret"
