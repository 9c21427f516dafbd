"""Record batches of message format v2, byte for byte as Kafka writes them.

A *buffer* is ``bytes``, ``bytearray`` or a ``memoryview`` of bytes; ``pos`` is the position of a
batch in it. Sizes are bytes and include the 12 bytes of log overhead; timestamps are milliseconds
since the epoch, −1 for none. Formats v0 and v1 are in ``legacy.py``.

Source: Kafka's ``DefaultRecordBatch``, ``DefaultRecord``, ``MemoryRecordsBuilder``,
``ControlRecordType``, ``EndTransactionMarker``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from functools import partial
from itertools import chain
from typing import Final, NamedTuple

from crc32c import crc32c

from fencepost.logcore.compression import Codec as Codec  # noqa: PLC0414 - part of this module's interface
from fencepost.logcore.compression import codec_for_id, compress, compressed_pieces, inflated_pieces
from fencepost.logcore.errors import CorruptRecordError, InvalidRecordError
from fencepost.logcore.record_codec import LogRecord as LogRecord  # noqa: PLC0414 - the same
from fencepost.logcore.record_codec import LogRow as LogRow  # noqa: PLC0414 - the same
from fencepost.logcore.record_codec import RecordBase, decode_chunk, encode_records
from fencepost.logcore.record_codec import wrap_int64 as wrap_int64  # noqa: PLC0414 - the same
from fencepost.logcore.record_window import RecordWindow

Buffer = bytes | bytearray | memoryview

LOG_OVERHEAD: Final = 12
"""The size of the base offset and the length field. The length does not include these bytes."""

HEADER_SIZE: Final = 61
MAGIC: Final = 2
NO_TIMESTAMP: Final = -1
NO_PRODUCER_ID: Final = -1
NO_PRODUCER_EPOCH: Final = -1
NO_SEQUENCE: Final = -1
NO_LEADER_EPOCH: Final = -1

DEFAULT_MAX_OUTPUT_BYTES: Final = 128 * 1024 * 1024
"""The maximum size of a batch's decompressed records, in bytes: 128 times the default
``max.message.bytes``, a ratio that compressed text does not reach."""

MIN_RECORD_SIZE: Final = 7
"""The size of a record with null key, null value and no headers, its length byte included."""

_INT32_MAX: Final = 0x7FFFFFFF
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
    """Kinds of control records. Readers skip unknown kinds."""

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

    ``size`` is the size of the whole batch. ``base_timestamp`` is the base of the records'
    timestamp deltas; in a batch with ``has_delete_horizon`` it is the delete horizon.
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
        """The offset of the last record that the batch had when it was produced."""
        return self.base_offset + self.last_offset_delta

    @property
    def next_offset(self) -> int:
        """The offset after the batch."""
        return self.base_offset + self.last_offset_delta + 1

    @property
    def codec(self) -> Codec:
        """The codec of the records; InvalidRecordError for an unknown codec."""
        return codec_for_id(self.attributes & 0x07)

    @property
    def is_log_append_time(self) -> bool:
        """Whether every record's timestamp is ``max_timestamp``, set by the broker."""
        return bool(self.attributes & LOG_APPEND_TIME_BIT)

    @property
    def is_transactional(self) -> bool:
        """Whether the batch belongs to a transaction, as data or as the end marker."""
        return bool(self.attributes & TRANSACTIONAL_BIT)

    @property
    def is_control(self) -> bool:
        """Whether the batch holds control records, which consumers skip."""
        return bool(self.attributes & _CONTROL)

    @property
    def has_delete_horizon(self) -> bool:
        """Whether compaction has set a time after which tombstones may be removed."""
        return bool(self.attributes & _DELETE_HORIZON)

    @property
    def delete_horizon_ms(self) -> int | None:
        """The time after which tombstones may be removed, or None."""
        return self.base_timestamp if self.attributes & _DELETE_HORIZON else None

    def with_horizon(self, horizon_ms: int) -> BatchHeader:
        """Return a copy of the header with a delete horizon."""
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


class ControlRecord(NamedTuple):
    """A decoded control record; the epoch is −1 unless the record ends a transaction."""

    type: ControlType
    coordinator_epoch: int


_CONTROL_TYPES: Final = {int(member): member for member in ControlType}
_new_tuple = tuple.__new__


def parse_header(buf: Buffer, pos: int = 0) -> BatchHeader:
    """Parse the header at ``pos``; the records after it need not be in ``buf``.

    Raises CorruptRecordError when fewer than 61 bytes remain, the length is impossible, or the
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
    """Yield position and header of each batch; CorruptRecordError if the last one is incomplete."""
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
    """Set the timestamp of every record of the batch, in place, and update the CRC."""
    size = _INT32.unpack_from(buf, pos + 8)[0] + LOG_OVERHEAD
    attributes = _INT16.unpack_from(buf, pos + 21)[0] | LOG_APPEND_TIME_BIT
    _INT16.pack_into(buf, pos + 21, attributes)
    _INT64.pack_into(buf, pos + 35, timestamp_ms)
    crc = crc32c(memoryview(buf)[pos + _CRC_START : pos + size])
    _UINT32.pack_into(buf, pos + CRC_POS, crc)


def record_window(
    buf: Buffer,
    pos: int,
    header: BatchHeader,
    max_output_bytes: int = DEFAULT_MAX_OUTPUT_BYTES,
    max_record_bytes: int | None = None,
) -> RecordWindow:
    """Return a window over the records of the batch at ``pos``, decompressed on demand.

    ``max_record_bytes`` bounds each record of a compressed batch. Raises CorruptRecordError for
    missing bytes. The window raises the same error for bytes that do not decompress.
    """
    pieces = _record_pieces(buf, pos, header, max_output_bytes)
    return RecordWindow(pieces, max_record_bytes if header.codec is not Codec.NONE else None)


def record_chunks(
    buf: Buffer,
    pos: int = 0,
    header: BatchHeader | None = None,
    *,
    max_output_bytes: int = DEFAULT_MAX_OUTPUT_BYTES,
) -> Iterator[Sequence[LogRecord]]:
    """Decode the records of the batch at ``pos`` in chunks that fit one turn of the event loop.

    Only one chunk is in memory at a time. A chunk is empty if the next record is not decompressed
    to its end yet. The caller must check the CRC.

    Raises CorruptRecordError for missing bytes, and for bytes that do not decompress or decompress
    to more than ``max_output_bytes``; InvalidRecordError for records that contradict their lengths,
    count or offsets. Offsets must ascend and stay within the batch, but may have holes.
    """
    if header is None:
        header = parse_header(buf, pos)
    window = record_window(buf, pos, header, max_output_bytes)
    base = RecordBase(
        header.base_offset,
        header.base_timestamp,
        header.max_timestamp if header.is_log_append_time else None,
        header.last_offset_delta,
    )
    return window.chunks(header.record_count, partial(decode_chunk, base))


def iter_records(
    buf: Buffer,
    pos: int = 0,
    header: BatchHeader | None = None,
    *,
    max_output_bytes: int = DEFAULT_MAX_OUTPUT_BYTES,
) -> Iterator[LogRecord]:
    """Decode the records of the batch at ``pos`` one by one; see :func:`record_chunks`."""
    return chain.from_iterable(record_chunks(buf, pos, header, max_output_bytes=max_output_bytes))


def decode_records(
    buf: Buffer,
    pos: int = 0,
    header: BatchHeader | None = None,
    *,
    max_output_bytes: int = DEFAULT_MAX_OUTPUT_BYTES,
) -> list[LogRecord]:
    """Decode all records of the batch at ``pos`` at once; see :func:`record_chunks`.

    This is for batches that the broker itself has written, and for callers that keep all records
    anyway.
    """
    return list(iter_records(buf, pos, header, max_output_bytes=max_output_bytes))


def record_bytes(
    buf: Buffer,
    pos: int,
    header: BatchHeader,
    max_output_bytes: int = DEFAULT_MAX_OUTPUT_BYTES,
) -> bytes:
    """Return the encoded records of the batch at ``pos``, decompressed.

    Raises CorruptRecordError for bytes that are missing or do not decompress.
    """
    return b"".join(_record_pieces(buf, pos, header, max_output_bytes))


def _record_pieces(
    buf: Buffer, pos: int, header: BatchHeader, max_output_bytes: int
) -> Iterator[bytes]:
    end = pos + header.size
    if end > len(buf):
        raise CorruptRecordError(f"a batch of {header.size} bytes where {len(buf) - pos} are left")
    stored = memoryview(buf)[pos + HEADER_SIZE : end]
    # Compaction leaves headers without records, with any codec bits.
    codec = header.codec if stored else Codec.NONE
    return inflated_pieces(codec, stored, max_output_bytes)


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
    """Encode ``records`` as one batch. Their offsets must ascend, but may have holes.

    ``base_offset`` defaults to the first record's offset, ``last_offset_delta`` to the last
    record's distance from ``base_offset``, ``max_timestamp_ms`` to the largest timestamp. Without
    records, ``base_offset`` and ``last_offset_delta`` must be given; compaction keeps such a header
    for its producer state. Raises ValueError when the offsets do not fit the batch.
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
    """Assemble a batch and its CRC; ``after_crc`` is the header from byte 21 on."""
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
    """Put a header before ``payload``: ``count`` records, encoded and compressed with ``codec``.

    The records' offsets are 0 to ``count - 1``, as in a producer's batch.
    """
    attributes = int(codec) | (TRANSACTIONAL_BIT if transactional else 0)
    times = base_timestamp_ms, max_timestamp_ms
    producer = producer_id, producer_epoch, base_sequence
    after_crc = AFTER_CRC.pack(attributes, count - 1, *times, *producer, count)
    return assemble(0, NO_LEADER_EPOCH, after_crc, payload)


def with_fewer_records(header: BatchHeader, payload: Iterable[Buffer]) -> bytes:
    """Encode a batch with the fields of ``header``, but a new size and CRC.

    ``payload`` is not compressed yet.
    """
    stored = b"".join(compressed_pieces(header.codec, payload))
    return assemble(header.base_offset, header.leader_epoch, AFTER_CRC.pack(*header[5:]), stored)


def recompress(header: BatchHeader, stored: Buffer, codec: Codec) -> bytes:
    """Return the batch of ``header`` with the content ``stored``, compressed with ``codec``."""
    after_crc = AFTER_CRC.pack(header.attributes & ~0x07 | codec, *header[6:])
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
    """Parse a record of a control batch; newer versions are parsed as version 0, as in Kafka.

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


def first_control(buf: Buffer, pos: int, header: BatchHeader) -> ControlRecord | None:
    """Parse the first record of a control batch; None if compaction has emptied the batch."""
    first = next(iter_records(buf, pos, header), None)
    return None if first is None else parse_control(first)
