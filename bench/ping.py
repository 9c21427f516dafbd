"""A client beside a workload that asks the least there is, and how long it waited at most.

One event loop serves everybody, so whatever keeps it long shows as the wait of somebody who asked
for next to nothing: the largest stall. Both brokers are asked in the same way, from a process of
its own, so that the workload's client is in nobody's way but the processor's. On a machine with as
many busy programs as cores a few milliseconds of it are the wait for a core.
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
"""Between two requests: a stall is seen but for so much of it."""

RECONNECT_S = 0.05
"""Between two attempts while a workload has its broker killed."""

TIMEOUT_S = 60.0
"""Longest wait for an answer."""

API_VERSIONS = struct.pack(">hhih4s", 18, 0, 1, 4, b"ping")
"""ApiVersions v0, header included: the same bytes each time."""

REQUEST = struct.pack(">i", len(API_VERSIONS)) + API_VERSIONS


@contextlib.contextmanager
def pinged(bootstrap: str) -> Iterator[list[float]]:
    """Ping the broker meanwhile; the list has the longest wait in milliseconds afterwards."""
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
    """Ping until standard input ends."""
    host, _, port = bootstrap.rpartition(":")
    longest = 0.0
    while not _is_over(0):
        try:
            with socket.create_connection((host, int(port)), TIMEOUT_S) as connected:
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                ping(connected)  # the first one pays for the connection
                while not _is_over(PAUSE_S):
                    longest = max(longest, ping(connected))
        except OSError:
            _is_over(RECONNECT_S)
    return longest


def _is_over(wait_s: float) -> bool:
    return bool(select.select([sys.stdin], [], [], wait_s)[0])


def ping(connected: socket.socket) -> float:
    """How long one request waits for its answer, in milliseconds."""
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
