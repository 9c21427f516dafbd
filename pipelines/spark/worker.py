"""Avoids two delays of Spark's Python workers: late TCP acknowledgements, garbage collection.

The JVM writes to its workers over loopback TCP in several small writes, without TCP_NODELAY: each
waits for the acknowledgement of the one before, which Linux delays for up to 40 ms if the reader
has nothing to send (Nagle's algorithm against delayed acknowledgements).

PySpark's daemon runs a full garbage collection after every task of a reused worker
(``pyspark.daemon``). It visits everything that is imported: some 70,000 objects and 50 ms of
processor time, in each of the three workers that a micro-batch passes through, while the work
itself takes less than 5 ms.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ParamSpec, TypeVar

from fencepost.logcore.system import acknowledge_quickly

P = ParamSpec("P")
T = TypeVar("T")

_modules_seen = 0
_to_jvm: list[socket.socket] | None = None


def prompt() -> None:
    """Acknowledge data of the JVM at once: the data that has arrived, and what follows soon.

    Call this at the beginning of a piece of work: Linux returns to delays (``tcp(7)``,
    TCP_QUICKACK). Does nothing if workers have Unix sockets
    (``spark.python.unix.domain.socket.enabled``).
    """
    global _to_jvm  # noqa: PLW0603 - the process has one JVM all its life
    if _to_jvm is None:
        _to_jvm = list(_loopback())
        for connection in _to_jvm:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for connection in _to_jvm:
        acknowledge_quickly(connection)


def _loopback() -> Iterator[socket.socket]:
    """Yield this process's loopback connections; at first a worker has only the JVM's."""
    seen: set[int] = set()
    for entry in Path("/proc/self/fd").iterdir():
        number = int(entry.name)
        with contextlib.suppress(OSError):
            status = os.fstat(number)
            if not stat.S_ISSOCK(status.st_mode) or status.st_ino in seen:
                continue
            seen.add(status.st_ino)
            connection = socket.socket(fileno=os.dup(number))
            with contextlib.ExitStack() as closing:
                closing.enter_context(connection)
                if connection.type == socket.SOCK_STREAM and _is_loopback(connection):
                    closing.pop_all()
                    yield connection


def _is_loopback(connection: socket.socket) -> bool:
    internet = connection.family in {socket.AF_INET, socket.AF_INET6}
    return internet and connection.getpeername()[0] in {"127.0.0.1", "::1"}


def settle() -> None:
    """Exclude all objects imported so far from garbage collection; only for Spark's own workers.

    Call this at the end of a piece of work. Does nothing unless modules were imported since the
    last call, so that garbage of later tasks is still collected.
    """
    global _modules_seen  # noqa: PLW0603 - like garbage collection, it belongs to the process
    if len(sys.modules) == _modules_seen:
        return
    _modules_seen = len(sys.modules)
    gc.collect()
    gc.freeze()


def settled(work: Callable[P, T]) -> Callable[P, T]:
    """Make a function call :func:`prompt` first, and :func:`settle` when it has returned."""

    @functools.wraps(work)
    def done(*args: P.args, **kwargs: P.kwargs) -> T:
        prompt()
        result = work(*args, **kwargs)
        settle()
        return result

    return done
