"""A broker's connection settings for ZooKeeper: TLS, login, and ACLs of znodes that it creates.

Source: ``ZkConfigs``, ``KafkaZkClient.createZkClient``, ``ZkData.defaultAcls``; ``X509Util``.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import field
from typing import Final

from fencepost.client.security import Security, SecurityError
from fencepost.client.tls import ssl_context
from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.config.key import HIDDEN, ConfigError
from fencepost.coordinator.security.cipher_suites import chosen_suites
from fencepost.logcore.values import dataclass
from fencepost.protocol.jaas import JaasError, parse_jaas

JAAS: Final = "fencepost.zookeeper.jaas.config"
LOGIN_MODULE: Final = "org.apache.zookeeper.server.auth.DigestLoginModule"

_NETTY: Final = "org.apache.zookeeper.ClientCnxnSocketNetty"
_ENABLE, _SOCKET = "zookeeper.ssl.client.enable", "zookeeper.clientCnxnSocket"
_KEYSTORE, _SET_ACL = "zookeeper.ssl.keystore.location", "zookeeper.set.acl"

_UNSERVED: Final = {
    "zookeeper.ssl.crl.enable": "certificate revocation lists are not checked",
    "zookeeper.ssl.ocsp.enable": "the revocation of certificates is not checked",
    "zookeeper.metadata.migration.enable": "migration to KRaft controllers is not supported",
}

_OF_CLIENTS: Final[Mapping[str, str]] = {
    "zookeeper.ssl.keystore.location": "ssl.keystore.location",
    # In ZooKeeper the key has the same password as the keystore.
    "zookeeper.ssl.keystore.password": "ssl.key.password",
    "zookeeper.ssl.keystore.type": "ssl.keystore.type",
    "zookeeper.ssl.truststore.location": "ssl.truststore.location",
    "zookeeper.ssl.truststore.password": "ssl.truststore.password",
    "zookeeper.ssl.truststore.type": "ssl.truststore.type",
    "zookeeper.ssl.endpoint.identification.algorithm": "ssl.endpoint.identification.algorithm",
}
"""For each TLS key of ZooKeeper, the corresponding key of Kafka's clients."""


@dataclass(frozen=True, slots=True)
class ZooKeeperConfig:
    """Connection settings. Equality does not compare ``tls``; ``repr`` shows no secret."""

    connect: str
    """Comma-separated HOST:PORT, and optionally a chroot path."""
    timeout_ms: int
    """The session timeout."""
    connection_timeout_ms: int
    """The time limit for connecting when the broker starts."""
    max_in_flight: int
    """The maximum number of requests in flight."""
    tls: ssl.SSLContext | None = field(default=None, compare=False)
    login: tuple[str, str] | None = field(default=None, repr=False)
    """User and password of SASL's DIGEST-MD5."""
    sets_acls: bool = False
    """Whether the broker creates znodes with an ACL that lets only their creator change them."""

    @classmethod
    def of(cls, config: BrokerConfig) -> ZooKeeperConfig:
        """Read the configuration, and the files it names. Raises ConfigError."""
        for key, reason in _UNSERVED.items():
            if config.bool(key):
                raise ConfigError(key, "true", reason)
        timeout_ms = config.int("zookeeper.session.timeout.ms")
        connection = config.get("zookeeper.connection.timeout.ms")
        result = cls(
            connect=config.text("zookeeper.connect") or "",
            timeout_ms=timeout_ms,
            connection_timeout_ms=connection if isinstance(connection, int) else timeout_ms,
            max_in_flight=config.int("zookeeper.max.in.flight.requests"),
            tls=_tls(config),
            login=_login(config),
            sets_acls=config.bool(_SET_ACL),
        )
        has_certificate = result.tls is not None and config.text(_KEYSTORE)
        if result.sets_acls and result.login is None and not has_certificate:
            raise ConfigError(
                _SET_ACL,
                "true",
                (
                    f"ACLs of znodes need an authenticated session: set {JAAS}, or {_ENABLE}"
                    f" with {_KEYSTORE}"
                ),
            )
        return result


def _tls(config: BrokerConfig) -> ssl.SSLContext | None:
    if not config.bool(_ENABLE):
        return None
    if config.text(_SOCKET) != _NETTY:
        raise ConfigError(_SOCKET, config.text(_SOCKET), f"with {_ENABLE} it must be {_NETTY}")
    properties = {client: config.text(key) or "" for key, client in _OF_CLIENTS.items()}
    properties["security.protocol"] = "SSL"
    protocol = config.text("zookeeper.ssl.protocol") or ""
    versions = config.items("zookeeper.ssl.enabled.protocols") or (protocol,)
    properties["ssl.enabled.protocols"] = ",".join(versions)
    properties["ssl.protocol"] = max(versions)
    suites = config.items("zookeeper.ssl.cipher.suites")
    older, _ = chosen_suites(suites)
    properties["ssl.cipher.suites"] = ",".join(older or suites)
    try:
        return ssl_context(Security.of(properties))
    except SecurityError as error:
        key, _, reason = str(error).partition(": ")
        names = {client: setting for setting, client in _OF_CLIENTS.items()}
        raise ConfigError(names.get(key, f"zookeeper.{key}"), HIDDEN, reason) from None


def _login(config: BrokerConfig) -> tuple[str, str] | None:
    text = config.text(JAAS)
    if not text:
        return None
    try:
        login = parse_jaas(text)
    except JaasError as error:
        raise ConfigError(JAAS, HIDDEN, str(error)) from None
    if login.module != LOGIN_MODULE:
        raise ConfigError(JAAS, HIDDEN, f"the only supported module is {LOGIN_MODULE}")
    user, password = login.options.get("username", ""), login.options.get("password", "")
    if not user or not password:
        raise ConfigError(JAAS, HIDDEN, "it needs username and password")
    return user, password


OPEN_PATH: Final = "/consumers"
"""The path that clients of older releases write to."""

SENSITIVE_PATHS: Final = ("/config/users", "/config/brokers", "/delegation_token/tokens")
"""Paths that other users may not even read (kafka: ``SensitiveRootPaths``)."""


def is_sensitive(path: str) -> bool:
    """Return whether a path may hold passwords or other secrets."""
    return path.startswith(SENSITIVE_PATHS)
