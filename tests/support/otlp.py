"""Messages of OTLP metrics, encoded field by field for tests."""

from __future__ import annotations

import struct
from collections.abc import Mapping

GAUGE, SUM = 5, 7
DELTA, CUMULATIVE = 1, 2
NO_LABELS: Mapping[str, str] = {}


def varint(number: int) -> bytes:
    """Encode an unsigned number."""
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def number(field: int, value: int) -> bytes:
    """Encode a field of wire type 0."""
    return varint(field << 3) + varint(value)


def fixed64(field: int, value: bytes) -> bytes:
    """Encode a field of wire type 1."""
    return varint(field << 3 | 1) + value


def nested(field: int, value: bytes | str) -> bytes:
    """Encode a field of wire type 2: a message, a text or bytes."""
    raw = value.encode() if isinstance(value, str) else value
    return varint(field << 3 | 2) + varint(len(raw)) + raw


def attributes(field: int, pairs: Mapping[str, str]) -> bytes:
    """Encode attributes with texts as values."""
    return b"".join(
        nested(field, nested(1, key) + nested(2, nested(1, text))) for key, text in pairs.items()
    )


def point(value: float, time_ms: int = 0, labels: Mapping[str, str] = NO_LABELS) -> bytes:
    """Encode a data point; an int is written as such."""
    is_int = isinstance(value, int)
    raw = struct.pack("<q", value) if is_int else struct.pack("<d", value)
    time_ns = fixed64(3, struct.pack("<Q", time_ms * 1_000_000))
    return time_ns + fixed64(6 if is_int else 4, raw) + attributes(7, labels)


def gauge(name: str, *points: bytes, unit: str = "") -> bytes:
    """Encode a metric with the current values."""
    return nested(1, name) + nested(3, unit) + nested(GAUGE, b"".join(nested(1, p) for p in points))


def counter(
    name: str, *points: bytes, temporality: int = DELTA, is_monotonic: bool = True
) -> bytes:
    """Encode a metric with sums."""
    body = b"".join(nested(1, p) for p in points) + number(2, temporality)
    return nested(1, name) + nested(SUM, body + number(3, is_monotonic))


def metrics_data(*metrics: bytes, **resource: str) -> bytes:
    """Encode a push: these metrics of a client with these labels."""
    scope = nested(2, b"".join(nested(2, metric) for metric in metrics))
    return nested(1, nested(1, attributes(1, resource)) + scope)
