"""Record batches of message format v2, byte for byte as Kafka writes them.

A *buffer* is ``bytes``, ``bytearray`` or a ``memoryview`` of bytes; ``pos`` is where a batch begins
in it. Sizes are bytes and include the 12 bytes of log overhead; timestamps are milliseconds since
the epoch, −1 for none. Formats v0 and v1 live in ``legacy.py``.

Source: Kafka's ``DefaultRecordBatch``, ``DefaultRecord``, ``MemoryRecordsBuilder``,
``ControlRecordType``, ``EndTransactionMarker``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from crc32c import crc32c

from fencepost.logcore.compression import Codec as Codec  # noqa: PLC0414 - part of this module's interface
from fencepost.logcore.compression import codec_for_id, compress, decompress
from fencepost.logcore.errors import CorruptRecordError, InvalidRecordError
from fencepost.logcore.varint import MINUS_ONE, ONE_BYTE, SMALL, encode, read_varint, read_varlong

Buffer = bytes | bytearray | memoryview

LOG_OVERHEAD: Final = 12
"""Base offset and length: what stands before the bytes that the length counts."""

HEADER_SIZE: Final = 61
MAGIC: Final = 2
NO_TIMESTAMP: Final = -1
NO_PRODUCER_ID: Final = -1
NO_PRODUCER_EPOCH: Final = -1
NO_SEQUENCE: Final = -1
NO_LEADER_EPOCH: Final = -1

DEFAULT_MAX_OUTPUT_BYTES: Final = 128 * 1024 * 1024
"""Limit of one batch's inflated records, bytes: a hundred times the default
``max.message.bytes``, beyond what text-like data reaches, and still a size one machine can hold."""

MIN_RECORD_SIZE: Final = 7
"""A record of null key, null value and no headers, its length byte included."""

_INT32_MAX: Final = 0x7FFFFFFF
_INT64_MIN: Final = -(1 << 63)
_INT64_MAX: Final = (1 << 63) - 1
CRC_POS: Final = 17
_CRC_START: Final = 21
LOG_APPEND_TIME_BIT: Final = 0x08
TRANSACTIONAL_BIT: Final = 0x10
_CONTROL: Final = 0x20
_DELETE_HORIZON: Final = 0x40

_HEADER: Final = struct.Struct(">qiibIhiqqqhii")
AFTER_CRC: Final = struct.Struct(">hiqqqhii")
_BEFORE_CRC: Final = struct.Struct(">qiibI")
_INT16: Final = struct.Struct(">h")
_INT32: Final = struct.Struct(">i")
_UINT32: Final = struct.Struct(">I")
_INT64: Final = struct.Struct(">q")
_CONTROL_KEY: Final = struct.Struct(">hh")
_END_MARKER_VALUE: Final = struct.Struct(">hi")


class ControlType(IntEnum):
    """Kinds of control records. Readers skip what they do not know."""

    UNKNOWN = -1
    ABORT = 0
    COMMIT = 1
    LEADER_CHANGE = 2
    SNAPSHOT_HEADER = 3
    SNAPSHOT_FOOTER = 4
    KRAFT_VERSION = 5
    KRAFT_VOTERS = 6


class BatchHeader(NamedTuple):
    """The first 61 bytes of a batch.

    ``size`` is the whole batch. ``base_timestamp`` is the field as it stands: with
    ``has_delete_horizon`` it holds the horizon, and the records' deltas refer to that.
    """

    base_offset: int
    size: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int

    @property
    def last_offset(self) -> int:
        """Offset of the last record the batch had when it was produced."""
        return self.base_offset + self.last_offset_delta

    @property
    def next_offset(self) -> int:
        """The offset behind the batch."""
        return self.base_offset + self.last_offset_delta + 1

    @property
    def codec(self) -> Codec:
        """How the records are compressed; InvalidRecordError for an unknown codec."""
        return codec_for_id(self.attributes & 0x07)

    @property
    def is_log_append_time(self) -> bool:
        """Whether every record's timestamp is ``max_timestamp``, given by the broker."""
        return bool(self.attributes & LOG_APPEND_TIME_BIT)

    @property
    def is_transactional(self) -> bool:
        """Whether the batch belongs to a transaction (its marker does as well)."""
        return bool(self.attributes & TRANSACTIONAL_BIT)

    @property
    def is_control(self) -> bool:
        """Whether the batch holds control records, which consumers skip."""
        return bool(self.attributes & _CONTROL)

    @property
    def has_delete_horizon(self) -> bool:
        """Whether compaction has set a time after which tombstones may go."""
        return bool(self.attributes & _DELETE_HORIZON)

    @property
    def delete_horizon_ms(self) -> int | None:
        """That time, or None."""
        return self.base_timestamp if self.attributes & _DELETE_HORIZON else None

    def with_horizon(self, horizon_ms: int) -> BatchHeader:
        """The same with such a time."""
        return self._replace(
            attributes=self.attributes | _DELETE_HORIZON, base_timestamp=horizon_ms
        )

    @property
    def has_producer(self) -> bool:
        """Whether an idempotent or transactional producer wrote the batch."""
        return self.producer_id > NO_PRODUCER_ID

    @property
    def last_sequence(self) -> int:
        """Sequence of the last record, −1 if there is none; 0 follows 2³¹−1."""
        if self.base_sequence == NO_SEQUENCE:
            return NO_SEQUENCE
        return (self.base_sequence + self.last_offset_delta) & _INT32_MAX


class LogRecord(NamedTuple):
    """One record of a batch, its offset and timestamp absolute.

    Header keys that are not UTF-8 carry their bytes as surrogate escapes, so that a batch that is
    decoded and encoded again keeps them.
    """

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()


LogRow = LogRecord | tuple[int, int, bytes | None, bytes | None, tuple[()]]
"""A record, or the same without headers for who makes many."""


class ControlRecord(NamedTuple):
    """A control record's meaning; the epoch is −1 unless it ends a transaction."""

    type: ControlType
    coordinator_epoch: int


_CONTROL_TYPES: Final = {int(member): member for member in ControlType}
_new_tuple = tuple.__new__


def parse_header(buf: Buffer, pos: int = 0) -> BatchHeader:
    """Read the header at ``pos``; the records behind it need not be in ``buf``.

    Raises CorruptRecordError when fewer than 61 bytes are there, the length is impossible, or the
    magic is not 2.
    """
    try:
        fields = _HEADER.unpack_from(buf, pos)
    except struct.error:
        raise CorruptRecordError(f"a batch header is cut short at position {pos}") from None
    if fields[3] != MAGIC:
        raise CorruptRecordError(f"magic {fields[3]} where a batch of format 2 is expected")
    size = fields[1] + LOG_OVERHEAD
    if size < HEADER_SIZE:
        raise CorruptRecordError(f"a batch of {size} bytes is smaller than its header")
    return _new_tuple(BatchHeader, (fields[0], size, *fields[2:]))


def iter_headers(buf: Buffer) -> Iterator[tuple[int, BatchHeader]]:
    """Yield position and header of each batch; CorruptRecordError if ``buf`` ends inside one."""
    pos, end = 0, len(buf)
    while pos < end:
        header = parse_header(buf, pos)
        if header.size > end - pos:
            raise CorruptRecordError(
                f"a batch of {header.size} bytes where {end - pos} are left, at position {pos}"
            )
        yield pos, header
        pos += header.size


def verify_crc(buf: Buffer, pos: int, header: BatchHeader) -> None:
    """Raise CorruptRecordError unless the batch at ``pos`` is whole and its CRC-32C is right."""
    end = pos + header.size
    if end > len(buf):
        raise CorruptRecordError(f"a batch of {header.size} bytes where {len(buf) - pos} are left")
    if crc32c(memoryview(buf)[pos + _CRC_START : end]) != header.crc:
        raise CorruptRecordError(f"the CRC of the batch at offset {header.base_offset} is wrong")


def stamp_log_append_time(buf: bytearray | memoryview, pos: int, timestamp_ms: int) -> None:
    """Make ``timestamp_ms`` the time of every record of the batch, in place; renews the CRC."""
    size = _INT32.unpack_from(buf, pos + 8)[0] + LOG_OVERHEAD
    attributes = _INT16.unpack_from(buf, pos + 21)[0] | LOG_APPEND_TIME_BIT
    _INT16.pack_into(buf, pos + 21, attributes)
    _INT64.pack_into(buf, pos + 35, timestamp_ms)
    crc = crc32c(memoryview(buf)[pos + _CRC_START : pos + size])
    _UINT32.pack_into(buf, pos + CRC_POS, crc)


def decode_records(
    buf: Buffer,
    pos: int = 0,
    header: BatchHeader | None = None,
    *,
    max_output_bytes: int = DEFAULT_MAX_OUTPUT_BYTES,
) -> list[LogRecord]:
    """Inflate and decode the records of the batch at ``pos``; the CRC is the caller's to check.

    Raises CorruptRecordError for bytes that are missing or do not inflate (also past
    ``max_output_bytes``), InvalidRecordError for records that break their own lengths, count or
    offsets, which must rise and stay within the batch, but may have holes.
    """
    if header is None:
        header = parse_header(buf, pos)
    data = record_bytes(buf, pos, header, max_output_bytes)
    count = header.record_count
    # Counted before the loop, so that a wrong count costs nothing.
    if count < 0 or count * MIN_RECORD_SIZE > len(data):
        raise InvalidRecordError(f"{count} records can't stand in {len(data)} bytes")
    try:
        return _decode(data, header)
    except IndexError:
        raise InvalidRecordError("the records end inside a field") from None


def record_bytes(
    buf: Buffer,
    pos: int,
    header: BatchHeader,
    max_output_bytes: int = DEFAULT_MAX_OUTPUT_BYTES,
) -> bytes:
    """Inflate what follows the header of the batch at ``pos``: its records, still encoded.

    Raises CorruptRecordError for bytes that are missing or do not inflate.
    """
    end = pos + header.size
    if end > len(buf):
        raise CorruptRecordError(f"a batch of {header.size} bytes where {len(buf) - pos} are left")
    codec = header.codec
    stored = memoryview(buf)[pos + HEADER_SIZE : end]
    # Compaction leaves headers without records, whatever the codec bits say.
    if codec is Codec.NONE or not stored:
        return bytes(stored)
    return decompress(codec, stored, max_output_bytes)


def _decode(data: bytes, header: BatchHeader) -> list[LogRecord]:  # noqa: C901 - inlined for speed
    """Decode ``data``, all records of the batch. One-byte numbers are looked up in place.

    A field that leaves its record is noticed at the record's end: positions only grow, and a slice
    past the end is merely short. IndexError when the bytes end inside a number.
    """
    base_offset, base_timestamp = header.base_offset, header.base_timestamp
    append_time = header.max_timestamp if header.is_log_append_time else None
    last_delta, previous = header.last_offset_delta, -1
    one_byte, limit = ONE_BYTE, len(data)
    records: list[LogRecord] = []
    append = records.append
    pos = 0
    for _ in range(header.record_count):
        length = one_byte[data[pos]]
        pos += 1
        if length is None:
            length, pos = read_varint(data, pos - 1)
        end = pos + length
        if length < 0 or end > limit:
            raise InvalidRecordError(f"a record of {length} bytes where {limit - pos} are left")
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
        append(_new_tuple(LogRecord, (base_offset + delta, timestamp, key, value, headers)))
    if pos != limit:
        raise InvalidRecordError(f"{limit - pos} bytes follow the last record of the batch")
    return records


def wrap_int64(value: int) -> int:
    """Overflow as Java's long does, which is how Kafka adds and subtracts timestamps."""
    return (value - _INT64_MIN & 0xFFFFFFFFFFFFFFFF) + _INT64_MIN


def _decode_headers(
    data: bytes, pos: int, end: int
) -> tuple[tuple[tuple[str, bytes | None], ...], int]:
    count, pos = read_varint(data, pos)
    # A header has two length bytes at least.
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


def encode_batch(
    records: Sequence[LogRecord],
    *,
    base_offset: int | None = None,
    leader_epoch: int = 0,
    codec: Codec = Codec.NONE,
    producer_id: int = NO_PRODUCER_ID,
    producer_epoch: int = NO_PRODUCER_EPOCH,
    base_sequence: int = NO_SEQUENCE,
    transactional: bool = False,
    control: bool = False,
    log_append_time: bool = False,
    delete_horizon_ms: int | None = None,
    last_offset_delta: int | None = None,
    max_timestamp_ms: int | None = None,
) -> bytes:
    """Encode ``records``, ascending in offset but possibly with holes, as one batch.

    ``base_offset`` defaults to the first record's, ``last_offset_delta`` to the last record's
    distance from it, ``max_timestamp_ms`` to the largest timestamp. Without records (a header that
    compaction keeps for its producer state) ``base_offset`` and ``last_offset_delta`` must be
    given. Raises ValueError when the offsets do not fit the batch.
    """
    if base_offset is None:
        if not records:
            raise ValueError("a batch without records needs a base offset")
        base_offset = records[0].offset
    if last_offset_delta is None:
        if not records:
            raise ValueError("a batch without records needs a last offset")
        last_offset_delta = records[-1].offset - base_offset
    if not 0 <= last_offset_delta <= _INT32_MAX:
        raise ValueError(f"a last offset delta of {last_offset_delta}")
    attributes = int(codec)
    if log_append_time:
        attributes |= LOG_APPEND_TIME_BIT
    if transactional:
        attributes |= TRANSACTIONAL_BIT
    if control:
        attributes |= _CONTROL
    base_timestamp = records[0].timestamp_ms if records else NO_TIMESTAMP
    if delete_horizon_ms is not None:
        attributes |= _DELETE_HORIZON
        base_timestamp = delete_horizon_ms
    if max_timestamp_ms is None:
        max_timestamp_ms = max((record.timestamp_ms for record in records), default=NO_TIMESTAMP)
    payload = b""
    if records:
        payload = encode_records(records, base_offset, base_timestamp, last_offset_delta)
        if codec is not Codec.NONE:
            payload = compress(codec, payload)
    after_crc = AFTER_CRC.pack(
        attributes,
        last_offset_delta,
        base_timestamp,
        max_timestamp_ms,
        producer_id,
        producer_epoch,
        base_sequence,
        len(records),
    )  # fmt: skip
    return assemble(base_offset, leader_epoch, after_crc, payload)


def assemble(base_offset: int, leader_epoch: int, after_crc: bytes, payload: Buffer) -> bytes:
    """Join a batch from what the CRC covers; ``after_crc`` is the header from byte 21 on."""
    length = HEADER_SIZE - LOG_OVERHEAD + len(payload)
    crc = crc32c(payload, crc32c(after_crc))
    before = _BEFORE_CRC.pack(base_offset, length, leader_epoch, MAGIC, crc)
    return b"".join((before, after_crc, payload))


def batch_of_payload(
    payload: Buffer,
    count: int,
    *,
    codec: Codec,
    base_timestamp_ms: int,
    max_timestamp_ms: int,
    producer_id: int,
    producer_epoch: int,
    base_sequence: int,
    transactional: bool,
) -> bytes:
    """Put a header before ``count`` records that are encoded, and compressed with ``codec``.

    They stand at offsets 0 to ``count - 1``, as a producer sends them.
    """
    attributes = int(codec) | (TRANSACTIONAL_BIT if transactional else 0)
    times = base_timestamp_ms, max_timestamp_ms
    producer = producer_id, producer_epoch, base_sequence
    after_crc = AFTER_CRC.pack(attributes, count - 1, *times, *producer, count)
    return assemble(0, NO_LEADER_EPOCH, after_crc, payload)


def encode_records(
    records: Sequence[LogRow], base_offset: int, base_timestamp: int, last_offset_delta: int
) -> bytes:
    """The records of a batch, one behind the other; ValueError where the offsets do not ascend."""
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


def with_fewer_records(header: BatchHeader, payload: bytes) -> bytes:
    """A batch of ``header`` less size and CRC; ``payload`` are its records before compression."""
    codec = header.codec
    stored = payload if codec is Codec.NONE else compress(codec, payload)
    return assemble(header.base_offset, header.leader_epoch, AFTER_CRC.pack(*header[5:]), stored)


def recompress(
    header: BatchHeader, records: Buffer, codec: Codec, *, level: int | None = None
) -> bytes:
    """Return a batch of the same header whose ``records``, encoded, are under ``codec``."""
    after_crc = AFTER_CRC.pack(header.attributes & ~0x07 | codec, *header[6:])
    stored = compress(codec, records, level)
    return assemble(header.base_offset, header.leader_epoch, after_crc, stored)


def end_marker(
    *,
    commit: bool,
    producer_id: int,
    producer_epoch: int,
    coordinator_epoch: int,
    timestamp_ms: int,
    log_append_time: bool = False,
) -> bytes:
    """Encode the control batch that ends a transaction (``EndTransactionMarker``)."""
    key = _CONTROL_KEY.pack(0, ControlType.COMMIT if commit else ControlType.ABORT)
    value = _END_MARKER_VALUE.pack(0, coordinator_epoch)
    return encode_batch(
        (LogRecord(0, timestamp_ms, key, value),),
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        transactional=True,
        control=True,
        log_append_time=log_append_time,
    )


def parse_control(record: LogRecord) -> ControlRecord:
    """Read a record of a control batch; versions above ours are read as ours, as Kafka does.

    Raises InvalidRecordError for a key or a marker value that is too short or of negative version.
    """
    key = record.key
    if key is None or len(key) < _CONTROL_KEY.size:
        raise InvalidRecordError("a control record's key is too short")
    version, number = _CONTROL_KEY.unpack_from(key)
    if version < 0:
        raise InvalidRecordError(f"a control record's key has version {version}")
    kind = _CONTROL_TYPES.get(number, ControlType.UNKNOWN)
    if kind not in {ControlType.ABORT, ControlType.COMMIT}:
        return ControlRecord(kind, -1)
    value = record.value
    if value is None or len(value) < _END_MARKER_VALUE.size:
        raise InvalidRecordError("an end marker's value is too short")
    version, coordinator_epoch = _END_MARKER_VALUE.unpack_from(value)
    if version < 0:
        raise InvalidRecordError(f"an end marker has version {version}")
    return ControlRecord(kind, coordinator_epoch)
