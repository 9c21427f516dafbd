"""One client connection: frames in, one request at a time, responses out in the same order.

While a request is being served no other of the same connection is looked at; what the client sends
meanwhile waits, at most one read of it in our memory and the rest in the kernel's. The same holds
while the client does not take its responses. So a connection costs bounded memory and needs no
queue, and responses cannot overtake one another.

Whatever a request does wrong ends with its own connection: malformed frames, unknown APIs and
unsupported versions close it without an answer (ApiVersions excepted), and a handler that fails is
logged and answered UNKNOWN_SERVER_ERROR where the response has room for it.

Source: the behaviour is that of Kafka's ``SocketServer.Processor`` and ``KafkaApis.handle``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

import structlog
from kio.schema.errors import ErrorCode

from coordinator.handlers import CloseConnection, Context, Handler
from coordinator.wire.api import APIS, ApiKey
from coordinator.wire.build import response_factory
from coordinator.wire.codec import (
    Request,
    decode_request,
    encode_response,
    unsupported_api_versions,
)
from coordinator.wire.errors import EncodeError, MalformedRequest, UnsupportedVersion
from coordinator.wire.frames import KEPT_BUFFER_BYTES, FrameBuffer
from coordinator.wire.limits import FIRST_BUFFER_BYTES
from coordinator.wire.schema import Entity
from coordinator.wire.writer import Chunk, InFile
from logcore.machine import DomainError

if TYPE_CHECKING:
    from coordinator.server import Server

log = structlog.get_logger(__name__)

FRAMES_PER_TURN = 32
"""Requests of one connection that are served before others get their turn."""

WRITE_BYTES = 262_144
"""A response goes to the transport in pieces of this size. What the socket does not take of a piece
is copied into the transport's buffer, and there moved to the front after every send: with megabytes
at a time that costs more than the sending itself."""


class Connection(asyncio.BufferedProtocol):
    """The protocol object of one accepted socket. Made by :class:`coordinator.server.Server`."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._limits = server.limits
        self._frames = FrameBuffer(server.limits.max_request_bytes)
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)
        self._loop = server.loop
        self._current: Context | None = None
        self._task: asyncio.Future[Any] | None = None
        self._reading = True
        self._writable = True
        self._granted_bytes = FIRST_BUFFER_BYTES
        self._waiting = False
        self._large_since = 0.0
        self._large_request = -1
        self._unsent: deque[memoryview | InFile] = deque()
        self._again: asyncio.Handle | None = None
        self._on_close: list[Callable[[], None]] = []
        self.closed = False
        self.peer_host = ""
        self.peer_port = 0
        self.client_software: tuple[str, str] | None = None
        """Name and version that the client gave in ApiVersions (KIP-511)."""
        self.last_active = 0.0
        """The loop's time of the last byte in or request done."""
        self.requests = 0
        """Requests that were decoded so far."""

    # --- life ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected; the server may have to refuse it."""
        self._transport = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("peername") or ("", 0)
        self.peer_host, self.peer_port = str(peer[0]), int(peer[1])
        self.last_active = self._loop.time()
        if not self._server.admit(self):
            self.closed = True
            self._transport.abort()
            return
        # Told of every byte that the socket does not take, and when all of them are gone.
        self._transport.set_write_buffer_limits(high=0)

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is gone. A request under way runs on; its response has nowhere to go."""
        if exc is not None:
            log.debug("connection lost", peer=self.peer, error=str(exc))
        self.closed = True
        self._unsent.clear()
        if self._again is not None:
            self._again.cancel()
        self._server.forget(self)
        self._server.budget.give(self)
        callbacks, self._on_close = self._on_close, []
        for callback in callbacks:
            callback()

    def on_close(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Have ``callback`` called when the connection ends; the returned function takes it back.

        For what waits on behalf of this client alone, such as the long poll of a Fetch.
        """
        self._on_close.append(callback)

        def take_back() -> None:
            if callback in self._on_close:
                self._on_close.remove(callback)

        return take_back

    def close(self, reason: str) -> None:
        """Send what is already written, then close."""
        if not self.closed:
            self.closed = True
            log.info("closing connection", peer=self.peer, reason=reason)
            while self._unsent and (piece := self._next_piece()) is not None:
                self._transport.write(piece)
            self._transport.close()

    def abort(self) -> None:
        """Close at once; unsent responses are lost, a request under way is cancelled."""
        if self._task is not None:
            self._task.cancel()
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    @property
    def peer(self) -> str:
        """The client's address as ``host:port``."""
        return f"{self.peer_host}:{self.peer_port}"

    @property
    def file_number(self) -> int:
        """The file descriptor of the socket, −1 once it is closed."""
        number: int = self._transport.get_extra_info("socket").fileno()
        return number

    @property
    def busy(self) -> bool:
        """Whether a request is being served."""
        return self._current is not None

    @property
    def pending_bytes(self) -> int:
        """Bytes of requests that wait, complete or not."""
        return self._frames.pending

    def check_idle(self, now: float) -> None:
        """Close a connection that has done nothing for too long; called by the server's sweep."""
        if self.busy or self._waiting:
            return
        quiet_ms = (now - self.last_active) * 1000
        if quiet_ms > self._limits.max_idle_ms:
            self.close("idle")
        elif self._is_slow(now) and self._server.budget.contended:
            self.close("a request arrives too slowly while others wait for its memory")
        elif self._frames.pending and self._reading and quiet_ms > self._limits.frame_timeout_ms:
            self.close("a request stopped half-way")
        elif quiet_ms > self._limits.frame_timeout_ms and self.release_idle():
            self._server.budget.give(self)

    def _is_slow(self, now: float) -> bool:
        """Whether a large frame under way stays behind the rate that it must keep."""
        if self._frames.wanted <= FIRST_BUFFER_BYTES:
            return False
        spent_ms = (now - self._large_since) * 1000 - self._limits.slow_frame_grace_ms
        return self._frames.pending < spent_ms * self._limits.min_frame_bytes_per_second / 1000

    def release_idle(self) -> bool:
        """Give the receive memory back if no request is in it; whether that was so."""
        if self.busy or self._frames.pending:
            return False
        self._frames.shrink()
        self._granted_bytes = FIRST_BUFFER_BYTES
        return True

    def granted(self) -> None:
        """The budget has room for the frame that waits."""
        self._waiting = False
        self._granted_bytes = self._frames.wanted
        self._large_since = self.last_active = self._loop.time()
        self._resume()

    # --- bytes in ---

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the frame knows better
        """Where the event loop receives into."""
        return self._frames.writable()

    def buffer_updated(self, nbytes: int) -> None:
        """``nbytes`` have arrived."""
        self._frames.received(nbytes)
        if self._current is not None or not self._writable or self._again is not None:
            self._pause()
        else:
            self.last_active = self._loop.time()
            self._serve()

    def eof_received(self) -> bool:
        """The client is done sending. As in Kafka that ends the connection, answered or not."""
        return False

    def pause_writing(self) -> None:
        """The socket is full: until it has taken all that is written, serve nothing more."""
        self._writable = False

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._writable = True
        self.last_active = self._loop.time()
        self._send_on()
        self._serve()

    def _pause(self) -> None:
        if self._reading and not self.closed:
            self._reading = False
            self._transport.pause_reading()

    # --- requests ---

    def _serve(self) -> None:
        """Serve what has arrived until a request has to wait, or others should get their turn."""
        self._again = None
        for _ in range(FRAMES_PER_TURN):
            if self.closed or self._current is not None or not self._writable or self._waiting:
                return
            try:
                frame = self._frames.next_frame()
                if frame is None:
                    break
                request = decode_request(
                    frame,
                    self._server.registry.versions,
                    max_objects=self._limits.max_request_objects,
                )
            except UnsupportedVersion as error:
                self._refuse_version(error)
                continue
            except MalformedRequest as error:
                self.close(str(error))
                return
            self.requests += 1
            self._run(request, len(frame))
        else:
            self._again = self._loop.call_soon(self._serve)
            return
        wanted = self._frames.wanted
        if wanted > FIRST_BUFFER_BYTES and not self._has_memory_for(wanted):
            self._pause()
            return
        if self._granted_bytes > KEPT_BUFFER_BYTES and self.release_idle():
            self._server.budget.give(self)
        self._resume()

    def _has_memory_for(self, wanted: int) -> bool:
        """Whether a large frame that has begun may arrive whole; if not it waits its turn."""
        if self._large_request != self.requests:
            self._large_request = self.requests
            self._large_since = self._loop.time()
        if wanted > self._granted_bytes:
            self._waiting = not self._server.budget.take(self, wanted)
            if not self._waiting:
                self._granted_bytes = wanted
        return not self._waiting

    def _resume(self) -> None:
        if not self._reading and not self.closed:
            self._reading = True
            self._transport.resume_reading()

    def _refuse_version(self, error: UnsupportedVersion) -> None:
        served = self._server.registry.versions.get(error.api_key)
        if error.api_key != ApiKey.API_VERSIONS or served is None:
            self.close(str(error))
            return
        self._send(unsupported_api_versions(served, error.correlation_id))

    def _run(self, request: Request, size_bytes: int) -> None:
        server = self._server
        context = Context(
            broker=server.broker,
            registry=server.registry,
            api_key=request.api_key,
            version=request.api_version,
            correlation_id=request.correlation_id,
            client_id=request.client_id,
            body=request.body,
            respond=response_factory(request.api_key, request.api_version),
            peer_host=self.peer_host,
            connection=self,
            size_bytes=size_bytes,
        )
        self._current = context
        try:
            handler: Handler = server.registry.handler(request.api_key)
            result = handler.run(context)
        except Exception as error:  # noqa: BLE001 - a handler's failure is its own request's only
            self._failed(context, error)
            return
        if hasattr(type(result), "__await__"):
            self._task = task = asyncio.ensure_future(cast("Awaitable[Any]", result))
            if task.done():
                self._done(task)
            else:
                task.add_done_callback(self._done_later)
        else:
            self._answer(context, result)

    def _done_later(self, task: asyncio.Future[Any]) -> None:
        self._done(task)
        if self._current is None:
            self._serve()

    def _done(self, task: asyncio.Future[Any]) -> None:
        self._task = None
        context = cast("Context", self._current)
        if task.cancelled():
            self._failed(context, CloseConnection("the request was cancelled"))
            return
        error = task.exception()
        if error is None:
            self._answer(context, task.result())
        else:
            self._failed(context, error)

    def _failed(self, context: Context, error: BaseException) -> None:
        """Answer a handler's exception, or close where there is no field to say it in."""
        self._current = None
        name = APIS[context.api_key].name
        if isinstance(error, CloseConnection):
            self.close(str(error))
            return
        code = int(ErrorCode.unknown_server_error)
        message: str | None = None
        if isinstance(error, DomainError):
            code, message = self._server.error_code(error), str(error)
        else:
            log.error("handler failed", api=name, version=context.version, exc_info=error)
        entity = context.respond.error(code, message)
        if entity is None:
            self.close(f"{name} failed and has no error field")
        else:
            self._answer(context, entity)

    def _answer(self, context: Context, entity: Entity | None) -> None:
        self._current = None
        if self.closed or entity is None:
            return
        try:
            chunks = encode_response(
                context.api_key, context.version, context.correlation_id, entity
            )
        except EncodeError:
            log.exception("response cannot be written", api=APIS[context.api_key].name)
            self.close("a response could not be written")
            return
        self._send(chunks)
        self.last_active = self._loop.time()

    # --- bytes out ---

    def _send(self, chunks: Iterable[Chunk | InFile]) -> None:
        """Write a response, as much of it as the socket takes; the rest follows in turn."""
        for chunk in chunks:
            if not isinstance(chunk, Chunk):
                self._unsent.append(chunk)
            elif self._unsent or len(chunk) > WRITE_BYTES:
                self._unsent.append(memoryview(chunk))
            else:
                self._transport.write(chunk)
        if self._unsent:
            self._send_on()

    def _send_on(self) -> None:
        transport, unsent = self._transport, self._unsent
        while unsent and self._writable and not transport.is_closing():
            piece = self._next_piece()
            if piece is None:
                return
            transport.write(piece)

    def _next_piece(self) -> memoryview | bytes | None:
        """Take the next piece of what is unsent; None, and the end, where it can't be read.

        The client was promised its length, so there is nothing else to tell it.
        """
        unsent = self._unsent
        chunk = unsent[0]
        if not isinstance(chunk, memoryview):
            try:
                piece: memoryview | bytes = chunk.take(WRITE_BYTES)
            except OSError:
                log.exception("records can not be read", peer=self.peer)
                self.abort()
                return None
            if not len(chunk):
                unsent.popleft()
            return piece
        if len(chunk) > WRITE_BYTES:
            unsent[0] = chunk[WRITE_BYTES:]
            return chunk[:WRITE_BYTES]
        unsent.popleft()
        return chunk
