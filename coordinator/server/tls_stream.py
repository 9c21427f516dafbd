"""TLS between a socket and its connection: a protocol for asyncio, a transport for the connection.

asyncio's TLS has three disadvantages. It reports a connection only after the handshake, so that
connection limits would not count unfinished handshakes. It takes a buffer of 256 KiB per
connection. It performs all simultaneous handshakes in one turn of the event loop. With this module
a connection exists from the first byte, all connections share one receive buffer, and handshakes
take turns.

Encrypted data waits in the socket's transport like any response, so a client that does not read
only pauses its own connection, as without TLS.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, cast

import structlog

from fencepost.coordinator.runtime.background import call_later, log_failure
from fencepost.coordinator.runtime.rate_limited_log import RateLimitedLog
from fencepost.coordinator.security.tls import ListenerTls, reason_of
from fencepost.coordinator.server.connection import Connection
from fencepost.logcore.clock import monotonic_s

log = structlog.get_logger(__name__)

HANDSHAKES_MS: Final = 2
"""The time in milliseconds for which handshakes may occupy the event loop before other work gets
its turn: two to four handshakes."""

RECEIVED_BYTES: Final = 32_768
"""The maximum number of bytes read from a socket at once, and kept encrypted while a request is
served."""

HANDSHAKE_BYTES: Final = 65_536
"""The maximum size of a client's handshake data. OpenSSL alone would hold 128 KiB of a ClientHello
and 100 KiB of certificates. A legitimate ClientHello has 2 KiB, and a certificate with its chain
seldom has more than 10 KiB."""

ENCRYPTED_BYTES: Final = 65_536
"""The maximum number of bytes encrypted at once. OpenSSL keeps a buffer of this size until the
connection ends."""

_HANDSHAKE_RECORD: Final = 0x16


class Handshakes:
    """Makes the handshakes of one event loop take turns with other work."""

    def __init__(self, loop: asyncio.AbstractEventLoop, timeout_ms: int) -> None:
        self.loop = loop
        self.timeout_ms = timeout_ms
        self.buffer = memoryview(bytearray(RECEIVED_BYTES))
        """The receive buffer, which all streams share; a stream takes its data out at once."""
        self.lines = RateLimitedLog("more handshakes failed")
        self._queue: deque[TlsStream] = deque()

    def queue(self, stream: TlsStream) -> None:
        """Schedule a stream to process its received handshake data."""
        self._queue.append(stream)
        if len(self._queue) == 1:
            self.loop.call_soon(self._next)

    def _next(self) -> None:
        until = monotonic_s() + HANDSHAKES_MS / 1000
        while self._queue:
            # The stream stays in the queue during the step, so that ``queue`` does not schedule
            # ``_next`` a second time.
            self._queue[0].guarded(self._queue[0].shake_hands)
            self._queue.popleft()
            if self._queue and monotonic_s() >= until:
                self.loop.call_soon(self._next)
                return


class TlsStream(asyncio.Transport, asyncio.BufferedProtocol):
    """The TLS layer between one client and its connection."""

    def __init__(self, connection: Connection, tls: ListenerTls, handshakes: Handshakes) -> None:
        super().__init__()
        self._connection: Connection | None = connection
        self._tls, self._handshakes = tls, handshakes
        self._socket: asyncio.Transport = cast("asyncio.Transport", None)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._cipher: ssl.SSLObject
        self._timer: asyncio.TimerHandle | None = None
        self._received_bytes = 0
        """The received bytes of the handshake."""
        self._is_queued = False
        self._is_shaken = False
        self._is_reading = True
        self._is_writable = True
        self._is_closing = False

    # --- socket callbacks ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the handshake of a new client connection."""
        self._socket = cast("asyncio.Transport", transport)
        connection = self._connection
        if connection is None:
            return
        connection.connection_made(self)
        if connection.closed:
            return
        self._cipher = self._tls.context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        shared = self._handshakes
        self._timer = call_later(shared.loop, shared.timeout_ms, "handshake", self._time_is_up)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - fixed size
        """Return the memory that the event loop receives into."""
        return self._handshakes.buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Handle ``nbytes`` received encrypted bytes."""
        received = self._handshakes.buffer[:nbytes]
        if self._is_shaken:
            self._incoming.write(received)
            self._deliver()
        elif not self._received_bytes and received[0] != _HANDSHAKE_RECORD:
            self._fail("it does not begin with TLS: a client that speaks PLAINTEXT?")
        elif self._received_bytes > HANDSHAKE_BYTES:
            self._fail(f"it has more than {HANDSHAKE_BYTES} bytes")
        else:
            self._received_bytes += nbytes
            self._incoming.write(received)
            self._is_queued = True
            # Data that follows the handshake must wait until the handshake is processed.
            self._socket.pause_reading()
            self._handshakes.queue(self)

    def eof_received(self) -> bool:
        """Close the connection at the client's EOF, as without TLS."""
        return False

    def pause_writing(self) -> None:
        """Stop reading while the socket is full."""
        self._is_writable = False
        self._socket.pause_reading()
        if self._connection is not None:
            self._connection.pause_writing()

    def resume_writing(self) -> None:
        """Resume: the socket has taken all written data."""
        self._is_writable = True
        self._read_on()
        if self._connection is not None:
            self._connection.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the loss of the socket."""
        self._end_timer()
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if not self._is_shaken and not self._is_closing:
            self._count(connection, "the client went away" if exc is None else str(exc))
        self._is_closing = True
        connection.connection_lost(exc)

    def guarded(self, step: Callable[[], None]) -> None:
        """Run a step outside of asyncio's callbacks; an unexpected error closes the connection."""
        try:
            step()
        except Exception as error:  # noqa: BLE001 - as asyncio does with a protocol
            log_failure("TLS", error)
            self.abort()

    # --- handshakes ---

    def shake_hands(self) -> None:
        """Process received handshake data; called only by :class:`Handshakes`."""
        self._is_queued = False
        connection = self._connection
        if connection is None or self._is_closing:
            return
        try:
            self._cipher.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            self._read_on()
            return
        except ssl.SSLError as error:
            self._flush()
            self._fail(reason_of(error))
            return
        self._flush()
        if not connection.listener.is_sasl:
            principal = self._tls.principal_of(self._cipher.getpeercert(binary_form=True))
            if principal is None:
                self._fail("no rule of ssl.principal.mapping.rules is for its certificate")
                return
            connection.identified(principal)
        self._is_shaken = True
        self._end_timer()
        self._read_on()
        self._deliver()

    def _time_is_up(self) -> None:
        self._fail(f"it was not done within {self._handshakes.timeout_ms} ms")

    def _fail(self, reason: str) -> None:
        if self._connection is not None:
            self._count(self._connection, reason)
        self._is_closing = True
        self._end_timer()
        self._socket.close()

    def _count(self, connection: Connection, reason: str) -> None:
        self._tls.handshake_failures += 1
        if self._handshakes.lines.may_log(self._handshakes.loop.time() * 1000):
            name = connection.listener.name
            log.info("handshake failed", listener=name, peer=connection.peer, reason=reason)

    def _end_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # --- bytes in ---

    def _deliver(self) -> None:
        """Pass received data to the connection, until it pauses."""
        while self._is_reading and not self._is_closing and self._connection is not None:
            view = self._connection.get_buffer(-1)
            count = self._decrypt(view)
            if count:
                self._connection.buffer_updated(count)
            if count < len(view):
                break
        self._flush()

    def _decrypt(self, view: memoryview) -> int:
        """Decrypt received data into ``view``; return the number of bytes."""
        count = 0
        try:
            while count < len(view):
                taken = self._cipher.read(len(view) - count, view[count:])
                if not taken:
                    self._handshakes.loop.call_soon(self.close)  # The client has sent close_notify.
                    break
                count += int(taken)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            if self._connection is not None:
                self._connection.close(f"TLS: {reason_of(error)}")
        return count

    def pause_reading(self) -> None:
        """Stop delivering data for now."""
        self._is_reading = False
        self._socket.pause_reading()

    def resume_reading(self) -> None:
        """Resume delivery: first the data already received, then new data."""
        self._is_reading = True
        if self._is_shaken:
            self._handshakes.loop.call_soon(self.guarded, self._deliver)
        self._read_on()

    def _read_on(self) -> None:
        """Read from the socket, unless reading is paused for any reason."""
        if self._is_reading and self._is_writable and not self._is_queued:
            self._socket.resume_reading()

    def is_reading(self) -> bool:
        """Return whether the connection accepts data."""
        return self._is_reading and not self._is_closing

    # --- bytes out ---

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypt ``data`` and send it."""
        if self._is_closing:
            return
        view, parts = memoryview(data), []
        try:
            for start in range(0, len(view), ENCRYPTED_BYTES):
                self._cipher.write(view[start : start + ENCRYPTED_BYTES])
                parts.append(self._outgoing.read())
        except ssl.SSLError as error:
            if self._connection is not None:
                self._connection.cut_off(f"TLS: {reason_of(error)}")
            return
        self._socket.write(parts[0] if len(parts) == 1 else b"".join(parts))

    def _flush(self) -> None:
        """Send the pending protocol data of TLS."""
        if self._outgoing.pending and not self._socket.is_closing():
            self._socket.write(self._outgoing.read())

    def get_write_buffer_size(self) -> int:
        """Return the encrypted bytes that the socket has not taken."""
        return self._socket.get_write_buffer_size()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set the limits of the socket's transport."""
        self._socket.set_write_buffer_limits(high, low)

    # --- close ---

    def is_closing(self) -> bool:
        """Return whether the stream is closing and sends no further data."""
        return self._is_closing or self._socket.is_closing()

    def close(self) -> None:
        """Send close_notify, and close once all data is sent."""
        if self._is_closing:
            return
        self._is_closing = True
        self._end_timer()
        if self._is_shaken:
            with suppress(ssl.SSLError):  # the client's close_notify is not awaited
                self._cipher.unwrap()
            self._flush()
        self._socket.close()

    def abort(self) -> None:
        """Close immediately."""
        self._is_closing = True
        self._end_timer()
        self._socket.abort()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return ``ssl_object``, or information of the socket's transport."""
        if name == "ssl_object":
            return self._cipher
        return self._socket.get_extra_info(name, default)
