"""The sender of a request: its principal, address and listener.

Source: ``KafkaPrincipal``, ``RequestContext``.
"""

from __future__ import annotations

import socket
from typing import Final

from fencepost.logcore.values import dataclass

USER: Final = "User"
"""The type of all clients' principals."""


@dataclass(frozen=True, slots=True)
class Principal:
    """A type and a name; the comparison is case-sensitive."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"

    @classmethod
    def parse(cls, text: str) -> Principal:
        """Return the principal written as ``TYPE:NAME``. Raises ValueError."""
        kind, separator, name = text.partition(":")
        if not separator or not kind:
            raise ValueError(f"{text!r} is not a principal of the form TYPE:NAME")
        return cls(kind, name)


ANONYMOUS: Final = Principal(USER, "ANONYMOUS")
"""The principal of a client that has not authenticated."""


@dataclass(frozen=True, slots=True)
class ClientSession:
    """A connection's client; each authentication replaces this object."""

    host: str
    """The client's address; an IPv4 address has no ``::ffff:``, which an IPv6 socket would add."""
    listener: str
    """The name of the client's listener."""
    principal: Principal = ANONYMOUS
    mechanism: str | None = None
    """The SASL mechanism of the login; None without SASL."""
    expires_at_ms: int | None = None
    """When the login expires, by the broker's clock; None for never (KIP-368)."""
    connected_s: float = 0.0
    """When the client connected, by the loop's clock; used to order a client's connections."""


def plain_host(host: str) -> str:
    """Return an address in the form that ACLs use: ``127.0.0.1`` for ``::ffff:127.0.0.1``."""
    mapped = host.removeprefix("::ffff:")
    return mapped if "." in mapped else host


def canonical_host(host: str) -> str:
    """Return an ACL's host in the form that sessions use.

    Java writes ``0:0:0:0:0:0:0:1`` for ``::1``. A text that is not an address is returned as is.
    """
    address, percent, zone = host.partition("%")
    try:
        packed = socket.inet_pton(socket.AF_INET6, address)
    except (OSError, ValueError):
        return host
    return plain_host(socket.inet_ntop(socket.AF_INET6, packed)) + percent + zone
