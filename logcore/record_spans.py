"""The records of a batch as positions in its bytes, with only their keys and offsets decoded.

Some callers read many records, keep a part of them and change none. Finding the positions costs
them a third of decoding the records, and they copy neighbouring records in one piece.

Source: ``DefaultRecord.readPartiallyFrom``, ``MemoryRecords.filterTo``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise

from fencepost.logcore.batch import BatchHeader, wrap_int64
from fencepost.logcore.errors import InvalidRecordError
from fencepost.logcore.record_check import skip_headers
from fencepost.logcore.record_window import LENGTH_BYTES, RecordWindow
from fencepost.logcore.varint import ONE_BYTE, encode, read_varint, read_varlong

Span = tuple[int, int, bytes | None, bool, int, int, int]
"""Offset delta, timestamp delta, key, whether it has a value; the positions of the record's length,
of its offset delta, and of its end."""


def span_chunks(header: BatchHeader, window: RecordWindow) -> Iterator[Sequence[Span]]:
    """Yield the records in ``window`` in chunks; positions are valid until the next chunk.

    Raises InvalidRecordError for the same records as ``decode_records``.
    """
    return window.chunks(header.record_count, partial(_walk, header.last_offset_delta))


def _walk(  # noqa: C901 - inlined for speed
    last_delta: int, window: RecordWindow, count: int
) -> list[Span]:
    """Parse up to ``count`` records; one-byte numbers are looked up instead of decoded."""
    data, pos, edge = window.data, window.pos, window.edge(LENGTH_BYTES)
    one_byte, limit, previous = ONE_BYTE, len(data), window.delta
    spans: list[Span] = []
    append = spans.append
    for _ in range(count):
        if (start := pos) >= edge:
            break
        size = one_byte[data[pos]]
        pos += 1
        if size is None:
            size, pos = read_varint(data, start)
        end = pos + size
        if size < 0 or end > limit:
            window.require(size, end)
            pos = start
            break
        pos += 1  # the record's attributes, all unused
        time = one_byte[data[pos]]
        pos += 1
        if time is None:
            time, pos = read_varlong(data, pos - 1)
        after_time = pos
        delta = one_byte[data[pos]]
        pos += 1
        if delta is None:
            delta, pos = read_varint(data, pos - 1)
        if not previous < delta <= last_delta:
            raise InvalidRecordError(f"offset delta {delta} follows {previous} of {last_delta}")
        previous = delta
        key = None
        size = one_byte[data[pos]]
        pos += 1
        if size is None:
            size, pos = read_varint(data, pos - 1)
        if size >= 0:
            key = data[pos : pos + size]
            pos += size
        elif size != -1:
            raise InvalidRecordError(f"a key of {size} bytes")
        size = one_byte[data[pos]]
        pos += 1
        if size is None:
            size, pos = read_varint(data, pos - 1)
        if size >= 0:
            pos += size
        elif size != -1:
            raise InvalidRecordError(f"a value of {size} bytes")
        if data[pos]:
            pos = skip_headers(data, pos, end)
        else:
            pos += 1
        if pos != end:
            raise InvalidRecordError(f"a record's length is wrong by {pos - end} bytes")
        append((delta, time, key, size >= 0, start, after_time, end))
    window.pos, window.delta = pos, previous
    return spans


def joined(data: bytes, spans: Sequence[Span], later_ms: int, time: int | None = None) -> bytes:
    """Return the bytes of these records for a new batch.

    The new batch's base timestamp is ``later_ms`` later than the old one, so the records' timestamp
    deltas are reduced. ``time``, if given, becomes each record's timestamp delta instead. Unchanged
    neighbours are copied in one piece.
    """
    if later_ms or time is not None:
        out: list[bytes] = []
        for _, own_time, _, _, _, after_time, end in spans:
            moved = encode(wrap_int64(own_time - later_ms) if time is None else time)
            out += encode(1 + len(moved) + end - after_time), b"\0", moved, data[after_time:end]
        return b"".join(out)
    cuts = [at for at, (one, other) in enumerate(pairwise(spans), 1) if one[6] != other[4]]
    return b"".join(
        data[spans[first][4] : spans[last - 1][6]]
        for first, last in pairwise([0, *cuts, len(spans)])
    )
