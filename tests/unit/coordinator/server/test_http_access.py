"""Access to the metrics: encryption, passwords, and limits for remote clients."""

from __future__ import annotations

import asyncio
import base64
import ssl
from pathlib import Path

import pytest

from fencepost import Broker
from fencepost.coordinator.config.key import ConfigError
from fencepost.coordinator.server import http_access
from fencepost.coordinator.server.http import HttpLimits, HttpRequest, HttpResponse, serve_http
from fencepost.coordinator.server.http_access import HttpAccessError, HttpUsers, RenewedContext
from tests.support.certificates import Authority, replace
from tests.support.waits import until_true

KEY = "fencepost.metrics"


def basic(pair: str) -> str:
    return f"Basic {base64.b64encode(pair.encode()).decode()}"


async def get(
    address: tuple[str, int], path: str, tls: ssl.SSLContext | None = None, authorization: str = ""
) -> tuple[int, str]:
    reader, writer = await asyncio.open_connection(*address, ssl=tls)
    told = f"Authorization: {authorization}\r\n" if authorization else ""
    writer.write(f"GET {path} HTTP/1.0\r\nHost: 127.0.0.1\r\n{told}\r\n".encode())
    answer = (await reader.read()).decode()
    writer.close()
    return int(answer.split()[1]), answer


def users_file(home: Path, text: str = "scraper:hunter2\n", mode: int = 0o600) -> Path:
    path = home / "users"
    path.write_text(text)
    path.chmod(mode)
    return path


async def test_metrics_require_a_password_and_health_probes_do_not(tmp_path: Path) -> None:
    text = "# who scrapes\n\nscraper:hunter2\nother:a:b\n"
    config = {f"{KEY}.listen": "0", f"{KEY}.users.file": str(users_file(tmp_path, text))}
    async with Broker(tmp_path / "data", config=config) as broker:
        address = broker.metrics_address
        for wrong in ("", "Basic", "Basic !!", basic("scraper:hunter"), basic("scraper:hunter2\n")):
            status, answer = await get(address, "/metrics", authorization=wrong)
            assert (status, 'WWW-Authenticate: Basic realm="fencepost"' in answer) == (401, True)
        bearer = basic("scraper:hunter2").replace("Basic", "Bearer")
        assert (await get(address, "/metrics", authorization=bearer))[0] == 401
        for right in ("scraper:hunter2", "other:a:b"):
            assert (await get(address, "/metrics", authorization=basic(right)))[0] == 200
        for path in ("/healthz", "/readyz"):
            assert (await get(address, path))[0] == 200


@pytest.mark.parametrize("is_apart", [False, True])
async def test_metrics_are_served_over_tls_only(tmp_path: Path, *, is_apart: bool) -> None:
    authority = Authority(tmp_path)
    made = authority.server("metrics")
    config = {f"{KEY}.listen": "0", f"{KEY}.certificate": str(made.file)}
    if is_apart:
        config |= {f"{KEY}.certificate": str(made.chain_file), f"{KEY}.key": str(made.key_file)}
    async with Broker(tmp_path / "data", config=config) as broker:
        address = broker.metrics_address
        trusting = ssl.create_default_context(cafile=str(authority.truststore))
        assert (await get(address, "/metrics", trusting))[0] == 200
        # A client without TLS gets no response.
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert await reader.read() == b""
        writer.close()


async def test_renewed_certificate_replaces_the_context_once_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_access, "LOOK_S", 0.0)
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    path = old.server("metrics").file
    renewed = RenewedContext(str(path), None)
    before = await renewed()
    assert await renewed() is before
    replace(path, b"half writ")
    assert await renewed() is before
    replace(path, new.server("metrics").file.read_bytes())
    assert await renewed() is not before


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "192.0.2.1"])
def test_public_metrics_address_without_tls_and_users_is_a_config_error(
    tmp_path: Path, host: str
) -> None:
    listen = {f"{KEY}.listen": f"{host}:0"}
    files = {f"{KEY}.certificate": "x.pem", f"{KEY}.users.file": "users"}
    for given in ({}, *({key: value} for key, value in files.items())):
        with pytest.raises(ConfigError, match="other machines can reach it") as refused:
            Broker(tmp_path, config={**listen, **given})
        for key in files.keys() - given.keys():
            assert key in str(refused.value)
    for enough in (files, {f"{KEY}.insecure": True}, {"fencepost.insecure": True}):
        Broker(tmp_path, config={**listen, **enough})


@pytest.mark.parametrize("name", ["certificate", "users.file"])
async def test_unusable_file_is_a_config_error_that_names_its_key(
    tmp_path: Path, name: str
) -> None:
    for path in (tmp_path / "nothing", users_file(tmp_path, "hunter2")):
        config = {f"{KEY}.listen": "0", f"{KEY}.{name}": str(path)}
        with pytest.raises(ConfigError, match=rf"{KEY}\.{name}.*{path}") as refused:
            await Broker(tmp_path / "data", config=config).start()
        assert "hunter2" not in str(refused.value)
    with pytest.raises(ConfigError, match=rf"{KEY}\.key: it needs a certificate"):
        Broker(tmp_path, config={f"{KEY}.listen": "0", f"{KEY}.key": "x"})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "0 users; it may have 1 to 100"),
        ("".join(f"u{n}:p\n" for n in range(101)), "101 users"),
        ("a:b\nhunter2", "entry 2 is not NAME:PASSWORD"),
        (":hunter2", "entry 1"),
        ("a:", "entry 1"),
        ("#" * 65_537, "more than 65536 bytes"),
    ],
)
def test_malformed_users_file_is_refused_without_revealing_passwords(
    tmp_path: Path, text: str, reason: str
) -> None:
    with pytest.raises(HttpAccessError, match=reason) as refused:
        HttpUsers(str(users_file(tmp_path, text)))
    assert "hunter2" not in str(refused.value)
    HttpUsers(str(users_file(tmp_path, "".join(f"u{n}:p\n" for n in range(100)))))


async def test_tls_client_that_reads_too_slowly_is_disconnected(tmp_path: Path) -> None:
    async def handler(_request: HttpRequest) -> HttpResponse:
        return HttpResponse(body=bytes(16 << 20))

    authority = Authority(tmp_path)
    renewed = RenewedContext(str(authority.server("metrics").file), None)
    limits = HttpLimits(take_timeout_ms=200)
    server = await serve_http("127.0.0.1", 0, handler, limits=limits, tls=renewed)
    trusting = ssl.create_default_context(cafile=str(authority.truststore))

    try:
        address = server.host, server.port
        reader, writer = await asyncio.open_connection(*address, ssl=trusting, limit=1024)
        writer.write(b"GET / HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
        await reader.read(1)
        await until_true(lambda: not server.connections, "it is cut off")
        writer.transport.abort()
        # A client that reads its response gets the whole response.
        assert len((await get(address, "/", trusting))[1]) > 16 << 20
    finally:
        await server.close()


async def test_stalled_tls_handshakes_count_as_connections_and_time_out(tmp_path: Path) -> None:
    async def handler(_request: HttpRequest) -> HttpResponse:
        return HttpResponse(body=b"pong")

    authority = Authority(tmp_path)
    # The timeout is long enough for the handshake below on a busy machine.
    limits = HttpLimits(max_connections=2, request_timeout_ms=3_000)
    server = await serve_http(
        "127.0.0.1",
        0,
        handler,
        limits=limits,
        tls=RenewedContext(str(authority.server("metrics").file), None),
    )

    try:
        address = server.host, server.port
        halves = [await asyncio.open_connection(*address) for _ in range(3)]
        async with asyncio.timeout(20):
            # One connection exceeds the limit, and the other connections time out.
            assert [await reader.read() for reader, _ in halves] == [b"", b"", b""]
            assert server.refused == 1
        await until_true(lambda: not server.connections, "no connection is left")
        trusting = ssl.create_default_context(cafile=str(authority.truststore))
        assert (await get(address, "/", trusting))[0] == 200
        for _, writer in halves:
            writer.close()
    finally:
        await server.close()
