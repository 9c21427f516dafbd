"""Attacks of unauthenticated clients on an encrypted listener."""

from __future__ import annotations

import random
import resource
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.certificates import Authority, trust_settings, trusting
from tests.support.daemon import Daemon
from tests.support.raw import RawClient

HEALTHY, STRANGERS, ROUNDS = 10, 1_000, 4
MEASURED_S = 3.0
"""Duration of the measurement, below the handshake timeout, so that no client is closed."""

DRIP_S = 0.25
"""Seconds between two bytes of each slow client."""

MAX_SLOWER = 2.0
"""Limit of the 99th percentile of response times, as a multiple of the value without attacks."""

SOAK, LEAK_BYTES = 3_000, 2_000_000
"""Number of failed handshakes, and the bytes that they may leak together: far less than a buffer
per handshake.
"""


@pytest.fixture
def many_files() -> Iterator[None]:
    """Raise this process's limit of open files to its maximum."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


@pytest.fixture
def daemon(tmp_path: Path, authority: Authority) -> Iterator[Daemon]:
    settings = {
        "listeners": "SSL://127.0.0.1:0",
        "ssl.client.auth": "required",
        **authority.server().keystore,
        **trust_settings(authority),
    }
    made = Daemon(tmp_path / "data", settings).start()
    yield made
    made.stop()


def first_flight(context: ssl.SSLContext) -> bytes:
    """Return the ClientHello of a client."""
    sent = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname="localhost").do_handshake()
    return sent.read()


def connected(daemon: Daemon) -> socket.socket:
    host, port = daemon.bootstrap.rsplit(":", 1)
    return socket.create_connection((host, int(port)), 20)


@contextmanager
def strangers(daemon: Daemon, hello: bytes) -> Iterator[None]:
    """Connect clients: half are silent, half send a handshake byte by byte."""
    there = [connected(daemon) for _ in range(STRANGERS)]
    leave = threading.Event()

    def drip() -> None:
        for byte in hello:
            if leave.wait(DRIP_S):
                return
            for client in there[::2]:
                with suppress(OSError):
                    client.send(bytes((byte,)))

    slow = threading.Thread(target=drip)
    slow.start()
    yield
    leave.set()
    slow.join()
    for client in there:
        client.setblocking(False)
        with pytest.raises(BlockingIOError):  # the broker has closed none of the connections
            client.recv(1)
        client.close()


def p99_ms(clients: list[RawClient]) -> float:
    """Measure response times, and return the 99th percentile in milliseconds."""
    taken: list[float] = []
    number, end = 0, time.monotonic() + MEASURED_S
    while time.monotonic() < end:
        number += 1
        client = clients[number % len(clients)]
        since = time.perf_counter()
        client.call("api_versions", 2)
        taken.append(time.perf_counter() - since)
    return sorted(taken)[-max(1, len(taken) // 100)] * 1000


@pytest.mark.slow
@pytest.mark.usefixtures("many_files")
def test_unfinished_handshakes_do_not_slow_down_healthy_clients(
    daemon: Daemon, authority: Authority
) -> None:
    alice = authority.client("alice").context()
    hello = first_flight(alice)
    clients = [RawClient(daemon.bootstrap, tls=alice) for _ in range(HEALTHY)]
    p99_ms(clients)
    ratios = []
    for _ in range(ROUNDS):
        quiet = p99_ms(clients)
        with strangers(daemon, hello):
            # A new client is served as well.
            with RawClient(daemon.bootstrap, tls=alice) as newcomer:
                assert newcomer.call("api_versions", 2)["error_code"] == "none"
            attacked = p99_ms(clients)
        ratios.append(attacked / quiet)
        print(f"p99 quiet {quiet:.2f} ms, with {STRANGERS} strangers {attacked:.2f} ms")
        if min(ratios) < MAX_SLOWER:
            break
    for client in clients:
        client.close()
    assert min(ratios) < MAX_SLOWER, ratios


@pytest.mark.slow
def test_failed_handshakes_leave_no_memory(daemon: Daemon, authority: Authority) -> None:
    nobody, hello = trusting(authority), first_flight(trusting(authority))
    starts = (hello, hello[:100] + bytes(3_000), b"GET / HTTP/1.1")

    def fail(number: int) -> None:
        with connected(daemon) as client, suppress(OSError):
            if number % 4 == 0:
                with nobody.wrap_socket(client, server_hostname="localhost") as shaken:
                    shaken.recv(1)
            else:
                client.sendall(starts[number % 4 - 1])
                client.recv(10)

    assert daemon.child is not None
    for number in range(400):  # warm up: allocate everything that is kept
        fail(number)
    before = daemon.child.resident_bytes
    for number in range(SOAK):
        fail(number)
    alice = authority.client("alice").context()
    with RawClient(daemon.bootstrap, tls=alice) as client:
        assert client.call("api_versions", 2)["error_code"] == "none"
    assert daemon.child.resident_bytes - before < LEAK_BYTES


BENT = 600
"""How many clients send malformed TLS at some step of a handshake."""


def bent(data: bytes, draw: random.Random) -> bytes:
    """Return ``data`` with some bytes changed, truncated or inserted."""
    found = bytearray(data or b"?")
    for _ in range(draw.randint(1, 3)):
        at, kind = draw.randrange(len(found)), draw.randrange(3)
        if kind == 0:
            found[at] = draw.randrange(256)
        elif kind == 1:
            found[at:] = draw.randbytes(1)
        else:
            found[at:at] = draw.randbytes(draw.randint(1, 20))
    return bytes(found)


def bend(daemon: Daemon, context: ssl.SSLContext, draw: random.Random) -> None:
    """Begin a handshake, and send malformed bytes at some step."""
    received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(received, sent, server_hostname="localhost")
    bent_step = draw.randrange(3)
    with connected(daemon) as wire, suppress(OSError):
        wire.settimeout(0.2)
        for step in range(2):
            with suppress(ssl.SSLWantReadError):
                client.do_handshake()
            flight = sent.read()
            wire.sendall(bent(flight, draw) if step == bent_step else flight)
            if step == bent_step:
                break
            if step == 0:
                received.write(wire.recv(65_536))
        if bent_step == 2:
            client.write(draw.randbytes(draw.randint(1, 20_000)))
            wire.sendall(bent(sent.read(), draw) + draw.randbytes(30))
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


@pytest.mark.slow
def test_corrupt_handshakes_and_records_do_not_disturb_other_clients(
    daemon: Daemon, authority: Authority
) -> None:
    draw = random.Random(5_246)
    alice = authority.client("alice").context()
    with RawClient(daemon.bootstrap, tls=alice) as healthy:
        for number in range(BENT):
            bend(daemon, alice, draw)
            if number % 100 == 0:
                assert healthy.call("api_versions", 2)["error_code"] == "none"
        assert healthy.call("api_versions", 2)["error_code"] == "none"
    assert daemon.child is not None
    assert not [line for line in daemon.child.lines if '"level": "error"' in line]
