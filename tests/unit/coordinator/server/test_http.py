"""The HTTP server for metrics and test hooks: its responses and its limits."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from fencepost.coordinator.server.http import (
    PIECE_BYTES,
    HttpError,
    HttpLimits,
    HttpRequest,
    HttpResponse,
    HttpServer,
    serve_http,
)
from fencepost.coordinator.server.http_messages import (
    MAX_QUERY_FIELDS,
    check_host,
    parse_head,
)
from tests.support import http
from tests.support.http import request
from tests.support.waits import DEADLINE_S, until_true

GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
LIMITS = HttpLimits()
LARGE_BYTES = 3 * PIECE_BYTES + 1


async def echo(asked: HttpRequest) -> HttpResponse:
    """Return the response for the request's path."""
    match asked.path:
        case "/fails":
            raise RuntimeError("on purpose")
        case "/refuses":
            raise HttpError(405, "POST it", {"Allow": "POST"})
        case "/pieces":
            return HttpResponse(body=pieces(b"one", b"", b"two"))
        case "/broken":
            return HttpResponse(body=pieces(b"one", None))
        case "/large":
            return HttpResponse(body=bytes(LARGE_BYTES))
    seen = f"{asked.method} {asked.path} {dict(asked.query)} {len(asked.body)}"
    return HttpResponse(200, "text/plain", seen.encode())


async def pieces(*parts: bytes | None) -> AsyncIterator[bytes]:
    for part in parts:
        await asyncio.sleep(0)
        if part is None:
            raise RuntimeError("on purpose")
        yield part


@asynccontextmanager
async def serving(
    host: str = "127.0.0.1", limits: HttpLimits = LIMITS
) -> AsyncIterator[HttpServer]:
    server = await serve_http(host, 0, echo, limits=limits)
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield server
    finally:
        await server.close()
        assert not server.connections


async def asked(server: HttpServer, sent: bytes) -> tuple[int, dict[str, str], bytes]:
    return await http.exchange((server.host, server.port), sent)


async def connected(server: HttpServer) -> bytes:
    """Return the data that a server sends to a silent client."""
    reader, writer = await asyncio.open_connection(server.host, server.port)
    with closing(writer):
        return await reader.read()


# --- responses ---


async def test_request_reaches_handler_and_response_reaches_client() -> None:
    async with serving() as server:
        status, headers, body = await asked(server, request("/a%20b?x=1&y=&x=2"))
        assert (status, body) == (200, b"GET /a b {'x': '2', 'y': ''} 0")
        assert headers["Content-Type"] == "text/plain"
        assert headers["Content-Length"] == str(len(body))
        assert headers["X-Content-Type-Options"] == "nosniff"
        status, _, body = await asked(server, request("/p", "POST", b"12345"))
        assert (status, body) == (200, b"POST /p {} 5")
        status, _, body = await asked(server, request("http://localhost/q?z=%C3%A9", "DELETE"))
        assert (status, body) == (200, "DELETE /q {'z': 'é'} 0".encode())


async def test_head_has_the_headers_of_get_and_no_body() -> None:
    async with serving() as server:
        for path, length in (("/large", str(LARGE_BYTES)), ("/pieces", None)):
            status, headers, body = await asked(server, request(path, "HEAD"))
            assert (status, headers.get("Content-Length"), body) == (200, length, b"")


async def test_pipelined_requests_are_answered_in_order_until_connection_close() -> None:
    async with serving() as server:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        with closing(writer):
            for path in ("/one", "/pieces", "/two"):
                writer.write(request(path))
            writer.write(request("/three", Connection="close"))
            answers = await reader.read()
        assert answers.count(b"HTTP/1.1 200 OK") == 4
        assert answers.count(b"Connection: keep-alive") == 3
        assert answers.index(b"/one") < answers.index(b"/two") < answers.index(b"/three")


async def test_streamed_body_is_chunked_in_http_1_1_and_plain_in_http_1_0() -> None:
    async with serving() as server:
        _, headers, body = await asked(server, request("/pieces"))
        assert headers["Transfer-Encoding"] == "chunked"
        assert body == b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"
        _, headers, body = await asked(server, request("/pieces", version="1.0"))
        assert "Transfer-Encoding" not in headers
        assert (headers["Connection"], body) == ("close", b"onetwo")


async def test_expect_100_continue_is_answered_before_the_body() -> None:
    async with serving() as server:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        with closing(writer):
            writer.write(request("/", "POST", Expect="100-continue")[: -len(b"\r\n\r\n")])
            writer.write(b"\r\n\r\n")
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")


async def test_failed_handler_is_logged_and_later_requests_are_served() -> None:
    async with serving() as server:
        with capture_logs() as said:
            status, _, body = await asked(server, request("/fails"))
            assert (status, b"on purpose" in body) == (500, False)
            _, _, body = await asked(server, request("/broken"))
            assert not body.endswith(b"0\r\n\r\n")
        assert [line["cause"] for line in said] == ["RuntimeError: on purpose"] * 2
        status, headers, body = await asked(server, request("/refuses"))
        assert (status, headers["Allow"], body) == (405, "POST", b"POST it\n")
        assert (await asked(server, GET))[0] == 200


# --- limits on both sides ---


async def test_request_head_of_exactly_the_limit_is_accepted_longer_is_431() -> None:
    room = LIMITS.max_head_bytes - len(request(Filler=""))
    async with serving() as server:
        assert (await asked(server, request(Filler="x" * room)))[0] == 200
        status, _, body = await asked(server, request(Filler="x" * (room + 1)))
        assert (status, b"8192 bytes" in body) == (431, True)
        twice = request() + request(Filler="x" * (room + 1))
        assert b"HTTP/1.1 431" in (await asked(server, twice))[2]
        assert (await asked(server, b"x" * 1_000_000))[0] == 431


async def test_request_body_of_exactly_the_limit_is_accepted_longer_is_413() -> None:
    most = LIMITS.max_body_bytes
    async with serving() as server:
        status, _, body = await asked(server, request("/", "POST", bytes(most)))
        assert (status, body) == (200, f"POST / {{}} {most}".encode())
        status, _, body = await asked(server, request("/", "POST", bytes(most + 1)))
        assert (status, b"65536 bytes" in body) == (413, True)


async def test_connection_above_the_limit_is_refused_with_503() -> None:
    async with serving(limits=HttpLimits(max_connections=2)) as server:
        first, second, third = [
            await asyncio.open_connection(server.host, server.port) for _ in range(3)
        ]
        answer = await third[0].read()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert answer.endswith(b"at most 2 connections are open\n")
        assert server.refused == 1
        for reader, writer in (first, second):
            writer.write(GET)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        first[1].close()
        await until_true(lambda: server.connections < 2, "a connection ends")
        assert (await asked(server, GET))[0] == 200
        for _, writer in (second, third):
            writer.close()


async def test_connection_above_the_limit_evicts_the_longest_idle_one() -> None:
    async with serving(limits=HttpLimits(max_connections=3)) as server:
        kept = []
        for path in ("/one", "/two", "/three"):
            reader, writer = await asyncio.open_connection(server.host, server.port)
            writer.write(request(path))
            await reader.readuntil(b"{} 0")
            kept.append((reader, writer))
        writer = kept[0][1]
        writer.write(request("/again"))  # so that the second connection is idle longest
        await kept[0][0].readuntil(b"{} 0")
        assert (await asked(server, GET))[0] == 200
        assert await kept[1][0].read() == b""
        # The other two connections stay open; a connection within a request is never evicted.
        kept[0][1].write(GET[:-2])
        kept[2][1].write(GET[:-2])
        silent = await asyncio.open_connection(server.host, server.port)
        await until_true(lambda: server.connections == 3, "all places are taken")
        assert (await connected(server)).startswith(b"HTTP/1.1 503 ")
        for reader, writer in (kept[0], kept[2]):
            writer.write(GET[-2:])
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        assert server.refused == 1
        for _, writer in (*kept, silent):
            writer.close()


async def test_log_lines_of_refused_connections_are_rate_limited() -> None:
    limits = HttpLimits(max_connections=0, refusal_log_ms=3_600_000)
    async with serving(limits=limits) as server:
        with capture_logs() as said:
            for _ in range(3):
                assert (await connected(server)).startswith(b"HTTP/1.1 503 ")
            assert [line["count"] for line in said] == [1]
            server.limits = replace(limits, refusal_log_ms=0)
            for _ in range(2):
                assert (await connected(server)).startswith(b"HTTP/1.1 503 ")
        assert [line["count"] for line in said] == [1, 3, 1]
        assert server.refused == 5


async def test_incomplete_request_times_out_with_408() -> None:
    async with serving(limits=HttpLimits(request_timeout_ms=50)) as server:
        for part in (b"", GET[:-2], request("/", "POST", b"12345")[:-1]):
            reader, writer = await asyncio.open_connection(server.host, server.port)
            with closing(writer):
                writer.write(part)
                assert (await reader.readline()).startswith(b"HTTP/1.1 408")


async def test_idle_http_connection_is_closed() -> None:
    async with serving(limits=HttpLimits(idle_timeout_ms=50)) as server:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        with closing(writer):
            writer.write(GET)
            answer = await reader.read()
        assert answer.count(b"HTTP/1.1") == answer.count(b"HTTP/1.1 200") == 1


async def test_client_that_does_not_read_its_response_is_disconnected() -> None:
    limits = HttpLimits(take_timeout_ms=50)
    async with serving(limits=limits) as server:
        # The buffers are too small for the responses to these requests.
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        client.connect((server.host, server.port))
        with client:
            client.sendall(request("/large") * 100)
            await until_true(lambda: server.connections == 1, "the connection is there")
            await until_true(lambda: server.connections == 0, "the connection ends")
        assert len((await asked(server, request("/large")))[2]) == LARGE_BYTES


# --- invalid requests ---


def refusal(check: Callable[[], object]) -> HttpError | None:
    try:
        check()
    except HttpError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET / HTTP/1.1", 400),  # no Host
        (b"GET / HTTP/2.0\r\nHost: a", 505),
        (b"BREW / HTTP/1.1\r\nHost: a", 501),
        (b"get / HTTP/1.1\r\nHost: a", 400),
        (b"GET /", 400),
        (b"GET  / HTTP/1.1\r\nHost: a", 400),
        (b"GET x HTTP/1.1\r\nHost: a", 400),
        (b"GET /%ff HTTP/1.1\r\nHost: a", 400),
        (b"GET /?a=%ff HTTP/1.1\r\nHost: a", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\n folded", 400),
        (b"GET / HTTP/1.1\r\nHost : a", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: a\nb", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -1", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: \xb2", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 1", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: " + b"9" * 5000, 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked", 411),
    ],
)
def test_ambiguous_request_head_is_refused(head: bytes, status: int) -> None:
    with pytest.raises(HttpError) as refused:
        parse_head(head)
    assert refused.value.status == status
    assert str(refused.value).isprintable()


def test_query_with_more_fields_than_the_limit_is_refused() -> None:
    line = "GET /?{} HTTP/1.1\r\nHost: a"
    fields = [f"f{number}=1" for number in range(MAX_QUERY_FIELDS + 1)]
    assert len(parse_head(line.format("&".join(fields[:-1])).encode()).query) == MAX_QUERY_FIELDS
    with pytest.raises(HttpError, match=str(MAX_QUERY_FIELDS)):
        parse_head(line.format("&".join(fields)).encode())


@pytest.mark.parametrize(
    ("names", "host", "status"),
    [
        ({"::1"}, "localhost:9101", None),
        ({"::1"}, "LocalHost.", None),
        ({"::1"}, "app.localhost", None),
        ({"::1"}, "127.0.0.1:9101", None),
        ({"::1"}, "[::1]:9101", None),
        ({"me.example"}, "me.example:9101", None),
        ({"::1"}, "evil.example", 421),
        ({"::1"}, "localhost.evil.example:9101", 421),
        ({"::1"}, "10.0.0.1", 421),
        ({"::1"}, "localhost@evil", 400),
        ({"::1"}, "", 400),
        (None, "broker.example:9101", None),
        (None, "a b", 400),
    ],
)
def test_host_header_must_be_a_local_name_on_a_local_server(
    names: set[str] | None, host: str, status: int | None
) -> None:
    known = None if names is None else frozenset(names)
    refused = refusal(lambda: check_host({"host": host}, known))
    assert (refused and refused.status) == status


def test_request_with_foreign_origin_is_refused() -> None:
    local = frozenset({"127.0.0.1"})
    check_host({"host": "127.0.0.1:1", "origin": "http://127.0.0.1:1"}, local)
    for origin in ("http://evil.example", "http://127.0.0.1:2", "null"):
        for names in (local, None):
            with pytest.raises(HttpError, match="origin"):
                check_host({"host": "127.0.0.1:1", "origin": origin}, names)


def test_server_checks_host_and_origin_of_requests() -> None:
    async def run() -> None:
        async with serving() as local:
            assert (await asked(local, request(Host="evil.example")))[0] == 421
            assert (await asked(local, request(Origin="http://evil.example")))[0] == 403
        async with serving("0.0.0.0") as everywhere:
            assert (await asked(everywhere, request(Host="any.example")))[0] == 200

    asyncio.run(run())


# --- fuzzing ---

CASES = 3_000
PARTS = (
    *(b"GET ", b"POST ", b"/", b"/a?b=c", b" HTTP/1.1", b"\r\n", b"\r\n\r\n", b"Host: localhost"),
    *(b"Content-Length: ", b"7", b":", b",", b"\0", b"%", b"%00", b"\xff", b"\n", b"chunked"),
    *(b"Transfer-Encoding: ", b"Expect: 100-continue", b"Connection: close", b"http://", b"[::1]"),
)


def draw(rng: random.Random) -> bytes:
    """Return a request with random defects, or random request parts."""
    if rng.random() < 0.3:
        return b"".join(rng.choice(PARTS) for _ in range(rng.randrange(30)))
    whole = bytearray(request("/x?y=1", rng.choice(("GET", "POST")), b"1234567"))
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(whole))
        match rng.randrange(3):
            case 0:
                whole[at] = rng.randrange(256)
            case 1:
                whole[at:at] = rng.choice(PARTS)
            case 2:
                del whole[at : at + rng.randrange(20)]
    return bytes(whole)


def test_random_request_head_is_parsed_or_refused() -> None:
    rng = random.Random(1)
    seen = {True: 0, False: 0}
    for _ in range(10 * CASES):
        head = draw(rng).partition(b"\r\n\r\n")[0]
        refused = refusal(lambda head=head: check_host(parse_head(head).headers, frozenset()))
        seen[refused is None] += 1
        if refused is not None:
            assert 400 <= refused.status < 600
            assert str(refused).isprintable()
    assert min(seen.values()) > CASES // 2


async def test_server_survives_random_requests() -> None:
    rng = random.Random(2)
    statuses: dict[int, int] = {}
    async with serving() as server:
        with capture_logs() as said:
            for _ in range(CASES // 10):
                reader, writer = await asyncio.open_connection(server.host, server.port)
                with closing(writer):
                    writer.write(draw(rng))
                    writer.write_eof()
                    answer = await reader.read()
                if answer:
                    status = int(answer.split(b" ", 2)[1])
                    statuses[status] = statuses.get(status, 0) + 1
        assert (await asked(server, GET))[0] == 200
        await until_true(lambda: server.connections == 0, "all connections end")
    assert said == []
    assert {200, 400} <= statuses.keys()
    assert 500 not in statuses
