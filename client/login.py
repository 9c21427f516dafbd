"""SASL authentication, client side.

Source: ``SaslClientAuthenticator``, ``ScramSaslClient``, ``PlainSaslClient``,
``OAuthBearerSaslClient``.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from typing import Any, Final, Protocol

from kio.schema.errors import ErrorCode

from fencepost.client.channel import AuthenticationError
from fencepost.client.security import Security
from fencepost.client.tokens import TokenError, TokenSource, token_source
from fencepost.protocol.api import ApiKey
from fencepost.protocol.schema import Entity
from fencepost.protocol.scram import (
    MIN_ITERATIONS,
    SCRAM_MECHANISMS,
    ClientFinal,
    ClientFirst,
    ScramError,
    ScramMechanism,
    ServerFirst,
    client_proof,
    new_nonce,
    parse_server_final,
    salted_password,
    server_key,
    server_signature,
    signed_text,
)

MAX_ITERATIONS: Final = 1_000_000
"""The maximum number of SCRAM iterations that a broker can demand of this client; they take about a
second. Kafka's own limit for stored credentials is 16,384."""

Dialogue = Generator[bytes, bytes, None]
"""A generator that yields the client's SASL tokens, and receives the broker's response to each."""

Run = Callable[[Callable[[], bytes | None]], Awaitable[bytes | None]]


class RequestSender(Protocol):
    """Sends one request on the connection being authenticated."""

    def __call__(self, api: ApiKey, /, **fields: Any) -> Awaitable[Entity]:
        """Return the response without checking its error code."""


async def log_in(send: RequestSender, run: Run, security: Security, where: str) -> float:
    """Authenticate; return the session lifetime in milliseconds, 0 for unlimited.

    ``run`` runs a slow function without blocking other coroutines. Raises
    :class:`AuthenticationError`, and the errors of ``send``.
    """
    answer = await send(ApiKey.SASL_HANDSHAKE, mechanism=security.mechanism)
    if answer.error_code == ErrorCode.unsupported_sasl_mechanism:
        enabled = ", ".join(answer.mechanisms) or "none"
        raise AuthenticationError(
            f"{where}: {security.mechanism} is not enabled there; sasl.mechanism can be: {enabled}"
        )
    _check(answer, security, where)
    dialogue = _dialogue(security)
    try:
        token = await run(partial(next, dialogue))
        while token is not None:
            answer = await send(ApiKey.SASL_AUTHENTICATE, auth_bytes=token)
            _check(answer, security, where)
            token = await run(partial(_next, dialogue, answer.auth_bytes))
    except (ScramError, TokenError) as error:
        raise AuthenticationError(f"{where}: {security.mechanism}: {error}") from None
    lifetime = getattr(answer, "session_lifetime", None)
    return lifetime.total_seconds() * 1000 if lifetime is not None else 0.0


def login_unsupported(security: Security, where: str) -> AuthenticationError:
    """Return the error for a listener without SASL."""
    without = "SSL" if security.has_tls else "PLAINTEXT"
    return AuthenticationError(
        f"{where}: the listener has no SASL: set security.protocol={without}, not"
        f" {security.protocol}"
    )


def _check(answer: Entity, security: Security, where: str) -> None:
    code = answer.error_code
    if not code:
        return
    if code == ErrorCode.illegal_sasl_state:
        raise login_unsupported(security, where)
    who = f"user {security.username!r}" if security.username else "the token's owner"
    message = getattr(answer, "error_message", None) or ErrorCode(code).name.upper()
    hint = f"; is the password correct, and does the user have one for {security.mechanism}?"
    raise AuthenticationError(
        f"{where}: {who} cannot log in by {security.mechanism}: {message}"
        + (hint if security.username else "")
    )


def _next(dialogue: Dialogue, reply: bytes) -> bytes | None:
    try:
        return dialogue.send(reply)
    except StopIteration:
        return None


def _dialogue(security: Security) -> Dialogue:
    if security.mechanism == "OAUTHBEARER":
        return _bearer(token_source(dict(security.login)))
    if security.mechanism in SCRAM_MECHANISMS:
        return _scram(SCRAM_MECHANISMS[security.mechanism], security.username, security.password)
    return _plain(security.username, security.password)


def _plain(user: str, password: str) -> Dialogue:
    yield f"\0{user}\0{password}".encode()


def _scram(mechanism: ScramMechanism, user: str, password: str) -> Dialogue:
    first = ClientFirst.of(user, new_nonce())
    answer = ServerFirst.parse((yield first.encode()))
    if len(answer.nonce) <= len(first.nonce) or not answer.nonce.startswith(first.nonce):
        raise ScramError("the broker's nonce does not begin with the client's")
    if not MIN_ITERATIONS <= answer.iterations <= MAX_ITERATIONS:
        raise ScramError(
            f"the broker asks for {answer.iterations} iterations, which must be between"
            f" {MIN_ITERATIONS} and {MAX_ITERATIONS}"
        )
    salted = salted_password(mechanism, password, answer.salt, answer.iterations)
    signed = signed_text(first, answer, ClientFinal.of(answer.nonce))
    final = ClientFinal.of(answer.nonce, client_proof(mechanism, salted, signed))
    signature = parse_server_final((yield final.encode()))
    if not hmac.compare_digest(
        signature, server_signature(mechanism, server_key(mechanism, salted), signed)
    ):
        raise ScramError("the broker's signature is wrong: it does not know the user's password")


def _bearer(source: TokenSource) -> Dialogue:
    extensions = "".join(f"{key}={value}\x01" for key, value in source.extensions.items())
    refusal = yield f"n,,\x01auth=Bearer {source.fetch()}\x01{extensions}\x01".encode()
    if refusal:
        # The broker has sent its reason as JSON, and fails the authentication after this token.
        yield b"\x01"
