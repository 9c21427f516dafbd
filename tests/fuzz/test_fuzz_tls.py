"""Arbitrary bytes at a TLS listener get a handshake or a close, and need little memory.

A script is the messages of one connection in memory, as in `test_fuzz_logins.py`.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from contextlib import suppress
from pathlib import Path

import pytest

from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.config.listener_config import ListenerConfig, SecurityProtocol
from fencepost.coordinator.security.principal import ANONYMOUS
from fencepost.coordinator.security.tls import ListenerTls, load, tls_settings
from fencepost.coordinator.server.server import Server
from tests.fuzz.in_memory import Link
from tests.fuzz.test_fuzz_logins import MAX_HELD_BYTES, bent, failures, framed, versions
from tests.support.certificates import Authority, trust_settings, trusting
from tests.support.stalls import watched_loop
from tests.unit.coordinator.services.coordinators import Services

TLS_SCRIPTS = 100
"""How many scripts run without ``--inputs``."""


class TlsScript:
    """A client that runs part of a handshake and alters its TLS records."""

    def __init__(self, link: Link, rng: random.Random, context: ssl.SSLContext) -> None:
        self.link, self.rng = link, rng
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._cipher = context.wrap_bio(self._in, self._out, server_hostname="localhost")

    async def play(self) -> None:
        """Alter one of the handshake's flights, or the application data after the handshake."""
        rng = self.rng
        bent_at = rng.randrange(4)
        for step in range(3):
            with suppress(ssl.SSLWantReadError):
                self._cipher.do_handshake()
            await self._send(self._out.read(), is_bent=step == bent_at)
            if step == bent_at:
                break
        else:
            self._cipher.write(framed(versions(rng), rng))
            self._send_raw(self._out.read())
            self._cipher.write(rng.randbytes(rng.choice((10, 5_000, 40_000))))
            await self._send(self._out.read(), is_bent=True)
        await asyncio.sleep(0)
        self.link.leave()

    async def _send(self, data: bytes, *, is_bent: bool) -> None:
        rng = self.rng
        if is_bent:
            kind = rng.randrange(4)
            data = rng.randbytes(rng.randrange(300)) if kind == 0 else bent(data, rng)
            if kind == 1:
                record = bytes((rng.choice((20, 21, 22, 23, 24)), 3, rng.randrange(5)))
                data += record + rng.randbytes(2) + rng.randbytes(rng.choice((0, 40, 70_000)))
        self._send_raw(data)
        await self.link.drained()
        for _ in range(3):  # handshakes take several turns
            await asyncio.sleep(0)
        self._in.write(self.link.encrypted)
        self.link.encrypted.clear()

    def _send_raw(self, data: bytes) -> None:
        if data:
            self.link.send(data)


async def test_random_bytes_at_a_tls_listener_are_dropped_in_bounded_memory(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    count = request.config.getoption("--inputs") or TLS_SCRIPTS
    seed = request.config.getoption("--seed") or 1
    authority = Authority(tmp_path / "ca")
    listener = ListenerConfig("SSL", protocol=SecurityProtocol.SSL)
    settings = {**authority.server().keystore, "ssl.client.auth": "required"}
    config = BrokerConfig(settings | dict(trust_settings(authority)))
    clients = [authority.client("alice").context(), trusting(authority)]
    held = shaken = 0
    services = Services(tmp_path / "data")
    server = Server(services)
    await server.start(listener, ListenerTls(load(tls_settings(config, listener))))
    with failures() as failed, watched_loop() as watch:
        for number in range(count):
            rng = random.Random(f"{seed}/{number}")
            link = Link(server, listener, rng)
            with suppress(ssl.SSLError):
                await TlsScript(link, rng, rng.choice(clients)).play()
            link.leave()
            assert not failed, (seed, number, failed)
            held = max(held, link.most_held)
            shaken += link.connection.session.principal != ANONYMOUS
            assert link.connection.requests <= 1, (seed, number)
        await asyncio.sleep(0.01)
        assert not server.connections
    watch.check()
    print(count, "connections", shaken, "shaken; most held", held, watch.cpu.judged_ms, "ms")
    assert 0 < shaken < count
    assert held <= MAX_HELD_BYTES
    await server.stop()
    await services.stop()
