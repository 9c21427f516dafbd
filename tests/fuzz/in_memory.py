"""A broker connection without a socket: bytes arrive in fragments, and responses are stored."""

from __future__ import annotations

import asyncio
import random
import struct
from typing import Any

from fencepost.coordinator.config.listener_config import ListenerConfig
from fencepost.coordinator.security.principal import ANONYMOUS
from fencepost.coordinator.server.connection import Connection
from fencepost.coordinator.server.server import Server
from fencepost.protocol.writer import Chunk


class Link(asyncio.Transport):
    """The socket of a connection, and the client at its other end."""

    def __init__(
        self,
        server: Server,
        listener: ListenerConfig,
        rng: random.Random,
    ) -> None:
        super().__init__()
        self._loop, self._rng = server.loop, rng
        self._inbox = bytearray()
        self._is_reading, self._is_pumping = True, False
        self._out = bytearray()
        self._changed = asyncio.Event()
        self.sent: list[bytes] = []
        """Complete frames that the client has sent, without their length."""
        self.messages = 0
        """The number of messages that the client has sent, complete or not."""
        self._stream = bytearray()
        self.answers: list[bytes] = []
        """Complete frames of the broker, without their length; none with encryption."""
        self.encrypted = bytearray()
        """Encrypted bytes of the broker, which the client has not taken yet."""
        self.is_closed = False
        self.most_held = 0
        """The largest number of bytes that the broker held for this client before the login."""
        self.connection = Connection(server, listener)
        self._tls = server._encrypted(self.connection) if listener.is_tls else None
        self._protocol: asyncio.BufferedProtocol = self._tls or self.connection
        self._protocol.connection_made(self)

    # --- the client ---

    def send(self, data: bytes) -> None:
        """Send arbitrary bytes."""
        self.messages += 1
        self._inbox += data
        self._stream += b"" if self._tls else data
        while len(self._stream) >= 4:
            size = int.from_bytes(self._stream[:4], signed=True)
            if size < 0 or len(self._stream) < size + 4:
                break
            self.sent.append(bytes(self._stream[4 : size + 4]))
            del self._stream[: size + 4]
        self._pump_soon()

    async def heard(self, count: int, timeout_s: float = 20) -> bool:
        """Wait for ``count`` responses in total; return False if the broker closes first."""
        async with asyncio.timeout(timeout_s):
            while len(self.answers) < count and not self.is_closed:
                self._changed.clear()
                await self._changed.wait()
        return len(self.answers) >= count

    async def drained(self, turns: int = 200_000) -> None:
        """Wait until the broker has read everything or closed; fail after ``turns`` turns."""
        for _ in range(turns):
            if not self._inbox or self.is_closed:
                return
            await asyncio.sleep(0)
        raise AssertionError("not read")

    def leave(self) -> None:
        """Close the connection as a client does."""
        if not self.is_closed and not self._protocol.eof_received():
            self.close()

    # --- the socket ---

    def _pump_soon(self) -> None:
        if self._inbox and self._is_reading and not self._is_pumping and not self.is_closed:
            self._is_pumping = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Deliver bytes, but not more than one read of a socket would return."""
        self._is_pumping = False
        if not self._is_reading or self.is_closed:
            return
        view = memoryview(self._protocol.get_buffer(-1))
        most = self._rng.choice((1, 3, 17, 600, 1 << 20)) if len(self._inbox) < 4096 else 1 << 20
        size = min(len(view), len(self._inbox), most)
        view[:size] = self._inbox[:size]
        del view, self._inbox[:size]
        self._protocol.buffer_updated(size)
        self.measure()
        self._pump_soon()

    def measure(self) -> None:
        """Record the bytes that the broker holds."""
        connection = self.connection
        if connection.session.principal != ANONYMOUS:
            return
        held = len(connection._frames._buffer) + connection._stream.unsent_bytes
        if self._tls is not None:
            held += self._tls._incoming.pending + self._tls._outgoing.pending
        self.most_held = max(self.most_held, held)

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        self._is_reading = True
        self._pump_soon()

    def write(self, data: Chunk) -> None:
        if self.is_closed:
            return
        if self._tls is not None:
            self.encrypted += data
            return
        self._out += data
        while len(self._out) >= 4:
            (size,) = struct.unpack_from(">i", self._out)
            if len(self._out) < size + 4:
                break
            self.answers.append(bytes(self._out[4 : size + 4]))
            del self._out[: size + 4]
        self._changed.set()

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._loop.call_soon(self._protocol.connection_lost, None)
            self._changed.set()

    abort = close

    def is_closing(self) -> bool:
        return self.is_closed

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 4711) if name == "peername" else default
