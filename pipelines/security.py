"""Encryption and login for aiokafka, out of the same settings as everywhere else.

``Security.of({"security.protocol": "SASL_SSL", …})`` reads Kafka's own names; here they become what
aiokafka calls them.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from aiokafka.abc import AbstractTokenProvider

from fencepost.coordinator.wire.client.client import (
    AsyncWireClient,
    BrokerUnreachable,
    ConnectionLostError,
)
from fencepost.coordinator.wire.client.security import PLAINTEXT, Security, SecurityError
from fencepost.coordinator.wire.client.tls import ssl_context
from fencepost.coordinator.wire.client.tokens import token_source

FIRST_CHECK_S, LAST_CHECK_S = 2.0, 30.0
"""How long work goes on before somebody looks whether logins are refused; pauses double."""

CHECK_TIMEOUT_MS = 10_000
"""How long a look at why nobody can log in may take."""


def aiokafka_options(security: Security) -> dict[str, Any]:
    """The arguments of aiokafka's clients that make their connections so. Raises SecurityError."""
    if security == PLAINTEXT:
        return {}
    options: dict[str, Any] = {
        "security_protocol": security.protocol,
        "ssl_context": ssl_context(security),
    }
    if security.has_login:
        _hush()
        options["sasl_mechanism"] = security.mechanism
        if security.mechanism == "OAUTHBEARER":
            options["sasl_oauth_token_provider"] = _Tokens(security)
        else:
            options["sasl_plain_username"] = security.username
            options["sasl_plain_password"] = security.password
    return options


class _Tokens(AbstractTokenProvider):  # type: ignore[misc]
    """A new token for each connection; to get one may take as long as a command does."""

    def __init__(self, security: Security) -> None:
        self._source = token_source(dict(security.login))

    async def token(self) -> str:
        """Aiokafka's question."""
        return await asyncio.get_running_loop().run_in_executor(None, self._source.fetch)

    def extensions(self) -> dict[str, str]:
        """Aiokafka's other question."""
        return dict(self._source.extensions)


async def check_login(bootstrap: str, security: Security) -> None:
    """Say in clear words whether the brokers take us, which aiokafka keeps to its log.

    Raises AuthenticationError and SecurityError. Nothing is said of brokers that are away.
    """
    if security == PLAINTEXT:
        return
    try:
        async with AsyncWireClient(
            bootstrap, timeout_ms=CHECK_TIMEOUT_MS, security=security
        ) as client:
            await client.versions()
    except (BrokerUnreachable, ConnectionLostError, OSError):
        pass


async def watched(work: asyncio.Future[Any], bootstrap: str, security: Security) -> None:
    """Wait for the end of ``work``; look now and then whether the brokers still take us.

    A client that loses its connection and may not log in again tries that for ever, several times a
    second. Raises what :func:`check_login` does, with the work cancelled and at its end.
    """
    pause_s: float | None = FIRST_CHECK_S if security != PLAINTEXT else None
    while not (await asyncio.wait([work], timeout=pause_s))[0] and pause_s is not None:
        try:
            await check_login(bootstrap, security)
        except BaseException:
            work.cancel()
            await asyncio.wait([work])
            raise
        pause_s = min(2 * pause_s, LAST_CHECK_S)


class _NoSecrets(logging.Filter):
    """aiokafka writes every request into its log at DEBUG, those with a password in them too."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep all but logins."""
        told = record.args if isinstance(record.args, tuple) else ()
        return not any(type(one).__name__.startswith("SaslAuthenticate") for one in told)


_filter = _NoSecrets()


def _hush() -> None:
    # The logger of a module keeps a filter for as long as the process lives; it takes each once.
    logging.getLogger("aiokafka.conn").addFilter(_filter)


__all__ = [
    "PLAINTEXT",
    "Security",
    "SecurityError",
    "aiokafka_options",
    "check_login",
    "watched",
]
