"""Zig-zag varints as Kafka writes them inside a record (``ByteUtils`` in Kafka's client library).

``varint`` is 32 bits wide (at most 5 bytes), ``varlong`` 64 bits (at most 10). As in Java, bits
that do not fit the width are dropped; only too many bytes are an error. Readers raise IndexError
when the bytes end inside a number and :class:`logcore.errors.InvalidRecordError` when it is too
long.
"""

from __future__ import annotations

from typing import Final

from logcore.errors import InvalidRecordError

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
"""The encodings of 0 … 1023, for loops that can't afford a call per field."""

MINUS_ONE: Final = _encode(-1)


def encode(value: int) -> bytes:
    """Encode a signed number of up to 64 bits; both widths share their encoding."""
    if 0 <= value < _TABLE_SIZE:
        return SMALL[value]
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"{value} does not fit 64 bits")
    return _encode(value)


def read_varint(data: bytes, pos: int) -> tuple[int, int]:
    """Decode a 32-bit number at ``pos``; return it and the position behind it."""
    byte = data[pos]
    pos += 1
    if byte < 0x80:
        return (byte >> 1) ^ -(byte & 1), pos
    value = byte & 0x7F
    for shift in (7, 14, 21, 28):
        byte = data[pos]
        pos += 1
        if byte < 0x80:
            value = (value | byte << shift) & 0xFFFFFFFF
            return (value >> 1) ^ -(value & 1), pos
        value |= (byte & 0x7F) << shift
    raise InvalidRecordError("a varint is longer than 5 bytes")


def read_varlong(data: bytes, pos: int) -> tuple[int, int]:
    """Decode a 64-bit number at ``pos``; return it and the position behind it."""
    byte = data[pos]
    pos += 1
    if byte < 0x80:
        return (byte >> 1) ^ -(byte & 1), pos
    value = byte & 0x7F
    for shift in (7, 14, 21, 28, 35, 42, 49, 56, 63):
        byte = data[pos]
        pos += 1
        if byte < 0x80:
            value = (value | byte << shift) & 0xFFFFFFFFFFFFFFFF
            return (value >> 1) ^ -(value & 1), pos
        value |= (byte & 0x7F) << shift
    raise InvalidRecordError("a varlong is longer than 10 bytes")
