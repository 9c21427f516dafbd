"""ACLs whose host is an address range in CIDR notation (KIP-1276).

An ACL for ``10.1.0.0/16`` applies to every client whose address is in the range. Bits after the
prefix have no effect. An ACL whose host has a slash but is not a range applies to no client.

Source: ``StandardAuthorizerData``, ``CidrUtils``.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterator, Mapping
from typing import Final, NamedTuple

_FAMILIES: Final = ((socket.AF_INET, 32), (socket.AF_INET6, 128))


class _Range(NamedTuple):
    """A range: the lengths of an address and of the prefix in bits, and the prefix's value."""

    bits: int
    length: int
    prefix: int


def _address(text: str) -> tuple[int, int] | None:
    """Return an address's length in bits and its value; None for any other text."""
    for family, bits in _FAMILIES:
        try:
            return bits, int.from_bytes(socket.inet_pton(family, text))
        except (OSError, ValueError):
            continue
    return None


def _range(text: str) -> _Range | None:
    """Return the range that an ACL's host names; None for any other text."""
    address, _, length = text.partition("/")
    if not (length.isascii() and length.isdigit()):
        return None
    parsed = _address(address)
    if parsed is None or int(length) > parsed[0]:
        return None
    bits, value = parsed
    return _Range(bits, int(length), value >> (bits - int(length)))


class Networks:
    """An immutable set of address ranges.

    A lookup tries each prefix length in use once; its cost does not depend on the number of ranges.
    """

    __slots__ = ("_lengths", "_texts")

    def __init__(self, texts: Mapping[_Range, frozenset[str]]) -> None:
        self._texts = texts
        """The hosts of ACLs by range; several hosts may denote the same range."""
        self._lengths = sorted({(text.bits, text.length) for text in texts})

    def __bool__(self) -> bool:
        return bool(self._texts)

    def containing(self, host: str) -> Iterator[str]:
        """Yield the hosts of ACLs whose range contains a client's address."""
        address = _address(host.partition("%")[0])
        if address is None:
            return
        bits, value = address
        for of, length in self._lengths:
            if of == bits:
                yield from self._texts.get(_Range(bits, length, value >> (bits - length)), ())

    def changed(self, added: Collection[str], removed: Collection[str]) -> Networks:
        """Return the ranges after hosts were added and removed; ignore hosts without a range."""
        texts = dict(self._texts)
        for hosts, is_added in ((removed, False), (added, True)):
            for host in hosts:
                range_ = _range(host)
                if range_ is None:
                    continue
                holders = texts.pop(range_, frozenset())
                left = holders | {host} if is_added else holders - {host}
                if left:
                    texts[range_] = left
        return Networks(texts)


NO_NETWORKS: Final = Networks({})
