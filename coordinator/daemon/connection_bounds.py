"""Limits of connections, from the configuration and the quotas, for the server to enforce.

Source: ``SocketServer.ConnectionQuotas``, ``SocketServerConfigs``, ``ClientQuotaMetadataManager``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import structlog

from fencepost.cluster.quota_entities import CONNECTIONS, IP, Entity
from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.config.key import Value, counts_of_addresses, plain_address
from fencepost.coordinator.config.listeners import between_brokers
from fencepost.coordinator.security.quotas import ClientQuotas
from fencepost.coordinator.security.rates import RateWindow
from fencepost.coordinator.server.connection_limits import (
    TOO_FAST,
    TOO_MANY,
    ConnectionLimit,
    ServerLimits,
)
from fencepost.coordinator.server.server import Server

_log = structlog.get_logger(__name__)


def window_of(config: BrokerConfig) -> RateWindow:
    """Return the window over which rates are measured."""
    return RateWindow(
        config.int("quota.window.num"), 1000 * config.int("quota.window.size.seconds")
    )


def bounds_of(config: BrokerConfig, listeners: Iterable[str]) -> ServerLimits:
    """Return the limits in force now."""
    return ServerLimits(
        broker=ConnectionLimit(config.int(TOO_MANY), config.int(TOO_FAST)),
        listeners={
            name: ConnectionLimit(
                _number(config.on_listener(name, TOO_MANY)),
                _number(config.on_listener(name, TOO_FAST)),
            )
            for name in listeners
        },
        per_ip=config.int("max.connections.per.ip"),
        of_ips=counts_of_addresses(config.text("max.connections.per.ip.overrides") or ""),
        protected=between_brokers(config)[0],
    )


def _number(value: Value) -> int:
    if not isinstance(value, int):
        raise TypeError(f"no number: {value!r}")
    return value


def enforce_limits(
    server: Server, config: BrokerConfig, quotas: ClientQuotas, listeners: Collection[str]
) -> None:
    """Have the server enforce limits and quotas, now and after each change."""

    def limit_clients() -> None:
        # Without any client quota, requests skip the check.
        server.throttles = quotas if quotas.limits_clients else None

    def limit_address(entity: Entity, key: str, value: float | None) -> None:
        if key != CONNECTIONS:
            return
        name = dict(entity)[IP]
        try:
            address = None if name is None else plain_address(name)
        except ValueError as error:
            # A controller of Apache Kafka accepts host names.
            if value is not None:
                _log.error("quota of an address is not used", address=name, cause=str(error))
            return
        if value is None:
            server.admission.ip_rates.pop(address, None)
        else:
            server.admission.ip_rates[address] = value

    def limit_connections() -> None:
        server.limit(bounds_of(config, listeners))

    for quota in quotas.table:
        limit_address(*quota)
    quotas.table.listen(limit_address)
    quotas.listen(limit_clients)
    config.listen(limit_connections)
    limit_clients()
    limit_connections()
