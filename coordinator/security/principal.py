"""Who sends a request: a principal, from an address, by a listener.

Source: ``KafkaPrincipal``, ``RequestContext``.
"""

from __future__ import annotations

import socket
from typing import Final

from fencepost.logcore.values import dataclass

USER: Final = "User"
"""The type of every principal that a client gets here."""


@dataclass(frozen=True, slots=True)
class Principal:
    """A type and a name; two are equal where both are, to the letter."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"

    @classmethod
    def parse(cls, text: str) -> Principal:
        """The principal written as ``TYPE:NAME``. Raises ValueError."""
        kind, found, name = text.partition(":")
        if not found or not kind:
            raise ValueError(f"{text!r} is no principal of the form TYPE:NAME")
        return cls(kind, name)


ANONYMOUS: Final = Principal(USER, "ANONYMOUS")
"""Whoever has not said who it is."""


@dataclass(frozen=True, slots=True)
class Session:
    """What is known of the client of a connection; another one takes its place at each login."""

    host: str
    """Its address; that of IPv4 without what an IPv6 socket writes before it."""
    listener: str
    """The name of the listener that it came by."""
    principal: Principal = ANONYMOUS
    mechanism: str | None = None
    """How it has logged in by SASL."""
    expires_at_ms: int | None = None
    """When its login ends, by the broker's clock; None for never (KIP-368)."""
    connected_s: float = 0.0
    """When it connected, by the loop's time: which of two connections is the later one."""


def plain_host(host: str) -> str:
    """An address as rules name it: ``127.0.0.1`` for ``::ffff:127.0.0.1``."""
    mapped = host.removeprefix("::ffff:")
    return mapped if "." in mapped else host


def one_form(host: str) -> str:
    """The address that a rule names, in the form in which sessions have theirs.

    Java writes ``0:0:0:0:0:0:0:1`` for ``::1``. What is no address stays as it is.
    """
    address, percent, zone = host.partition("%")
    try:
        packed = socket.inet_pton(socket.AF_INET6, address)
    except (OSError, ValueError):
        return host
    return plain_host(socket.inet_ntop(socket.AF_INET6, packed)) + percent + zone
