"""What the configuration says of the controllers, for those who speak with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fencepost.cluster.lifecycle import Intervals
from fencepost.cluster.observer import Address
from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.config.roles import Roles
from fencepost.coordinator.replication.peers import security_of
from fencepost.coordinator.wire.client.security import PLAINTEXT, Security
from fencepost.logcore.values import dataclass


@dataclass(frozen=True, slots=True)
class Quorum:
    """How controllers are found, and spoken with."""

    bootstrap: Sequence[Address]
    """``controller.quorum.bootstrap.servers``, or the addresses of the voters."""
    voters: Mapping[int, Address]
    """``controller.quorum.voters``: empty where the quorum is dynamic."""
    listener: str
    """The first of ``controller.listener.names``."""
    security: Security = PLAINTEXT
    request_timeout_ms: int = 2_000
    """``controller.quorum.request.timeout.ms``."""
    fetch_timeout_ms: int = 2_000
    """``controller.quorum.fetch.timeout.ms``."""
    retry_backoff_ms: int = 20
    """``controller.quorum.retry.backoff.ms``."""
    socket_timeout_ms: int = 30_000
    """``controller.socket.timeout.ms``: of the other requests."""

    @classmethod
    def of(cls, config: BrokerConfig, roles: Roles) -> Quorum:
        """As configured. Raises ConfigError."""
        return cls(
            bootstrap=roles.bootstrap,
            voters=dict(roles.voters),
            listener=roles.controller_listener,
            security=security_of(
                config,
                roles.controller_listener,
                roles.controller_protocol,
                config.text("sasl.mechanism.controller.protocol") or "",
            ),
            request_timeout_ms=config.int("controller.quorum.request.timeout.ms"),
            fetch_timeout_ms=config.int("controller.quorum.fetch.timeout.ms"),
            retry_backoff_ms=config.int("controller.quorum.retry.backoff.ms"),
            socket_timeout_ms=config.int("controller.socket.timeout.ms"),
        )


def intervals_of(config: BrokerConfig) -> Intervals:
    """How often a broker is heard of, and how long it waits."""
    return Intervals(
        heartbeat_ms=config.int("broker.heartbeat.interval.ms"),
        session_ms=config.int("broker.session.timeout.ms"),
        initial_registration_ms=config.int("initial.broker.registration.timeout.ms"),
    )
