"""SCRAM-SHA-256 and -512: a client proves that it knows its password without sending it.

The responses to an unknown user are like those to an existing user with a wrong password, and the
login fails at the same step.

Source: ``ScramSaslServer``. Apache Kafka rejects an unknown user at the first message.
"""

from __future__ import annotations

import hmac
from typing import Final

from fencepost.coordinator.runtime.turns import Work
from fencepost.coordinator.security.mechanism import AuthenticationFailed, Identity
from fencepost.coordinator.security.principal import USER, Principal
from fencepost.coordinator.security.users import Credential, ScramUsers
from fencepost.protocol.scram import (
    MIN_ITERATIONS,
    ClientFinal,
    ClientFirst,
    ScramError,
    ScramMechanism,
    ServerFirst,
    is_proof,
    new_nonce,
    server_final,
    server_signature,
    signed_text,
)

MAX_TOKEN_BYTES: Final = 8_192
"""The maximum size of a message with the user's name. The broker holds several times this size
between two steps, and while it hashes a password. An ordinary message has a hundred bytes."""

OTHER_USER = (
    "Authentication failed: Client requested an authorization id that is different from username"
)
"""The error for a client that requests another authorization id, whether or not the user exists."""


def check_size(token: bytes, limit: int = MAX_TOKEN_BYTES) -> None:
    """Raise AuthenticationFailed for a message that is too long."""
    if len(token) > limit:
        cause = f"a message of {len(token)} bytes; the limit is {limit}"
        raise AuthenticationFailed(cause)


class ScramLogin:
    """SCRAM with one of the two hash functions."""

    def __init__(self, mechanism: ScramMechanism, users: ScramUsers) -> None:
        self.name = mechanism.name
        self._mechanism, self._users = mechanism, users

    def begin(self, host: str = "") -> ScramExchange:  # noqa: ARG002 - nothing depends on it
        """Start a login."""
        return ScramExchange(self._mechanism, self._users)


class ScramExchange:
    """One login."""

    def __init__(self, mechanism: ScramMechanism, users: ScramUsers) -> None:
        self.identity: Identity | None = None
        self._mechanism, self._users = mechanism, users
        self._first: ClientFirst
        self._credential: Credential
        self._answer: ServerFirst | None = None
        self._doubt = ""
        """Why the login will fail, for the operator; empty if it may succeed."""

    def step(self, token: bytes) -> Work[bytes]:
        """Return the broker's first or last message. Raises AuthenticationFailed."""
        yield from ()
        try:
            return self._begin(token) if self._answer is None else self._end(token, self._answer)
        except ScramError as error:
            user = None if self._answer is None else self._first.user
            raise AuthenticationFailed(str(error), user=user) from error

    def _begin(self, token: bytes) -> bytes:
        check_size(token)
        first = ClientFirst.parse(token)
        if first.authorized not in {"", first.user}:
            raise AuthenticationFailed(
                "the client wants to be another user", client_message=OTHER_USER, user=first.user
            )
        # Also computed for existing users, so that the duration does not reveal whether a user
        # exists.
        stand_in = self._users.stand_in(first.user, self._mechanism)
        credential = self._users.credential(first.user, self._mechanism)
        if first.extensions.get("tokenauth", "").lower() == "true":
            self._doubt = "there are no delegation tokens"
        elif credential is None:
            self._doubt = f"the user has no credential of {self._mechanism.name}"
        elif credential.iterations < MIN_ITERATIONS:
            self._doubt = f"the credential has too few iterations: {credential.iterations}"
        self._credential = stand_in if self._doubt or credential is None else credential
        self._first = first
        nonce = first.nonce + new_nonce()
        self._answer = ServerFirst.of(nonce, self._credential.salt, self._credential.iterations)
        return self._answer.encode()

    def _end(self, token: bytes, answer: ServerFirst) -> bytes:
        user, credential = self._first.user, self._credential
        final = ClientFinal.parse(token)
        if not hmac.compare_digest(final.nonce, answer.nonce):
            raise AuthenticationFailed("the client does not repeat the broker's nonce", user=user)
        if final.channel_binding != self._first.header.encode():
            raise AuthenticationFailed("the channel binding does not match", user=user)
        signed = signed_text(self._first, answer, final)
        is_right = is_proof(self._mechanism, credential.stored_key, signed, final.proof)
        if self._doubt or not is_right:
            raise AuthenticationFailed(self._doubt or "the password is wrong", user=user)
        self.identity = Identity(Principal(USER, user))
        return server_final(server_signature(self._mechanism, credential.server_key, signed))
