"""What a way of logging in by SASL is to the connection that uses it.

Source: ``SaslServer``, ``SaslServerFactory`` as Kafka uses them.
"""

from __future__ import annotations

from typing import Protocol

from fencepost.coordinator.runtime.turns import Work
from fencepost.coordinator.security.principal import Principal
from fencepost.logcore.values import dataclass


@dataclass(frozen=True, slots=True)
class Identity:
    """Who has logged in."""

    principal: Principal
    expires_at_ms: int | None = None
    """When what it has shown ends, by the broker's clock; None for never."""


class AuthenticationFailed(Exception):  # noqa: N818 - Kafka's word
    """A login has failed (SASL_AUTHENTICATION_FAILED).

    The message is the operator's: it may tell why, but holds nothing secret. ``told`` is what the
    client reads instead of the usual text, and must not tell whether there is such a user. ``user``
    is the name that the client has given, as it came.
    """

    def __init__(self, cause: str, *, told: str | None = None, user: str | None = None) -> None:
        super().__init__(cause)
        self.told = told
        self.user = user


class TooManyLoginsError(Exception):
    """A login can not be looked at now; the client may try again. It is closed without a word."""


class Exchange(Protocol):
    """One login, from its first token to its end."""

    identity: Identity | None
    """Set with the last step that succeeds."""

    def step(self, token: bytes) -> Work[bytes]:
        """The answer to the client's next token. Raises AuthenticationFailed.

        A future may be yielded, for work that would hold the loop. ``token`` is the exchange's to
        keep. An exchange that has failed, or has an identity, is asked for nothing more.
        """


class Mechanism(Protocol):
    """One way of logging in, by a listener that has it enabled."""

    name: str

    def begin(self, host: str = "") -> Exchange:
        """A login that has just begun, by a client at the address ``host``."""
