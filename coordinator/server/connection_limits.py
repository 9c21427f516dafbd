"""Limits of connections and of their rate: in total, per listener and per address.

:class:`ConnectionQuotas` counts connections, without knowing sockets or the event loop.
:class:`ConnectionAcceptor` makes connecting clients wait at their listener, or refuses them.

Source: ``SocketServer.ConnectionQuotas``, ``SocketServer.Acceptor``; KIP-402, KIP-612.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from typing import Any, Final

from fencepost.coordinator.config.listener_config import ListenerConfig
from fencepost.coordinator.runtime.background import call_later
from fencepost.coordinator.security.principal import plain_host
from fencepost.coordinator.security.rates import Rate, RateWindow
from fencepost.coordinator.server.listener import Listener, first_reserved_file
from fencepost.logcore.values import dataclass

UNLIMITED: Final = 2**31 - 1

MAX_ADDRESSES: Final = 10_000
"""The maximum number of addresses whose connection rates are tracked, about 2 KiB each. If all of
them have connected within the rate's window, further addresses share one rate."""

MAX_HELD: Final = 1_000
"""The maximum number of sockets of throttled addresses that are kept open for the throttle time.
Further sockets are closed at once, so that they do not use up the file descriptors."""

# The reasons for which a connection is refused, by the setting responsible.
TOO_MANY, TOO_MANY_OF_IP = "max.connections", "max.connections.per.ip"
TOO_FAST, TOO_FAST_OF_IP = "max.connection.creation.rate", "connection_creation_rate"
NO_FILES = "open files"
REASONS: Final = (TOO_MANY, TOO_MANY_OF_IP, TOO_FAST_OF_IP, NO_FILES)


@dataclass(frozen=True, slots=True)
class ConnectionLimit:
    """The limit of simultaneous connections, and of connections per second."""

    count: int = UNLIMITED
    rate: float = UNLIMITED


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """The current limits."""

    broker: ConnectionLimit = ConnectionLimit()
    listeners: Mapping[str, ConnectionLimit] = field(default_factory=dict)
    """By listener name."""
    per_ip: int = UNLIMITED
    """The limit of simultaneous connections of one address."""
    of_ips: Mapping[str, int] = field(default_factory=dict)
    """The limits that replace ``per_ip`` for some addresses."""
    protected: str | None = None
    """The listener that admits connections even if the broker has too many (kafka:
    ``ConnectionQuotas.protectedListener``)."""


class ConnectionSlot:
    """One connection that :class:`ConnectionQuotas` has counted."""

    __slots__ = ("_admission", "host", "listener")

    def __init__(self, admission: ConnectionQuotas, listener: str, host: str) -> None:
        self._admission: ConnectionQuotas | None = admission
        self.listener, self.host = listener, host

    def leave(self) -> None:
        """Remove the connection from the counts; a second call does nothing."""
        admission, self._admission = self._admission, None
        if admission is not None:
            admission.left(self)


@dataclass(frozen=True, slots=True)
class RefusedConnection:
    """A refused connection: the responsible setting, and how long the socket is kept open."""

    reason: str
    held_ms: int = 0


class ConnectionQuotas:
    """Counts connections against ``bounds``. ``now_ms`` is a monotonic clock."""

    def __init__(
        self,
        now_ms: Callable[[], int],
        bounds: ServerLimits | None = None,
        window: RateWindow | None = None,
    ) -> None:
        self._now_ms = now_ms
        self._window = RateWindow() if window is None else window
        self.bounds = ServerLimits() if bounds is None else bounds
        """May be replaced at any time."""
        self.ip_rates: dict[str | None, float] = {}
        """The limits of connections per second by address; None is the default."""
        self.count = 0
        self.by_listener: Counter[str] = Counter()
        self.by_ip: Counter[str] = Counter()
        self.throttled_ms: Counter[tuple[str, str]] = Counter()
        """The total throttle time of connections, by listener and setting."""
        self._rate = Rate(self._window)
        self._listener_rates: defaultdict[str, Rate] = defaultdict(lambda: Rate(self._window))
        self._ip_rates: OrderedDict[str | None, Rate] = OrderedDict()  # least recently used first

    def rate(self, listener: str | None = None) -> float:
        """Return the recent rate of connections per second."""
        rate = self._rate if listener is None else self._listener_rates[listener]
        return rate.per_second(self._now_ms())

    # --- accept ---

    def arrived(self, listener: str) -> int:
        """Count an accepted connection; return how long its listener must pause, in ms."""
        now_ms, bounds = self._now_ms(), self.bounds
        wait_ms = 0
        if not self._is_protected(listener):
            self._rate.record(1, now_ms)
            wait_ms = self._throttle_ms(self._rate, bounds.broker.rate, now_ms)
        rate = self._listener_rates[listener]
        rate.record(1, now_ms)
        wait_ms = max(
            wait_ms,
            self._throttle_ms(rate, bounds.listeners.get(listener, ConnectionLimit()).rate, now_ms),
        )
        if wait_ms:
            self.throttled_ms[listener, TOO_FAST] += wait_ms
        return wait_ms

    def has_room(self, listener: str) -> bool:
        """Return whether the limits allow one more connection."""
        bounds = self.bounds
        if self.by_listener[listener] >= bounds.listeners.get(listener, ConnectionLimit()).count:
            return False
        return self._is_protected(listener) or self.count < bounds.broker.count

    # --- admission ---

    def enter(self, listener: str, host: str) -> ConnectionSlot | RefusedConnection:
        """Count a connection, unless its address exceeds a limit.

        The caller has checked :meth:`has_room`.
        """
        held_ms = self._ip_throttle_ms(listener, host)
        if held_ms:
            return RefusedConnection(TOO_FAST_OF_IP, held_ms)
        if self.by_ip[host] >= self.bounds.of_ips.get(host, self.bounds.per_ip):
            if not self.by_ip[host]:
                del self.by_ip[host]
            return RefusedConnection(TOO_MANY_OF_IP)
        self.count += 1
        self.by_listener[listener] += 1
        self.by_ip[host] += 1
        return ConnectionSlot(self, listener, host)

    def left(self, slot: ConnectionSlot) -> None:
        """Remove an ended connection from the counts."""
        self.count -= 1
        self.by_listener[slot.listener] -= 1
        self.by_ip[slot.host] -= 1
        if not self.by_ip[slot.host]:
            del self.by_ip[slot.host]

    @property
    def excess(self) -> int:
        """The number of connections above the broker's limit.

        Such connections arise when a protected listener admits them, or when the limit is lowered.
        """
        return max(0, self.count - self.bounds.broker.count)

    def gives_way(self, listener: str) -> bool:
        """Return whether the broker may close the listener's connections to admit others."""
        return not self._is_protected(listener)

    def _is_protected(self, listener: str) -> bool:
        return self.bounds.protected == listener and len(self.bounds.listeners) > 1

    def _throttle_ms(self, rate: Rate, quota: float, now_ms: int) -> int:
        if quota >= UNLIMITED:
            return 0
        return min(rate.throttle_ms(quota, now_ms), self._window.sample_ms)

    def _ip_throttle_ms(self, listener: str, host: str) -> int:
        """Count a connection of an address; return its throttle time, 0 if it is admitted.

        If the address exceeds its rate, the connection is removed from all rates.
        """
        quota = self.ip_rates.get(host, self.ip_rates.get(None))
        if quota is None:
            return 0
        now_ms = self._now_ms()
        rate = self._rate_of(host, now_ms)
        rate.record(1, now_ms)
        held_ms = self._throttle_ms(rate, quota, now_ms)
        if held_ms:
            rate.record(-1, now_ms)
            self._listener_rates[listener].record(-1, now_ms)
            if not self._is_protected(listener):
                self._rate.record(-1, now_ms)
            self.throttled_ms[listener, TOO_FAST_OF_IP] += held_ms
        return held_ms

    def _rate_of(self, host: str | None, now_ms: int) -> Rate:
        rates = self._ip_rates
        if host in rates:
            rates.move_to_end(host)
            return rates[host]
        if len(rates) >= MAX_ADDRESSES:
            oldest, rate = next(iter(rates.items()))
            if rate.per_second(now_ms) == 0:
                del rates[oldest]
            else:
                host = None
        return rates.setdefault(host, Rate(self._window))


@dataclass(slots=True)
class _WaitingClient:
    """A client that was accepted and waits for admission."""

    client: socket.socket
    address: Any
    not_before_ms: float


class _ListenerState:
    """One listener: its sockets, and its waiting clients."""

    def __init__(self, config: ListenerConfig) -> None:
        self.config = config
        self.listeners: list[Listener] = []
        self.waiting: deque[_WaitingClient] = deque()
        self.timer: asyncio.TimerHandle | None = None


class ConnectionAcceptor:
    """The listeners of one server.

    ``enter`` is called for each admitted client, ``refused`` for each refused one. At the
    connection limit a listener holds one accepted client and accepts no other; further clients wait
    in the kernel.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        admission: ConnectionQuotas,
        enter: Callable[[ListenerConfig, socket.socket, ConnectionSlot], None],
        refused: Callable[[str, str], None],
    ) -> None:
        self._loop, self._admission = loop, admission
        self._enter, self._refused = enter, refused
        self._listeners: dict[str, _ListenerState] = {}
        self._held: dict[socket.socket, asyncio.TimerHandle] = {}

    @property
    def is_open(self) -> bool:
        """Whether any listener is open."""
        return bool(self._listeners)

    @property
    def waiting(self) -> int:
        """The number of accepted clients that wait because of a rate or connection limit."""
        return sum(len(state.waiting) for state in self._listeners.values())

    def open(self, config: ListenerConfig, bound: Iterable[socket.socket]) -> tuple[str, int]:
        """Accept connections on these sockets; return the address of the first."""
        state = self._listeners.setdefault(config.name, _ListenerState(config))

        def arrived(client: socket.socket, address: Any) -> None:
            self._arrived(state, client, address)

        listeners = [Listener(self._loop, listening_socket, arrived) for listening_socket in bound]
        state.listeners += listeners
        return listeners[0].address

    def close(self) -> None:
        """Close the listeners; refuse the waiting clients."""
        listeners, self._listeners = self._listeners, {}
        for state in listeners.values():
            for listener in state.listeners:
                listener.close()
            if state.timer is not None:
                state.timer.cancel()
            for connection in state.waiting:
                connection.client.close()
        for client in list(self._held):
            self._close_held(client)

    def admit_waiting(self) -> None:
        """Admit waiting clients after a connection has ended or limits have changed."""
        for state in self._listeners.values():
            if state.waiting:
                self._admit_waiting(state)

    def _arrived(self, state: _ListenerState, client: socket.socket, address: Any) -> None:
        if client.fileno() >= first_reserved_file():
            # Close the socket before the next accept: many clients may arrive in one turn of the
            # event loop.
            client.close()
            self._refused(f"{address[0]}:{address[1]}", NO_FILES)
            return
        wait_ms = self._admission.arrived(state.config.name)
        not_before_ms = self._loop.time() * 1000 + wait_ms
        state.waiting.append(_WaitingClient(client, address, not_before_ms))
        self._admit_waiting(state)

    def _admit_waiting(self, state: _ListenerState) -> None:
        """Admit waiting clients in order; pause the listener while any of them must wait."""
        if state.timer is not None:
            state.timer.cancel()
            state.timer = None
        admission, name = self._admission, state.config.name
        while state.waiting:
            first = state.waiting[0]
            left_ms = first.not_before_ms - self._loop.time() * 1000
            if left_ms > 0:
                state.timer = call_later(
                    self._loop, left_ms, "let in", lambda: self._admit_waiting(state)
                )
                break
            if not admission.has_room(name):
                break
            state.waiting.popleft()
            self._admit(state, first)
        for listener in state.listeners:
            listener.hold(is_held=bool(state.waiting))

    def _admit(self, state: _ListenerState, waiting: _WaitingClient) -> None:
        host = plain_host(str(waiting.address[0]))
        slot = self._admission.enter(state.config.name, host)
        if isinstance(slot, ConnectionSlot):
            self._enter(state.config, waiting.client, slot)
            return
        self._refused(f"{host}:{waiting.address[1]}", slot.reason)
        if slot.held_ms and len(self._held) < MAX_HELD:
            # Nothing is read or sent, which slows down clients that would retry at once.
            self._held[waiting.client] = call_later(
                self._loop, slot.held_ms, "close a socket", lambda: self._close_held(waiting.client)
            )
        else:
            waiting.client.close()

    def _close_held(self, client: socket.socket) -> None:
        self._held.pop(client).cancel()
        client.close()
