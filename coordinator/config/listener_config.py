"""The configuration of one listener: name, address, protocol and SASL mechanisms.

Source: ``Endpoint``, ``SecurityProtocol``.
"""

from __future__ import annotations

from enum import StrEnum

from fencepost.logcore.values import dataclass


class SecurityProtocol(StrEnum):
    """The security protocols of listeners, by Kafka's names and in the order of its ids."""

    PLAINTEXT = "PLAINTEXT"
    SSL = "SSL"
    SASL_PLAINTEXT = "SASL_PLAINTEXT"
    SASL_SSL = "SASL_SSL"


@dataclass(frozen=True, slots=True)
class ListenerConfig:
    """One listener, as configured."""

    name: str = SecurityProtocol.PLAINTEXT.value
    """In upper case."""
    host: str = "127.0.0.1"
    port: int = 0
    """0 for an ephemeral port."""
    protocol: SecurityProtocol = SecurityProtocol.PLAINTEXT
    mechanisms: tuple[str, ...] = ()
    """The enabled SASL mechanisms (``sasl.enabled.mechanisms``); empty without SASL."""

    @property
    def is_tls(self) -> bool:
        """Whether the listener uses TLS."""
        return self.protocol in {SecurityProtocol.SSL, SecurityProtocol.SASL_SSL}

    @property
    def is_sasl(self) -> bool:
        """Whether clients must authenticate by SASL."""
        return self.protocol in {SecurityProtocol.SASL_PLAINTEXT, SecurityProtocol.SASL_SSL}
