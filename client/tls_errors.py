"""Explanations of TLS errors for the user of a client."""

from __future__ import annotations

import ssl
from typing import Final

_UNTRUSTED: Final = frozenset({2, 18, 19, 20, 21})

_OWN_REFUSED: Final = (
    "ALERT_CERTIFICATE_REQUIRED",
    "ALERT_BAD_CERTIFICATE",
    "ALERT_UNKNOWN_CA",
    "ALERT_CERTIFICATE_EXPIRED",
    "ALERT_CERTIFICATE_UNKNOWN",
    "ALERT_ACCESS_DENIED",
)
_NO_TLS: Final = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG")


def refusal(error: OSError, host: str) -> str | None:
    """Return the explanation of a permanent error; None if a retry may succeed."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _about_certificate(error, host)
    if not isinstance(error, ssl.SSLError):
        return None
    reason = error.reason or ""
    if reason in _NO_TLS:
        return "the listener does not use TLS: its security.protocol is PLAINTEXT or SASL_PLAINTEXT"
    if any(text in reason for text in _OWN_REFUSED):
        return (
            "the broker refuses this client's certificate, or requires one"
            f" ({_spoken(reason)}): ssl.keystore.location is a file with its private key and"
            " certificate chain"
        )
    if "PROTOCOL_VERSION" in reason or reason == "UNSUPPORTED_PROTOCOL":
        return (
            f"client and broker have no TLS version in common ({_spoken(reason)}):"
            " ssl.enabled.protocols"
        )
    if "HANDSHAKE_FAILURE" in reason:
        return (
            "the broker refuses the TLS handshake: client and broker have no cipher suite"
            " in common, or it requires a client certificate (ssl.keystore.location)"
        )
    return None


def _about_certificate(error: ssl.SSLCertVerificationError, host: str) -> str:
    match error.verify_code:
        case 9:
            return "the broker's certificate is not valid yet: is this machine's clock correct?"
        case 10:
            return "the broker's certificate has expired: renew it at the broker"
        case 62 | 64:
            return (
                f"the broker's certificate is not for {host}: connect by a name in the"
                " certificate, or issue one with this name (an empty"
                " ssl.endpoint.identification.algorithm accepts any name, and so every"
                " certificate of the same authority)"
            )
        case code if code in _UNTRUSTED:
            return (
                "the broker's certificate is not signed by an authority that this client"
                f" trusts ({error.verify_message}): ssl.truststore.location is a PEM file"
                " with the authority's certificate"
            )
    return f"the broker's certificate cannot be trusted: {error.verify_message}"


def _spoken(reason: str) -> str:
    return reason.lower().replace("_", " ")
