"""Connections to other brokers: one for each broker and purpose, made when it is first needed.

The metadata image has the address of a broker's inter-broker listener. A
:class:`BrokerConnection` never retries a request: only the caller knows whether a retry is safe,
and the broker's address may have changed. After a failure, the next connection attempt waits for a
backoff.

Source: ``BrokerBlockingSender``, ``NetworkUtils.buildNetworkClient``,
``TransactionMarkerChannelManager``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Final, TypeVar

from fencepost.client.channel import (
    ASYNC,
    BrokerUnreachable,
    ConnectionLostError,
)
from fencepost.client.router import ANY_NODE, Router
from fencepost.client.security import PLAINTEXT, Security, SecurityError
from fencepost.cluster.image import MetadataImage
from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.config.key import ConfigError
from fencepost.coordinator.config.listener_config import SecurityProtocol
from fencepost.coordinator.config.listeners import PROTOCOLS, between_brokers
from fencepost.coordinator.config.security_keys import OF_LISTENERS
from fencepost.logcore.clock import monotonic_s
from fencepost.protocol.errors import UnsupportedVersion, WireError
from fencepost.protocol.messages import RequestFactory
from fencepost.protocol.schema import Entity

T = TypeVar("T")

Address = tuple[str, int]
"""Host and port."""

FIRST_BACKOFF_MS: Final = 50
MAX_BACKOFF_MS: Final = 1_000
"""The backoff before reconnecting: it begins at ``FIRST_BACKOFF_MS``, and doubles with each failure
up to ``MAX_BACKOFF_MS``."""

_OF_CLIENTS: Final = frozenset(
    {
        "sasl.jaas.config",
        "ssl.cipher.suites",
        "ssl.enabled.protocols",
        "ssl.endpoint.identification.algorithm",
        "ssl.key.password",
        "ssl.keystore.certificate.chain",
        "ssl.keystore.key",
        "ssl.keystore.location",
        "ssl.keystore.type",
        "ssl.protocol",
        "ssl.truststore.certificates",
        "ssl.truststore.location",
        "ssl.truststore.type",
    }
)
"""The settings of this broker's listeners that also apply when it connects to a listener of the
same name on another node."""


class Purpose(Enum):
    """The purpose of a connection.

    The value is a format string for the client id, with this broker's id and the number of the
    connection.
    """

    FETCHER = "broker-{0}-fetcher-{1}"
    TXN_MARKER_SENDER = "broker-{0}-txn-marker-sender"
    ADD_PARTITIONS = "AddPartitionsManager-client-{0}"
    PARTITION_METADATA = "broker-{0}-partition-metadata-client"
    SHARE_STATE = "broker-{0}-share-state-sender"
    DEAD_LETTERS = "broker-{0}-dead-letter-sender"

    @property
    def negotiates(self) -> bool:
        """Whether API versions are negotiated; a fetcher derives them from ``metadata.version``."""
        return self is not Purpose.FETCHER

    @property
    def timeout_key(self) -> str:
        """The setting that limits the time for a response."""
        return "request.timeout.ms" if self.negotiates else "replica.socket.timeout.ms"


def security_of(
    config: BrokerConfig, listener: str, protocol: SecurityProtocol, mechanism: str
) -> Security:
    """Return the security settings for connections to other brokers on ``listener``.

    As in Kafka, they are the settings of this broker's own listener of that name. Raises
    ConfigError for unusable settings or files.
    """
    if protocol is SecurityProtocol.PLAINTEXT:
        return PLAINTEXT
    properties = {"security.protocol": protocol.value, "sasl.mechanism": mechanism}
    for name in sorted(_OF_CLIENTS & OF_LISTENERS.keys()):
        value = config.on_listener(listener, name, mechanism)
        text = ",".join(value) if isinstance(value, tuple) else value
        if text is not None:
            properties[name] = str(text)
    if properties.get("ssl.protocol") == "TLS":
        del properties["ssl.protocol"]
    from fencepost.client.tls import ssl_context  # noqa: PLC0415 - most brokers need none of it

    try:
        security = Security.of(properties)
        ssl_context(security)
    except SecurityError as error:
        raise ConfigError(PROTOCOLS, f"{listener}:{protocol}", str(error)) from None
    return security


@contextmanager
def usable_security() -> Iterator[None]:
    """Turn a SecurityError into BrokerUnreachable, so that the caller retries.

    The error may be temporary, such as a half-written keystore.
    """
    try:
        yield
    except SecurityError as error:
        raise BrokerUnreachable(str(error)) from None


class BrokerConnection:
    """One connection to one broker, for use on the event loop only.

    Responses come in the order of their requests. Cancelling a call leaves the connection open; the
    response is dropped when it arrives.
    """

    def __init__(
        self,
        address_of_peer: Callable[[], Address],
        *,
        client_id: str,
        timeout_ms: float,
        security: Security = PLAINTEXT,
        negotiates: bool = True,
    ) -> None:
        """``address_of_peer`` raises BrokerUnreachable for a broker without an address."""
        self._address_of_peer = address_of_peer
        self._client_id, self._security = client_id, security
        self._timeout_ms, self._negotiates = timeout_ms, negotiates
        self._router: Router | None = None
        self._to: Address | None = None
        self._backoff_ms = 0.0
        self._not_before = 0.0
        self._closed = False

    async def request(self, entity: Entity, *, timeout_ms: float | None = None) -> Entity:
        """Send ``entity`` in its own version, and return the response, which may hold an error.

        Raises WireError: BrokerUnreachable if nothing was sent, ConnectionLostError if the fate of
        the request is unknown, AuthenticationError.
        """
        return await self._guarded(
            timeout_ms,
            lambda router, left_ms: router.request(
                entity.__api_key__, entity.__version__, entity, ANY_NODE, left_ms
            ),
        )

    async def newest(
        self,
        api_key: int,
        build: Callable[[RequestFactory], Entity],
        *,
        at_most: int | None = None,
        timeout_ms: float | None = None,
    ) -> Entity:
        """Send a request like :meth:`request`, in the newest version that both sides support.

        Also raises UnsupportedVersion.
        """
        return await self._guarded(
            timeout_ms,
            lambda router, left_ms: router.newest(api_key, at_most, build, left_ms),
        )

    async def _guarded(
        self, timeout_ms: float | None, ask: Callable[[Router, float], Awaitable[T]]
    ) -> T:
        """Send a request within its time limit, and update the backoff."""
        until = monotonic_s() + (self._timeout_ms if timeout_ms is None else timeout_ms) / 1000
        pause = min(self._not_before, until) - monotonic_s()
        if pause > 0:
            await asyncio.sleep(pause)
        router = self._connected()
        try:
            answer = await ask(router, max(1.0, (until - monotonic_s()) * 1000))
        except UnsupportedVersion:
            if self._router is router:
                self._disconnect()  # another connection may report other versions
            raise
        except WireError:
            if self._router is router and not router.is_open:
                self._backoff_ms = min(max(2 * self._backoff_ms, FIRST_BACKOFF_MS), MAX_BACKOFF_MS)
                self._not_before = monotonic_s() + self._backoff_ms / 1000
            raise
        except (TypeError, ValueError) as error:
            # A response that was decoded, but does not make sense.
            if self._router is router:
                self._disconnect()
            raise ConnectionLostError(f"{self._to}: {error!r}") from error
        finally:
            if self._router is not router:
                # ``close`` or a new address removed this router, which may have connected since.
                router.close()
        self._backoff_ms = 0.0
        return answer

    def _connected(self) -> Router:
        if self._closed:
            raise BrokerUnreachable("the broker stops")
        to = self._address_of_peer()
        if self._router is None or to != self._to:
            self._disconnect()
            host, port = to
            with usable_security():
                self._router = Router(
                    ASYNC,
                    [f"[{host}]:{port}" if ":" in host else f"{host}:{port}"],
                    client_id=self._client_id,
                    timeout_ms=self._timeout_ms,
                    security=self._security,
                    negotiates=self._negotiates,
                )
            self._to = to
        return self._router

    def _disconnect(self) -> None:
        router, self._router = self._router, None
        if router is not None:
            router.close()

    def close(self) -> None:
        """Close the connection; requests in flight fail."""
        self._closed = True
        self._disconnect()


class Peers:
    """The connections of this broker to other brokers, for use on the event loop only."""

    def __init__(
        self, config: BrokerConfig, image: Callable[[], MetadataImage], *, node_id: int
    ) -> None:
        """Raises ConfigError if the inter-broker listener is unusable."""
        self._config, self._image, self._node_id = config, image, node_id
        self.listener, protocol = between_brokers(config)
        mechanism = config.text("sasl.mechanism.inter.broker.protocol") or ""
        self._security = security_of(config, self.listener, protocol, mechanism)
        self._peers: dict[tuple[int, Purpose, int], BrokerConnection] = {}

    def address(self, broker_id: int) -> Address | None:
        """Return a broker's inter-broker address; None if it is not registered or has none.

        The broker may be fenced, because a fenced broker may still be reachable.
        """
        broker = self._image().brokers.get(broker_id)
        endpoint = None if broker is None else broker.listeners.get(self.listener)
        return None if endpoint is None else (endpoint.host, endpoint.port)

    def channel(self, broker_id: int, purpose: Purpose, n: int = 0) -> BrokerConnection:
        """Return the ``n``-th connection to a broker for a purpose."""
        key = broker_id, purpose, n
        connection = self._peers.get(key)
        if connection is None:

            def address_of_peer() -> Address:
                address = self.address(broker_id)
                if address is None:
                    raise BrokerUnreachable(
                        f"broker {broker_id} has no listener {self.listener} that is known"
                    )
                return address

            connection = self._peers[key] = BrokerConnection(
                address_of_peer,
                client_id=purpose.value.format(self._node_id, n),
                timeout_ms=self._config.int(purpose.timeout_key),
                security=self._security,
                negotiates=purpose.negotiates,
            )
        return connection

    def hang_up(self, broker_id: int, purpose: Purpose, n: int = 0) -> None:
        """Close a connection that is not needed now."""
        peer = self._peers.pop((broker_id, purpose, n), None)
        if peer is not None:
            peer.close()

    def close(self) -> None:
        """Close all connections."""
        peers, self._peers = self._peers, {}
        for peer in peers.values():
            peer.close()
