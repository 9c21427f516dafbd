"""The fields of an X.509 certificate that a broker needs, read from its DER.

This module does not verify the certificate; OpenSSL does, before or afterwards. The module exists
because a distinguished name in Java's form needs object identifiers and ASN.1 types, but Python's
``ssl`` returns only OpenSSL's names of attributes and no types.

Source: RFC 5280, RFC 2253, ``X500Principal.getName``.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final

from fencepost.logcore.values import dataclass

_SEQUENCE, _OID, _VERSION, _EXTENSIONS, _OCTETS = 0x30, 0x06, 0xA0, 0xA3, 0x04
_UTC_TIME = 0x17
_SUBJECT_ALT_NAME: Final = bytes.fromhex("551d11")

_KEYWORDS: Final = {
    "2.5.4.3": "CN",
    "2.5.4.6": "C",
    "2.5.4.7": "L",
    "2.5.4.8": "ST",
    "2.5.4.9": "STREET",
    "2.5.4.10": "O",
    "2.5.4.11": "OU",
    "0.9.2342.19200300.100.1.25": "DC",
    "0.9.2342.19200300.100.1.1": "UID",
}
"""All attribute types for which RFC 2253 has names; Java writes other types as numbers."""

_CHARSETS: Final = {
    0x0C: "utf-8",  # UTF8String
    0x13: "utf-8",  # PrintableString
    0x14: "utf-8",  # T61String, decoded as Java does
    0x16: "utf-8",  # IA5String
    0x1E: "utf-16-be",  # BMPString
}

_ESCAPED: Final = frozenset(',=+<>#;"\\')


class CertificateError(ValueError):
    """The bytes are not a certificate."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """The fields of a certificate."""

    subject: str
    """The distinguished name by RFC 2253, the most specific part first."""
    not_before_s: float
    not_after_s: float
    """The validity period, in seconds since 1970."""
    alternative_names: frozenset[bytes]
    """The subject alternative names, in DER."""


def read_certificate(der: bytes) -> Certificate:
    """Return the fields of a certificate. Raises :class:`CertificateError`."""
    try:
        return _read(der)
    except (ValueError, IndexError, StopIteration) as error:
        raise CertificateError("these bytes are not a certificate") from error


def _read(der: bytes) -> Certificate:
    ((_, certificate),) = _items(der)
    _, body = next(_items(certificate))
    parts = list(_items(body))
    if parts[0][0] == _VERSION:
        del parts[0]
    (_, validity), (_, subject) = parts[3:5]  # after serial number, algorithm and issuer
    not_before_s, not_after_s = (_seconds(tag, text) for tag, text in _items(validity))
    names: frozenset[bytes] = frozenset()
    for tag, content in parts[6:]:
        if tag == _EXTENSIONS:
            names = _alternative_names(content)
    return Certificate(distinguished_name(subject), not_before_s, not_after_s, names)


def _items(der: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (tag, content) of each element in ``der``."""
    at = 0
    while at < len(der):
        tag, size = der[at], der[at + 1]
        at += 2
        if size & 0x80:
            count = size & 0x7F
            if not 1 <= count <= 4:
                raise ValueError("a length that DER does not have")
            size = int.from_bytes(der[at : at + count], "big")
            at += count
        if at + size > len(der):
            raise ValueError("cut short")
        yield tag, der[at : at + size]
        at += size


def _seconds(tag: int, text: bytes) -> float:
    digits = text.decode("ascii")
    if tag == _UTC_TIME:  # has a two-digit year, up to 2049
        digits = ("20" if digits[:2] < "50" else "19") + digits
    return datetime.strptime(digits, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _alternative_names(extensions: bytes) -> frozenset[bytes]:
    ((_, sequence),) = _items(extensions)
    for _, extension in _items(sequence):
        (_, oid), *_, (tag, content) = _items(extension)
        if oid == _SUBJECT_ALT_NAME and tag == _OCTETS:
            ((_, names),) = _items(content)
            return frozenset(bytes((kind,)) + name for kind, name in _items(names))
    return frozenset()


# --- distinguished names -------------------------------------------------------------------------


def distinguished_name(subject: bytes) -> str:
    """Return a distinguished name, given in DER without its header, as RFC 2253 text.

    Raises ValueError.
    """
    parts = ["+".join(map(_attribute, _members(rdn))) for _, rdn in _items(subject)]
    return ",".join(reversed(parts))


def _members(relative_name: bytes) -> Iterator[bytes]:
    for tag, attribute in _items(relative_name):
        if tag != _SEQUENCE:
            raise ValueError("no attribute")
        yield attribute


def _attribute(attribute: bytes) -> str:
    (kind, oid), (tag, value) = _items(attribute)
    if kind != _OID:
        raise ValueError("no name of an attribute")
    dotted = _dotted(oid)
    keyword, charset = _KEYWORDS.get(dotted), _CHARSETS.get(tag)
    if keyword is None or charset is None:
        # The value is written whole, with its tag and length.
        return f"{keyword or dotted}=#{attribute[2 + len(oid) :].hex()}"
    return f"{keyword}={_escaped(value.decode(charset))}"


def _dotted(oid: bytes) -> str:
    numbers, number = [], 0
    for byte in oid:
        number = number << 7 | byte & 0x7F
        if not byte & 0x80:
            numbers.append(number)
            number = 0
    first = min(numbers[0] // 40, 2)
    return ".".join(map(str, (first, numbers[0] - 40 * first, *numbers[1:])))


def _escaped(text: str) -> str:
    leading = len(text) - len(text.lstrip(" "))
    trailing = max(leading, len(text.rstrip(" ")))
    characters = []
    for at, character in enumerate(text):
        if character == "\0":
            characters.append("\\00")
        elif character in _ESCAPED or not leading <= at < trailing:
            characters.append("\\" + character)
        else:
            characters.append(character)
    return "".join(characters)
