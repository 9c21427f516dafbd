"""What a listener is: a name, where it listens, and how its clients speak.

Source: ``Endpoint``, ``SecurityProtocol``.
"""

from __future__ import annotations

from enum import StrEnum

from fencepost.logcore.values import dataclass


class SecurityProtocol(StrEnum):
    """How clients of a listener speak, by Kafka's names and in the order of its numbers."""

    PLAINTEXT = "PLAINTEXT"
    SSL = "SSL"
    SASL_PLAINTEXT = "SASL_PLAINTEXT"
    SASL_SSL = "SASL_SSL"


@dataclass(frozen=True, slots=True)
class ListenerConfig:
    """One listener for clients, as the configuration has it."""

    name: str = SecurityProtocol.PLAINTEXT.value
    """In upper case."""
    host: str = "127.0.0.1"
    port: int = 0
    """0 for any free one."""
    protocol: SecurityProtocol = SecurityProtocol.PLAINTEXT
    mechanisms: tuple[str, ...] = ()
    """How clients may log in (``sasl.enabled.mechanisms``); none where they need not."""

    @property
    def is_tls(self) -> bool:
        """Whether its bytes are encrypted."""
        return self.protocol in {SecurityProtocol.SSL, SecurityProtocol.SASL_SSL}

    @property
    def is_sasl(self) -> bool:
        """Whether its clients have to log in."""
        return self.protocol in {SecurityProtocol.SASL_PLAINTEXT, SecurityProtocol.SASL_SSL}
