"""The log's only access to the file system, so that tests and simulators can replace it.

Files are named by ``str`` paths while closed and by plain ``int`` handles while open. Every step
that must survive a crash (``write``, ``truncate``, ``sync``, ``rename``, ``remove``,
``make_directory``, ``sync_directory``) is one method call: a wrapper that stops at the n-th
call sees every state that a kill can leave behind.

Fault model: after ``kill -9`` all written data survives (the page cache outlives the process);
after power loss only synced data does, and a file's name only if its directory was synced.
All methods raise OSError; the owner of a log converts that to ``StorageError``.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol
from weakref import WeakSet

from fencepost.logcore import system
from fencepost.logcore.system import ReadableBuffer

TEMPORARY_SUFFIX: Final = ".tmp"

_BLANK_BYTES: Final = 1 << 16

NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a full disk, a full quota, and a file at its size limit."""

NO_HANDLES: Final = frozenset({errno.EMFILE, errno.ENFILE})
"""The errors of an open that fails because the process, or the system, has too many open files. The
failed call has no effect."""

RESERVED_HANDLES: Final = 256
"""The number of file descriptors that the logs of a process leave free for connections and
short-lived files, and that the connections leave free for the logs. A quarter of the process's
limit (``RLIMIT_NOFILE``) applies if it is less. So the logs cannot exhaust the descriptors of the
connections, nor the connections those of the logs."""


def handle_limit() -> tuple[int, int]:
    """Return the process's limit of descriptors, and the reserve that each side leaves free."""
    limit = system.descriptor_limit()
    return limit, min(RESERVED_HANDLES, limit // 4)


class FileMap(Protocol):
    """A file's bytes in memory; a store reaches the file without a system call."""

    def __getitem__(self, key: slice, /) -> bytes:
        """Copy out a range."""

    def __setitem__(self, key: slice, value: bytes, /) -> None:
        """Store a range of the same length."""

    def flush(self) -> None:
        """Make stored bytes survive power loss."""

    def close(self) -> None:
        """End the mapping; stored bytes stay in the file."""


class FileSystem(Protocol):
    """The operating system calls that a log needs."""

    def open(self, path: str, *, create: bool = False) -> int:
        """Open for reading and writing; FileNotFoundError unless ``create``."""

    def open_for_reading(self, path: str) -> int:
        """Open a file read-only, even one of another program; may raise FileNotFoundError."""

    def close(self, handle: int) -> None:
        """Close the handle."""

    def open_long_lived(self, path: str, *, create: bool = False) -> int:
        """Open a file that stays open, like ``open``; OSError (``EMFILE``) without a free handle.

        The refusal has no effect. ``map`` keeps a descriptor too, and is refused in the same case.
        """

    def size(self, handle: int) -> int:
        """Return the length of the file in bytes."""

    def read(self, handle: int, count: int, position: int) -> bytes:
        """Read up to ``count`` bytes at ``position``; fewer only at the end of the file."""

    def send(self, handle: int, count: int, position: int, target: int) -> int:
        """Have the kernel send up to ``count`` bytes to the socket ``target``; return how many.

        The number is 0 at the end of the file. Raises BlockingIOError if the socket is full; any
        other OSError may come from the file or the socket, or mean that the call is unsupported.
        """

    def write(self, handle: int, buffers: Sequence[ReadableBuffer], position: int) -> int:
        """Write ``buffers`` at ``position`` in one system call; return the bytes written."""

    def truncate(self, handle: int, size: int) -> None:
        """Set the file's length to ``size`` bytes; an extended file reads as zeros at its end."""

    def allocate(self, handle: int, position: int, count: int) -> None:
        """Reserve disk blocks: a later store through a map must not fail for lack of space."""

    def data_from(self, handle: int, position: int) -> int:
        """Return the next position from ``position`` on that may hold data; else the file size."""

    def sync(self, handle: int) -> None:
        """Return once the file's bytes survive power loss."""

    def map(self, handle: int, size: int) -> FileMap:
        """Map the first ``size`` bytes for random access; the map outlives the handle."""

    def rename(self, source: str, target: str) -> None:
        """Rename atomically, over ``target`` if it exists."""

    def remove(self, path: str) -> None:
        """Remove a file if it exists."""

    def remove_tree(self, path: str) -> None:
        """Remove a directory and all in it, if it exists."""

    def make_directory(self, path: str) -> None:
        """Create a directory and its parents, if they do not exist."""

    def make_private(self, path: str) -> None:
        """Restrict access to a file or directory to its owner."""

    def sync_directory(self, path: str) -> None:
        """Return once the names in the directory survive power loss."""

    def list_directory(self, path: str) -> list[str] | None:
        """Return the names in a directory, in no order; None if it does not exist."""

    def is_directory(self, path: str) -> bool:
        """Return whether ``path`` names a directory."""

    def read_file(self, path: str) -> bytes | None:
        """Read a whole file; None if it does not exist."""

    def modified_ms(self, path: str) -> int:
        """Return the time of the last write to the file, in milliseconds since the epoch."""

    def lock(self, path: str) -> int:
        """Take the advisory lock on a file, created if missing; BlockingIOError if it is held.

        The lock ends with ``close`` of the returned handle, or with the process. It conflicts with
        Apache Kafka's own lock on the same file.
        """


# Process-wide, like the limit: several brokers may share a process. Set operations are atomic.
_handles: set[int] = set()
_maps: WeakSet[_Map] = WeakSet()


class _Map(mmap.mmap):
    """A map whose descriptor is counted: Python keeps a descriptor for each map."""

    def close(self) -> None:
        _maps.discard(self)
        super().close()


def held_handles() -> int:
    """Return how many descriptors the logs of this process keep: one per segment and per map."""
    return len(_handles) + len(_maps)


def _refuse_at_limit(path: str | None = None) -> None:
    limit, reserve = handle_limit()
    held = held_handles()
    if held >= limit - reserve:
        why = f"the logs keep {held} of {limit}, {reserve} are for connections"
        raise OSError(errno.EMFILE, f"Too many open files: {why}", path)


class OsFileSystem:
    """The operating system's file system."""

    def open(self, path: str, *, create: bool = False) -> int:
        return os.open(path, os.O_RDWR | system.OPEN_FLAGS | (os.O_CREAT if create else 0), 0o644)

    def open_long_lived(self, path: str, *, create: bool = False) -> int:
        _refuse_at_limit(path)
        handle = self.open(path, create=create)
        _handles.add(handle)
        return handle

    def open_for_reading(self, path: str) -> int:
        return os.open(path, os.O_RDONLY | system.OPEN_FLAGS)

    def close(self, handle: int) -> None:
        # Discard it first: after the close, another thread may get the same descriptor.
        _handles.discard(handle)
        os.close(handle)

    def size(self, handle: int) -> int:
        return os.fstat(handle).st_size

    def read(self, handle: int, count: int, position: int) -> bytes:
        data = system.read_at(handle, count, position)
        if len(data) == count or not data:
            return data
        # One read returns at most 2 GiB, and less if it is interrupted; at the end of the file it
        # returns nothing.
        parts = [data]
        done = len(data)
        while done < count and (data := system.read_at(handle, count - done, position + done)):
            parts.append(data)
            done += len(data)
        return b"".join(parts)

    def send(self, handle: int, count: int, position: int, target: int) -> int:
        return system.send_file(target, handle, position, count)

    def write(self, handle: int, buffers: Sequence[ReadableBuffer], position: int) -> int:
        return system.write_at(handle, buffers, position)

    def truncate(self, handle: int, size: int) -> None:
        os.ftruncate(handle, size)

    def allocate(self, handle: int, position: int, count: int) -> None:
        system.allocate(handle, position, count)

    def data_from(self, handle: int, position: int) -> int:
        return system.data_from(handle, position)

    def sync(self, handle: int) -> None:
        system.sync_data(handle)

    def map(self, handle: int, size: int) -> FileMap:
        _refuse_at_limit()
        if not system.MAPS_FILES:
            return system.FileBytes(handle)
        try:
            mapped = _Map(handle, size)
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            # The process has reached its limit of maps (``vm.max_map_count``) or of memory.
            raise OSError(errno.ENFILE, "No further file can be mapped") from error
        _maps.add(mapped)
        # Otherwise the first access to a page would read in the device's whole read-ahead:
        # megabytes of zeros for an index that was just extended, while the event loop waits.
        system.expect_random_access(mapped)
        return mapped

    def rename(self, source: str, target: str) -> None:
        os.replace(source, target)  # noqa: PTH105 - pathlib costs more than the call

    def remove(self, path: str) -> None:
        try:
            os.unlink(path)  # noqa: PTH108 - the same
        except FileNotFoundError:
            return

    def remove_tree(self, path: str) -> None:
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            return

    def make_directory(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)  # noqa: PTH103 - the same

    def make_private(self, path: str) -> None:
        os.chmod(path, 0o700)  # noqa: PTH101 - the same

    def sync_directory(self, path: str) -> None:
        system.sync_directory(path)

    def list_directory(self, path: str) -> list[str] | None:
        try:
            return os.listdir(path)  # noqa: PTH208 - the same
        except FileNotFoundError:
            return None

    def is_directory(self, path: str) -> bool:
        return os.path.isdir(path)  # noqa: PTH112 - the same

    def read_file(self, path: str) -> bytes | None:
        try:
            handle = self.open_for_reading(path)
        except FileNotFoundError:
            return None
        try:
            return self.read(handle, os.fstat(handle).st_size, 0)
        finally:
            os.close(handle)

    def modified_ms(self, path: str) -> int:
        return os.stat(path).st_mtime_ns // 1_000_000  # noqa: PTH116 - the same

    def lock(self, path: str) -> int:
        handle = self.open(path, create=True)
        try:
            system.lock_file(handle)
        except OSError:
            os.close(handle)
            raise
        return handle


@contextmanager
def opened(fs: FileSystem, handle: int) -> Iterator[int]:
    """Close ``handle`` on exit."""
    try:
        yield handle
    finally:
        fs.close(handle)


def is_blank(fs: FileSystem, handle: int, position: int) -> bool:
    """Return whether a file holds only zeros from ``position`` on. Holes are not read."""
    end = fs.size(handle)
    while (position := fs.data_from(handle, position)) < end:
        data = fs.read(handle, _BLANK_BYTES, position)
        if data.strip(b"\0"):
            return False
        position += len(data)
    return True


def sync_handle(fs: FileSystem, handle: int, path: str) -> None:
    """Force an open file to disk. Raises OSError with ``path``, never ENOSPC or EMFILE."""
    try:
        fs.sync(handle)
    except OSError as error:
        # Callers retry after a full disk, but a failed fsync may have lost the written pages.
        number = errno.EIO if error.errno in NO_ROOM | NO_HANDLES else error.errno
        raise OSError(number, error.strerror, path) from error


def sync_path(fs: FileSystem, path: str) -> None:
    """Force the file at ``path`` to disk; FileNotFoundError if there is none."""
    with opened(fs, fs.open(path)) as handle:
        sync_handle(fs, handle, path)


def write_file(fs: FileSystem, path: str, data: bytes, *, sync: bool) -> None:
    """Write ``data`` as the whole content of the file at ``path``, in place and not atomically.

    This is for files that carry a checksum.
    """
    with opened(fs, fs.open(path, create=True)) as handle:
        fs.truncate(handle, 0)
        if fs.write(handle, (data,), 0) != len(data):
            raise OSError(errno.ENOSPC, "short write", path)
        if sync:
            fs.sync(handle)


def replace_file(
    fs: FileSystem, directory: str, name: str, data: bytes, *, sync: bool = True
) -> None:
    """Replace a file's content. After a kill or power loss, it is the old or the new one, whole.

    Without ``sync``, power loss may leave the file empty or missing.
    """
    path = f"{directory}/{name}"
    temporary = path + TEMPORARY_SUFFIX
    write_file(fs, temporary, data, sync=sync)
    fs.rename(temporary, path)
    if sync:
        fs.sync_directory(directory)


def fresh_memory(size: int) -> memoryview:
    """Return ``size`` bytes of memory whose pages the system allocates on their first write."""
    return memoryview(mmap.mmap(-1, size))
