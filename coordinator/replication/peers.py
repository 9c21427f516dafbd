"""Connections to other brokers: one for each broker and purpose, made when it is first needed.

Where a broker listens comes from the image, by the name of the listener that brokers use among
themselves. Nothing is repeated here: whoever asks knows whether that may be done, and a broker may
have moved meanwhile. A connection that could not be made, or broke, is not tried again at once.

Source: ``BrokerBlockingSender``, ``NetworkUtils.buildNetworkClient``,
``TransactionMarkerChannelManager``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Final, TypeVar

from fencepost.cluster.image import MetadataImage
from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.config.key import ConfigError
from fencepost.coordinator.config.listener_config import SecurityProtocol
from fencepost.coordinator.config.listeners import PROTOCOLS, between_brokers
from fencepost.coordinator.config.security_keys import OF_LISTENERS
from fencepost.coordinator.wire.client.channel import (
    ASYNC,
    BrokerUnreachable,
    ConnectionLostError,
)
from fencepost.coordinator.wire.client.router import ANY_NODE, Router
from fencepost.coordinator.wire.client.security import PLAINTEXT, Security, SecurityError
from fencepost.coordinator.wire.errors import UnsupportedVersion, WireError
from fencepost.coordinator.wire.messages import RequestFactory
from fencepost.coordinator.wire.schema import Entity
from fencepost.logcore.clock import monotonic_s

T = TypeVar("T")

Address = tuple[str, int]
"""Host and port."""

FIRST_BACKOFF_MS: Final = 50
MAX_BACKOFF_MS: Final = 1_000
"""Pauses between two attempts to connect to a broker double from the first to the last of these."""

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
"""What a listener's settings say to those who connect to the same listener elsewhere."""


class Purpose(Enum):
    """What a connection is for; the value is its client id with the own broker id in it."""

    FETCHER = "broker-{0}-fetcher-{1}"
    TXN_MARKER_SENDER = "broker-{0}-txn-marker-sender"
    ADD_PARTITIONS = "AddPartitionsManager-client-{0}"

    @property
    def negotiates(self) -> bool:
        """Whether versions are asked for; those of replication follow from metadata.version."""
        return self is not Purpose.FETCHER

    @property
    def timeout_key(self) -> str:
        """The setting that says how long an answer may take."""
        return "request.timeout.ms" if self.negotiates else "replica.socket.timeout.ms"


def security_of(
    config: BrokerConfig, listener: str, protocol: SecurityProtocol, mechanism: str
) -> Security:
    """How this broker connects to others on ``listener``, and as whom if that asks for a login.

    Its keys are the same as those of its own listener of that name, as in Kafka. Raises ConfigError
    for what can not be used, files among it.
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
    from fencepost.coordinator.wire.client.tls import ssl_context  # noqa: PLC0415 - most brokers need none of it

    try:
        found = Security.of(properties)
        ssl_context(found)
    except SecurityError as error:
        raise ConfigError(PROTOCOLS, f"{listener}:{protocol}", str(error)) from None
    return found


@contextmanager
def usable_security() -> Iterator[None]:
    """Whoever can not connect for the sake of a file tries again: it may be half written.

    Raises BrokerUnreachable.
    """
    try:
        yield
    except SecurityError as error:
        raise BrokerUnreachable(str(error)) from None


class Peer:
    """One connection to one broker. Belongs to the event loop.

    Answers come in the order of their requests. A call that is cancelled leaves the connection as
    it is, and its answer is dropped when it comes.
    """

    def __init__(
        self,
        where: Callable[[], Address],
        *,
        client_id: str,
        timeout_ms: float,
        security: Security = PLAINTEXT,
        negotiates: bool = True,
    ) -> None:
        """``where`` raises BrokerUnreachable for a broker that nobody knows."""
        self._where = where
        self._client_id, self._security = client_id, security
        self._timeout_ms, self._negotiates = timeout_ms, negotiates
        self._router: Router | None = None
        self._to: Address | None = None
        self._backoff_ms = 0.0
        self._not_before = 0.0
        self._closed = False

    async def request(self, entity: Entity, *, timeout_ms: float | None = None) -> Entity:
        """Send ``entity`` in the version that it is of; the answer, whatever it says.

        Raises WireError: BrokerUnreachable where nothing was sent, ConnectionLostError where the
        fate of the request is unknown, AuthenticationError.
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
        """Do the same in the newest version that both sides know. UnsupportedVersion as well."""
        return await self._guarded(
            timeout_ms,
            lambda router, left_ms: router.newest(api_key, at_most, build, left_ms),
        )

    async def _guarded(
        self, timeout_ms: float | None, ask: Callable[[Router, float], Awaitable[T]]
    ) -> T:
        """Ask within the time, and remember how it went."""
        until = monotonic_s() + (self._timeout_ms if timeout_ms is None else timeout_ms) / 1000
        pause = min(self._not_before, until) - monotonic_s()
        if pause > 0:
            await asyncio.sleep(pause)
        router = self._connected()
        try:
            answer = await ask(router, max(1.0, (until - monotonic_s()) * 1000))
        except UnsupportedVersion:
            if self._router is router:
                self._disconnect()  # maybe another answer tells of other versions
            raise
        except WireError:
            if self._router is router and not router.is_open:
                self._backoff_ms = min(max(2 * self._backoff_ms, FIRST_BACKOFF_MS), MAX_BACKOFF_MS)
                self._not_before = monotonic_s() + self._backoff_ms / 1000
            raise
        except (TypeError, ValueError) as error:
            # An answer that makes no sense, where nobody has looked for that.
            if self._router is router:
                self._disconnect()
            raise ConnectionLostError(f"{self._to}: {error!r}") from error
        finally:
            if self._router is not router:
                # Closed meanwhile, and it may have connected after that.
                router.close()
        self._backoff_ms = 0.0
        return answer

    def _connected(self) -> Router:
        if self._closed:
            raise BrokerUnreachable("the broker stops")
        to = self._where()
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
        """End the connection; requests under way fail."""
        self._closed = True
        self._disconnect()


class Peers:
    """``services.peers``: the connections of this broker to others. Belongs to the event loop."""

    def __init__(
        self, config: BrokerConfig, image: Callable[[], MetadataImage], *, node_id: int
    ) -> None:
        """ConfigError where the listener between brokers can not be used."""
        self._config, self._image, self._node_id = config, image, node_id
        self.listener, protocol = between_brokers(config)
        mechanism = config.text("sasl.mechanism.inter.broker.protocol") or ""
        self._security = security_of(config, self.listener, protocol, mechanism)
        self._peers: dict[tuple[int, Purpose, int], Peer] = {}

    def address(self, broker_id: int) -> Address | None:
        """Where a broker listens for others; None if it is not registered, or has no such listener.

        A broker that is fenced may be there all the same.
        """
        known = self._image().brokers.get(broker_id)
        endpoint = None if known is None else known.listeners.get(self.listener)
        return None if endpoint is None else (endpoint.host, endpoint.port)

    def channel(self, broker_id: int, purpose: Purpose, n: int = 0) -> Peer:
        """The connection to a broker for a purpose, the ``n``-th of them."""
        key = broker_id, purpose, n
        found = self._peers.get(key)
        if found is None:

            def where() -> Address:
                address = self.address(broker_id)
                if address is None:
                    raise BrokerUnreachable(
                        f"broker {broker_id} has no listener {self.listener} that is known"
                    )
                return address

            found = self._peers[key] = Peer(
                where,
                client_id=purpose.value.format(self._node_id, n),
                timeout_ms=self._config.int(purpose.timeout_key),
                security=self._security,
                negotiates=purpose.negotiates,
            )
        return found

    def hang_up(self, broker_id: int, purpose: Purpose, n: int = 0) -> None:
        """End a connection that is not needed now."""
        peer = self._peers.pop((broker_id, purpose, n), None)
        if peer is not None:
            peer.close()

    def close(self) -> None:
        """End all connections."""
        peers, self._peers = self._peers, {}
        for peer in peers.values():
            peer.close()
