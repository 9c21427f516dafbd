"""The listener of the metrics: its address, TLS and users (the keys ``fencepost.metrics.*``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Self

from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.config.key import ConfigError
from fencepost.coordinator.config.listeners import INSECURE, parse_address
from fencepost.logcore.values import dataclass

if TYPE_CHECKING:
    from fencepost.coordinator.metrics.endpoint import Endpoint

_LISTEN: Final = "fencepost.metrics.listen"
_CERTIFICATE, _KEY = "fencepost.metrics.certificate", "fencepost.metrics.key"
_USERS, _INSECURE = "fencepost.metrics.users.file", "fencepost.metrics.insecure"


@dataclass(frozen=True, slots=True)
class MetricsListener:
    """An address, and the paths of certificate, key and users; empty if not configured."""

    host: str
    port: int
    certificate: str
    key: str
    users: str

    @classmethod
    def of(cls, config: BrokerConfig) -> Self | None:
        """Return the configured listener; None if metrics are not served. Raises ConfigError.

        The default host is loopback. A listener that other machines can reach must have TLS and
        users, unless the configuration explicitly permits a listener without them.
        """
        text = config.text(_LISTEN)
        if not text:
            return None
        try:
            host, port = parse_address(
                text if ":" in text[1:] else f"127.0.0.1:{text.removeprefix(':')}"
            )
        except ValueError as error:
            raise ConfigError(
                _LISTEN, text, "it is not an address of the form HOST:PORT or PORT"
            ) from error
        certificate, key, users = (config.text(key) or "" for key in (_CERTIFICATE, _KEY, _USERS))
        if key and not certificate:
            raise ConfigError(_KEY, key, f"it needs a certificate, {_CERTIFICATE}")
        from fencepost.coordinator.server.http_messages import is_loopback  # noqa: PLC0415 - few brokers serve metrics

        is_open = not (host.lower() == "localhost" or is_loopback(host))
        if is_open and not (config.bool(_INSECURE) or config.bool(INSECURE)):
            files = {_CERTIFICATE: certificate, _USERS: users}
            missing = " and ".join(key for key, value in files.items() if not value)
            if missing:
                raise ConfigError(
                    _LISTEN,
                    text,
                    (
                        "other machines can reach it: require encryption and a password"
                        f" ({missing}), or let every client read it with {_INSECURE}=true"
                    ),
                )
        return cls(host, port, certificate, key, users)

    async def serve(self, config: BrokerConfig) -> Endpoint:
        """Start the endpoint. Raises ConfigError for an unusable file, and OSError."""
        from fencepost.coordinator.metrics.endpoint import Endpoint  # noqa: PLC0415 - few brokers serve metrics
        from fencepost.coordinator.server.http_access import (  # noqa: PLC0415
            HttpAccessError,
            HttpUsers,
            RenewedContext,
        )
        from fencepost.protocol.server_tls import ServerTlsError  # noqa: PLC0415

        try:
            tls = RenewedContext(self.certificate, self.key or None) if self.certificate else None
            users = HttpUsers(self.users) if self.users else None
        except ServerTlsError as error:
            raise ConfigError(_CERTIFICATE, self.certificate, str(error)) from None
        except HttpAccessError as error:
            raise ConfigError(_USERS, self.users, str(error)) from None
        endpoint = Endpoint(
            compat=config.items("fencepost.metrics.compat"),
            max_series=config.int("fencepost.metrics.max.series"),
            users=users,
            tls=tls,
        )
        await endpoint.start(self.host, self.port)
        return endpoint
