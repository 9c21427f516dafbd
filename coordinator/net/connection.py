"""One client connection: a request stream on a socket, one request served at a time.

While a request is being served no other of the same connection is looked at; what the client sends
meanwhile waits, at most one read of it in our memory and the rest in the kernel's. The same holds
while the client does not take its responses. So a connection costs bounded memory and needs no
queue, and responses cannot overtake one another.

The way from frame to response is work in steps (:mod:`fencepost.coordinator.runtime.turns`): a
large one gives way to other connections, in the decoder, in the handler and in the encoder.

A faulty request ends its own connection only: malformed frames, unknown APIs and unsupported
versions close it unanswered (ApiVersions excepted). A failed handler's API has an error response.

Source: the behaviour is that of Kafka's ``SocketServer.Processor`` and ``KafkaApis.handle``.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from dataclasses import replace
from types import GeneratorType
from typing import TYPE_CHECKING, Any, Protocol, cast

import structlog

from fencepost.coordinator.config.listener_config import ListenerConfig
from fencepost.coordinator.handlers import CloseConnection, Context, Registry
from fencepost.coordinator.net.connection_limits import Seat
from fencepost.coordinator.net.memory_budget import RequestBudget
from fencepost.coordinator.net.refusals import UnservedRequests, refusal
from fencepost.coordinator.net.request_stream import RequestStream
from fencepost.coordinator.net.request_watch import RequestWatch
from fencepost.coordinator.net.response_budget import LARGE_ANSWERS, ResponseBudget
from fencepost.coordinator.net.sending import SENT_PER_TURN_BYTES, send_next, socket_of
from fencepost.coordinator.net.throttling import is_gone, throttle_of, throttled
from fencepost.coordinator.runtime.background import SLICE_MS, call_later
from fencepost.coordinator.runtime.turns import Job, Turns, Wait, Work, is_to_come
from fencepost.coordinator.security.principal import Principal, Session, plain_host
from fencepost.coordinator.security.quotas import ClientQuotas
from fencepost.coordinator.security.throttle import LoopTime
from fencepost.coordinator.wire.api import KNOWN_APIS
from fencepost.coordinator.wire.codec import Request
from fencepost.coordinator.wire.errors import MalformedRequest, UnsupportedVersion
from fencepost.coordinator.wire.frames import KEPT_BUFFER_BYTES
from fencepost.coordinator.wire.limits import FIRST_BUFFER_BYTES, ConnectionLimits
from fencepost.coordinator.wire.messages import response_factory
from fencepost.coordinator.wire.pieces import let_go
from fencepost.coordinator.wire.schema import Entity
from fencepost.logcore.clock import monotonic_s
from fencepost.logcore.machine import DomainError

if TYPE_CHECKING:
    from fencepost.coordinator.net.authentication import Gate
    from fencepost.coordinator.security.logins import Logins
    from fencepost.coordinator.services import Services

log = structlog.get_logger(__name__)

FRAMES_PER_TURN = 32
"""Requests of one connection that are served before others get their turn."""

SENT_TOGETHER = 16
"""Small responses that leave in one write, if the client has sent as many requests ahead: a write
costs more than most of them do. The first one waits for the last: about a millisecond, and never
longer than the slice of the loop in which they are served."""

SENT_TOGETHER_BYTES = 16_384
"""Responses with more bytes than this, together, leave as they are."""


class Owner(Protocol):
    """What all connections of one server share, and where they are counted."""

    broker: Services
    registry: Registry
    limits: ConnectionLimits
    error_code: Callable[[DomainError], int]
    loop: asyncio.AbstractEventLoop
    turns: Turns
    budget: RequestBudget
    responses: ResponseBudget
    watch: RequestWatch | None
    throttles: ClientQuotas | None
    logins: Logins | None  # None where clients need not log in.
    unserved: UnservedRequests

    def admit(self, connection: Connection) -> None:
        """A connection has begun."""

    def forget(self, connection: Connection) -> None:
        """A connection has ended."""


class Connection(asyncio.BufferedProtocol):
    """The protocol object of one accepted socket. Its owner is the server that made it."""

    def __init__(self, server: Owner, listener: ListenerConfig) -> None:
        self.listener = listener
        """By which it came."""
        self.seat: Seat | None = None
        """Where it is counted."""
        self.session = Session("", listener.name)
        self._server = server
        self._limits = server.limits
        self._stream = RequestStream(
            server.registry.versions, server.limits, server.registry.forwarded
        )
        self._frames = self._stream.frames
        self.next_request: Callable[[], Request | Work[Request | None] | None] = (
            self._stream.next_request
        )
        """Where its requests come from: a gate, until somebody has logged in."""
        self._gate: Gate | None = None
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)
        self._socket = -1
        """That takes bytes from files as they are; -1 where they are encrypted."""
        self._loop = server.loop
        self._job: Job | None = None
        """The request under way, once it has given way to others or waits."""
        self._answer_comes: Wait | None = None
        """What its handler waits for."""
        self._reading = True
        self._writable = True
        self._granted_bytes = FIRST_BUFFER_BYTES
        self._waiting = False
        self._large_since = 0.0
        self._large_request = -1
        self._sending_since = 0.0
        self._sent_bytes = 0
        self._gathers = False
        """Whether small responses may wait for the next one."""
        self._gathered = 0
        """Responses that wait for it."""
        self._again: asyncio.Handle | None = None
        self._sends_again: asyncio.Handle | None = None
        self._muted: asyncio.TimerHandle | None = None
        """Until when nothing is read, for the client has taken more than its quota."""
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
        """A client has connected."""
        self._transport = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("peername") or ("", 0)
        self.peer_host, self.peer_port = plain_host(str(peer[0])), int(peer[1])
        self.last_active = self._loop.time()
        self.session = replace(self.session, host=self.peer_host, connected_s=self.last_active)
        self._server.admit(self)
        if not self.listener.is_tls:
            self._socket = socket_of(transport)
        # The transport tells us of every byte that the socket does not take, and when all are gone.
        self._transport.set_write_buffer_limits(high=0)
        if self._server.logins is not None:
            from fencepost.coordinator.net.authentication import open_gate  # noqa: PLC0415 - most brokers let anybody in

            self._gate = open_gate(self, self._stream, self._server.logins, self._loop)

    def identified(self, principal: Principal) -> None:
        """The client has shown who it is."""
        self.session = replace(self.session, principal=principal)

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is gone. A coroutine runs on, without an answer; work in steps ends."""
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
        self._server.budget.give(self)
        self._server.responses.hold(self, 0)

    def close(self, reason: str) -> None:
        """Serve nothing more; close when the client has taken what is written."""
        if not self.closed:
            log.info("closing connection", peer=self.peer, reason=reason)
            self.end()

    def end(self) -> None:
        """The same without a word."""
        if not self.closed:
            self._pause()
            self.closed = True
            self._close_if_sent()

    def _close_if_sent(self) -> None:
        if not self._stream.unsent:
            self._transport.close()

    def abort(self) -> None:
        """Close at once; unsent responses are lost, a request under way is cancelled."""
        self.closed = True
        if self._job is not None:
            self._job.drop()
        if self._transport is not None:
            self._transport.abort()

    def reset(self) -> None:
        """Close at once, and have the client know by an error of its socket."""
        client = self._transport.get_extra_info("socket")
        if client is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.abort()

    def cut_off(self, reason: str) -> None:
        """Close at once, and say why."""
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
        """Close a connection that has done nothing for too long; called by the server's sweep."""
        server, limits = self._server, self._limits
        quiet_ms = (now - self.last_active) * 1000
        if self._is_sending:
            if self._is_slow_reader(now) and server.responses.contended:
                self.cut_off("a response is taken too slowly while others wait for its memory")
            elif quiet_ms > (limits.drain_timeout_ms if self.closed else limits.max_idle_ms):
                # The rest of the response is lost: nobody can wait for it, nor keep it.
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
            server.budget.give(self)

    @property
    def _is_sending(self) -> bool:
        """Whether the client has not taken all that was written for it."""
        return bool(self._stream.unsent) or self._transport.get_write_buffer_size() > 0

    def _is_slow_reader(self, now: float) -> bool:
        """Whether the response under way is taken more slowly than it must be."""
        limits = self._limits
        taken = self._sent_bytes - self._transport.get_write_buffer_size()
        spent_ms = (now - self._sending_since) * 1000 - limits.slow_frame_grace_ms
        return taken < spent_ms * limits.min_frame_bytes_per_second / 1000

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
        if self._job is not None or not self._writable or self._again is not None:
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

    def _mute(self, throttle_ms: int) -> None:
        """Read nothing for so long: the client has taken more than its quota (KIP-219)."""
        self._pause()
        self._muted = call_later(self._loop, throttle_ms, "read a client on", self._unmute)

    def _unmute(self) -> None:
        self._muted = None
        self.last_active = self._large_since = self._loop.time()
        self._serve()

    # --- requests ---

    def _serve(self) -> None:
        """Serve what has arrived until a request has to wait, or others should get their turn."""
        self._again = None
        self._gathers = True
        try:
            self._serve_arrived()
        finally:
            self._gathers = False
            if self._gathered:
                self._gathered = 0
                self._send_on()

    def _serve_arrived(self) -> None:
        turns = self._server.turns
        until = turns.until()
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
            self._job = turns.begin(self._exchange(request), until, self._served)
            if self._job is not None:
                if self._stream.size_bytes > FIRST_BUFFER_BYTES:
                    # The request may still be read from, and new bytes would overwrite it.
                    self._pause()
                return
            if monotonic_s() >= until:
                self._serve_again()
                return
        else:
            self._serve_again()
            return
        wanted = self._frames.wanted
        if wanted > FIRST_BUFFER_BYTES and not self._has_memory_for(wanted):
            self._pause()
            return
        if self._granted_bytes > KEPT_BUFFER_BYTES and self.release_idle():
            self._server.budget.give(self)
        self._resume()

    @property
    def _may_serve(self) -> bool:
        """Whether nothing is under way, neither a request nor a response."""
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
        if not self._reading and self._muted is None and not self.closed:
            self._reading = True
            self._transport.resume_reading()

    def _exchange(self, coming: Request | Work[Request | None]) -> Work[None]:
        """One request, from its frame to its response."""
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
            watch.note(request.api_key, request.api_version, monotonic_s() - since)
        if self._job is not None and self._job.has_given_way:
            held.append(request.body)
            del request, coming, answer
            yield from let_go(held)

    def _within_budget(self, answer: Work[None]) -> Work[None]:
        """Answer when there is room for an answer that may be large."""
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
        return Context(  # by place: names cost a third more, for every request
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
        """The answer to ApiVersions, before anybody has logged in."""
        return self._server.registry.handler(request.api_key).run(self._context(request))

    def _answer(self, request: Request, held: list[Entity], spent: LoopTime | None) -> Work[None]:
        """Have a request handled, and send what comes of it, which is added to ``held``.

        ``spent`` has the time that it takes, where its client may have a quota of that.
        """
        context = self._context(request)
        if spent is not None:
            context.throttle = throttle_of(context, self._server.throttles, spent)
        try:
            entity: Any = self._server.registry.handler(context.api_key).run(context)
            if is_to_come(type(entity)):
                entity = yield from self._result(entity, spent)
        except asyncio.CancelledError:
            self.close("the request was cancelled")
            return
        except CloseConnection as error:
            self.close(str(error))
            return
        except Exception as error:  # noqa: BLE001 - a handler's failure is its own request's only
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
            self.close("a response could not be written")  # the client must not wait for ever
            return
        held.append(entity)
        self._send()
        if context.throttle is not None:
            context.throttle.sent()

    def _result(self, result: Any, spent: LoopTime | None) -> Work[Entity | None]:
        """The answer of a handler that works in steps, or waits."""
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
        """Write a response, as much of it as the socket takes; the rest follows in turn."""
        self._sending_since = self.last_active = self._loop.time()
        self._sent_bytes = 0
        if self._gathers and self._gathered < SENT_TOGETHER - 1 and self._is_small:
            self._gathered += 1
            return
        self._gathered = 0
        self._send_on()

    @property
    def _is_small(self) -> bool:
        """Whether the responses to send, one chunk each, are few bytes in memory."""
        stream = self._stream
        return (
            len(stream.unsent) == self._gathered + 1
            and type(stream.unsent[-1]) is bytes
            and stream.unsent_bytes <= SENT_TOGETHER_BYTES
        )

    def _send_on(self) -> None:
        """Write pieces of what is unsent as long as the socket takes them whole."""
        transport, stream, unsent = self._transport, self._stream, self._stream.unsent
        most = self._sent_bytes + SENT_PER_TURN_BYTES
        until = monotonic_s() + SLICE_MS / 1000
        while unsent and self._writable and not transport.is_closing():
            try:
                self._sent_bytes += send_next(stream, transport, self._socket)
            except OSError:
                log.exception("records can not be read", peer=self.peer)
                self.abort()
                return
            if unsent and (self._sent_bytes >= most or monotonic_s() >= until):
                self._sends_again = self._loop.call_soon(self._send_again)
                break
        self._hold()
        if self.closed:
            self._close_if_sent()

    def _hold(self) -> None:
        """Account for what the client has not taken of its response."""
        held = self._stream.unsent_bytes
        if not self._writable:
            held += self._transport.get_write_buffer_size()
        self._server.responses.hold(self, held)

    def _send_again(self) -> None:
        self._send_on()
        self._serve()
