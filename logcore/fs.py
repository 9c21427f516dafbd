"""The one door of the log to the file system, so that a test or a simulator can stand in it.

Files are named by ``str`` paths while closed and by plain ``int`` handles while open. Every step
that must survive a crash (``write``, ``truncate``, ``sync``, ``rename``, ``remove``,
``make_directory``, ``sync_directory``) is one method call here: a wrapper that stops at the n-th
call sees every state that a kill can leave behind.

Fault model: after ``kill -9`` everything written is still there (the page cache outlives the
process); after power loss only what was synced is, and a file's name only once its directory was.
All methods raise OSError; whoever owns a log turns that into ``StorageError``.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import resource
import shutil
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol
from weakref import WeakSet

ReadableBuffer = bytes | bytearray | memoryview

TEMPORARY_SUFFIX: Final = ".tmp"

_BLANK_BYTES: Final = 1 << 16

NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What a full disk says, a full quota, and a file that may not grow."""

NO_HANDLES: Final = frozenset({errno.EMFILE, errno.ENFILE})
"""What opening a file says at the limit of the process or of the system. Nothing has been done."""

RESERVED_HANDLES: Final = 256
"""File descriptors that the logs of a process leave to its connections and to steps that hold one
for a moment, and that the connections leave to the logs; a quarter of the process's limit
(``RLIMIT_NOFILE``) if that is less. Neither can take all, and so keep the other from working."""


def handle_limit() -> tuple[int, int]:
    """How many descriptors this process may hold, and how many of those each side leaves free."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        limit = sys.maxsize
    return limit, min(RESERVED_HANDLES, limit // 4)


class FileMap(Protocol):
    """A file's bytes in memory; what is stored here reaches the file without a system call."""

    def __getitem__(self, key: slice, /) -> bytes:
        """Copy out a range."""

    def __setitem__(self, key: slice, value: bytes, /) -> None:
        """Store a range of the same length."""

    def flush(self) -> None:
        """Make what was stored survive power loss."""

    def close(self) -> None:
        """End the mapping; the file keeps what was stored."""


class FileSystem(Protocol):
    """What a log asks of the operating system."""

    def open(self, path: str, *, create: bool = False) -> int:
        """Open for reading and writing; FileNotFoundError unless ``create``."""

    def open_for_reading(self, path: str) -> int:
        """Open a file that must not change, whoever owns it; FileNotFoundError."""

    def close(self, handle: int) -> None:
        """Give the handle back."""

    def open_for_good(self, path: str, *, create: bool = False) -> int:
        """As ``open``, for a handle that is kept; OSError (``EMFILE``) where too few are left.

        Nothing has been done then. ``map`` keeps one as well, and is refused likewise.
        """

    def size(self, handle: int) -> int:
        """Length of the file in bytes."""

    def read(self, handle: int, count: int, position: int) -> bytes:
        """Read up to ``count`` bytes at ``position``; fewer only at the end of the file."""

    def send(self, handle: int, count: int, position: int, target: int) -> int:
        """Have the kernel send up to ``count`` bytes to a socket, ``target``; how many it took.

        It takes none at the end of the file. BlockingIOError where the socket is full; any other
        OSError may be that of the file, or of the socket, or say that there is no such call.
        """

    def write(self, handle: int, buffers: Sequence[ReadableBuffer], position: int) -> int:
        """Write ``buffers`` at ``position`` in one system call; return the bytes written."""

    def truncate(self, handle: int, size: int) -> None:
        """Make the file ``size`` bytes long; a longer file reads as zeros at its end."""

    def allocate(self, handle: int, position: int, count: int) -> None:
        """Reserve disk blocks, so that a later store through a map can't fail for lack of space."""

    def data_from(self, handle: int, position: int) -> int:
        """Where the file may hold anything but zeros from ``position`` on; its size if nowhere."""

    def sync(self, handle: int) -> None:
        """Return once the file's bytes survive power loss."""

    def map(self, handle: int, size: int) -> FileMap:
        """Map the first ``size`` bytes for access here and there; it outlives the handle."""

    def rename(self, source: str, target: str) -> None:
        """Rename atomically, over ``target`` if it exists."""

    def remove(self, path: str) -> None:
        """Remove a file; one that is not there is fine."""

    def remove_tree(self, path: str) -> None:
        """Remove a directory and all in it; one that is not there is fine."""

    def make_directory(self, path: str) -> None:
        """Create a directory and its parents; one that is there is fine."""

    def make_private(self, path: str) -> None:
        """Let nobody but the owner into a directory."""

    def sync_directory(self, path: str) -> None:
        """Return once the names in the directory survive power loss."""

    def list_directory(self, path: str) -> list[str] | None:
        """Names in a directory, in no order; None if it does not exist."""

    def is_directory(self, path: str) -> bool:
        """Whether ``path`` names a directory."""

    def read_file(self, path: str) -> bytes | None:
        """Read a whole file; None if it does not exist."""

    def modified_ms(self, path: str) -> int:
        """When the file was last written, milliseconds since the epoch."""

    def lock(self, path: str) -> int:
        """Take the advisory lock on a file, created if need be; BlockingIOError if it is held.

        The lock ends with ``close`` of the returned handle, or with the process. Apache Kafka's own
        lock on the same file holds it as well, and the other way round.
        """


# Of the whole process, for its limit is: several brokers fit in one. Set operations are atomic.
_handles: set[int] = set()
_maps: WeakSet[_Map] = WeakSet()


class _Map(mmap.mmap):
    """A map whose descriptor is counted: Python keeps one of its own for each."""

    def close(self) -> None:
        _maps.discard(self)
        super().close()


def held_handles() -> int:
    """How many descriptors the logs of this process keep: one a segment, one a map of an index."""
    return len(_handles) + len(_maps)


def _refuse_at_limit(path: str | None = None) -> None:
    limit, reserve = handle_limit()
    held = held_handles()
    if held >= limit - reserve:
        why = f"the logs keep {held} of {limit}, {reserve} are for connections"
        raise OSError(errno.EMFILE, f"Too many open files: {why}", path)


class OsFileSystem:
    """The operating system's own."""

    def open(self, path: str, *, create: bool = False) -> int:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o644)

    def open_for_good(self, path: str, *, create: bool = False) -> int:
        _refuse_at_limit(path)
        handle = self.open(path, create=create)
        _handles.add(handle)
        return handle

    def open_for_reading(self, path: str) -> int:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def close(self, handle: int) -> None:
        # Before the close, behind which the number may be another thread's.
        _handles.discard(handle)
        os.close(handle)

    def size(self, handle: int) -> int:
        return os.fstat(handle).st_size

    def read(self, handle: int, count: int, position: int) -> bytes:
        data = os.pread(handle, count, position)
        if len(data) == count or not data:
            return data
        # The kernel caps one read at 2 GiB and may be interrupted; the end of the file reads empty.
        parts = [data]
        done = len(data)
        while done < count and (data := os.pread(handle, count - done, position + done)):
            parts.append(data)
            done += len(data)
        return b"".join(parts)

    def send(self, handle: int, count: int, position: int, target: int) -> int:
        return os.sendfile(target, handle, position, count)

    def write(self, handle: int, buffers: Sequence[ReadableBuffer], position: int) -> int:
        return os.pwritev(handle, buffers, position)

    def truncate(self, handle: int, size: int) -> None:
        os.ftruncate(handle, size)

    def allocate(self, handle: int, position: int, count: int) -> None:
        os.posix_fallocate(handle, position, count)

    def data_from(self, handle: int, position: int) -> int:
        try:
            return os.lseek(handle, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return os.fstat(handle).st_size
            return position

    def sync(self, handle: int) -> None:
        os.fdatasync(handle)

    def map(self, handle: int, size: int) -> FileMap:
        _refuse_at_limit()
        try:
            mapped = _Map(handle, size)
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            # The process has as many maps (``vm.max_map_count``), or as much memory, as it may.
            raise OSError(errno.ENFILE, "No further file can be mapped") from error
        _maps.add(mapped)
        # Else the first touch of a page brings in all around it that the device's read-ahead says,
        # megabytes of zeros for an index that was just stretched, while the event loop waits.
        mapped.madvise(mmap.MADV_RANDOM)
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
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

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
            _lock_handle(handle)
        except OSError:
            os.close(handle)
            raise
        return handle


def _lock_handle(handle: int) -> None:
    """Lock a file so that Java's ``FileChannel.tryLock``, a POSIX record lock, meets it.

    A record lock of our own would be lost as soon as this process closes *any* descriptor of the
    file, that of a second attempt for instance. Linux has one that belongs to the open file, is in
    each other's way with record locks, and with its own kind even inside one process.
    """
    if hasattr(fcntl, "F_OFD_SETLK"):
        # struct flock: type, whence, start, length (0 is all), process id (must be 0).
        everything = struct.pack("@hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        fcntl.fcntl(handle, fcntl.F_OFD_SETLK, everything)
    else:
        # The first tells two of us apart even in one process; Java knows the second alone.
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def opened(fs: FileSystem, handle: int) -> Iterator[int]:
    """Close the file behind ``handle`` in the end."""
    try:
        yield handle
    finally:
        fs.close(handle)


def is_blank(fs: FileSystem, handle: int, position: int) -> bool:
    """Whether a file holds nothing but zeros from ``position`` on. Holes are not read."""
    end = fs.size(handle)
    while (position := fs.data_from(handle, position)) < end:
        data = fs.read(handle, _BLANK_BYTES, position)
        if data.strip(b"\0"):
            return False
        position += len(data)
    return True


def sync_handle(fs: FileSystem, handle: int, path: str) -> None:
    """Force an open file to disk. The error names ``path``, and never says that there is no room.

    For then the bytes are lost, as after any sync that fails: there is nothing to try again.
    """
    try:
        fs.sync(handle)
    except OSError as error:
        number = errno.EIO if error.errno in NO_ROOM | NO_HANDLES else error.errno
        raise OSError(number, error.strerror, path) from error


def sync_path(fs: FileSystem, path: str) -> None:
    """Force the file at ``path`` to disk; FileNotFoundError if there is none."""
    with opened(fs, fs.open(path)) as handle:
        sync_handle(fs, handle, path)


def write_file(fs: FileSystem, path: str, data: bytes, *, sync: bool) -> None:
    """Write ``data`` as the whole of the file at ``path``, in place and not atomically.

    For files that carry a checksum of their own.
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
    """Put ``data`` in the file ``name``: a kill or power loss leaves the old content or the new.

    Without ``sync`` that holds for a kill alone.
    """
    path = f"{directory}/{name}"
    temporary = path + TEMPORARY_SUFFIX
    write_file(fs, temporary, data, sync=sync)
    fs.rename(temporary, path)
    if sync:
        fs.sync_directory(directory)


def fresh_memory(size: int) -> memoryview:
    """Return ``size`` bytes that the system gives out page by page, as they are written."""
    return memoryview(mmap.mmap(-1, size))
