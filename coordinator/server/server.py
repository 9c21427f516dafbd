"""The listening sockets and their connections."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from heapq import nsmallest
from typing import TYPE_CHECKING

import structlog
from kio.schema.errors import ErrorCode

from fencepost.coordinator.config.listener_config import ListenerConfig
from fencepost.coordinator.handlers import Registry
from fencepost.coordinator.runtime.background import call_later, spawn, swallow
from fencepost.coordinator.runtime.turns import ActionQueue, Turns
from fencepost.coordinator.security.quotas import ClientQuotas
from fencepost.coordinator.security.rates import RateWindow
from fencepost.coordinator.server.connection import Connection
from fencepost.coordinator.server.connection_limits import (
    TOO_MANY,
    ConnectionAcceptor,
    ConnectionLimit,
    ConnectionQuotas,
    ConnectionSlot,
    ServerLimits,
)
from fencepost.coordinator.server.listener import BACKLOG
from fencepost.coordinator.server.memory_budget import RequestBudget
from fencepost.coordinator.server.refusals import UnservedRequests
from fencepost.coordinator.server.request_watch import RequestWatch
from fencepost.coordinator.server.response_budget import ResponseBudget
from fencepost.logcore.machine import DomainError
from fencepost.protocol.limits import ConnectionLimits

if TYPE_CHECKING:
    from fencepost.coordinator.broker_services import Services
    from fencepost.coordinator.security.logins import Logins
    from fencepost.coordinator.security.tls import ListenerTls
    from fencepost.coordinator.server.tls_stream import Handshakes, TlsStream

log = structlog.get_logger(__name__)

CLOSED_PER_TURN = 64
"""The maximum number of connections closed in one turn when the connection limit is exceeded."""

_SWEEPS_PER_LIMIT = 4
"""Idle connections are searched for this many times within the shortest limit on idle time."""


def _always_unknown(_error: DomainError) -> int:
    return int(ErrorCode.unknown_server_error)


async def bind(listener: ListenerConfig) -> list[socket.socket]:
    """Bind sockets for ``listener`` and listen; the kernel queues the connecting clients.

    Raises OSError if the address cannot be bound.
    """
    # asyncio resolves the name and binds; our listeners accept the connections.
    bound = await asyncio.get_running_loop().create_server(
        asyncio.Protocol, listener.host, listener.port, start_serving=False
    )
    try:
        sockets = [listening_socket.dup() for listening_socket in bound.sockets]
    finally:
        bound.close()
    for listening_socket in sockets:
        listening_socket.listen(BACKLOG)
    return sockets


class Server:
    """Accepts connections and keeps them within the limits.

    ``broker`` is only passed to the handlers; ``error_code`` maps a domain error that escapes from
    a handler to Kafka's code (``fencepost.coordinator.error_codes`` in the daemon).
    """

    def __init__(
        self,
        broker: Services,
        *,
        registry: Registry | None = None,
        limits: ConnectionLimits | None = None,
        error_code: Callable[[DomainError], int] = _always_unknown,
        logins: Logins | None = None,
        window: RateWindow | None = None,
        actions: ActionQueue | None = None,
    ) -> None:
        self.broker = broker
        self.actions = ActionQueue() if actions is None else actions
        """Completes requests whose wait another request has ended."""
        self.registry = Registry() if registry is None else registry
        self.limits = ConnectionLimits() if limits is None else limits
        self.error_code = error_code
        self.logins = logins
        self.loop: asyncio.AbstractEventLoop
        self.turns: Turns
        self.responses: ResponseBudget
        self.budget = RequestBudget(self.limits.max_queued_request_bytes)
        self.connections: dict[Connection, None] = {}
        """The open connections, the oldest first."""
        self.unserved = UnservedRequests()
        """Logs requests that are not served."""
        self.watch: RequestWatch | None = None
        """Counts requests, if metrics are enabled."""
        self.throttles: ClientQuotas | None = None
        """The quotas of users and clients, if any are configured."""
        self.on_closed: Callable[[Connection], None] | None = None
        """Called with each connection that has ended."""
        self.accepted = 0
        """The number of connections admitted so far."""
        self.refusals: Counter[str] = Counter()
        """The number of connections refused or closed so far, by the limit responsible."""
        self.admission = ConnectionQuotas(
            lambda: int(self.loop.time() * 1000),
            ServerLimits(
                ConnectionLimit(self.limits.max_connections),
                per_ip=self.limits.max_connections_per_ip,
            ),
            window,
        )
        """Enforces the connection limits."""
        self.acceptor: ConnectionAcceptor | None = None
        self._arriving: set[asyncio.Task[None]] = set()
        self.addresses: dict[str, tuple[str, int]] = {}
        """The addresses by listener name, in start order; kept after the listeners close."""
        self.tls: dict[str, ListenerTls] = {}
        """The TLS settings by listener."""
        self._handshakes: Handshakes | None = None
        self._sweep: asyncio.TimerHandle | None = None
        self._emptied: asyncio.Event | None = None

    async def start(
        self,
        listener: ListenerConfig,
        tls: ListenerTls | None = None,
        bound: Sequence[socket.socket] = (),
    ) -> tuple[str, int]:
        """Listen on the address of ``listener``, with ``tls`` if it uses TLS; return the address.

        May be called again for another listener. ``bound`` are the listener's sockets, if
        :func:`bind` has already created them. Raises OSError if the address cannot be bound.
        """
        if listener.is_tls and tls is None:
            raise ValueError(f"nothing to encrypt {listener.name} with")
        if self.acceptor is None:
            self.loop = asyncio.get_running_loop()
            self.acceptor = ConnectionAcceptor(
                self.loop, self.admission, self._arrived, self._refused
            )
            self.turns = Turns(self.loop)
            self.responses = ResponseBudget(self.loop, self.limits.max_queued_response_bytes)
            self._arm_sweep()
        address = self.acceptor.open(listener, bound or await bind(listener))
        if tls is not None:
            self.tls[listener.name] = tls
        self.addresses[listener.name] = address
        return address

    @property
    def refused(self) -> int:
        """The number of connections refused so far because of a limit."""
        return self.refusals.total()

    @property
    def address(self) -> tuple[str, int]:
        """The first listener's address, even after it is closed, for requests in progress.

        Raises RuntimeError before the first start.
        """
        if not self.addresses:
            raise RuntimeError("the server is not listening")
        return next(iter(self.addresses.values()))

    def stop_accepting(self) -> None:
        """Close the listening sockets; keep open connections."""
        if self.acceptor is not None:
            self.acceptor.close()
            self.acceptor = None

    def reset(self) -> None:
        """Stop accepting, and reset every connection, as if the process had been killed."""
        self.on_closed = None  # a killed process does nothing after its connections end
        self.stop_accepting()
        for connection in list(self.connections):
            connection.reset()

    async def stop(self) -> None:
        """Stop accepting, let requests in progress finish within a time limit, close everything."""
        self.stop_accepting()
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        if self._arriving:
            await asyncio.wait(self._arriving)
        deadline = self.loop.time() + self.limits.drain_timeout_ms / 1000
        while any(connection.busy for connection in self.connections):
            if self.loop.time() >= deadline:
                log.warning("requests under way are cut off", connections=len(self.connections))
                break
            await asyncio.sleep(0.01)
        self._emptied = asyncio.Event()
        for connection in list(self.connections):
            connection.close("the server stops")
        if self.connections:
            # Closing waits until the kernel has taken all data, which may never happen.
            wait = max(0.1, deadline - self.loop.time())
            try:
                await asyncio.wait_for(self._emptied.wait(), wait)
            except TimeoutError:
                for connection in list(self.connections):
                    connection.abort()

    # --- connections ---

    def _arrived(
        self, listener: ListenerConfig, client: socket.socket, slot: ConnectionSlot
    ) -> None:
        """Create a connection for an admitted socket."""
        task = spawn(self._connect(listener, client, slot), "accept a connection")
        self._arriving.add(task)
        task.add_done_callback(self._arriving.discard)
        if self.admission.excess:
            self.give_way()

    async def _connect(
        self, listener: ListenerConfig, client: socket.socket, slot: ConnectionSlot
    ) -> None:
        connection = Connection(self, listener)
        connection.slot = slot
        protocol = self._encrypted(connection) if listener.is_tls else connection
        try:
            await self.loop.connect_accepted_socket(lambda: protocol, client)
        except BaseException:
            self._left(slot)
            raise

    def _encrypted(self, connection: Connection) -> TlsStream:
        from fencepost.coordinator.server import tls_stream  # noqa: PLC0415 - most brokers do not need it

        if self._handshakes is None:
            timeout_ms = self.limits.handshake_timeout_ms
            self._handshakes = tls_stream.Handshakes(self.loop, timeout_ms)
        tls = self.tls[connection.listener.name]
        return tls_stream.TlsStream(connection, tls, self._handshakes)

    def admit(self, connection: Connection) -> None:
        """Register a connection that has begun."""
        self.connections[connection] = None
        self.accepted += 1

    def _refused(self, peer: str, reason: str) -> None:
        self.refusals[reason] += 1
        log.warning("connection refused", peer=peer, limit=reason)

    def forget(self, connection: Connection) -> None:
        """Remove a connection that has ended."""
        if connection not in self.connections:
            return
        del self.connections[connection]
        if connection.slot is not None:
            self._left(connection.slot)
        if self._emptied is not None and not self.connections:
            self._emptied.set()
        if self.on_closed is not None:
            self.on_closed(connection)

    def _left(self, slot: ConnectionSlot) -> None:
        slot.leave()
        if self.acceptor is not None:
            self.acceptor.admit_waiting()

    def limit(self, bounds: ServerLimits) -> None:
        """Replace the limits; admit waiting clients, or close connections above the new limits."""
        self.admission.bounds = bounds
        if self.acceptor is not None:
            self.acceptor.admit_waiting()
            self.give_way()

    def give_way(self) -> None:
        """Close the connections above the limit, the least recently used first."""
        left = [connection for connection in self.connections if not connection.closed]
        excess = self.admission.excess - (len(self.connections) - len(left))
        if excess <= 0:
            return
        closing = nsmallest(
            min(excess, CLOSED_PER_TURN),
            (
                connection
                for connection in left
                if self.admission.gives_way(connection.listener.name)
            ),
            key=lambda connection: connection.last_active,
        )
        for connection in closing:
            self.refusals[TOO_MANY] += 1
            connection.close(f"{TOO_MANY}: others need its place")
        if closing:
            self.loop.call_soon(self.give_way)

    # --- idle connections ---

    def _arm_sweep(self) -> None:
        limit_ms = min(self.limits.max_idle_ms, self.limits.frame_timeout_ms)
        self._sweep = call_later(
            self.loop, limit_ms / _SWEEPS_PER_LIMIT, "idle sweep", self._run_sweep
        )

    def _run_sweep(self) -> None:
        now = self.loop.time()
        for connection in list(self.connections):
            with swallow("idle sweep", peer=connection.peer):
                connection.check_idle(now)
        self._arm_sweep()
