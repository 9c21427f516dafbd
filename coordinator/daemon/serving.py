"""Listeners: their sockets, the server that accepts connections, and the advertised addresses.

Source: ``SocketServer``, ``KafkaConfig``.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import structlog

from fencepost.coordinator.config.key import ConfigError
from fencepost.coordinator.config.listener_config import ListenerConfig
from fencepost.coordinator.config.listeners import (
    ANY_ADDRESS,
    check_closed,
    sends_plaintext_passwords,
)
from fencepost.coordinator.daemon.connection_bounds import enforce_limits, window_of
from fencepost.coordinator.daemon.errors import BrokerError
from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.server.server import Server, bind
from fencepost.protocol.limits import ConnectionLimits

if TYPE_CHECKING:
    from fencepost.coordinator.broker_services import Services
    from fencepost.coordinator.config.broker_config import BrokerConfig
    from fencepost.coordinator.daemon.certificates import ListenerCertificates
    from fencepost.coordinator.daemon.request_recorder import RequestRecorder
    from fencepost.coordinator.handlers import Registry
    from fencepost.coordinator.security.logins import Logins
    from fencepost.coordinator.server.connection import Connection
    from fencepost.logcore.clock import Clock

_log = structlog.get_logger(__name__)

Address = tuple[str, int]
"""Host and port."""


class Listeners:
    """Listeners of a node that one server serves: first bound, then opened."""

    def __init__(
        self, listeners: Mapping[str, ListenerConfig], advertised: Mapping[str, ListenerConfig]
    ) -> None:
        self.all = listeners
        """Listeners by name, in order."""
        self.advertised = advertised
        """Advertised listeners by name; a listener without an entry advertises its bound address.
        """
        self._bound: dict[str, list[socket.socket]] = {}
        """Sockets that are bound but not served yet."""
        self.server: Server | None = None

    def address_of(self, name: str | None = None) -> Address:
        """Return the (host, port) advertised to clients of a listener, by default the first one.

        Raises RuntimeError before the listener is bound.
        """
        name = next(iter(self.all)) if name is None else name
        address = self.advertised.get(name)
        if address is not None and address.port:
            return address.host, address.port
        bound = self._bound.get(name)
        if bound:
            host, port = bound[0].getsockname()[:2]
        elif self.server is not None:
            host, port = self.server.addresses[name]
        else:
            raise RuntimeError("the broker is not started")
        if address is not None:
            return address.host, port
        return (socket.gethostname() if host in ANY_ADDRESS else host), port

    async def bind(self) -> None:
        """Bind the ports; clients wait in the backlog until :meth:`open`. Raises BrokerError."""
        for name, listener in self.all.items():
            try:
                self._bound[name] = await bind(listener)
            except OSError as error:
                raise _not_bound(listener, error) from error

    def prepare(self, services: Services, registry: Registry) -> Server:
        """Return the server of these listeners; it does not listen yet."""
        config = services.config
        idle_ms = config.int("connections.max.idle.ms")
        limits = ConnectionLimits(
            max_request_bytes=config.int("socket.request.max.bytes"),
            max_queued_request_bytes=config.int("queued.max.request.bytes"),
            max_queued_response_bytes=config.int("queued.max.response.bytes"),
            max_idle_ms=max(1, idle_ms) if idle_ms >= 0 else sys.maxsize,
        )
        self.server = server = Server(
            services,
            registry=registry,
            limits=limits,
            error_code=error_code,
            logins=_logins(services, self.all.values()),
            window=window_of(config),
            actions=services.storage.actions,
        )
        server.on_closed = services.connection_closed
        if services.storage.is_broker and config.bool("fencepost.history.enable"):
            _watch_requests(server, services, registry)
        enforce_limits(server, config, services.quotas, self.all)
        return server

    async def open(self, server: Server, certificates: ListenerCertificates | None) -> None:
        """Accept connections on all listeners. Raises BrokerError."""
        if certificates is not None:
            try:
                await certificates.load()
            except ConfigError as error:
                raise BrokerError(str(error)) from error
            certificates.start()
            server.broker.check_certificates = certificates.check
        for name, listener in self.all.items():
            tls = None if certificates is None else certificates.tls.get(name)
            try:
                await server.start(listener, tls, self._bound.pop(name, ()))
            except OSError as error:
                raise _not_bound(listener, error) from error

    def unbind(self) -> None:
        """Close the sockets that were bound but never served."""
        for sockets in self._bound.values():
            for listening_socket in sockets:
                listening_socket.close()
        self._bound.clear()


def _not_bound(listener: ListenerConfig, error: OSError) -> BrokerError:
    return BrokerError(f"cannot listen on {listener.host}:{listener.port}: {error}")


def check_listeners(config: BrokerConfig, listeners: Iterable[ListenerConfig]) -> None:
    """Raise ConfigError for a listener that cannot be served, or lacks required authentication."""
    listeners = list(listeners)
    check_closed(config, listeners)
    for listener in listeners:
        if listener.is_sasl:
            from fencepost.coordinator.security.logins import check_logins  # noqa: PLC0415 - most brokers have no SASL listener

            check_logins(config, listener.name)


def certificates_of(
    config: BrokerConfig, listeners: Iterable[ListenerConfig], clock: Clock
) -> ListenerCertificates | None:
    """Return the certificates of TLS listeners; None without any. Raises ConfigError."""
    encrypted = [listener for listener in listeners if listener.is_tls]
    if not encrypted:
        return None
    # Imported here because few brokers have TLS listeners.
    from fencepost.coordinator.daemon.certificates import ListenerCertificates  # noqa: PLC0415

    return ListenerCertificates(config, encrypted, clock)


def _logins(services: Services, listeners: Iterable[ListenerConfig]) -> Logins | None:
    """Return the SASL logins; None without a SASL listener."""
    with_sasl = [listener for listener in listeners if listener.is_sasl]
    for listener in filter(sends_plaintext_passwords, with_sasl):
        _log.warning("PLAIN without TLS: others can read the passwords", listener=listener.name)
    if not with_sasl:
        return None
    from fencepost.coordinator.security.logins import Logins  # noqa: PLC0415 - most brokers have no SASL listener

    names = [listener.name for listener in with_sasl]
    return Logins.of_listeners(
        names, services.config, services.users, services.password_checks, services.clock
    )


def _watch_requests(server: Server, services: Services, registry: Registry) -> None:
    """Record requests in the history while ``fencepost.history.requests.enable`` is true."""
    recorder: RequestRecorder | None = None

    def apply() -> None:
        nonlocal recorder
        is_on = services.config.bool("fencepost.history.requests.enable")
        if is_on and recorder is None:
            from fencepost.coordinator.daemon.request_recorder import RequestRecorder  # noqa: PLC0415 - most brokers record none

            recorder = RequestRecorder(services, registry)
        if recorder is not None:
            recorder.is_on = is_on

    def closed(connection: Connection) -> None:
        services.connection_closed(connection)
        if recorder is not None:
            recorder.closed(connection)

    server.on_closed = closed
    services.config.listen(apply)
    apply()
