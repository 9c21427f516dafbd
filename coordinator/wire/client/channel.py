"""One client connection to one broker: frames out, frames in, in order.

Two forms with the same asynchronous face. :class:`AsyncChannel` lives on an event loop and lets
several requests be under way; :class:`BlockingChannel` does its work inside the call, so that a
coroutine which uses it never really suspends and can be run without a loop.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol, Self

from fencepost.coordinator.wire.errors import WireError
from fencepost.coordinator.wire.limits import MAX_RESPONSE_BYTES
from fencepost.coordinator.wire.writer import Chunk

_LENGTH = struct.Struct(">i")


class ConnectionLostError(WireError):
    """The connection failed or timed out with a request under way; its fate is unknown."""


class BrokerUnreachable(WireError):  # noqa: N818 - says what it is
    """No connection to any of the brokers tried could be made, or one was lost."""


class Channel(Protocol):
    """A connection; requests are answered in the order in which they were sent."""

    closed: bool

    async def exchange(
        self, chunks: list[Chunk], *, answered: bool, timeout_ms: float
    ) -> bytes | None:
        """Send one request frame; return the response frame without its length.

        With ``answered`` False (acks=0) there is none, and None is returned as soon as the request
        is on its way. Raises :class:`ConnectionLostError` and closes if the time is up.
        """

    def close(self) -> None:
        """Close the connection; requests under way fail."""


class Io(NamedTuple):
    """What a client needs of its surroundings."""

    connect: Callable[[str, int, float], Awaitable[Channel]]
    """Opens a channel to host and port within so many milliseconds. Raises OSError."""
    sleep: Callable[[float], Awaitable[None]]
    """Waits for so many seconds."""


def _response_size(prefix: bytes) -> int:
    size: int = _LENGTH.unpack(prefix)[0]
    if not 0 <= size <= MAX_RESPONSE_BYTES:
        raise ConnectionLostError(f"a response of {size} bytes; the limit is {MAX_RESPONSE_BYTES}")
    return size


class BlockingChannel:
    """A blocking socket with a deadline per request."""

    def __init__(self, sock: socket.socket, address: tuple[str, int]) -> None:
        self._socket = sock
        self._where = f"{address[0]}:{address[1]}"
        self.closed = False

    @classmethod
    async def connect(cls, host: str, port: int, timeout_ms: float) -> Self:
        """Connect within the time. Raises OSError (TimeoutError among them)."""
        sock = socket.create_connection((host, port), timeout_ms / 1000)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return cls(sock, (host, port))

    async def exchange(
        self, chunks: list[Chunk], *, answered: bool, timeout_ms: float
    ) -> bytes | None:
        """See :class:`Channel`."""
        deadline = time.monotonic() + timeout_ms / 1000
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
            raise ConnectionLostError(f"{self._where}: {error}") from error
        except BaseException:
            # Ctrl-C among them: the next one to ask would be given the answer that is under way.
            self.close()
            raise

    def _receive(self, size: int, deadline: float) -> bytes:
        parts: list[bytes] = []
        while size:
            self._socket.settimeout(_left(deadline))
            part = self._socket.recv(min(size, 1 << 20))
            if not part:
                raise ConnectionLostError(f"{self._where}: closed by broker")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        """See :class:`Channel`."""
        self.closed = True
        self._socket.close()


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("no answer in time")
    return left


class AsyncChannel:
    """A pair of streams; a task reads responses and gives them to whoever waits the longest."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: tuple[str, int]
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._waiting: deque[asyncio.Future[bytes]] = deque()
        self._task = asyncio.create_task(self._read())
        self._where = f"{address[0]}:{address[1]}"
        self.closed = False

    @classmethod
    async def connect(cls, host: str, port: int, timeout_ms: float) -> Self:
        """Connect within the time. Raises OSError (TimeoutError among them)."""
        reader, writer = await asyncio.wait_for(
            asyncio.open_connection(host, port), timeout_ms / 1000
        )
        return cls(reader, writer, (host, port))

    async def exchange(
        self, chunks: list[Chunk], *, answered: bool, timeout_ms: float
    ) -> bytes | None:
        """See :class:`Channel`."""
        if self.closed:
            raise ConnectionLostError(f"{self._where}: closed")
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
            # A broker that is silent for so long is as good as gone. (A call that is cancelled
            # instead leaves its place in the queue, and its response is dropped when it comes.)
            self._fail(f"gave up waiting: {type(error).__name__}")
            raise ConnectionLostError(f"{self._where}: {error or 'no answer in time'}") from error

    async def _read(self) -> None:
        try:
            while True:
                size = _response_size(await self._reader.readexactly(_LENGTH.size))
                frame = await self._reader.readexactly(size)
                if not self._waiting:
                    self._fail("a response that nobody asked for")
                    return
                answer = self._waiting.popleft()
                if not answer.done():
                    answer.set_result(frame)
        except (OSError, EOFError, WireError) as error:
            self._fail(f"closed by broker ({error})" if isinstance(error, EOFError) else str(error))

    def _fail(self, reason: str) -> None:
        self.closed = True
        self._writer.close()
        waiting, self._waiting = self._waiting, deque()
        for answer in waiting:
            if not answer.done():
                answer.set_exception(ConnectionLostError(f"{self._where}: {reason}"))
                answer.exception()  # the one who waits may have gone; that is no news then

    def close(self) -> None:
        """See :class:`Channel`."""
        self._task.cancel()
        self._fail("closed by us")


async def _sleep(seconds: float) -> None:
    time.sleep(seconds)  # noqa: ASYNC251 - there is no event loop to block


BLOCKING = Io(BlockingChannel.connect, _sleep)
"""Sockets and sleeping without an event loop."""

ASYNC = Io(AsyncChannel.connect, asyncio.sleep)
"""Streams and sleeping on the running event loop."""
