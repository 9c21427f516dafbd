"""A client that sends the smallest request beside a workload, and records its longest wait.

One event loop serves all clients, so a long turn of the loop shows as the wait of a client with a
trivial request: the largest stall. Both brokers are pinged in the same way, from a separate
process, so that the workload's client competes with it only for the processor. On a machine with as
many busy programs as cores, a few milliseconds of the stall are the wait for a core.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator

PAUSE_S = 0.002
"""The pause between two requests, by which a stall may be underestimated."""

RECONNECT_S = 0.05
"""The pause between two attempts while a workload has its broker killed."""

TIMEOUT_S = 60.0
"""The longest wait for a response."""

API_VERSIONS = struct.pack(">hhih4s", 18, 0, 1, 4, b"ping")
"""ApiVersions v0 with its header: the same bytes each time."""

REQUEST = struct.pack(">i", len(API_VERSIONS)) + API_VERSIONS


@contextlib.contextmanager
def pinged(bootstrap: str) -> Iterator[list[float]]:
    """Ping the broker during the context; the list then has the longest wait in milliseconds."""
    longest: list[float] = []
    command = [sys.executable, "-m", "bench.ping", bootstrap]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield longest
        finally:
            told, _ = process.communicate(timeout=TIMEOUT_S + 10)
            longest.append(float(told))


def longest_ms(bootstrap: str) -> float:
    """Ping until standard input ends; return the longest wait in milliseconds."""
    host, _, port = bootstrap.rpartition(":")
    longest = 0.0
    while not _is_over(0):
        try:
            with socket.create_connection((host, int(port)), TIMEOUT_S) as connected:
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                ping(connected)  # the first ping includes the connection's setup
                while not _is_over(PAUSE_S):
                    longest = max(longest, ping(connected))
        except OSError:
            _is_over(RECONNECT_S)
    return longest


def _is_over(wait_s: float) -> bool:
    return bool(select.select([sys.stdin], [], [], wait_s)[0])


def ping(connected: socket.socket) -> float:
    """Return how long one request waits for its response, in milliseconds."""
    began = time.perf_counter()
    connected.sendall(REQUEST)
    (left,) = struct.unpack(">i", _exactly(connected, 4))
    _exactly(connected, left)
    return (time.perf_counter() - began) * 1000


def _exactly(connected: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connected.recv(size - len(data))
        if not part:
            raise ConnectionResetError
        data += part
    return data


if __name__ == "__main__":
    print(longest_ms(sys.argv[1]))
