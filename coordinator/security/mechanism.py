"""The interfaces of SASL mechanisms that a connection uses.

Source: ``SaslServer``, ``SaslServerFactory`` as Kafka uses them.
"""

from __future__ import annotations

from typing import Protocol

from fencepost.coordinator.runtime.turns import Work
from fencepost.coordinator.security.principal import Principal
from fencepost.logcore.values import dataclass


@dataclass(frozen=True, slots=True)
class Identity:
    """An authenticated client."""

    principal: Principal
    expires_at_ms: int | None = None
    """When the credentials expire, by the broker's clock; None for never."""


class AuthenticationFailed(Exception):  # noqa: N818 - Kafka's word
    """A login has failed (SASL_AUTHENTICATION_FAILED).

    The message is for the operator. It may state the reason, but contains no secret.
    ``client_message`` replaces the usual message in the response, and must not reveal whether the
    user exists. ``user`` is the name that the client sent, unchanged.
    """

    def __init__(
        self, cause: str, *, client_message: str | None = None, user: str | None = None
    ) -> None:
        super().__init__(cause)
        self.client_message = client_message
        self.user = user


class TooManyLoginsError(Exception):
    """A login cannot be handled now; the broker closes the connection, and the client may retry."""


class Exchange(Protocol):
    """One login, from its first token to its result."""

    identity: Identity | None
    """Set by the last step if it succeeds."""

    def step(self, token: bytes) -> Work[bytes]:
        """Return the response to the client's next token. Raises AuthenticationFailed.

        The step may yield a future for work that would block the event loop, and may keep a
        reference to ``token``. The caller makes no further step after a failure, or after
        :attr:`identity` is set.
        """


class Mechanism(Protocol):
    """A SASL mechanism that a listener has enabled."""

    name: str

    def begin(self, host: str = "") -> Exchange:
        """Start a login of a client at the address ``host``."""
