"""Conversion of Kafka's record batches to Arrow columns and back, a column at a time.

Python walks only over the lengths of the records; numpy and Arrow read or write every other field
of all records together. The format is Kafka's ``DefaultRecord``::

    length varint · attributes · timestamp delta varlong · offset delta varint
    key length varint · key · value length varint · value · header count varint · headers
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fencepost.logcore.batch import BatchHeader
from fencepost.logcore.errors import InvalidRecordError
from fencepost.logcore.varint import encode, read_varint
from fencepost.pipelines.spark.errors import SparkPipelineError
from fencepost.pipelines.spark.partitioner import binary_parts

HEADERS = pa.list_(
    pa.field(
        "element",
        pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]),
    )
)

OVERHEAD_BYTES = 21
"""The largest overhead of a record without headers, with key and value below 2 MiB."""

_MAX_VARINT_BYTES = 10


class Columns(NamedTuple):
    """Records, one column per field; ``headers`` is None unless requested."""

    offsets: Any
    """int64[n]"""
    timestamps_ms: Any
    """int64[n]"""
    keys: Any
    values: Any
    headers: Any


# --- reading ---


def decode(groups: list[tuple[BatchHeader, bytes]], *, with_headers: bool = False) -> Columns:
    """Decode the uncompressed records of several batches at once.

    Raises InvalidRecordError if records contradict their lengths or the batch's record count.
    """
    data = b"".join(payload for _, payload in groups)
    counts = [header.record_count for header, _ in groups]
    starts, ends = _boundaries(groups)
    flat = np.frombuffer(data, np.uint8)
    try:
        _, at = _read_varints(flat, starts)
        stamps, at = _read_varints(flat, at + 1)
        deltas, at = _read_varints(flat, at)
        key_sizes, at = _read_varints(flat, at)
        key_at = at
        key_ends = key_at + np.maximum(key_sizes, 0)
        value_sizes, value_at = _read_varints(flat, key_ends)
        value_ends = value_at + np.maximum(value_sizes, 0)
        header_counts, header_at = _read_varints(flat, value_ends)
    except IndexError:
        raise InvalidRecordError("the records end inside a field") from None
    bare = header_counts == 0
    if (
        (key_sizes < -1).any()
        or (value_sizes < -1).any()
        or (header_counts < 0).any()
        or (header_at > ends).any()
        or (header_at[bare] != ends[bare]).any()
    ):
        raise InvalidRecordError("a record's length does not fit its fields")
    edges = np.empty(4 * len(starts), np.int32)
    edges[0::4], edges[1::4], edges[2::4], edges[3::4] = key_at, key_ends, value_at, value_ends
    return Columns(
        offsets=_per_record([h.base_offset for h, _ in groups], counts) + deltas,
        timestamps_ms=_timestamps([h for h, _ in groups], counts, stamps),
        keys=_slices(data, edges, 0, key_sizes < 0),
        values=_slices(data, edges, 2, value_sizes < 0),
        headers=_headers(data, header_counts, header_at, ends) if with_headers else None,
    )


def _boundaries(groups: list[tuple[BatchHeader, bytes]]) -> tuple[Any, Any]:
    """Return where each record begins and ends in the joined payloads.

    This is the only loop over records: a length of one or two bytes, which covers every record
    below 8 KiB, is decoded in place.
    """
    starts: list[int] = []
    append = starts.append
    base = 0
    for header, payload in groups:
        pos, limit = 0, len(payload)
        try:
            for _ in range(header.record_count):
                append(base + pos)
                length = payload[pos]
                if length < 0x80:
                    pos += 1
                elif (second := payload[pos + 1]) < 0x80:
                    length += (second << 7) - 0x80
                    pos += 2
                else:
                    length, pos = read_varint(payload, pos)
                    length <<= 1  # back to the zigzag encoding, in which negative numbers are odd
                if length & 1 or length < 0:
                    raise InvalidRecordError("a record of a negative length")
                pos += length >> 1
        except IndexError:
            raise InvalidRecordError("the records end inside a length") from None
        if pos != limit:
            raise InvalidRecordError(f"{limit} bytes hold records of {pos} bytes")
        base += limit
    begin = np.array(starts, np.int64)
    end = np.empty_like(begin)
    end[:-1] = begin[1:]
    if len(end):
        end[-1] = base
    return begin, end


def _read_varints(flat: Any, pos: Any) -> tuple[Any, Any]:
    """Decode one signed varint at each position; return values and the positions after them."""
    first = flat[pos]
    value = (first & 0x7F).astype(np.uint64)
    behind = pos + 1
    more = np.flatnonzero(first >= 0x80)
    shift = 7
    while len(more):
        if shift >= 7 * _MAX_VARINT_BYTES:
            raise InvalidRecordError(f"a varint is longer than {_MAX_VARINT_BYTES} bytes")
        byte = flat[behind[more]]
        value[more] |= (byte & 0x7F).astype(np.uint64) << np.uint64(shift)
        behind[more] += 1
        more = more[byte >= 0x80]
        shift += 7
    signed = (value >> np.uint64(1)).astype(np.int64) ^ -(value & np.uint64(1)).astype(np.int64)
    return signed, behind


def _per_record(per_batch: list[int], counts: list[int]) -> Any:
    return np.repeat(np.array(per_batch, np.int64), counts)


def _timestamps(headers: list[BatchHeader], counts: list[int], deltas: Any) -> Any:
    stamps = _per_record([h.base_timestamp for h in headers], counts) + deltas
    if any(h.is_log_append_time for h in headers):
        by_broker = np.repeat(np.array([h.is_log_append_time for h in headers]), counts)
        stamps = np.where(
            by_broker, _per_record([h.max_timestamp for h in headers], counts), stamps
        )
    return stamps


def _slices(data: bytes, edges: Any, first: int, null: Any) -> Any:
    """Return a binary array of every fourth piece of ``data`` between ``edges``."""
    count = len(edges) // 4
    if not count:
        return pa.array([], pa.binary())
    pieces = pa.Array.from_buffers(
        pa.binary(), len(edges) - 1, [None, pa.py_buffer(edges), pa.py_buffer(data)]
    )
    at = pa.array(np.arange(count, dtype=np.int64) * 4 + first, mask=null if null.any() else None)
    return pieces.take(at)


def _headers(data: bytes, counts: Any, pos: Any, ends: Any) -> Any:
    rows: list[list[dict[str, object]] | None] = [None] * len(counts)
    for row in np.flatnonzero(counts):
        rows[row] = _headers_of(data, int(counts[row]), int(pos[row]), int(ends[row]))
    return pa.array(rows, HEADERS)


def _headers_of(data: bytes, count: int, pos: int, end: int) -> list[dict[str, object]]:
    # A header has at least two length bytes.
    if count * 2 > end - pos:
        raise InvalidRecordError(f"{count} headers in {end - pos} bytes")
    headers: list[dict[str, object]] = []
    try:
        for _ in range(count):
            size, pos = read_varint(data, pos)
            if size < 0 or size > end - pos:
                raise InvalidRecordError(f"a header key of {size} bytes")
            key = data[pos : pos + size].decode(errors="replace")
            pos += size
            size, pos = read_varint(data, pos)
            value = data[pos : pos + size] if size >= 0 else None
            pos += max(size, 0)
            headers.append({"key": key, "value": value})
    except IndexError:
        raise InvalidRecordError("the records end inside a header") from None
    if pos != end:
        raise InvalidRecordError(f"a record's length is wrong by {pos - end} bytes")
    return headers


# --- writing ---


class Piece(NamedTuple):
    """The records of a future batch, without the batch header."""

    topic: str
    partition: int
    records: int
    base_timestamp_ms: int
    max_timestamp_ms: int
    payload: Any
    """The records' bytes, not yet compressed."""


class Rows(NamedTuple):
    """Records of one topic-partition to write, one column per field."""

    keys: Any
    """Binary Arrow array, or None."""
    values: Any
    timestamps_ms: Any
    """int64[n]"""
    headers: Any
    """Array of :data:`HEADERS`, or None."""


def encode_rows(
    topic: str, partition: int, rows: Rows, max_bytes: int, first_count: int | None = None
) -> Iterator[Piece]:
    """Encode records in batches of at most ``max_bytes`` (or of one record, if that is larger).

    The first batch has at most ``first_count`` records.
    """
    tails = encode_headers(rows.headers)
    sizes = np.full(len(rows.values), OVERHEAD_BYTES, np.int64)
    for column in (rows.keys, rows.values, tails):
        if column is not None:
            sizes += np.diff(binary_parts(column)[0])
    total = np.cumsum(sizes)
    at = 0
    while at < len(total):
        before = int(total[at - 1]) if at else 0
        end = int(np.searchsorted(total, before + max_bytes, side="right"))
        end = max(end, at + 1)
        if first_count is not None and not at:
            end = min(end, first_count)
        stamps = rows.timestamps_ms[at:end]
        keys, values, tail = (
            None if column is None else column.slice(at, end - at)
            for column in (rows.keys, rows.values, tails)
        )
        payload = _records(keys, values, stamps - stamps[0], tail)
        yield Piece(topic, partition, end - at, int(stamps[0]), int(stamps.max()), payload)
        at = end


def _records(keys: Any, values: Any, stamp_deltas: Any, tails: Any) -> Any:
    """Return the bytes of records 0 … n-1 of one batch."""
    count = len(values)
    key_sizes, value_sizes = _sizes(keys, count), _sizes(values, count)
    stamps = _varints(stamp_deltas)
    deltas = _varints(np.arange(count, dtype=np.int64))
    key_lengths, value_lengths = _varints(key_sizes), _varints(value_sizes)
    body = np.maximum(key_sizes, 0) + np.maximum(value_sizes, 0) + 1
    body += 1 if tails is None else np.diff(binary_parts(tails)[0])
    for number in (stamps, deltas, key_lengths, value_lengths):
        body += number.width
    attributes = _varints(np.zeros(1, np.int64))
    parts = [_varint_column(count, _varints(body), attributes, stamps, deltas, key_lengths)]
    if keys is not None:
        parts.append(keys.fill_null(b"") if keys.null_count else keys)
    if tails is None:
        # Without headers, their count of 0 follows each value.
        tails = pa.array([b"\x00"], pa.binary())[0]
    parts.append(_varint_column(count, value_lengths))
    parts.append(values.fill_null(b"") if values.null_count else values)
    joined = pc.binary_join_element_wise(*parts, tails, pa.scalar(b"", pa.binary()))
    offsets, data, _ = binary_parts(joined)
    return memoryview(data[int(offsets[0]) : int(offsets[-1])])


def _sizes(column: Any, count: int) -> Any:
    """Return the length of each value, −1 for null."""
    if column is None:
        return np.full(count, -1, np.int64)
    offsets, _, valid = binary_parts(column)
    sizes = np.diff(offsets)
    if column.null_count:
        sizes[~valid] = -1
    return sizes


class _Varints(NamedTuple):
    """Numbers to encode as varints; a single number applies to all records."""

    zigzag: Any
    """uint64[n], or uint64[1] if all are equal."""
    width: Any
    """Encoded size of each, int64[n]; a plain int if all are equal."""
    narrowest: int
    widest: int


def _varints(values: Any) -> _Varints:
    zigzag = ((values << 1) ^ (values >> 63)).astype(np.uint64)
    low, high = int(zigzag.min()), int(zigzag.max())
    narrowest, widest = (max(1, -(-number.bit_length() // 7)) for number in (low, high))
    if low == high:
        return _Varints(zigzag[:1], widest, widest, widest)
    if narrowest == widest:
        return _Varints(zigzag, widest, widest, widest)
    width = np.full(len(zigzag), narrowest, np.int64)
    for size in range(narrowest, widest):
        width += zigzag >= np.uint64(1 << 7 * size)
    return _Varints(zigzag, width, narrowest, widest)


def _varint_column(count: int, *fields: _Varints) -> Any:
    """Return a binary array of ``count`` values: the varints of all fields, one after another."""
    columns = sum(field.widest for field in fields)
    data = np.empty((count, columns), np.uint8)
    used: Any = None
    sizes: Any = 0
    column = 0
    for field in fields:
        sizes = sizes + field.width
        for at in range(field.widest):
            byte = (field.zigzag >> np.uint64(7 * at)).astype(np.uint8) & np.uint8(0x7F)
            if at + 1 < field.narrowest:
                byte |= np.uint8(0x80)
            elif at + 1 < field.widest:
                byte |= (field.width > at + 1).astype(np.uint8) << np.uint8(7)
            data[:, column] = byte
            if at >= field.narrowest:
                used = np.ones((count, columns), np.bool_) if used is None else used
                used[:, column] = field.width > at
            column += 1
    if used is not None:
        data = data[used]
    offsets = np.zeros(count + 1, np.int32)
    np.cumsum(np.broadcast_to(sizes, count), out=offsets[1:])
    return pa.Array.from_buffers(
        pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(data.reshape(-1))]
    )


def encode_headers(column: Any) -> Any:
    """Return the bytes of each record's headers with their count; None if no record has any.

    Raises :class:`SparkPipelineError` for a null header, or a header with a null key.
    """
    if column is None or column.null_count == len(column):
        return None
    # As in the stock sink, the names of the struct's fields may be in any case.
    key_name, value_name = (field.name for field in column.type.value_type)
    encoded: list[bytes] = []
    for row in column.to_pylist():
        parts = [encode(len(row or ()))]
        for header in row or ():
            if header is None or header[key_name] is None:
                what = "a header" if header is None else "the key of a header"
                raise SparkPipelineError(
                    f"{what} is null in a row's column headers: every header of a record has a key"
                )
            key = header[key_name].encode()
            value = header[value_name]
            parts += [encode(len(key)), key, encode(-1 if value is None else len(value))]
            if value is not None:
                parts.append(value)
        encoded.append(b"".join(parts))
    return pa.array(encoded, pa.binary())
