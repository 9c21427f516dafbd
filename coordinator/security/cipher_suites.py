"""Converts the registered names of cipher suites, which Kafka's keys use, to OpenSSL's names.

Source: RFC 8446 appendix B.4, the IANA registry of TLS cipher suites, ``ciphers(1)`` of OpenSSL.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

NEWER: Final = frozenset(
    {
        "TLS_AES_128_GCM_SHA256",
        "TLS_AES_256_GCM_SHA384",
        "TLS_CHACHA20_POLY1305_SHA256",
        "TLS_AES_128_CCM_SHA256",
        "TLS_AES_128_CCM_8_SHA256",
    }
)
"""The suites of TLS 1.3, which can only be enabled all together. TLS 1.2 has other suites."""

_REGISTERED: Final = re.compile(r"TLS_(?:(\w+)_)?WITH_(\w+)")


def chosen_suites(names: Iterable[str]) -> tuple[tuple[str, ...], bool]:
    """Return OpenSSL's names of the TLS 1.2 suites in ``names``, and whether any is of TLS 1.3."""
    cipher_names = list(names)
    older = tuple(openssl_name(name) for name in cipher_names if name not in NEWER)
    return older, len(older) < len(cipher_names)


def openssl_name(name: str) -> str:
    """Return ``ECDHE-RSA-AES128-GCM-SHA256`` for ``TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256``.

    A name of another form is returned unchanged.
    """
    match = _REGISTERED.fullmatch(name)
    if match is None:
        return name
    exchange, cipher = match[1] or "", match[2]
    cipher = re.sub(r"(AES|CAMELLIA|ARIA)_(\d+)", r"\1\2", cipher).replace("_CBC", "")
    cipher = re.sub(r"(CHACHA20_POLY1305)_SHA256", r"\1", cipher)
    parts = [] if exchange == "RSA" else [exchange]
    return "_".join((*parts, cipher)).replace("_", "-")
