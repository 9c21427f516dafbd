"""Translates :class:`Security` into aiokafka's arguments, and detects rejected logins.

``Security.of({"security.protocol": "SASL_SSL", …})`` reads settings by Kafka's names.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from aiokafka.abc import AbstractTokenProvider

from fencepost.client.client import (
    AsyncWireClient,
    BrokerUnreachable,
    ConnectionLostError,
)
from fencepost.client.security import PLAINTEXT, Security, SecurityError
from fencepost.client.tls import ssl_context
from fencepost.client.tokens import token_source

FIRST_CHECK_S, LAST_CHECK_S = 2.0, 30.0
"""The first and the longest pause before a check of the login of running work; pauses double."""

CHECK_TIMEOUT_MS = 10_000
"""The time limit of such a check."""


def aiokafka_options(security: Security) -> dict[str, Any]:
    """Return the arguments of aiokafka's clients for these settings. Raises SecurityError."""
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
    """Returns a new token for each connection; a thread fetches it, as that may take long."""

    def __init__(self, security: Security) -> None:
        self._source = token_source(dict(security.login))

    async def token(self) -> str:
        """Return a token, for aiokafka."""
        return await asyncio.get_running_loop().run_in_executor(None, self._source.fetch)

    def extensions(self) -> dict[str, str]:
        """Return the SASL extensions, for aiokafka."""
        return dict(self._source.extensions)


async def check_login(bootstrap: str, security: Security) -> None:
    """Raise the error with which brokers reject the login; aiokafka only logs it.

    Raises AuthenticationError and SecurityError. An unreachable broker is no error here.
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
    """Wait for the end of ``work``, and check periodically whether brokers accept the login.

    A client that has lost its connection and is refused would retry forever, several times a
    second. Raises the errors of :func:`check_login`, after ``work`` was cancelled and has ended.
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
    """Drops log lines with passwords: aiokafka logs every request at DEBUG."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a line is not about a login."""
        arguments = record.args if isinstance(record.args, tuple) else ()
        return not any(
            type(argument).__name__.startswith("SaslAuthenticate") for argument in arguments
        )


_filter = _NoSecrets()


def _hush() -> None:
    # The logger keeps a filter for the life of the process, and adds it only once.
    logging.getLogger("aiokafka.conn").addFilter(_filter)


__all__ = [
    "PLAINTEXT",
    "Security",
    "SecurityError",
    "aiokafka_options",
    "check_login",
    "watched",
]
