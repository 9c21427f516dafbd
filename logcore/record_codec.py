"""Encoding and decoding of the records inside a batch.

Source: ``DefaultRecord``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from fencepost.logcore.errors import InvalidRecordError
from fencepost.logcore.record_window import LENGTH_BYTES, RecordWindow
from fencepost.logcore.varint import MINUS_ONE, ONE_BYTE, SMALL, encode, read_varint, read_varlong

_INT64_MIN: Final = -(1 << 63)
_INT64_MAX: Final = (1 << 63) - 1
_new_tuple = tuple.__new__


class LogRecord(NamedTuple):
    """One record of a batch, its offset and timestamp absolute.

    Header keys that are not UTF-8 keep their bytes as surrogate escapes, so that decoding and
    encoding a batch preserves them.
    """

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()


LogRow = LogRecord | tuple[int, int, bytes | None, bytes | None, tuple[()]]
"""A record, or a plain tuple without headers, which takes less time to build."""


class RecordBase(NamedTuple):
    """The fields of a batch's header that its records refer to.

    ``append_time`` is the timestamp of all records, None if each record has its own.
    """

    offset: int
    timestamp_ms: int
    append_time: int | None
    last_delta: int


def decode_chunk(  # noqa: C901 - inlined for speed
    base: RecordBase, window: RecordWindow, count: int
) -> list[LogRecord]:
    """Decode the next ``count`` records, or as many as the window holds.

    One-byte numbers are looked up in place. A field that exceeds its record is detected at the
    record's end: a slice past the end is merely short. IndexError if the bytes end inside a number.
    """
    base_offset, base_timestamp, append_time, last_delta = base
    data, start, edge, previous = window.data, window.pos, window.edge(LENGTH_BYTES), window.delta
    one_byte, limit = ONE_BYTE, len(data)
    records: list[LogRecord] = []
    for _ in range(count):
        if (pos := start) >= edge:
            break
        length = one_byte[data[pos]]
        pos += 1
        if length is None:
            length, pos = read_varint(data, pos - 1)
        end = pos + length
        if length < 0 or end > limit:
            window.require(length, end)
            break
        pos += 1  # the record's attributes, all unused
        timestamp = one_byte[data[pos]]
        pos += 1
        if timestamp is None:
            timestamp, pos = read_varlong(data, pos - 1)
        timestamp += base_timestamp
        if not _INT64_MIN <= timestamp <= _INT64_MAX:
            timestamp = wrap_int64(timestamp)
        delta = one_byte[data[pos]]
        pos += 1
        if delta is None:
            delta, pos = read_varint(data, pos - 1)
        if not previous < delta <= last_delta:
            raise InvalidRecordError(f"offset delta {delta} follows {previous} of {last_delta}")
        previous = delta
        key = value = None
        length = one_byte[data[pos]]
        pos += 1
        if length is None:
            length, pos = read_varint(data, pos - 1)
        if length >= 0:
            key = data[pos : pos + length]
            pos += length
        elif length != -1:
            raise InvalidRecordError(f"a key of {length} bytes")
        length = one_byte[data[pos]]
        pos += 1
        if length is None:
            length, pos = read_varint(data, pos - 1)
        if length >= 0:
            value = data[pos : pos + length]
            pos += length
        elif length != -1:
            raise InvalidRecordError(f"a value of {length} bytes")
        headers: tuple[tuple[str, bytes | None], ...] = ()
        if data[pos]:
            headers, pos = _decode_headers(data, pos, end)
        else:
            pos += 1
        if pos != end:
            raise InvalidRecordError(f"a record's length is wrong by {pos - end} bytes")
        if append_time is not None:
            timestamp = append_time
        records.append(_new_tuple(LogRecord, (base_offset + delta, timestamp, key, value, headers)))
        start = end
    window.pos, window.delta = start, previous
    return records


def wrap_int64(value: int) -> int:
    """Overflow as Java's long does: Kafka adds and subtracts timestamps that way."""
    return (value - _INT64_MIN & 0xFFFFFFFFFFFFFFFF) + _INT64_MIN


def _decode_headers(
    data: bytes, pos: int, end: int
) -> tuple[tuple[tuple[str, bytes | None], ...], int]:
    count, pos = read_varint(data, pos)
    # A header has at least two length bytes.
    if count < 0 or count * 2 > end - pos:
        raise InvalidRecordError(f"{count} headers in {end - pos} bytes")
    headers: list[tuple[str, bytes | None]] = []
    for _ in range(count):
        length, pos = read_varint(data, pos)
        if length < 0 or length > end - pos:
            raise InvalidRecordError(f"a header key of {length} bytes")
        key = data[pos : pos + length].decode(errors="surrogateescape")
        pos += length
        length, pos = read_varint(data, pos)
        value: bytes | None = None
        if length >= 0:
            if length > end - pos:
                raise InvalidRecordError(f"a header value of {length} bytes leaves its record")
            value = data[pos : pos + length]
            pos += length
        elif length != -1:
            raise InvalidRecordError(f"a header value of {length} bytes")
        headers.append((key, value))
    return tuple(headers), pos


def encode_records(
    records: Sequence[LogRow], base_offset: int, base_timestamp: int, last_offset_delta: int
) -> bytes:
    """Encode the records of a batch, back to back; ValueError if the offsets do not ascend."""
    small, table = SMALL, len(SMALL)
    join = b"".join
    out: list[bytes] = []
    append = out.append
    previous = -1
    for offset, timestamp, key, value, headers in records:
        delta = offset - base_offset
        if not previous < delta <= last_offset_delta:
            raise ValueError(f"offset {offset} does not follow in the batch at {base_offset}")
        previous = delta
        timestamp -= base_timestamp  # noqa: PLW2901 - from here on it is the delta
        parts = [
            b"\x00",
            small[timestamp] if 0 <= timestamp < table else encode(wrap_int64(timestamp)),
            small[delta] if delta < table else encode(delta),
        ]
        if key is None:
            parts.append(MINUS_ONE)
        else:
            size = len(key)
            parts += small[size] if size < table else encode(size), key
        if value is None:
            parts.append(MINUS_ONE)
        else:
            size = len(value)
            parts += small[size] if size < table else encode(size), value
        if headers:
            parts.append(_encode_headers(headers))
        else:
            parts.append(b"\x00")
        body = join(parts)
        size = len(body)
        append(small[size] if size < table else encode(size))
        append(body)
    return join(out)


def _encode_headers(headers: Sequence[tuple[str, bytes | None]]) -> bytes:
    parts = [encode(len(headers))]
    for name, value in headers:
        key = name.encode(errors="surrogateescape")
        parts += encode(len(key)), key
        if value is None:
            parts.append(MINUS_ONE)
        else:
            parts += encode(len(value)), value
    return b"".join(parts)
