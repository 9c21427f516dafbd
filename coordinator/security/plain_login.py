"""PLAIN: a client sends its name and password, which only TLS protects.

The password is checked against the user's SCRAM credential or, as in Kafka, against a password in
the configuration.

Source: ``PlainSaslServer``, ``PlainServerCallbackHandler``; RFC 4616.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping

from fencepost.coordinator.runtime.turns import Work
from fencepost.coordinator.security.mechanism import AuthenticationFailed, Identity
from fencepost.coordinator.security.password_checks import PasswordChecks
from fencepost.coordinator.security.principal import USER, Principal
from fencepost.coordinator.security.scram_login import OTHER_USER, check_size
from fencepost.coordinator.security.users import ScramUsers
from fencepost.protocol.scram import stored_key

PLAIN = "PLAIN"
_PARTS = 3
_WRONG = "Authentication failed: Invalid username or password"


class PlainLogin:
    """The mechanism PLAIN; ``passwords`` come from the configuration, by user."""

    def __init__(
        self, users: ScramUsers, checks: PasswordChecks, passwords: Mapping[str, str] | None = None
    ) -> None:
        self.name = PLAIN
        self.users, self.checks = users, checks
        self._digests = {user: _digest(password) for user, password in (passwords or {}).items()}

    def begin(self, host: str = "") -> PlainExchange:
        """Start a login."""
        return PlainExchange(self, host)

    def is_configured(self, user: str, password: str) -> bool:
        """Return whether the configuration has the user with this password."""
        digest = self._digests.get(user, bytes(hashlib.sha256().digest_size))
        return hmac.compare_digest(digest, _digest(password))

    def knows(self, user: str) -> bool:
        """Return whether the configuration has the user."""
        return user in self._digests


class PlainExchange:
    """One login, which takes a single token."""

    def __init__(self, login: PlainLogin, host: str) -> None:
        self.identity: Identity | None = None
        self._login, self._host = login, host

    def step(self, token: bytes) -> Work[bytes]:
        """Return empty bytes for a correct password.

        Raises AuthenticationFailed, TooManyLoginsError.
        """
        check_size(token)
        parts = token.decode(errors="replace").split("\0", _PARTS)
        if len(parts) != _PARTS:
            client_message = (
                f"Invalid SASL/PLAIN response: expected {_PARTS} tokens, got {len(parts)}"
            )
            raise AuthenticationFailed(client_message, client_message=client_message)
        authorized, user, password = parts
        if not user:
            client_message = "Authentication failed: username not specified"
            raise AuthenticationFailed(client_message, client_message=client_message)
        if not password:
            client_message = "Authentication failed: password not specified"
            raise AuthenticationFailed(client_message, client_message=client_message, user=user)
        login = self._login
        # The work is the same for every name, so that the duration does not reveal whether a user
        # exists.
        stand_in = login.users.stand_in(user)
        configured = login.users.any_credential(user)
        credential = stand_in if configured is None else configured
        check = login.checks.begin(credential, password, self._host)
        yield check
        stored = stored_key(credential.mechanism, check.result())
        is_right = hmac.compare_digest(stored, credential.stored_key) and configured is not None
        is_configured = login.is_configured(user, password)
        if not (is_right or is_configured):
            is_known = configured is not None or login.knows(user)
            cause = "the password is wrong" if is_known else "there is no such user"
            raise AuthenticationFailed(cause, client_message=_WRONG, user=user)
        if authorized not in {"", user}:
            raise AuthenticationFailed(
                "the client wants to be another user", client_message=OTHER_USER, user=user
            )
        self.identity = Identity(Principal(USER, user))
        return b""


def _digest(password: str) -> bytes:
    return hashlib.sha256(password.encode()).digest()
