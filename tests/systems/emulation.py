"""Removes the calls that only Linux has, and emulates the behaviour of another system.

This module runs when a Python process starts, before any other module
(``startup/sitecustomize.py``). ``sys.platform`` stays the same, because the standard library would
not work otherwise. The emulation shows that Fencepost calls only what these systems have, and that
the replacements suit the rest of the broker. It does not show that the real systems behave like the
emulation.
"""

from __future__ import annotations

import asyncio
import builtins
import errno
import fcntl
import mmap
import os
import resource
import select
import signal
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

ONLY_LINUX = {
    os: (
        *("posix_fallocate", "posix_fadvise", "fdatasync", "memfd_create", "MFD_CLOEXEC"),
        *("copy_file_range", "splice", "eventfd", "pidfd_open", "O_DIRECT", "O_TMPFILE"),
    ),
    socket: ("TCP_QUICKACK", "SOCK_NONBLOCK", "SOCK_CLOEXEC", "TCP_USER_TIMEOUT", "MSG_NOSIGNAL"),
    select: ("POLLRDHUP",),
    time: ("CLOCK_BOOTTIME",),
    fcntl: ("F_OFD_SETLK", "F_OFD_SETLKW", "F_OFD_GETLK", "F_SETPIPE_SZ"),
}

NOT_ON_WINDOWS = {
    os: (
        *("pread", "preadv", "pwrite", "pwritev", "sendfile", "SEEK_DATA", "SEEK_HOLE"),
        *("O_DIRECTORY", "O_NOFOLLOW", "statvfs", "fstatvfs", "killpg", "getpgid", "sysconf"),
    ),
    mmap: ("MADV_RANDOM", "MADV_SEQUENTIAL", "MADV_WILLNEED", "MADV_DONTNEED"),
    select: ("poll", "epoll"),
    signal: ("SIGHUP", "SIGKILL", "SIGUSR1", "SIGUSR2", "SIGQUIT"),
    time: ("clock_gettime", "clock_gettime_ns", "CLOCK_MONOTONIC", "CLOCK_REALTIME"),
}

WINDOWS_MODULES = frozenset({"fcntl", "resource", "pwd", "grp", "termios"})
"""Modules that Windows does not have. Only imports by Fencepost's own code fail, because asyncio's
loop for Unix needs some of the modules."""

F_FULLFSYNC = 51
MACOS_DESCRIPTORS = int(os.environ.get("EMULATED_DESCRIPTORS", "256"))
"""The soft limit with which a process of macOS starts; the hard limit is unlimited."""

_OFD_LOCK = getattr(fcntl, "F_OFD_SETLK", 0)
_fcntl, _fsync, _sendfile = fcntl.fcntl, os.fsync, os.sendfile
_getrlimit, _setrlimit = resource.getrlimit, resource.setrlimit


def begin(name: str) -> None:
    """Emulate ``macos`` or ``windows`` from now on."""
    _take_away(ONLY_LINUX)
    if name == "macos":
        _become_macos()
    elif name == "windows":
        _take_away(NOT_ON_WINDOWS)
        _become_windows()
    else:
        raise ValueError(f"no emulation of {name!r}")


def _take_away(names: dict[ModuleType, tuple[str, ...]]) -> None:
    for module, taken in names.items():
        for name in taken:
            if hasattr(module, name):
                delattr(module, name)
                if name in getattr(module, "__all__", ()):
                    module.__all__.remove(name)


def _lock(handle: int, kind: int) -> None:
    """Take a lock that conflicts with locks of its kind and with record locks.

    The lock conflicts even with locks of the same process.
    """
    _fcntl(handle, _OFD_LOCK, struct.pack("@hhqqi4x", kind, os.SEEK_SET, 0, 0, 0))


# --- macOS ---


def _become_macos() -> None:
    fcntl.F_FULLFSYNC = F_FULLFSYNC
    fcntl.fcntl, fcntl.flock = _macos_fcntl, _macos_flock
    os.sendfile = _macos_sendfile
    resource.getrlimit, resource.setrlimit = _macos_getrlimit, _macos_setrlimit


def _macos_fcntl(handle: Any, command: int, *argument: Any) -> Any:
    if command == F_FULLFSYNC:
        _fsync(handle)
        return 0
    return _fcntl(handle, command, *argument)


def _macos_flock(handle: Any, operation: int) -> None:
    """Emulate BSD, on which ``flock`` conflicts with record locks, even within one process."""
    if operation & fcntl.LOCK_UN:
        _lock(handle, fcntl.F_UNLCK)
        return
    kind = fcntl.F_WRLCK if operation & fcntl.LOCK_EX else fcntl.F_RDLCK
    while True:
        try:
            _lock(handle, kind)
        except BlockingIOError:
            if operation & fcntl.LOCK_NB:
                raise
            time.sleep(0.001)
        else:
            return


def _macos_sendfile(target: int, source: int, offset: int, count: int) -> int:
    """Emulate macOS, on which a count of 0 means everything up to the end of the file."""
    return _sendfile(target, source, offset, count or os.fstat(source).st_size - offset)


_limits = {"descriptors": MACOS_DESCRIPTORS}


def _macos_getrlimit(which: int) -> tuple[int, int]:
    if which == resource.RLIMIT_NOFILE:
        return _limits["descriptors"], resource.RLIM_INFINITY
    return _getrlimit(which)


def _macos_setrlimit(which: int, limits: tuple[int, int]) -> None:
    if which == resource.RLIMIT_AS:
        raise ValueError("current limit exceeds maximum limit")
    if which == resource.RLIMIT_NOFILE:
        if limits[0] == resource.RLIM_INFINITY:
            raise ValueError("current limit exceeds maximum limit")
        _limits["descriptors"] = limits[0]
    else:
        _setrlimit(which, limits)


# --- Windows ---


def _become_windows() -> None:
    builtins.__import__ = _refusing(builtins.__import__)
    sys.modules["msvcrt"] = _msvcrt()
    policy = asyncio.DefaultEventLoopPolicy
    policy._loop_factory = _ProactorLoop
    asyncio.ProactorEventLoop = _ProactorLoop
    asyncio.SelectorEventLoop.add_signal_handler = _no_such_call
    asyncio.SelectorEventLoop.remove_signal_handler = _no_such_call
    _select = select.select

    def sockets_only(reading: Any, *others: Any) -> Any:
        for source in reading:
            if isinstance(source, int) and not _is_socket(source):
                raise OSError(errno.ENOTSOCK, "not a socket")
        return _select(reading, *others)

    select.select = sockets_only


def _is_socket(handle: int) -> bool:
    return stat.S_ISSOCK(os.fstat(handle).st_mode)


def _refusing(importing: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(name: str, space: Any = None, *rest: Any, **more: Any) -> Any:
        if name in WINDOWS_MODULES and str((space or {}).get("__name__", "")).startswith(
            "fencepost."
        ):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return importing(name, space, *rest, **more)

    return refuse


def _msvcrt() -> ModuleType:
    made = ModuleType("msvcrt")
    made.LK_NBLCK = 2

    def locking(handle: int, mode: int, count: int) -> None:
        assert (mode, count, os.lseek(handle, 0, os.SEEK_CUR)) == (made.LK_NBLCK, 1, 0)
        try:
            _lock(handle, fcntl.F_WRLCK)
        except BlockingIOError:
            raise PermissionError(errno.EACCES, "Permission denied") from None

    made.locking = locking
    return made


def _no_such_call(*arguments: Any) -> Any:
    raise NotImplementedError


class _ProactorLoop(asyncio.SelectorEventLoop):
    """Windows' default loop, which watches no sockets and handles no signals."""

    add_reader = remove_reader = add_writer = remove_writer = _no_such_call
