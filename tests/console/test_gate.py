"""Clients that connect to the console: with and without TLS, with and without the token."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner

from fencepost.cli import main
from fencepost.client.client import ApiError
from fencepost.client.queries.session import ClusterSession
from fencepost.client.security import Security
from fencepost.console import gate, server
from fencepost.console.sessions import SessionPool
from fencepost.testing import Kafka
from tests.console.scenes import TOKEN
from tests.support.certificates import Authority

KNOWN = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@contextlib.asynccontextmanager
async def console(bootstrap: str, keystore: Path | None = None) -> AsyncIterator[tuple[str, int]]:
    """Run a console; yield its URL without the token, and its port."""
    context = None
    if keystore is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(keystore)
    settings = server.ConsoleSettings(bootstrap=bootstrap, token=TOKEN, tls=context)
    async with server.served(settings) as url:
        shown = url.partition("#")[0]
        yield shown, int(shown.rstrip("/").rpartition(":")[2])


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port)


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """Wait for the next byte; return whether the connection was closed instead."""
    async with asyncio.timeout(20):
        try:
            return await reader.read(1) == b""
        except ConnectionError:
            return True


async def test_tls_console_serves_only_https_clients(bootstrap: str, authority: Authority) -> None:
    trusting = ssl.create_default_context(cafile=str(authority.truststore))
    async with (
        console(bootstrap, authority.issue("console")) as (url, port),
        aiohttp.ClientSession(headers=KNOWN) as client,
    ):
        assert url.startswith("https://127.0.0.1:")
        async with client.get(f"{url}api/about", ssl=trusting) as answer:
            assert answer.status == 200
        async with client.get(url, ssl=trusting) as answer:
            assert "<html" in await answer.text()
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await client.get(url)
        reader, writer = await connect(port)
        writer.write(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert await is_closed(reader)
        writer.close()


@pytest.mark.parametrize("is_encrypted", [False, True])
async def test_oldest_unauthenticated_connection_is_closed_at_the_limit(
    bootstrap: str, authority: Authority, monkeypatch: pytest.MonkeyPatch, *, is_encrypted: bool
) -> None:
    monkeypatch.setattr(gate, "MAX_UNAUTHENTICATED", 3)
    context = ssl.create_default_context(cafile=str(authority.truststore))
    keystore = authority.issue("console") if is_encrypted else None
    async with (
        console(bootstrap, keystore) as (url, port),
        aiohttp.ClientSession(headers=KNOWN) as client,
    ):
        async with client.get(f"{url}api/about", ssl=context) as answer:
            assert answer.status == 200
        # With TLS these connections never begin their handshakes.
        strangers: list[Any] = [await connect(port) for _ in range(3)]
        late = await connect(port)
        assert await is_closed(strangers[0][0])
        # The client with the token does not count towards the limit, and keeps its connection.
        async with client.get(f"{url}api/about", ssl=context) as answer:
            assert answer.status == 200
        for _, writer in (*strangers[1:], late):
            assert not writer.transport.is_closing()
        for _, writer in (*strangers, late):
            writer.close()


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b"GET"])
@pytest.mark.parametrize("is_encrypted", [False, True])
async def test_connection_without_token_is_closed_after_timeout(
    bootstrap: str,
    authority: Authority,
    monkeypatch: pytest.MonkeyPatch,
    said: bytes,
    *,
    is_encrypted: bool,
) -> None:
    monkeypatch.setattr(gate, "AUTHENTICATION_TIMEOUT_S", 0.3)
    context = ssl.create_default_context(cafile=str(authority.truststore))
    keystore = authority.issue("console") if is_encrypted else None
    async with (
        console(bootstrap, keystore) as (url, port),
        aiohttp.ClientSession(headers={**KNOWN, "Accept": "text/event-stream"}) as client,
        client.get(f"{url}api/overview", ssl=context) as stream,
    ):
        tls = context if is_encrypted and said else None
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
        writer.write(said)
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionError):
                while await reader.read(65_536):
                    pass
        writer.close()
        # The client that sent the token stays connected.
        assert await stream.content.readany()


def test_refused_query_keeps_its_connection(bootstrap: str) -> None:
    def refused(session: ClusterSession) -> None:
        session.topics(["no-such-topic"])

    async def run() -> None:
        sessions = SessionPool(bootstrap, 10.0, most=1)
        try:
            seen = set()
            for _ in range(3):
                with pytest.raises(ApiError):
                    await sessions.run_query(refused)
                (session,) = sessions._idle
                (node,) = session.client._router._nodes.values()
                seen.add(id(node.channel))
                assert not node.channel.closed
            with pytest.raises(ValueError, match="not of the broker"):
                await sessions.run_query(_wrong)
            assert sessions._idle == [session]
            assert len(seen) == 1
        finally:
            sessions.close()

    asyncio.run(run())


def _wrong(_session: ClusterSession) -> None:
    raise ValueError("not of the broker")


@pytest.mark.parametrize(("password", "status"), [("b", 200), ("wrong", 502)])
async def test_console_logs_in_to_the_broker_without_showing_the_password(
    password: str, status: int
) -> None:
    with Kafka(users={"bob": "b"}, tls=True) as broker:
        told = {**broker.client_config("bob"), "sasl.password": password}
        settings = server.ConsoleSettings(broker.bootstrap, token=TOKEN, security=Security.of(told))
        async with (
            server.served(settings) as url,
            aiohttp.ClientSession(headers=KNOWN) as client,
            client.get(f"{url.partition('#')[0]}api/overview") as answer,
        ):
            assert answer.status == status
            text = await answer.text()
            assert ("cannot log in" in text) == (status != 200)
            assert "wrong" not in text


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--listen", "0.0.0.0:0"), "0.0.0.0:0 can be reached from other machines"),
        (("--listen", "[::]:0"), "[::]:0 can be reached from other machines"),
        (("--tls-key", "x"), "--tls-key needs --tls-cert"),
        (("--tls-cert", "/nowhere"), "--tls-cert: /nowhere: No such file or directory"),
        (("--tls-cert", __file__), "no PEM certificate and key that belong together"),
    ],
)
def test_insecure_listen_options_are_refused(arguments: tuple[str, ...], told: str) -> None:
    done = CliRunner().invoke(main, ("console", *arguments))
    assert done.exit_code == 2
    assert told in " ".join(done.stderr.split())
