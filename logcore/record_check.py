"""Checks that a consumer can read every record of a client's batch, without decoding the records.

A consumer gets stuck at an unreadable record forever, so each batch is checked once, on arrival:
compressed records are decompressed, and one walk follows the lengths. The walk allocates no objects
for records, and costs 0.4 to 0.8 µs a record (CPython 3.11).

Source: ``DefaultRecordBatch.RecordIterator``, ``DefaultRecord``, ``Lz4BlockOutputStream``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from fencepost.logcore.batch import (
    DEFAULT_MAX_OUTPUT_BYTES,
    HEADER_SIZE,
    NO_TIMESTAMP,
    BatchHeader,
    Buffer,
    wrap_int64,
)
from fencepost.logcore.compression import Codec, inflated_pieces
from fencepost.logcore.errors import CorruptRecordError, InvalidRecordError
from fencepost.logcore.record_window import LENGTH_BYTES, START_BYTES, RecordWindow
from fencepost.logcore.steps import Steps
from fencepost.logcore.values import dataclass
from fencepost.logcore.varint import ONE_BYTE, read_varint, read_varlong

MAX_RECORD_ERRORS: Final = 100
"""The maximum number of invalid records that the error response for a batch lists. Kafka lists all
of them, which can make a response of 60 MB to a request of 1 MB. Clients use the list only to tell
the invalid records of the batch from the valid ones."""

MAX_RECORD_HEADERS: Final = 250_000
"""The maximum number of headers of a record. Checking so many headers takes a tenth of a second,
during which no other batch is handled."""

TURN_RECORDS: Final = 10_000
"""The maximum number of records that are checked in one turn of the event loop, in about 5 ms. The
largest batches of clients have as many records (``batch.num.messages`` of librdkafka is 10,000)."""

TURN_BYTES: Final = 4 << 20
"""The maximum number of bytes that are decompressed in one turn. For gzip, the slowest codec, this
takes about 10 ms."""

COMPRESSED_BYTE_COST: Final = 64
"""A compressed byte counts as this many decompressed bytes, because a stream may consist of tiny
pieces."""

_UINT32_MAX: Final = 0xFFFFFFFF
_VARINT_BYTES: Final = 5


class CheckBudgetExceededError(Exception):
    """A batch would block the event loop too long. The batch is not at fault: use a thread."""


@dataclass(slots=True)
class CheckBudget:
    """The remaining budget of checks in this turn of the event loop."""

    records: int = TURN_RECORDS
    bytes: int = TURN_BYTES

    def charge(self, records: int, size: int) -> None:
        """Use a part of the budget. Raises CheckBudgetExceededError beyond it."""
        self.records -= records
        self.bytes -= size
        if self.records < 0 or self.bytes < 0:
            raise CheckBudgetExceededError


def open_records(
    data: Buffer,
    header: BatchHeader,
    budget: CheckBudget | None = None,
    max_record_bytes: int | None = None,
) -> RecordWindow:
    """Return a window over the records of the batch ``data``, within ``budget`` if it is given.

    The window raises CorruptRecordError if the records do not decompress within
    DEFAULT_MAX_OUTPUT_BYTES, and InvalidRecordError if a record of a compressed batch has more than
    ``max_record_bytes``.
    """
    codec = header.codec
    if codec is Codec.NONE:
        if budget is not None:
            budget.charge(header.record_count, 0)
        return RecordWindow.over(data, HEADER_SIZE)
    stored = memoryview(data)[HEADER_SIZE:]
    pieces = inflated_pieces(codec, stored, DEFAULT_MAX_OUTPUT_BYTES, strict=True)
    if budget is not None:
        budget.charge(header.record_count, len(stored) * COMPRESSED_BYTE_COST)
        pieces = _within(budget, pieces)
    return RecordWindow(pieces, max_record_bytes)


def _within(budget: CheckBudget, pieces: Iterator[bytes]) -> Iterator[bytes]:
    for piece in pieces:
        budget.charge(0, len(piece))
        yield piece


def check_records(
    window: RecordWindow, header: BatchHeader, budget: CheckBudget | None, *, want_keys: bool
) -> Steps[list[int]]:
    """Walk over all records of a batch; return up to MAX_RECORD_ERRORS indexes without a key.

    Without ``want_keys`` the list is empty. Every header of a record takes as much of ``budget`` as
    a record. Raises InvalidRecordError for records that do not match their lengths, a record count
    other than the header's, or offset deltas other than 0, 1, 2 ….
    """
    keyless: list[int] = []
    read = partial(_walk, budget, keyless if want_keys else None)
    try:
        for _ in window.chunks(header.record_count, read):
            yield
    except CorruptRecordError as error:
        raise InvalidRecordError(str(error)) from None
    return keyless


def _walk(  # noqa: C901 - inlined for speed
    budget: CheckBudget | None, keyless: list[int] | None, window: RecordWindow, count: int
) -> range:
    """Step over ``count`` records, or as many as the window holds; return their offset deltas.

    Numbers of one and two bytes are read in place, zig-zag included: an even one is twice its
    value, an odd one is negative. A field that exceeds its record is detected at the record's end.
    """
    data, pos, edge, last = window.data, window.pos, window.edge(LENGTH_BYTES), window.edge(1)
    first = window.delta + 1
    for twice in range(2 * first, 2 * (first + count), 2):
        if (start := pos) >= edge:
            break
        byte = data[pos]
        if byte < 0x80 and not byte & 1:
            pos += 1
            stop = pos + (byte >> 1)
        elif (high := data[pos + 1]) < 0x80 and not byte & 1:
            pos += 2
            stop = pos + ((byte & 0x7F | high << 7) >> 1)
        else:
            size, pos = _read_size(data, pos)
            stop = pos + size
        if stop > last:
            window.require(stop - pos, stop)
            pos = start
            break
        pos += 2  # the record's attributes, all unused, and its timestamp, if that is one byte
        if data[pos - 1] >= 0x80:
            pos = pos + 1 if data[pos] < 0x80 else read_varlong(data, pos - 1)[1]
        byte = data[pos]
        if byte < 0x80:
            delta = byte
            pos += 1
        elif (high := data[pos + 1]) < 0x80:
            delta = byte & 0x7F | high << 7
            pos += 2
        else:
            size, pos = _read_size(data, pos)
            delta = size << 1
        if delta != twice:
            raise InvalidRecordError(f"record {twice >> 1} has another offset delta")
        byte = data[pos]
        if byte == 1:
            pos += 1
            if keyless is not None and len(keyless) < MAX_RECORD_ERRORS:
                keyless.append(twice >> 1)
        elif byte < 0x80 and not byte & 1:
            pos += 1 + (byte >> 1)
        else:
            size, pos = _read_size(data, pos)
            pos += size
        byte = data[pos]
        if byte == 1 or (byte < 0x80 and not byte & 1):
            pos += 1 + (byte >> 1)
        elif (high := data[pos + 1]) < 0x80 and not byte & 1:
            pos += 2 + ((byte & 0x7F | high << 7) >> 1)
        else:
            size, pos = _read_size(data, pos)
            pos += size
        if data[pos]:
            pos = skip_headers(data, pos, stop, budget, MAX_RECORD_HEADERS)
        else:
            pos += 1
        if pos != stop:
            raise InvalidRecordError(f"record {twice >> 1} is {pos - stop} bytes too long")
    else:
        twice = 2 * (first + count)
    window.pos, window.delta = pos, (twice >> 1) - 1
    return range(first, twice >> 1)


def _read_size(data: Buffer, pos: int) -> tuple[int, int]:
    """Return a length of any width, and the position after it.

    A number of more than 32 bits is refused: some clients drop the excess bits and some do not.
    """
    value = shift = 0
    for at in range(pos, pos + _VARINT_BYTES):
        byte = data[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value & 1 or value > _UINT32_MAX:
                break
            return value >> 1, at + 1
        shift += 7
    raise InvalidRecordError(f"no length at byte {pos} of the records")


def skip_headers(
    data: Buffer, pos: int, stop: int, budget: CheckBudget | None = None, most: int = _UINT32_MAX
) -> int:
    """Step over at most ``most`` headers of a record that ends at ``stop``.

    Raises InvalidRecordError if the record has more headers, or announces more than fit into it.
    The caller must compare the returned position with ``stop``.
    """
    count, pos = _read_size(data, pos)
    if count > most:
        raise InvalidRecordError(f"{count} headers in a record, at most {most}")
    if count * 2 > stop - pos:
        raise InvalidRecordError(f"{count} headers in {stop - pos} bytes")
    if budget is not None:
        budget.charge(count, 0)
    for _ in range(count):
        size, pos = _read_size(data, pos)
        pos += size
        if data[pos] == 1:
            pos += 1
        else:
            size, pos = _read_size(data, pos)
            pos += size
    return pos


def record_times(header: BatchHeader, window: RecordWindow) -> Iterator[Sequence[tuple[int, int]]]:
    """Yield offset delta and timestamp of each record, in chunks.

    The rest of a record is neither kept nor checked.
    """
    return window.chunks(header.record_count, partial(_walk_times, header))


def _walk_times(header: BatchHeader, window: RecordWindow, count: int) -> Sequence[tuple[int, int]]:
    data, pos, edge = window.data, window.pos, window.edge(START_BYTES)
    base, one_byte = header.base_timestamp, ONE_BYTE
    append_time = header.max_timestamp if header.is_log_append_time else None
    last_delta, previous = header.last_offset_delta, window.delta
    times: list[tuple[int, int]] = []
    append = times.append
    for _ in range(count):
        if pos >= edge:
            break
        size = one_byte[data[pos]]
        pos += 1
        if size is None:
            size, pos = read_varint(data, pos - 1)
        end = pos + size
        pos += 1  # the record's attributes, all unused
        time = one_byte[data[pos]]
        pos += 1
        if time is None:
            time, pos = read_varlong(data, pos - 1)
        delta = one_byte[data[pos]]
        pos += 1
        if delta is None:
            delta, pos = read_varint(data, pos - 1)
        if not previous < delta <= last_delta:
            raise InvalidRecordError(f"offset delta {delta} follows {previous} of {last_delta}")
        if pos > end:
            raise InvalidRecordError(f"a record of {size} bytes is too short")
        previous, pos = delta, end
        append((delta, wrap_int64(base + time) if append_time is None else append_time))
    window.pos, window.delta = pos, previous
    return times


def times_outside(
    window: RecordWindow, header: BatchHeader, earliest_ms: int, latest_ms: int
) -> Steps[list[tuple[int, int]]]:
    """Return index and time of the first MAX_RECORD_ERRORS records outside of the two bounds.

    A record without a timestamp (-1) is accepted. The records have passed :func:`check_records`.
    """
    outside: list[tuple[int, int]] = []
    for chunk in record_times(header, window):
        outside += (
            (index, time_ms)
            for index, time_ms in chunk
            if not earliest_ms <= time_ms <= latest_ms and time_ms != NO_TIMESTAMP
        )
        if len(outside) >= MAX_RECORD_ERRORS:
            break
        yield
    return outside[:MAX_RECORD_ERRORS]
