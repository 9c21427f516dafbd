"""kazoo's client, extended with TLS by Kafka's settings, and with a SASL login.

kazoo's own SASL login needs a library that is no longer maintained (pure-sasl, of 2019), and kazoo
gives up for good if a connection breaks during the login. With this client, an interrupted login
counts as a failed attempt to connect, and the client tries the next server.

Source: ``ZooKeeperSaslClient``, ``ClientCnxnSocketNetty``.
"""

from __future__ import annotations

import socket
from typing import Any

import structlog
from kazoo.client import KazooClient
from kazoo.exceptions import ConnectionDropped
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.connection import ConnectionHandler
from kazoo.protocol.serialization import SASL
from kazoo.security import CREATOR_ALL_ACL, OPEN_ACL_UNSAFE, READ_ACL_UNSAFE

from fencepost.coordinator.zookeeper.connection import OPEN_PATH, ZooKeeperConfig, is_sensitive
from fencepost.coordinator.zookeeper.digest_md5 import DigestError, DigestMd5

_log = structlog.get_logger(__name__)


def client_of(config: ZooKeeperConfig) -> Any:
    """Return a client that is not connected yet."""
    client = KazooClient(
        config.connect,
        timeout=config.timeout_ms / 1000,
        handler=_Handler(config),
        default_acl=acl_of(config, "/"),  # for the znodes above the cluster's chroot
    )
    if config.login is not None:
        client._connection = _AuthenticatedConnection(client, config.login)
    return client


def acl_of(config: ZooKeeperConfig, path: str) -> list[Any] | None:
    """Return the ACL of a new znode; None permits everything to every client."""
    if not config.sets_acls:
        return None
    if path == OPEN_PATH:
        return list(OPEN_ACL_UNSAFE)
    return [*CREATOR_ALL_ACL, *(() if is_sensitive(path) else READ_ACL_UNSAFE)]


def problem_of(client: Any) -> str:
    """Return the last error that kept a client from connecting; empty if there is none."""
    return str(client.handler.problem)


class _Handler(SequentialThreadingHandler):  # type: ignore[misc]
    """Opens connections, in kazoo's thread."""

    def __init__(self, config: ZooKeeperConfig) -> None:
        super().__init__()
        self._config = config
        self.problem = ""

    def create_connection(
        self,
        address: tuple[str, int],
        hostname: str | None = None,
        timeout: float | None = None,
        **_settings: Any,
    ) -> socket.socket:
        """Return a connected socket; kazoo's own TLS arguments are ignored."""
        try:
            sock = socket.create_connection(address, timeout)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._config.tls is not None:
                sock = self._config.tls.wrap_socket(sock, server_hostname=hostname)
        except (OSError, ValueError) as error:
            self.failed(error)
            # For example for a half-written certificate. kazoo only retries after an OSError.
            raise OSError(str(error)) from error
        if self._config.login is None:
            self.problem = ""
        return sock

    def failed(self, error: Exception) -> None:
        """Keep the error for :func:`problem_of`, and log it once."""
        if str(error) != self.problem:
            self.problem = str(error)
            _log.warning("no connection to ZooKeeper", cause=self.problem)


class _AuthenticatedConnection(ConnectionHandler):  # type: ignore[misc]
    """A connection that begins with a login."""

    def __init__(self, client: Any, login: tuple[str, str]) -> None:
        super().__init__(client, client._conn_retry.copy(), logger=client.logger, sasl_options={})
        self._login = login

    def _authenticate_with_sasl(self, host: str, timeout: float) -> None:  # noqa: ARG002 - kazoo's
        """Log in. Raises ConnectionDropped if the login fails or the connection is lost."""
        login = DigestMd5(*self._login)
        try:
            challenge = self._exchange_token(b"", 1, timeout)
            login.check(self._exchange_token(login.answer(challenge), 2, timeout))
        except (DigestError, ConnectionDropped) as error:
            refused = DigestError(f"the login has failed: {error}")
            self.handler.failed(refused)
            raise ConnectionDropped(str(refused)) from error
        self.handler.problem = ""

    def _exchange_token(self, token: bytes, xid: int, timeout: float) -> bytes:
        self._submit(SASL(token), timeout, xid)
        header, buffer, offset = self._read_header(timeout)
        if header.xid != xid or header.err:
            raise DigestError(f"ZooKeeper's error {header.err}")
        if header.zxid > 0:
            self.client.last_zxid = header.zxid
        return bytes(SASL.deserialize(buffer, offset)[0] or b"")
