"""One client connection: a request stream on a socket, one request served at a time.

Until a request is served and its response is written to the socket, the connection handles no other
request. In the meantime it reads from the socket at most once; further data waits in the kernel. So
a connection takes bounded memory and needs no queue, and responses stay in order.

A frame is decoded, handled and answered in steps (:mod:`fencepost.coordinator.runtime.turns`), so
that a large request yields to other connections.

A faulty request ends only its own connection: malformed frames, unknown APIs and unsupported
versions close it without a response (except for ApiVersions). A failed handler results in the API's
error response.

Source: ``SocketServer.Processor`` and ``KafkaApis.handle``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import GeneratorType
from typing import TYPE_CHECKING, Any, Protocol, cast

import structlog

from fencepost.coordinator.config.listener_config import ListenerConfig
from fencepost.coordinator.handlers import CloseConnection, Context, Registry
from fencepost.coordinator.handlers.api_versions import versions_of
from fencepost.coordinator.runtime.background import SLICE_MS, call_later
from fencepost.coordinator.runtime.turns import ActionQueue, Job, Turns, Work, is_pending_work
from fencepost.coordinator.security.principal import ClientSession, Principal, plain_host
from fencepost.coordinator.security.quotas import ClientQuotas
from fencepost.coordinator.security.throttle import LoopTime
from fencepost.coordinator.server.connection_limits import ConnectionSlot
from fencepost.coordinator.server.memory_budget import RequestBudget
from fencepost.coordinator.server.refusals import UnservedRequests, refusal
from fencepost.coordinator.server.request_stream import RequestStream
from fencepost.coordinator.server.request_watch import RequestWatch
from fencepost.coordinator.server.response_budget import LARGE_ANSWERS, ResponseBudget
from fencepost.coordinator.server.sending import SENT_PER_TURN_BYTES, reset, send_next, socket_of
from fencepost.coordinator.server.throttling import is_gone, throttle_of, throttled
from fencepost.logcore.clock import monotonic_s
from fencepost.logcore.machine import DomainError
from fencepost.protocol.api import KNOWN_APIS
from fencepost.protocol.codec import Request
from fencepost.protocol.errors import MalformedRequest, UnsupportedVersion
from fencepost.protocol.frames import KEPT_BUFFER_BYTES
from fencepost.protocol.limits import LARGE_FRAME_BYTES, ConnectionLimits
from fencepost.protocol.messages import response_factory
from fencepost.protocol.pieces import free_in_steps
from fencepost.protocol.schema import Entity

if TYPE_CHECKING:
    from fencepost.coordinator.broker_services import Services
    from fencepost.coordinator.security.logins import Logins
    from fencepost.coordinator.server.authentication import SaslGate

log = structlog.get_logger(__name__)

FRAMES_PER_TURN = 32
"""The maximum number of requests of one connection that are served in one turn."""

SENT_TOGETHER = 16
"""The maximum number of small responses to pipelined requests that are sent in one write. (A write
costs more than handling most requests.) A response waits for others for at most one time slice."""

SENT_TOGETHER_BYTES = 16_384
"""Responses with more bytes in total are sent without waiting."""


class Owner(Protocol):
    """The state and counters that all connections of one server share."""

    broker: Services
    registry: Registry
    limits: ConnectionLimits
    error_code: Callable[[DomainError], int]
    loop: asyncio.AbstractEventLoop
    turns: Turns
    actions: ActionQueue
    budget: RequestBudget
    responses: ResponseBudget
    watch: RequestWatch | None
    throttles: ClientQuotas | None
    logins: Logins | None  # None if clients need not log in.
    unserved: UnservedRequests

    def admit(self, connection: Connection) -> None:
        """Register a connection that has begun."""

    def forget(self, connection: Connection) -> None:
        """Remove a connection that has ended."""


class Connection(asyncio.BufferedProtocol):
    """The protocol object of one accepted socket. Its owner is the server that created it."""

    def __init__(self, server: Owner, listener: ListenerConfig) -> None:
        self.listener = listener
        """The listener that accepted the connection."""
        self.slot: ConnectionSlot | None = None
        """The connection's entry in the counts of :class:`ConnectionQuotas`."""
        self.session = ClientSession("", listener.name)
        self._server = server
        self._limits = server.limits
        self._stream = RequestStream(
            server.registry.versions, server.limits, server.registry.forwarded
        )
        self._frames = self._stream.frames
        self.next_request: Callable[[], Request | Work[Request | None] | None] = (
            self._stream.next_request
        )
        """Returns the next request. A gate takes its place until the client is authenticated."""
        self._gate: SaslGate | None = None
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)
        self._socket = -1
        """The socket for sending from files; -1 if the connection uses TLS."""
        self._loop = server.loop
        self._job: Job | None = None
        """The request in progress, if it has yielded to others or waits."""
        self._answer_comes: asyncio.Future[Any] | None = None
        """The future that the request's handler waits for."""
        self._reading = True
        self._writable = True
        self._granted_bytes = LARGE_FRAME_BYTES
        self._waiting = False
        self._large_since = 0.0
        self._large_request = -1
        self._sending_since = 0.0
        self._sent_bytes = 0
        self._gathers = False
        """Whether small responses may wait for the next one."""
        self._gathered = 0
        """The number of small responses that wait for the next one."""
        self._again: asyncio.Handle | None = None
        self._sends_again: asyncio.Handle | None = None
        self._muted: asyncio.TimerHandle | None = None
        """The end of a throttle time, during which nothing is read."""
        self.closed = False
        self.peer_host = ""
        self.peer_port = 0
        self.client_software: tuple[str, str] | None = None
        """The name and version that the client sent in ApiVersions (KIP-511)."""
        self.last_active = 0.0
        """The event loop's time of the last received byte or completed request."""
        self.requests = 0
        """The number of requests decoded so far."""

    # --- lifecycle ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Handle a new client connection."""
        self._transport = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("peername") or ("", 0)
        self.peer_host, self.peer_port = plain_host(str(peer[0])), int(peer[1])
        self.last_active = self._loop.time()
        self.session = replace(self.session, host=self.peer_host, connected_s=self.last_active)
        self._server.admit(self)
        if not self.listener.is_tls:
            self._socket = socket_of(transport)
        # The transport then reports when the socket is full, and when all bytes are sent.
        self._transport.set_write_buffer_limits(high=0)
        if self._server.logins is not None:
            from fencepost.coordinator.server.authentication import open_gate  # noqa: PLC0415 - most listeners have no SASL

            self._gate = open_gate(self, self._stream, self._server.logins, self._loop)

    def identified(self, principal: Principal) -> None:
        """Set the principal that the client has authenticated as."""
        self.session = replace(self.session, principal=principal)

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the loss of the socket: cancel a handler's steps, but let its coroutine finish."""
        if exc is not None:
            log.debug("connection lost", peer=self.peer, error=str(exc))
        self.closed = True
        if self._gate is not None:
            self._gate.close()
        self._stream.drop_unsent()
        for handle in (self._again, self._sends_again, self._muted):
            if handle is not None:
                handle.cancel()
        if self._job is not None and self._answer_comes is None:
            self._job.drop()
        self._server.forget(self)
        self._server.budget.release(self)
        self._server.responses.hold(self, 0)

    def close(self, reason: str) -> None:
        """Stop serving; close once all responses are written to the socket."""
        if not self.closed:
            log.info("closing connection", peer=self.peer, reason=reason)
            self.end()

    def end(self) -> None:
        """Close like :meth:`close`, without a log line."""
        if not self.closed:
            self._pause()
            self.closed = True
            self._close_if_sent()

    def _close_if_sent(self) -> None:
        if not self._stream.unsent:
            self._transport.close()

    def abort(self) -> None:
        """Close immediately; unsent responses are lost, a request in progress is cancelled."""
        self.closed = True
        if self._job is not None:
            self._job.drop()
        if self._transport is not None:
            self._transport.abort()

    def reset(self) -> None:
        """Close immediately with a TCP reset."""
        reset(self._transport)
        self.abort()

    def cut_off(self, reason: str) -> None:
        """Close immediately, and log the reason."""
        log.info("closing connection", peer=self.peer, reason=reason)
        self.abort()

    @property
    def peer(self) -> str:
        """The client's address as ``host:port``."""
        return f"{self.peer_host}:{self.peer_port}"

    @property
    def busy(self) -> bool:
        """Whether a request is being served."""
        return self._job is not None

    def check_idle(self, now: float) -> None:
        """Close the connection if it is idle or slow for too long; called by the server's sweep."""
        server, limits = self._server, self._limits
        quiet_ms = (now - self.last_active) * 1000
        if self._is_sending:
            if self._is_slow_reader(now) and server.responses.contended:
                self.cut_off("a response is taken too slowly while others wait for its memory")
            elif quiet_ms > (limits.drain_timeout_ms if self.closed else limits.max_idle_ms):
                # The client does not read the remaining response, which is lost.
                self.cut_off("idle, with responses not taken")
            return
        if self.busy or self._waiting:
            return
        if quiet_ms > limits.max_idle_ms:
            self.close("idle")
        elif self._muted is not None:
            if is_gone(self._transport):
                self.cut_off("the client has gone, and was not read")
        elif self._is_slow(now) and server.budget.contended:
            self.close("a request arrives too slowly while others wait for its memory")
        elif self._frames.pending and self._reading and quiet_ms > limits.frame_timeout_ms:
            self.close("a request stopped half-way")
        elif quiet_ms > limits.frame_timeout_ms and self.release_idle():
            server.budget.release(self)

    @property
    def _is_sending(self) -> bool:
        """Whether data for the client is still in the broker's memory."""
        return bool(self._stream.unsent) or self._transport.get_write_buffer_size() > 0

    def _is_slow_reader(self, now: float) -> bool:
        """Return whether the client receives the current response below the minimum rate."""
        limits = self._limits
        taken = self._sent_bytes - self._transport.get_write_buffer_size()
        spent_ms = (now - self._sending_since) * 1000 - limits.slow_frame_grace_ms
        return taken < spent_ms * limits.min_frame_bytes_per_second / 1000

    def _is_slow(self, now: float) -> bool:
        """Return whether a large incomplete frame arrives below the minimum rate."""
        if self._frames.frame_size <= LARGE_FRAME_BYTES:
            return False
        spent_ms = (now - self._large_since) * 1000 - self._limits.slow_frame_grace_ms
        return self._frames.pending < spent_ms * self._limits.min_frame_bytes_per_second / 1000

    def release_idle(self) -> bool:
        """Free the receive memory if it contains no request; return whether it was freed."""
        if self.busy or self._frames.pending:
            return False
        self._frames.shrink()
        self._granted_bytes = LARGE_FRAME_BYTES
        return True

    def granted(self) -> None:
        """Resume reading: the budget has room for the waiting frame."""
        self._waiting = False
        self._granted_bytes = self._frames.frame_size
        self._large_since = self.last_active = self._loop.time()
        self._resume()

    # --- bytes in ---

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - set by the frame
        """Return the memory that the event loop receives into."""
        return self._frames.writable()

    def buffer_updated(self, nbytes: int) -> None:
        """Handle ``nbytes`` received bytes."""
        self._frames.received(nbytes)
        if self._job is not None or not self._writable or self._again is not None:
            self._pause()
        else:
            self.last_active = self._loop.time()
            self._serve()

    def eof_received(self) -> bool:
        """Close the connection at the client's EOF, as Kafka does, even during a request."""
        return False

    def pause_writing(self) -> None:
        """Stop serving while the socket is full, until it has taken all written data."""
        self._writable = False

    def resume_writing(self) -> None:
        """Resume sending and serving: the socket has taken all written data."""
        self._writable = True
        self.last_active = self._loop.time()
        self._send_on()
        self._serve()

    def _pause(self) -> None:
        if self._reading and not self.closed:
            self._reading = False
            self._transport.pause_reading()

    def _mute(self, throttle_ms: int) -> None:
        """Stop reading for the throttle time, because the client has exceeded a quota (KIP-219)."""
        self._pause()
        self._muted = call_later(self._loop, throttle_ms, "read a client on", self._unmute)

    def _unmute(self) -> None:
        self._muted = None
        self.last_active = self._large_since = self._loop.time()
        self._serve()

    # --- requests ---

    def _serve(self) -> None:
        """Serve received requests until one must wait, or other connections get their turn."""
        self._again = None
        self._gathers = True
        releases = self._server.actions.hold()
        until = self._server.turns.until()
        try:
            self._serve_arrived(until)
        finally:
            self._gathers = False
            if self._gathered:
                self._gathered = 0
                self._send_on()
            if releases:
                # The appends of these requests may have ended the wait of other connections.
                self._server.actions.release(until)

    def _serve_arrived(self, until: float) -> None:
        for _ in range(FRAMES_PER_TURN):
            if not self._may_serve:
                return
            try:
                request = self.next_request()
            except (MalformedRequest, UnsupportedVersion) as error:
                self.close(self._server.unserved.reason(error, self.peer))
                return
            if request is None:
                break
            self._job = self._server.turns.begin(self._exchange(request), until, self._served)
            if self._job is not None:
                if self._stream.size_bytes > LARGE_FRAME_BYTES:
                    # New bytes would overwrite a request that is still being decoded.
                    self._pause()
                return
            if monotonic_s() >= until:
                self._serve_again()
                return
        else:
            self._serve_again()
            return
        size = self._frames.frame_size
        if size > LARGE_FRAME_BYTES and not self._has_memory_for(size):
            self._pause()
            return
        if self._granted_bytes > KEPT_BUFFER_BYTES and self.release_idle():
            self._server.budget.release(self)
        self._resume()

    @property
    def _may_serve(self) -> bool:
        """Whether to serve a request: no request, write, allocation or throttling is pending."""
        return (
            self._job is None
            and self._writable
            and (not self._stream.unsent or self._gathered > 0)
            and not self._waiting
            and self._muted is None
            and not self.closed
        )

    def _served(self) -> None:
        self._job = None
        self._serve()

    def _serve_again(self) -> None:
        self._again = self._loop.call_soon(self._serve)

    def _has_memory_for(self, size: int) -> bool:
        """Take memory for a whole large frame; return False if the connection must wait for it."""
        if self._large_request != self.requests:
            self._large_request = self.requests
            self._large_since = self._loop.time()
        if size > self._granted_bytes:
            self._waiting = not self._server.budget.try_allocate(self, size)
            if not self._waiting:
                self._granted_bytes = size
        return not self._waiting

    def _resume(self) -> None:
        if not self._reading and self._muted is None and not self.closed:
            self._reading = True
            self._transport.resume_reading()

    def _exchange(self, coming: Request | Work[Request | None]) -> Work[None]:
        """Handle one request, from its frame to its response."""
        request: Request | None
        spent = None if self._server.throttles is None else LoopTime()
        if isinstance(coming, Request):
            request = coming
        else:
            try:
                request = yield from coming if spent is None else spent.timed(coming)
            except (MalformedRequest, UnsupportedVersion) as error:
                self.close(self._server.unserved.reason(error, self.peer))
                return
            if request is None:
                self._send()
                return
        self.requests += 1
        watch = self._server.watch
        since = 0.0 if watch is None else monotonic_s()
        held: list[Entity] = []
        answer = self._answer(request, held, spent)
        if request.api_key in LARGE_ANSWERS:
            answer = self._within_budget(answer)
        yield from answer if spent is None else spent.timed(answer)
        if watch is not None:
            watch.note(request, monotonic_s() - since)
        if self._job is not None and self._job.has_given_way:
            held.append(request.body)
            del request, coming, answer
            yield from free_in_steps(held)

    def _within_budget(self, answer: Work[None]) -> Work[None]:
        """Run ``answer``, whose response may be large, once the budget has room for it."""
        budget = self._server.responses
        is_large = False
        try:
            if not budget.is_open:
                yield from budget.wait()
            for wait in answer:
                yield wait
                if wait is not None:
                    if not budget.is_open:
                        yield from budget.wait()
                elif not is_large and self._job is not None and self._job.has_given_way:
                    yield from budget.begin_large()
                    is_large = True
        finally:
            budget.end(is_large=is_large)

    def _context(self, request: Request) -> Context:
        server = self._server
        return Context(  # positional: keyword arguments cost a third more, for every request
            server.broker,
            server.registry,
            request.api_key,
            request.api_version,
            request.correlation_id,
            request.client_id,
            request.body,
            response_factory(request.api_key, request.api_version),
            self.peer_host,
            self,
            self._stream.size_bytes,
            None,
            request.frame,
        )

    def versions(self, request: Request) -> Entity:
        """Answer ApiVersions before authentication, without comparing cluster and node ids."""
        return versions_of(self._context(request))

    def _answer(self, request: Request, held: list[Entity], spent: LoopTime | None) -> Work[None]:
        """Handle a request, send its response, and add the response to ``held``, to be freed.

        ``spent`` measures the handling time, if the client may have a quota for that.
        """
        context = self._context(request)
        if spent is not None:
            context.throttle = throttle_of(context, self._server.throttles, spent)
        try:
            entity: Any = self._server.registry.handler(context.api_key).run(context)
            if is_pending_work(type(entity)):
                entity = yield from self._result(entity, spent)
        except asyncio.CancelledError:
            self.close("the request was cancelled")
            return
        except CloseConnection as error:
            self.close(str(error))
            return
        except Exception as error:  # noqa: BLE001 - a handler's failure affects only its request
            refused = refusal(context, error, self._server.error_code)
            entity = yield from self._result(refused, spent)
            if entity is None:
                self.close(f"{KNOWN_APIS[context.api_key].name} failed and has no error field")
        if context.throttle is not None and not self.closed:
            entity, throttle_ms = throttled(context, entity)
            if throttle_ms:
                self._mute(throttle_ms)
        if self.closed or entity is None:
            return
        try:
            yield from self._stream.answer(request, entity) or ()
        except Exception:
            log.exception("response cannot be written", api=KNOWN_APIS[context.api_key].name)
            self.close("a response could not be written")  # the client must not wait forever
            return
        held.append(entity)
        self._send()
        if context.throttle is not None:
            context.throttle.sent()

    def _result(self, result: Any, spent: LoopTime | None) -> Work[Entity | None]:
        """Return the response of a handler that is a generator or awaitable."""
        while not self.closed:
            if isinstance(result, GeneratorType):
                result = yield from result
            elif hasattr(type(result), "__await__"):
                coming = result if spent is None else spent.awaited(result)
                self._answer_comes = asyncio.ensure_future(coming)
                if not self._answer_comes.done():
                    yield self._answer_comes
                done, self._answer_comes = self._answer_comes, None
                result = done.result()
            else:
                return result
        return None

    # --- bytes out ---

    def _send(self) -> None:
        """Begin to send the last response, or leave a small one to be sent with the next."""
        self._sending_since = self.last_active = self._loop.time()
        self._sent_bytes = 0
        if self._gathers and self._gathered < SENT_TOGETHER - 1 and self._is_small:
            self._gathered += 1
            return
        self._gathered = 0
        self._send_on()

    @property
    def _is_small(self) -> bool:
        """Whether every unsent response is one chunk in memory, and all together are small."""
        stream = self._stream
        return (
            len(stream.unsent) == self._gathered + 1
            and type(stream.unsent[-1]) is bytes
            and stream.unsent_bytes <= SENT_TOGETHER_BYTES
        )

    def _send_on(self) -> None:
        """Write parts of the unsent data as long as the socket takes them whole."""
        transport, stream, unsent = self._transport, self._stream, self._stream.unsent
        most = self._sent_bytes + SENT_PER_TURN_BYTES
        until = monotonic_s() + SLICE_MS / 1000
        while unsent and self._writable and not transport.is_closing():
            try:
                self._sent_bytes += send_next(stream, transport, self._socket)
            except OSError:
                log.exception("records cannot be read", peer=self.peer)
                self.abort()
                return
            if unsent and (self._sent_bytes >= most or monotonic_s() >= until):
                self._sends_again = self._loop.call_soon(self._send_again)
                break
        self._hold()
        if self.closed:
            self._close_if_sent()

    def _hold(self) -> None:
        """Charge the unsent part of the response to the budget."""
        held = self._stream.unsent_bytes
        if not self._writable:
            held += self._transport.get_write_buffer_size()
        self._server.responses.hold(self, held)

    def _send_again(self) -> None:
        self._send_on()
        self._serve()
