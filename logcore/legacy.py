"""Message formats v0 and v1, which Kafka wrote before 0.11 and still serves from old disks.

A message set is a sequence of *messages*, each with its own header and CRC-32. A compressed message
is a *wrapper*: its value is another message set, and it has the last inner message's offset. Inner
offsets are absolute in v0 and relative to the wrapper's first message in v1. Brokers no longer
write these formats.

Source: Kafka's ``AbstractLegacyRecordBatch``, ``LegacyRecord``, ``Lz4BlockOutputStream``; KIP-31,
KIP-32, KIP-57.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Final, NamedTuple

from fencepost.logcore.batch import (
    DEFAULT_MAX_OUTPUT_BYTES,
    LOG_OVERHEAD,
    MAGIC,
    NO_LEADER_EPOCH,
    NO_PRODUCER_EPOCH,
    NO_PRODUCER_ID,
    NO_SEQUENCE,
    NO_TIMESTAMP,
    BatchHeader,
    Buffer,
    LogRecord,
    encode_batch,
    parse_header,
)
from fencepost.logcore.compression import Codec, codec_for_id, decompress, xxh32_short
from fencepost.logcore.errors import CorruptRecordError, InvalidRecordError

MAGIC_POS: Final = 16
"""Position of the magic byte in every format, v2 included."""

RUN_BYTES: Final = 64 * 1024
"""The maximum size of the uncompressed messages that the conversion joins into one batch, in one
step. It is large enough to amortise the batch header's 61 bytes, and small enough for a small fetch
and for one turn of the event loop (14 ms for empty messages)."""

_INT32_MAX: Final = 0x7FFFFFFF
_LOG_APPEND_TIME: Final = 0x08
_CODEC_MASK: Final = 0x07
_HEADER_V0: Final = struct.Struct(">qiIbb")
_HEADER_V1: Final = struct.Struct(">qiIbbq")
_CRC_START: Final = 16
_OVERHEAD_V0: Final = LOG_OVERHEAD + 14
_OVERHEAD_V1: Final = LOG_OVERHEAD + 22
_INT32: Final = struct.Struct(">i")

MIN_MESSAGE_SIZE: Final = _OVERHEAD_V0
"""The size of the smallest message: v0 without key and value."""

_LZ4_DESCRIPTOR: Final = 4
"""Position of the frame descriptor, after the frame's magic."""


class MessageHeader(NamedTuple):
    """The fixed fields of one outer message. ``size`` is the whole message, log overhead included.

    ``timestamp_ms`` is −1 in v0. In a v1 wrapper it is the largest inner timestamp, or the time at
    which the broker appended it.
    """

    offset: int
    size: int
    crc: int
    magic: int
    attributes: int
    timestamp_ms: int

    @property
    def codec(self) -> Codec:
        """The message's codec; InvalidRecordError for a codec that the format does not allow."""
        codec = codec_for_id(self.attributes & _CODEC_MASK)
        if codec is Codec.ZSTD:
            raise InvalidRecordError(f"zstd in a message of format {self.magic}")
        return codec

    @property
    def is_log_append_time(self) -> bool:
        """Whether the timestamp is the broker's and applies to every inner message."""
        return self.magic > 0 and bool(self.attributes & _LOG_APPEND_TIME)

    @property
    def last_offset(self) -> int:
        """The offset of the message, or of its last inner message."""
        return self.offset

    @property
    def next_offset(self) -> int:
        """The offset after the message."""
        return self.offset + 1


def magic_at(buf: Buffer, pos: int) -> int:
    """Return the magic of the message or batch at ``pos``; CorruptRecordError if it is missing."""
    if pos + MAGIC_POS >= len(buf):
        raise CorruptRecordError(f"a message header is cut short at position {pos}")
    return buf[pos + MAGIC_POS]


def parse_message(buf: Buffer, pos: int = 0) -> MessageHeader:
    """Parse the header of the v0 or v1 message at ``pos``; its body need not be in ``buf``.

    Raises CorruptRecordError for a header cut short, another magic or an impossible length.
    """
    magic = magic_at(buf, pos)
    if magic > 1:
        raise CorruptRecordError(f"magic {magic} where a message of format 0 or 1 is expected")
    timestamp = NO_TIMESTAMP
    try:
        if magic:
            offset, length, crc, _, attributes, timestamp = _HEADER_V1.unpack_from(buf, pos)
        else:
            offset, length, crc, _, attributes = _HEADER_V0.unpack_from(buf, pos)
    except struct.error:
        raise CorruptRecordError(f"a message header is cut short at position {pos}") from None
    size = length + LOG_OVERHEAD
    if size < (_OVERHEAD_V1 if magic else _OVERHEAD_V0):
        raise CorruptRecordError(f"a message of {size} bytes is smaller than its header")
    return MessageHeader(offset, size, crc, magic, attributes, timestamp)


def as_batch_header(message: MessageHeader) -> BatchHeader:
    """Return a batch header for a message, for a walk over headers, without decoding the message.

    Size, magic and CRC are the message's. The first offset of a wrapper cannot be known without
    decoding the wrapper, so both base and last offset are the offset of its last message.
    """
    return BatchHeader(
        base_offset=message.offset,
        size=message.size,
        leader_epoch=NO_LEADER_EPOCH,
        magic=message.magic,
        crc=message.crc,
        attributes=message.attributes & (_CODEC_MASK | _LOG_APPEND_TIME),
        last_offset_delta=0,
        base_timestamp=message.timestamp_ms,
        max_timestamp=message.timestamp_ms,
        producer_id=NO_PRODUCER_ID,
        producer_epoch=NO_PRODUCER_EPOCH,
        base_sequence=NO_SEQUENCE,
        record_count=1,
    )


def leading_messages(buf: Buffer) -> int:
    """Return how many bytes at the start of ``buf`` are whole messages of format v0 and v1."""
    pos, end = 0, len(buf)
    while pos + MAGIC_POS < end and buf[pos + MAGIC_POS] < MAGIC:
        size = _INT32.unpack_from(buf, pos + LOG_OVERHEAD - _INT32.size)[0] + LOG_OVERHEAD
        if not MIN_MESSAGE_SIZE <= size <= end - pos:
            break
        pos += size
    return pos


def iter_messages(buf: Buffer) -> Iterator[tuple[int, MessageHeader]]:
    """Yield position and header of each outer message; CorruptRecordError for a torn one."""
    pos, end = 0, len(buf)
    while pos < end:
        header = parse_message(buf, pos)
        _check_whole(buf, pos, header)
        yield pos, header
        pos += header.size


def verify_message_crc(buf: Buffer, pos: int, header: MessageHeader) -> None:
    """Raise CorruptRecordError unless the message is whole and its CRC-32 is right.

    A wrapper's CRC covers its inner messages.
    """
    _check_whole(buf, pos, header)
    if zlib.crc32(memoryview(buf)[pos + _CRC_START : pos + header.size]) != header.crc:
        raise CorruptRecordError(f"the CRC of the message at offset {header.offset} is wrong")


def decode_message(
    buf: Buffer,
    pos: int = 0,
    header: MessageHeader | None = None,
    *,
    max_output_bytes: int = DEFAULT_MAX_OUTPUT_BYTES,
) -> list[LogRecord]:
    """Decode the message at ``pos``: one record, or the inner records in the order of offsets.

    The caller must check the CRC. Raises CorruptRecordError and InvalidRecordError as
    :func:`fencepost.logcore.batch.decode_records` does.
    """
    if header is None:
        header = parse_message(buf, pos)
    _check_whole(buf, pos, header)
    key, value = _key_and_value(buf, pos, header)
    if header.codec is Codec.NONE:
        return [LogRecord(header.offset, header.timestamp_ms, key, value)]
    if value is None:
        raise InvalidRecordError("a compressed message without a value")
    if header.codec is Codec.LZ4 and header.magic == 0:
        value = _with_correct_checksum(value)
    return _inner_records(header, decompress(header.codec, value, max_output_bytes))


def _check_whole(buf: Buffer, pos: int, header: MessageHeader) -> None:
    if header.size > len(buf) - pos:
        raise CorruptRecordError(
            f"a message of {header.size} bytes where {len(buf) - pos} are left"
        )


def _inner_records(wrapper: MessageHeader, data: bytes) -> list[LogRecord]:
    records: list[LogRecord] = []
    previous = -1
    for pos, header in iter_messages(data):
        if header.magic != wrapper.magic:
            raise InvalidRecordError(f"format {header.magic} inside format {wrapper.magic}")
        if header.codec is not Codec.NONE:
            raise InvalidRecordError("a compressed message inside a compressed message")
        if header.offset <= previous:
            raise InvalidRecordError(f"inner offset {header.offset} follows {previous}")
        previous = header.offset
        key, value = _key_and_value(data, pos, header)
        timestamp = wrapper if wrapper.is_log_append_time else header
        records.append(LogRecord(header.offset, timestamp.timestamp_ms, key, value))
    if not records:
        raise InvalidRecordError("a compressed message with nothing inside")
    if wrapper.magic == 0:
        return records
    base = wrapper.offset - records[-1].offset
    if base < 0:
        raise InvalidRecordError(f"inner offsets reach below 0 in the wrapper at {wrapper.offset}")
    return [record._replace(offset=base + record.offset) for record in records]


def _key_and_value(
    buf: Buffer, pos: int, header: MessageHeader
) -> tuple[bytes | None, bytes | None]:
    end = pos + header.size
    at = pos + (_HEADER_V1.size if header.magic else _HEADER_V0.size)
    key, at = _read_bytes(buf, at, end)
    value, at = _read_bytes(buf, at, end)
    if at != end:
        raise InvalidRecordError(f"{end - at} bytes follow a message's value")
    return key, value


def _read_bytes(buf: Buffer, pos: int, end: int) -> tuple[bytes | None, int]:
    if end - pos < _INT32.size:
        raise InvalidRecordError("a message ends inside a length")
    length = _INT32.unpack_from(buf, pos)[0]
    pos += _INT32.size
    if length == -1:
        return None, pos
    if not 0 <= length <= end - pos:
        raise InvalidRecordError(f"a field of {length} bytes where {end - pos} are left")
    return bytes(buf[pos : pos + length]), pos + length


def to_v2(buf: Buffer, *, max_output_bytes: int = DEFAULT_MAX_OUTPUT_BYTES) -> bytes:
    """Convert the messages of ``buf`` to v2 batches without a leader epoch, for current readers.

    A wrapper becomes one batch of its codec; neighbouring uncompressed messages become batches of
    up to RUN_BYTES. Offsets and timestamps stay. v2 batches among the messages, as in an upgraded
    log, are copied. Raises CorruptRecordError and InvalidRecordError; CRCs are checked.
    """
    out: list[bytes] = []
    run = _Run()
    pos, end = 0, len(buf)
    while pos < end:
        if magic_at(buf, pos) == MAGIC:
            size = parse_header(buf, pos).size
            if size > end - pos:
                raise CorruptRecordError(f"a batch of {size} bytes where {end - pos} are left")
            out += run.finish(), bytes(buf[pos : pos + size])
            pos += size
            continue
        header = parse_message(buf, pos)
        verify_message_crc(buf, pos, header)
        records = decode_message(buf, pos, header, max_output_bytes=max_output_bytes)
        if header.codec is not Codec.NONE:
            out += run.finish(), _wrapper_to_v2(header, records)
        else:
            if not run.fits(header):
                out.append(run.finish())
            run.add(header, records[0])
        pos += header.size
    out.append(run.finish())
    return b"".join(out)


def _wrapper_to_v2(header: MessageHeader, records: list[LogRecord]) -> bytes:
    base = records[0].offset
    last_offset_delta = max(header.offset, records[-1].offset) - base
    if last_offset_delta > _INT32_MAX:
        raise InvalidRecordError(f"a wrapper spans {last_offset_delta} offsets")
    return encode_batch(
        records,
        leader_epoch=NO_LEADER_EPOCH,
        codec=header.codec,
        log_append_time=header.is_log_append_time,
        last_offset_delta=last_offset_delta,
    )


class _Run:
    """Collects uncompressed messages for one batch."""

    def __init__(self) -> None:
        self._headers: list[MessageHeader] = []
        self._records: list[LogRecord] = []
        self._bytes = 0

    def fits(self, header: MessageHeader) -> bool:
        """Return whether a message fits: a batch has one timestamp type, and ascending offsets."""
        if not self._headers:
            return True
        first, last = self._headers[0], self._headers[-1]
        return (
            self._bytes + header.size <= RUN_BYTES
            and last.offset < header.offset <= first.offset + _INT32_MAX
            and header.is_log_append_time == first.is_log_append_time
            and (not first.is_log_append_time or header.timestamp_ms == first.timestamp_ms)
        )

    def add(self, header: MessageHeader, record: LogRecord) -> None:
        """Add one message."""
        self._headers.append(header)
        self._records.append(record)
        self._bytes += header.size

    def finish(self) -> bytes:
        """Return the batch (empty bytes if it has no messages), and start the next one."""
        if not self._headers:
            return b""
        batch = encode_batch(
            self._records,
            leader_epoch=NO_LEADER_EPOCH,
            log_append_time=self._headers[0].is_log_append_time,
        )
        self._headers, self._records, self._bytes = [], [], 0
        return batch


def _with_correct_checksum(frame: bytes) -> bytes:
    """Repair the header checksum of a v0 LZ4 frame, which readers of that format ignored.

    Kafka before 0.10 hashed the frame's magic along with the descriptor (KIP-57).
    """
    at = _checksum_pos(frame)
    if at >= len(frame):
        raise CorruptRecordError("an lz4 frame is cut short in its header")
    checksum = xxh32_short(frame[_LZ4_DESCRIPTOR:at]) >> 8 & 0xFF
    return b"".join((frame[:at], bytes((checksum,)), frame[at + 1 :]))


def _checksum_pos(frame: bytes) -> int:
    """Return the position of the header checksum: after the flags and the optional fields."""
    flags = frame[_LZ4_DESCRIPTOR] if len(frame) > _LZ4_DESCRIPTOR else 0
    content_size = 8 if flags & 0x08 else 0
    dictionary_id = 4 if flags & 0x01 else 0
    return _LZ4_DESCRIPTOR + 2 + content_size + dictionary_id
