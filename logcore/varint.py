"""Zig-zag varints as Kafka writes them inside a record (``ByteUtils`` in Kafka's client library).

``varint`` is 32 bits wide (at most 5 bytes), ``varlong`` 64 bits (at most 10). As in Java, bits
that do not fit the width are dropped; only too many bytes are an error. Readers raise IndexError
when the bytes end inside a number and :class:`fencepost.logcore.errors.InvalidRecordError` when it
is too long.
"""

from __future__ import annotations

from typing import Final

from fencepost.logcore.errors import InvalidRecordError

Bytes = bytes | bytearray | memoryview

_TABLE_SIZE: Final = 1024


def _encode(value: int) -> bytes:
    value = (value << 1) ^ (value >> 63)
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


SMALL: Final = tuple(_encode(value) for value in range(_TABLE_SIZE))
"""The encodings of 0 … 1023, for loops that cannot afford a call per field."""

MINUS_ONE: Final = _encode(-1)


ONE_BYTE: Final = tuple((byte >> 1) ^ -(byte & 1) if byte < 0x80 else None for byte in range(256))
"""By byte, the number that it encodes; None for the first byte of a longer encoding."""


def encode(value: int) -> bytes:
    """Encode a signed number of up to 64 bits; both widths share their encoding."""
    if 0 <= value < _TABLE_SIZE:
        return SMALL[value]
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"{value} does not fit 64 bits")
    return _encode(value)


def read_varint(data: Bytes, pos: int) -> tuple[int, int]:
    """Decode a 32-bit number at ``pos``; return it and the position after it."""
    value = data[pos]
    if value < 0x80:
        return (value >> 1) ^ -(value & 1), pos + 1
    byte = data[pos + 1]
    if byte < 0x80:
        value = value & 0x7F | byte << 7
        return (value >> 1) ^ -(value & 1), pos + 2
    return _read_long(data, pos, 5, 0xFFFFFFFF)


def read_varlong(data: Bytes, pos: int) -> tuple[int, int]:
    """Decode a 64-bit number at ``pos``; return it and the position after it."""
    return _read_long(data, pos, 10, 0xFFFFFFFFFFFFFFFF)


def _read_long(data: Bytes, pos: int, max_bytes: int, mask: int) -> tuple[int, int]:
    value = shift = 0
    for at in range(pos, pos + max_bytes):
        byte = data[at]
        if byte < 0x80:
            value = (value | byte << shift) & mask
            return (value >> 1) ^ -(value & 1), at + 1
        value |= (byte & 0x7F) << shift
        shift += 7
    raise InvalidRecordError(f"a varint is longer than {max_bytes} bytes")
