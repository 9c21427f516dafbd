"""The controller quorum's addresses and settings, from the broker's configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fencepost.client.security import PLAINTEXT, Security
from fencepost.cluster.lifecycle import LifecycleIntervals
from fencepost.cluster.observer import Address
from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.config.roles import Roles
from fencepost.coordinator.replication.peers import security_of
from fencepost.logcore.values import dataclass


@dataclass(frozen=True, slots=True)
class QuorumConfig:
    """How to find the controllers, and how to connect to them."""

    bootstrap: Sequence[Address]
    """``controller.quorum.bootstrap.servers``, or the addresses of the voters."""
    voters: Mapping[int, Address]
    """``controller.quorum.voters``; empty for a dynamic quorum."""
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
    """``controller.socket.timeout.ms``, for all other requests."""

    @classmethod
    def of(cls, config: BrokerConfig, roles: Roles) -> QuorumConfig:
        """Return the configured quorum. Raises ConfigError."""
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


def intervals_of(config: BrokerConfig) -> LifecycleIntervals:
    """Return the configured heartbeat interval and timeouts."""
    return LifecycleIntervals(
        heartbeat_ms=config.int("broker.heartbeat.interval.ms"),
        session_ms=config.int("broker.session.timeout.ms"),
        initial_registration_ms=config.int("initial.broker.registration.timeout.ms"),
    )
