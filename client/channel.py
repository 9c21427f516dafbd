"""One client connection to one broker: frames out, frames in, in order.

:class:`Channel`, an asynchronous interface, has two implementations. :class:`AsyncChannel` runs on
an event loop and allows several requests in flight. :class:`BlockingChannel` blocks inside the
call, so that a coroutine which uses it never suspends and can be run without an event loop.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Protocol, Self

from fencepost.client.tls_errors import refusal
from fencepost.logcore.clock import monotonic_s
from fencepost.logcore.tracebacks import without_traceback
from fencepost.protocol.errors import WireError
from fencepost.protocol.limits import MAX_RESPONSE_BYTES
from fencepost.protocol.writer import Chunk

_LENGTH = struct.Struct(">i")
_TLS_ALERT = b"\x15\x03"
"""The first bytes of a TLS alert, the response of a TLS listener to a plaintext request."""


SHUTDOWN_S = 1.0
"""The time in seconds that the client waits for the broker's close_notify at the end of TLS."""


class ConnectionLostError(WireError):
    """The connection failed or timed out; the outcome of a request in flight is unknown."""


class BrokerUnreachable(WireError):  # noqa: N818 - says what it is
    """No connection to any of the tried brokers could be made, or a connection was lost."""


class AuthenticationError(WireError):
    """Authentication of the client or of the broker failed, so a retry would not help."""


class Channel(Protocol):
    """A connection; the broker answers requests in the order in which they were sent."""

    closed: bool
    where: str
    """HOST:PORT of the broker."""

    async def exchange(
        self, chunks: list[Chunk], *, answered: bool, timeout_ms: float
    ) -> bytes | None:
        """Send one request frame; return the response frame without its length.

        With ``answered`` False (acks=0) no response exists, and None is returned once the request
        is sent. On a timeout the channel closes and raises :class:`ConnectionLostError`.
        """

    def close(self) -> None:
        """Close the connection; requests in flight fail."""


class Io(NamedTuple):
    """The I/O functions that a client uses."""

    connect: Callable[[str, int, float, ssl.SSLContext | None], Awaitable[Channel]]
    """Opens a channel to a host and port within a number of milliseconds, with TLS if a context is
    given. Raises OSError, and AuthenticationError."""
    sleep: Callable[[float], Awaitable[None]]
    """Waits for a number of seconds."""
    run: Callable[[Callable[[], bytes | None]], Awaitable[bytes | None]]
    """Runs a slow function without blocking the caller's event loop."""


def _response_size(prefix: bytes) -> int:
    size: int = _LENGTH.unpack(prefix)[0]
    if prefix[:2] == _TLS_ALERT:
        raise AuthenticationError("the listener speaks TLS: security.protocol is SSL or SASL_SSL")
    if not 0 <= size <= MAX_RESPONSE_BYTES:
        raise ConnectionLostError(f"a response of {size} bytes; the limit is {MAX_RESPONSE_BYTES}")
    return size


class BlockingChannel:
    """A blocking socket with a deadline per request."""

    def __init__(self, sock: socket.socket, address: tuple[str, int]) -> None:
        self._socket = sock
        self.where = f"{address[0]}:{address[1]}"
        self.closed = False

    @classmethod
    async def connect(
        cls, host: str, port: int, timeout_ms: float, tls: ssl.SSLContext | None = None
    ) -> Self:
        """Connect within the timeout. Raises OSError, including TimeoutError."""
        deadline = monotonic_s() + timeout_ms / 1000
        sock = socket.create_connection((host, port), timeout_ms / 1000)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if tls is not None:
                sock.settimeout(_left(deadline))
                sock = tls.wrap_socket(sock, server_hostname=host)
        except BaseException as error:
            sock.close()
            if isinstance(error, OSError):
                raise tls_connect_error(error, host, port) from error
            raise
        return cls(sock, (host, port))

    async def exchange(
        self, chunks: list[Chunk], *, answered: bool, timeout_ms: float
    ) -> bytes | None:
        """See :class:`Channel`."""
        deadline = monotonic_s() + timeout_ms / 1000
        try:
            for chunk in chunks:
                self._socket.settimeout(_left(deadline))
                self._socket.sendall(chunk)
            if not answered:
                return None
            size = _response_size(self._receive(_LENGTH.size, deadline))
            return self._receive(size, deadline)
        except OSError as error:
            self.close()
            raise _broken(error, self.where) from error
        except AuthenticationError as error:
            self.close()
            raise AuthenticationError(f"{self.where}: {error}") from None
        except BaseException:
            # Close even on Ctrl-C: otherwise the next request would get the response to this
            # request.
            self.close()
            raise

    def _receive(self, size: int, deadline: float) -> bytes:
        parts: list[bytes] = []
        while size:
            self._socket.settimeout(_left(deadline))
            part = self._socket.recv(min(size, 1 << 20))
            if not part:
                raise ConnectionLostError(f"{self.where}: closed by broker")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        """See :class:`Channel`."""
        self.closed = True
        self._socket.close()


def tls_connect_error(error: OSError, host: str, port: int) -> Exception:
    """Return the exception to raise for an error while connecting with TLS."""
    if reason := refusal(error, host):
        return AuthenticationError(f"{host}:{port}: {reason}")
    if isinstance(error, TimeoutError) or not isinstance(
        error, (ssl.SSLError, ConnectionResetError, BrokenPipeError)
    ):
        return error
    return ConnectionResetError(
        "closed during the TLS handshake; perhaps the listener does not use TLS (its"
        " security.protocol is PLAINTEXT or SASL_PLAINTEXT), or it requires a client"
        " certificate (ssl.keystore.location)"
    )


def _broken(error: OSError, where: str) -> WireError:
    """Return the exception for a connection that failed with a request in flight."""
    if reason := refusal(error, where):
        return AuthenticationError(f"{where}: {reason}")
    return ConnectionLostError(f"{where}: {str(error) or 'no answer in time'}")


def _left(deadline: float) -> float:
    left = deadline - monotonic_s()
    if left <= 0:
        raise TimeoutError("no answer in time")
    return left


class AsyncChannel:
    """A pair of streams; a task reads responses and gives each to the oldest waiting request."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: tuple[str, int]
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._waiting: deque[asyncio.Future[bytes]] = deque()
        self._task = asyncio.create_task(self._read())
        self.where = f"{address[0]}:{address[1]}"
        self.closed = False

    @classmethod
    async def connect(
        cls, host: str, port: int, timeout_ms: float, tls: ssl.SSLContext | None = None
    ) -> Self:
        """Connect within the timeout. Raises OSError, including TimeoutError."""
        encrypted: dict[str, Any] = (
            {} if tls is None else {"ssl": tls, "ssl_shutdown_timeout": SHUTDOWN_S}
        )
        try:
            # Up to Python 3.11, wait_for may swallow a cancellation.
            async with asyncio.timeout(timeout_ms / 1000):
                reader, writer = await asyncio.open_connection(host, port, **encrypted)
        except OSError as error:
            raise (tls_connect_error(error, host, port) if tls else error) from error
        return cls(reader, writer, (host, port))

    async def exchange(
        self, chunks: list[Chunk], *, answered: bool, timeout_ms: float
    ) -> bytes | None:
        """See :class:`Channel`."""
        if self.closed:
            raise ConnectionLostError(f"{self.where}: closed")
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        if answered:
            self._waiting.append(answer)
        for chunk in chunks:
            self._writer.write(chunk)
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await self._writer.drain()
                return await answer if answered else None
        except OSError as error:
            # A broker that does not respond in time is treated as disconnected. (A cancelled call
            # keeps its place in the queue, and its response is dropped when it arrives.)
            problem = _broken(error, self.where)
            self._fail(ConnectionLostError(f"{self.where}: gave up waiting: {problem}"))
            raise problem from error

    async def _read(self) -> None:
        try:
            while True:
                size = _response_size(await self._reader.readexactly(_LENGTH.size))
                frame = await self._reader.readexactly(size)
                if not self._waiting:
                    self._fail(ConnectionLostError(f"{self.where}: a response without a request"))
                    return
                answer = self._waiting.popleft()
                if not answer.done():
                    answer.set_result(frame)
        except EOFError as error:
            self._fail(ConnectionLostError(f"{self.where}: closed by broker ({error})"))
        except OSError as error:
            self._fail(_broken(error, self.where))
        except WireError as error:
            self._fail(type(error)(f"{self.where}: {error}"))

    def _fail(self, problem: WireError) -> None:
        self.closed = True
        self._writer.close()
        waiting, self._waiting = self._waiting, deque()
        for answer in waiting:
            if not answer.done():
                answer.set_exception(without_traceback(type(problem)(str(problem))))
                # Retrieved here, so that asyncio does not log it if the caller was cancelled.
                answer.exception()

    def close(self) -> None:
        """See :class:`Channel`."""
        self._task.cancel()
        self._fail(ConnectionLostError(f"{self.where}: closed by us"))


async def _sleep(seconds: float) -> None:
    time.sleep(seconds)  # noqa: ASYNC251 - there is no event loop to block


async def _run(work: Callable[[], bytes | None]) -> bytes | None:
    return work()


BLOCKING = Io(BlockingChannel.connect, _sleep, _run)
"""Sockets and sleeping without an event loop."""

ASYNC = Io(AsyncChannel.connect, asyncio.sleep, asyncio.to_thread)
"""Streams and sleeping on the running event loop."""
