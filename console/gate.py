"""Accepts connections, each of which must show the token within a time limit.

The limits apply as soon as a connection is accepted, including its TLS handshake. This module
therefore starts the handshake itself: asyncio's server would report a connection only after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import cast

from aiohttp import web

from fencepost.console.limits import AUTHENTICATION_TIMEOUT_S, MAX_UNAUTHENTICATED


class ConnectionGate:
    """A protocol factory in front of ``server``; with a ``context``, connections use TLS."""

    def __init__(self, server: web.Server, context: ssl.SSLContext | None = None) -> None:
        self.server = server
        self.context = context
        self.unauthenticated: dict[asyncio.BaseProtocol, _GatedConnection] = {}
        """Connections that have not shown the token, by their inner protocol; the oldest first."""
        self.handshakes: set[asyncio.Task[None]] = set()

    def __call__(self) -> asyncio.Protocol:
        """Return a protocol for a connection that was just accepted."""
        return _GatedConnection(self)

    def authenticated(self, protocol: asyncio.BaseProtocol | None) -> None:
        """Note that the connection of ``protocol`` has shown the token."""
        connection = self.unauthenticated.pop(protocol, None) if protocol is not None else None
        if connection is not None:
            connection.timeout.cancel()

    def close(self) -> None:
        """Close every connection that has not shown the token."""
        for connection in list(self.unauthenticated.values()):
            connection.end()
        for task in self.handshakes:
            task.cancel()


class _GatedConnection(asyncio.Protocol):
    """One connection: it passes data to the inner protocol, in TLS after the handshake."""

    timeout: asyncio.TimerHandle

    def __init__(self, gate: ConnectionGate) -> None:
        self._gate = gate
        self._inner = gate.server()
        self._transport: asyncio.Transport | None = None
        self._is_open = False

    def connection_made(self, made: asyncio.BaseTransport) -> None:
        self._transport = transport = cast("asyncio.Transport", made)
        gate, loop = self._gate, asyncio.get_running_loop()
        if len(gate.unauthenticated) >= MAX_UNAUTHENTICATED:
            # Close the oldest, because a client that has the token sends it at once.
            next(iter(gate.unauthenticated.values())).end()
        gate.unauthenticated[self._inner] = self
        self.timeout = loop.call_later(AUTHENTICATION_TIMEOUT_S, self.end)
        if gate.context is None:
            self._open(transport)
        else:
            transport.pause_reading()
            task = loop.create_task(self._encrypt(transport, gate.context))
            gate.handshakes.add(task)
            task.add_done_callback(gate.handshakes.discard)

    async def _encrypt(self, transport: asyncio.Transport, context: ssl.SSLContext) -> None:
        # A failed handshake is not logged: its client sees the error.
        with contextlib.suppress(OSError):
            encrypted = await asyncio.get_running_loop().start_tls(
                transport,
                self,
                context,
                server_side=True,
                ssl_handshake_timeout=AUTHENTICATION_TIMEOUT_S,
            )
            if encrypted is not None:
                self._transport = encrypted
                self._open(encrypted)
                return
        self._leave()

    def _open(self, transport: asyncio.Transport) -> None:
        self._is_open = True
        self._inner.connection_made(transport)

    def end(self) -> None:
        """Close the connection in any state."""
        self._leave()
        if self._transport is not None:
            self._transport.abort()

    def _leave(self) -> None:
        self.timeout.cancel()
        self._gate.unauthenticated.pop(self._inner, None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        if self._is_open:
            self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._inner.data_received(data)

    def eof_received(self) -> None:
        self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()
