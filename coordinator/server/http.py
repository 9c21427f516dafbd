"""A small HTTP server for metrics, health checks and test hooks.

One handler answers every request::

    async def handler(request: HttpRequest) -> HttpResponse:
        return HttpResponse(body=b"pong")

    server = await serve_http("127.0.0.1", 0, handler)
    ...  # http://{server.host}:{server.port}/
    await server.close()

A connection is one coroutine with one request at a time. :class:`HttpLimits` bounds each client's
use of the broker; a request that exceeds a limit gets an error in plain text. Clients that send or
receive too slowly are disconnected. An exception in the handler is logged, and the response is 500.
"""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import structlog

from fencepost.coordinator.runtime.background import log_failure, spawn
from fencepost.coordinator.server.http_messages import (
    LAST_CHUNK,
    TEXT,
    HttpError,
    HttpRequest,
    HttpResponse,
    RequestHead,
    check_host,
    chunk,
    is_loopback,
    parse_head,
    response_head,
    text_response,
)
from fencepost.coordinator.server.listener import Listener, first_reserved_file
from fencepost.logcore.values import dataclass

__all__ = [
    "TEXT",
    "HttpError",
    "HttpLimits",
    "HttpRequest",
    "HttpResponse",
    "HttpServer",
    "serve_http",
]

_log = structlog.get_logger(__name__)

Handler = Callable[[HttpRequest], Awaitable[HttpResponse]]
"""Returns the response to one request, or raises HttpError."""

Tls = Callable[[], Awaitable[ssl.SSLContext]]
"""Returns the TLS context of a connection."""

_Idle = dict[asyncio.StreamWriter, None]
"""The connections that wait for their next request, the longest waiting first."""

PIECE_BYTES = 65_536
"""The size of the parts of a body; the next part is written when the previous one is sent."""

LINGER_BYTES = 1_048_576
"""The maximum number of bytes read and dropped after an error response to an incomplete request.
Closing the socket with unread bytes would cause a reset, and the client would lose the response."""

LINGER_MS = 1_000
"""The time limit for reading the bytes after an error response."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """The limits of one server's clients."""

    max_head_bytes: int = 8_192
    """The maximum size of a request line and its headers, including the empty line (431)."""
    max_body_bytes: int = 65_536
    """The maximum size of a request's body (413)."""
    max_connections: int = 64
    """The maximum number of open connections. A new connection replaces the longest idle one; if
    none is idle, the new connection is refused (503)."""
    refusal_log_ms: int = 5_000
    """The minimum interval between log lines about refused connections; a line gives their number.
    """
    request_timeout_ms: int = 10_000
    """The time limit for receiving a request, from its first byte; for the first request, from the
    moment the connection is opened (408)."""
    idle_timeout_ms: int = 90_000
    """The maximum time between two requests: longer than the usual interval of Prometheus, a
    minute."""
    take_timeout_ms: int = 10_000
    """The time in which a client must receive :data:`PIECE_BYTES` of a response."""


async def serve_http(
    host: str,
    port: int,
    handler: Handler,
    *,
    limits: HttpLimits | None = None,
    tls: Tls | None = None,
) -> HttpServer:
    """Listen on ``host:port`` (port 0: any free one) until the result is closed.

    Raises OSError if the address cannot be bound.
    """
    loop = asyncio.get_running_loop()
    # asyncio resolves the name and binds; our listeners accept the connections.
    bound = await loop.create_server(asyncio.Protocol, host, port, start_serving=False)
    try:
        sockets = [listening_socket.dup() for listening_socket in bound.sockets]
    finally:
        bound.close()
    return HttpServer(loop, host, sockets, handler, limits or HttpLimits(), tls)


class HttpServer:
    """Created by :func:`serve_http`; serves until :meth:`close`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        host: str,
        sockets: list[socket.socket],
        handler: Handler,
        limits: HttpLimits,
        tls: Tls | None = None,
    ) -> None:
        self.limits = limits
        self._tls = tls
        self.refused = 0
        """The number of connections refused so far because of a limit."""
        self._handler = handler
        self._loop = loop
        self._unlogged = 0
        self._logged_at_s = -math.inf
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle: _Idle = {}
        self._listeners = [
            Listener(loop, listening_socket, self._arrived) for listening_socket in sockets
        ]
        self.host, self.port = self._listeners[0].address
        """The address it listens on."""
        is_local = all(is_loopback(listener.address[0]) for listener in self._listeners)
        self._names = frozenset({host.lower()}) if is_local else None

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._tasks)

    async def close(self) -> None:
        """Stop accepting and end every connection, busy or not."""
        for listener in self._listeners:
            listener.close()
        self._listeners = []
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _arrived(self, client: socket.socket, _address: Any) -> None:
        if client.fileno() >= first_reserved_file():
            self._refuse(client, "no file descriptor is left for connections")
        elif len(self._tasks) >= self.limits.max_connections and not self._displace():
            self._refuse(client, f"at most {self.limits.max_connections} connections are open")
        else:
            task = spawn(self._connected(client), "an HTTP connection")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _displace(self) -> bool:
        """Close the longest idle connection; return False if none is idle."""
        for longest in self._idle:
            del self._idle[longest]
            longest.close()
            return True
        return False

    def _refuse(self, client: socket.socket, why: str) -> None:
        self.refused += 1
        self._unlogged += 1
        now = self._loop.time()
        if (now - self._logged_at_s) * 1000 >= self.limits.refusal_log_ms:
            _log.warning("HTTP connections refused", count=self._unlogged, cause=why)
            self._unlogged, self._logged_at_s = 0, now
        refusal = text_response(503, why)
        with suppress(OSError), client:
            if self._tls is not None:
                return
            client.setblocking(False)
            client.send(_as_bytes(refusal))
            client.shutdown(socket.SHUT_WR)
            client.recv(PIECE_BYTES)  # unread data would cause a reset and lose the response

    async def _connected(self, client: socket.socket) -> None:
        try:
            reader, writer = await self._opened(client)
        except OSError:
            # A failed or slow handshake is not logged: it concerns only its client.
            client.close()
            return
        connection = _HttpConnection(
            self.limits, self._names, self._handler, self._idle, reader, writer
        )
        try:
            with suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
                await connection.serve()
        finally:
            # Data is left if the client is too slow, or the task was cancelled.
            if writer.transport.get_write_buffer_size():
                writer.transport.abort()
            else:
                writer.close()

    async def _opened(
        self, client: socket.socket
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return the streams of a connection, with TLS if configured. Raises OSError."""
        limit = self.limits.max_head_bytes - len(_HEAD_END)
        if self._tls is None:
            return await asyncio.open_connection(sock=client, limit=limit)
        reader = asyncio.StreamReader(limit=limit, loop=self._loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=self._loop)
        transport, _ = await self._loop.connect_accepted_socket(
            lambda: protocol,
            client,
            ssl=await self._tls(),
            ssl_handshake_timeout=self.limits.request_timeout_ms / 1000,
            ssl_shutdown_timeout=LINGER_MS / 1000,
        )
        return reader, asyncio.StreamWriter(transport, protocol, reader, self._loop)


_HEAD_END = b"\r\n\r\n"


def _as_bytes(response: HttpResponse) -> bytes:
    """Encode a connection's last response, which has a short body."""
    body = response.body if isinstance(response.body, bytes) else b""
    return response_head(response, is_1_0=False, keeps_alive=False) + body


class _HttpConnection:
    """One client connection. It ends with an error response to a request that cannot be read."""

    def __init__(
        self,
        limits: HttpLimits,
        names: frozenset[str] | None,
        handler: Handler,
        idle: _Idle,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._limits, self._names, self._handler, self._idle = limits, names, handler, idle
        self._reader, self._writer = reader, writer
        # Make drain() wait until the socket has taken every byte. (With asyncio's TLS, drain() also
        # waits while the buffer size equals the limit; with limit 0 it would wait forever.)
        is_encrypted = writer.get_extra_info("ssl_object") is not None
        writer.transport.set_write_buffer_limits(high=int(is_encrypted), low=0)

    async def serve(self) -> None:
        """Answer requests until the connection ends.

        Raises OSError, TimeoutError or IncompleteReadError if the client ends the connection.
        """
        first = b""
        while True:
            try:
                head, body = await self._read(first)
            except HttpError as error:
                await self._write(_as_bytes(text_response(error.status, str(error), error.headers)))
                await self._linger()
                return
            response = await self._handled(head, body)
            if not await self._answer(head, response):
                return
            first = await self._read_next()

    # --- requests ---

    async def _read_next(self) -> bytes:
        """Return the first byte of the next request. Raises TimeoutError, IncompleteReadError."""
        self._idle[self._writer] = None
        try:
            async with asyncio.timeout(self._limits.idle_timeout_ms / 1000):
                return await self._reader.readexactly(1)
        finally:
            self._idle.pop(self._writer, None)

    async def _read(self, first: bytes) -> tuple[RequestHead, bytes]:
        """Read a request after ``first``, its first byte. Raises HttpError, IncompleteReadError."""
        limits = self._limits
        try:
            async with asyncio.timeout(limits.request_timeout_ms / 1000):
                head = parse_head(await self._read_head(first))
                check_host(head.headers, self._names)
                if head.body_bytes > limits.max_body_bytes:
                    raise HttpError(
                        413,
                        (
                            f"the limit of a body is {limits.max_body_bytes} bytes; it has"
                            f" {head.body_bytes}"
                        ),
                    )
                if head.headers.get("expect", "").lower() == "100-continue":
                    await self._write(b"HTTP/1.1 100 Continue\r\n\r\n")
                return head, await self._reader.readexactly(head.body_bytes)
        except TimeoutError:
            raise HttpError(
                408, f"the request was not complete within {limits.request_timeout_ms} ms"
            ) from None

    async def _read_head(self, first: bytes) -> bytes:
        most = self._limits.max_head_bytes
        with suppress(asyncio.LimitOverrunError):
            head = first + await self._reader.readuntil(_HEAD_END)
            if len(head) <= most:
                return head
        raise HttpError(431, f"request line and headers have more than {most} bytes")

    async def _linger(self) -> None:
        """Let the client read an error response before the connection is closed."""
        if self._writer.can_write_eof():
            self._writer.write_eof()
        left = LINGER_BYTES
        async with asyncio.timeout(LINGER_MS / 1000):
            while left > 0 and (dropped := await self._reader.read(PIECE_BYTES)):
                left -= len(dropped)

    # --- responses ---

    async def _handled(self, head: RequestHead, body: bytes) -> HttpResponse:
        request = HttpRequest(head.method, head.path, head.query, head.headers, body)
        try:
            return await self._handler(request)
        except HttpError as error:
            return text_response(error.status, str(error), error.headers)
        except Exception as error:  # noqa: BLE001 - a handler's failure affects only its request
            log_failure("an HTTP request", error, path=head.path)
            return text_response(500, "the request failed; see the log of the broker")

    async def _answer(self, head: RequestHead, response: HttpResponse) -> bool:
        """Send a response; return whether the connection remains open."""
        body = response.body
        is_whole = isinstance(body, bytes)
        keeps_alive = head.keeps_alive and (is_whole or not head.is_1_0)
        start = response_head(response, is_1_0=head.is_1_0, keeps_alive=keeps_alive)
        if isinstance(body, bytes):
            sent = start if head.method == "HEAD" else start + body
            for at in range(0, len(sent), PIECE_BYTES):
                await self._write(sent[at : at + PIECE_BYTES])
            return keeps_alive
        try:
            await self._write(start)
            if head.method != "HEAD":
                await self._write_pieces(body, in_chunks=not head.is_1_0)
        finally:
            if isinstance(body, AsyncGenerator):
                await body.aclose()
        return keeps_alive

    async def _write_pieces(self, body: AsyncIterator[bytes], *, in_chunks: bool) -> None:
        """Send the parts of an iterator; if it raises, the client gets a truncated response."""
        try:
            async for piece in body:
                if piece:
                    await self._write(chunk(piece) if in_chunks else piece)
        except OSError:
            raise
        except Exception as error:
            log_failure("an HTTP answer", error)
            self._writer.transport.abort()
            raise ConnectionAbortedError from error
        if in_chunks:
            await self._write(LAST_CHUNK)

    async def _write(self, data: bytes) -> None:
        """Write, and wait until the socket has taken all of it. Raises OSError."""
        self._writer.write(data)
        try:
            async with asyncio.timeout(self._limits.take_timeout_ms / 1000):
                await self._writer.drain()
        except TimeoutError:
            self._writer.transport.abort()
            raise ConnectionAbortedError("an answer is taken too slowly") from None
