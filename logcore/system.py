"""The calls that differ between operating systems; no other module may distinguish systems.

At import, each name is bound to a call that this system offers. The choice depends on the presence
of the call, not on the system's name, so that tests can take calls away. On Linux, names on the hot
path are bound directly to functions of the standard library, without a wrapper. The replacements
are for macOS and, for a broker inside the process of a test, for Windows.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    import asyncio

_HAS_POSIX = True
try:
    import fcntl
    import resource
except ImportError:  # Windows
    _HAS_POSIX = False

ReadableBuffer = bytes | bytearray | memoryview

_IS_LINUX: Final = sys.platform == "linux" and hasattr(time, "CLOCK_BOOTTIME")
"""Whether this is Linux. Other systems have some calls of the same names, but with other constants
or structures."""


# --- clocks: partials, because freezegun replaces functions of `time` wherever they are found ---

if sys.platform != "win32" and hasattr(time, "clock_gettime"):
    _clocks = (
        partial(time.clock_gettime, time.CLOCK_MONOTONIC),
        partial(time.clock_gettime_ns, time.CLOCK_MONOTONIC),
        partial(time.clock_gettime_ns, time.CLOCK_REALTIME),
    )
else:
    _clocks = (partial(time.monotonic), partial(time.monotonic_ns), partial(time.time_ns))

monotonic_s: Final[Callable[[], float]] = _clocks[0]
monotonic_ns: Final[Callable[[], int]] = _clocks[1]
time_of_day_ns: Final[Callable[[], int]] = _clocks[2]

_CLOCK_REALTIME_COARSE: Final = 5  # Linux; `time` has no name for it
_EPOCH_NS: Final = time_of_day_ns() - monotonic_ns()


def _real_time_of_day_ns() -> int:
    """Return the time of day at import, before a test could freeze it, plus the time since then."""
    return _EPOCH_NS + monotonic_ns()


real_time_of_day_ns: Final[Callable[[], int]] = (
    partial(time.clock_gettime_ns, _CLOCK_REALTIME_COARSE)
    if _IS_LINUX and hasattr(time, "clock_gettime_ns")
    else _real_time_of_day_ns
)
"""The time of day, at most a few ms late, which neither freezegun nor time-machine replaces.

On systems other than Linux it does not follow corrections of the machine's clock."""


# --- files ---

OPEN_FLAGS: Final = (
    getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOINHERIT", 0)
)
"""Flags with which every file is opened: child processes do not inherit the descriptor, and no
bytes are converted."""

_seeking = threading.Lock()
"""Held between a seek and the access: systems without ``pread`` have one position per file."""


def _read_at(handle: int, count: int, position: int) -> bytes:
    with _seeking:
        os.lseek(handle, position, os.SEEK_SET)
        return os.read(handle, count)


def _write_at(handle: int, buffers: Sequence[ReadableBuffer], position: int) -> int:
    with _seeking:
        os.lseek(handle, position, os.SEEK_SET)
        return os.write(handle, b"".join(buffers))


read_at: Final[Callable[[int, int, int], bytes]] = os.pread if hasattr(os, "pread") else _read_at
"""Read up to a number of bytes of a file, at a position."""

write_at: Final[Callable[[int, Sequence[ReadableBuffer], int], int]] = (
    os.pwritev if hasattr(os, "pwritev") else _write_at
)
"""Write buffers to a file at a position, in one system call; return the bytes written."""


def _full_sync(handle: int) -> None:
    if sys.platform != "win32" and _HAS_POSIX and hasattr(fcntl, "F_FULLFSYNC"):
        # fsync of macOS leaves the bytes in the drive's cache. Network disks may refuse this call.
        with contextlib.suppress(OSError):
            fcntl.fcntl(handle, fcntl.F_FULLFSYNC)
            return
    os.fsync(handle)


sync_data: Final[Callable[[int], None]] = os.fdatasync if hasattr(os, "fdatasync") else _full_sync
"""Return once a file's bytes survive power loss."""


def sync_directory(path: str) -> None:
    """Return once the names in a directory survive power loss.

    Windows cannot open directories, and Apache Kafka does not flush them there either.
    Source: ``Utils.flushDir``.
    """
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_BLOCK_BYTES: Final = 4096
"""No file system in use has smaller disk blocks, so one write in each piece of this size reserves
all blocks."""


def _allocate(handle: int, position: int, count: int) -> None:
    """Read and rewrite the last byte of each block, as glibc does without a kernel call."""
    end = position + count
    size = os.fstat(handle).st_size
    block = position - position % _BLOCK_BYTES + _BLOCK_BYTES - 1
    for last in (*range(block, end - 1, _BLOCK_BYTES), end - 1):
        data = read_at(handle, 1, last) if last < size else b""
        write_at(handle, (data or b"\0",), last)


allocate: Final[Callable[[int, int, int], None]] = (
    os.posix_fallocate if hasattr(os, "posix_fallocate") else _allocate
)
"""Reserve disk blocks for a file's bytes from a position on, and extend the file to them."""


def _send_file(target: int, handle: int, position: int, count: int) -> int:
    if sys.platform != "win32" and hasattr(os, "sendfile"):
        # For 0 bytes, sendfile of macOS sends all up to the end of the file.
        return os.sendfile(target, handle, position, count) if count else 0
    raise OSError(errno.ENOTSUP, "sendfile is not available")


send_file: Final[Callable[[int, int, int, int], int]] = (
    os.sendfile if _IS_LINUX and hasattr(os, "sendfile") else _send_file
)
"""Have the kernel send bytes of a file to the socket ``target``; return how many.

Raise OSError if the kernel cannot: the caller then reads and sends the bytes itself."""


def data_from(handle: int, position: int) -> int:
    """Return the next position that may hold data; else the file's size. Holes are not data."""
    if not hasattr(os, "SEEK_DATA"):
        return position
    try:
        return os.lseek(handle, position, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return os.fstat(handle).st_size
        return position


def lock_file(handle: int) -> None:
    """Lock a file until it is closed; BlockingIOError if another handle has locked it.

    The lock conflicts with Java's ``FileChannel.tryLock``, a record lock. A POSIX record lock would
    be lost as soon as this process closes *any* descriptor of the file, for instance one of a
    second attempt. Linux's open file description locks survive that; they conflict with record
    locks, and with each other even inside one process. The same holds for the locks of ``flock`` on
    macOS, which also conflict with a record lock of the same process. On Windows, a lock of the
    first byte conflicts with a lock of the whole file.
    """
    if sys.platform == "linux" and _HAS_POSIX and hasattr(fcntl, "F_OFD_SETLK"):
        # struct flock: type, whence, start, length (0 is all), process id (must be 0).
        everything = struct.pack("@hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        fcntl.fcntl(handle, fcntl.F_OFD_SETLK, everything)
    elif sys.platform != "win32" and _HAS_POSIX:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    else:
        _lock_first_byte(handle)


def wait_for_lock(handle: int) -> None:
    """Lock a file until it is closed, once no other handle has it locked."""
    if sys.platform != "win32" and _HAS_POSIX:
        fcntl.flock(handle, fcntl.LOCK_EX)
        return
    while True:
        with contextlib.suppress(BlockingIOError):
            _lock_first_byte(handle)
            return
        time.sleep(_LOCK_RETRY_S)


_LOCK_RETRY_S: Final = 0.01


def _lock_first_byte(handle: int) -> None:
    import msvcrt  # noqa: PLC0415 - Windows only

    with _seeking:
        os.lseek(handle, 0, os.SEEK_SET)
        try:
            _lock_byte(msvcrt, handle)
        except OSError as error:
            raise BlockingIOError(errno.EWOULDBLOCK, "The file is locked") from error


def _lock_byte(msvcrt: Any, handle: int) -> None:
    msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)


class FileBytes:
    """A file's bytes, by reads and writes, for systems that cannot truncate a mapped file."""

    def __init__(self, handle: int) -> None:
        self._handle = os.dup(handle)

    def __getitem__(self, key: slice) -> bytes:
        return read_at(self._handle, key.stop - key.start, key.start)

    def __setitem__(self, key: slice, value: bytes) -> None:
        write_at(self._handle, (value,), key.start)

    def flush(self) -> None:
        """Make stored bytes survive power loss."""
        sync_data(self._handle)

    def close(self) -> None:
        """Close the file."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    def __del__(self) -> None:
        self.close()


MAPS_FILES: Final = hasattr(mmap, "MADV_RANDOM")
"""Whether files are mapped. Windows, which lacks ``MADV_RANDOM``, refuses to truncate or replace a
mapped file, so a :class:`FileBytes` takes the place of the map there."""


def expect_random_access(mapped: mmap.mmap) -> None:
    """Make an access to the map read in only the page that is accessed."""
    if sys.platform != "win32" and hasattr(mmap, "MADV_RANDOM"):
        mapped.madvise(mmap.MADV_RANDOM)


@contextlib.contextmanager
def private_file(text: str) -> Iterator[str]:
    """Yield the path of a private temporary file with this text, for APIs that only take paths.

    The file is in memory where the system supports that, and is removed at the end.
    """
    if sys.platform == "linux" and hasattr(os, "memfd_create"):
        descriptor, path = os.memfd_create("fencepost", os.MFD_CLOEXEC), ""
    else:
        import tempfile  # noqa: PLC0415 - a large import that Linux does not need

        descriptor, path = tempfile.mkstemp(prefix="fencepost-")  # mode 0600
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            yield path or f"/proc/self/fd/{descriptor}"
    finally:
        if path:
            Path(path).unlink()


# --- descriptors, sockets ---

MACOS_OPEN_MAX: Final = 10_240
"""The largest limit of descriptors that macOS accepts where the hard limit is "unlimited"."""


def descriptor_limit() -> int:
    """Return the process's limit of descriptors; ``sys.maxsize`` if there is none."""
    if sys.platform != "win32" and _HAS_POSIX:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return sys.maxsize if limit == resource.RLIM_INFINITY else limit
    return sys.maxsize


def raise_descriptor_limit() -> None:
    """Raise the limit of descriptors to the hard limit. Raises OSError or ValueError."""
    if sys.platform != "win32" and _HAS_POSIX:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if hard != resource.RLIM_INFINITY and soft >= hard:
            return
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            if hard != resource.RLIM_INFINITY or soft >= MACOS_OPEN_MAX:
                raise
            resource.setrlimit(resource.RLIMIT_NOFILE, (MACOS_OPEN_MAX, hard))


LEAST_DESCRIPTORS: Final = 1024
"""Linux's usual limit, which must suffice for a broker in a test's process. macOS starts processes
with 256, which the logs of some sixty written partitions use up."""


def allow_usual_descriptors() -> None:
    """Raise the limit of descriptors to Linux's usual one, if it is lower and may be raised."""
    if sys.platform != "win32" and _HAS_POSIX:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        limited = hard != resource.RLIM_INFINITY
        limit = min(LEAST_DESCRIPTORS, hard) if limited else LEAST_DESCRIPTORS
        if soft != resource.RLIM_INFINITY and soft < limit:
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def open_descriptors() -> int | None:
    """Return how many descriptors this process has open; None if the system does not tell."""
    for folder in ("/proc/self/fd", "/dev/fd"):
        with contextlib.suppress(OSError):
            return len(os.listdir(folder))  # noqa: PTH208 - names are enough
    return None


def local_datagram_socket() -> socket.socket | None:
    """Return a non-blocking Unix datagram socket; None if Python has none on this system."""
    if not hasattr(socket, "AF_UNIX"):
        return None
    result = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | getattr(socket, "SOCK_NONBLOCK", 0))
    result.setblocking(False)
    return result


def acknowledge_quickly(connection: socket.socket) -> None:
    """Turn off delayed TCP acknowledgements for a while; only Linux has such an option."""
    if hasattr(socket, "TCP_QUICKACK"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)


def has_hung_up(descriptor: int) -> bool:
    """Return whether the peer of a socket has closed it; False if the system does not tell."""
    if sys.platform != "win32" and hasattr(select, "poll"):
        ended = select.poll()
        # POLLHUP is always reported on Linux, but must be asked for on macOS.
        ended.register(descriptor, getattr(select, "POLLRDHUP", select.POLLHUP))
        return bool(ended.poll(0))
    return False


def has_input(handle: int, timeout_s: float) -> bool:
    """Return whether a file or pipe can be read within the time; True if the system can't tell."""
    try:
        return bool(select.select([handle], [], [], timeout_s)[0])
    except OSError:  # Windows only waits for sockets
        return True


# --- the process ---


class SignalLoop(Protocol):
    """The event loop methods that signal handling needs."""

    def add_signal_handler(self, sig: int, callback: Callable[..., object], *args: Any) -> None:
        """Call back on the loop for each signal."""

    def remove_signal_handler(self, sig: int) -> bool:
        """Remove the handler."""

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any) -> object:
        """Call back on the loop."""


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return the class of loop that a broker needs; None for the program's default.

    The default of Windows, a ``ProactorEventLoop``, cannot watch a listening socket.
    """
    import asyncio  # noqa: PLC0415 - programs without a loop import this module too

    return asyncio.SelectorEventLoop if hasattr(asyncio, "ProactorEventLoop") else None


RELOAD: Final[int | None] = getattr(signal, "SIGHUP", None)
"""The signal to read the settings again; None on Windows."""


def on_signal(
    loop: SignalLoop, number: int | None, callback: Callable[..., object], *args: object
) -> None:
    """Call back on the loop for each signal ``number``; do nothing if that is None."""
    if number is None:
        return
    try:
        loop.add_signal_handler(number, callback, *args)
    except NotImplementedError:  # the loops of Windows
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(callback, *args))


def ignore_signals(loop: SignalLoop, numbers: Iterable[int | None]) -> None:
    """Ignore signals. A handler of the loop is not enough, because closing the loop removes it."""
    for number in numbers:
        if number is not None:
            with contextlib.suppress(NotImplementedError):
                loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)


def kill_this_process() -> None:
    """End this process without any clean-up, as ``kill -9`` does."""
    os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))


def kill_group(process: int) -> None:
    """Kill a process that leads a group, and the group."""
    if hasattr(os, "killpg") and hasattr(signal, "SIGKILL"):
        os.killpg(process, signal.SIGKILL)
    else:
        os.kill(process, signal.SIGTERM)  # on Windows: ends that process, at once


def limit_memory(limit_bytes: int) -> None:
    """Limit the process's address space; do nothing if the system does not support that."""
    if sys.platform != "win32" and _HAS_POSIX:
        # macOS refuses any limit below the size that shared libraries have reserved.
        with contextlib.suppress(*(() if _IS_LINUX else (OSError, ValueError))):
            resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))


def user_id() -> int:
    """Return the number of the user; 0 where users have none."""
    return os.getuid() if hasattr(os, "getuid") else 0


def cpu_seconds() -> float:
    """Return the processor time of this process."""
    if sys.platform != "win32" and _HAS_POSIX:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime
    return time.process_time()


def resident_bytes() -> int | None:
    """Return the memory that the process has in use; None if the system has no ``/proc``."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * mmap.PAGESIZE
    return None


def age_s() -> float | None:
    """Return how long this process has run; None if the system has no ``/proc``."""
    if sys.platform == "linux" and hasattr(time, "CLOCK_BOOTTIME"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # Field 22, the start in clock ticks since boot; the name in brackets may hold blanks.
            stat = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2]
            ticks = int(stat.split()[19])
            alive: float = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / _ticks_per_s()
            return alive
    return None


def _ticks_per_s() -> int:
    return int(os.sysconf("SC_CLK_TCK")) if hasattr(os, "sysconf") else 100
