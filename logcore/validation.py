"""What a client's batch must be before it enters a log.

No record is looked at unless the topic's configuration asks for it: compaction wants keys, a lower
bound on timestamps wants every timestamp, another codec wants the bytes. Everything else is read
off the header, whose CRC vouches for it.

Source: ``UnifiedLog.analyzeAndValidateRecords``, ``LogValidator``.
"""

from __future__ import annotations

from typing import Final

from logcore.batch import (
    DEFAULT_MAX_OUTPUT_BYTES,
    HEADER_SIZE,
    MAGIC,
    MIN_RECORD_SIZE,
    BatchHeader,
    Buffer,
    decode_records,
    parse_header,
    recompress,
    stamp_log_append_time,
    verify_crc,
)
from logcore.compression import Codec
from logcore.config import LOG_APPEND_TIME, MAX_INT64, LogConfig
from logcore.errors import (
    CorruptRecordError,
    InvalidRecordError,
    InvalidTimestampError,
    NotOneBatchError,
    RecordListTooLargeError,
    RecordTooLargeError,
    UnsupportedCompressionError,
)

_MAGIC_POSITION: Final = 16
_CODEC_MASK: Final = 0x07
_CODECS: Final = {
    "uncompressed": Codec.NONE,
    "gzip": Codec.GZIP,
    "snappy": Codec.SNAPPY,
    "lz4": Codec.LZ4,
    "zstd": Codec.ZSTD,
}


def admit(
    data: Buffer, config: LogConfig, *, now_ms: int, min_zstd_ok: bool
) -> tuple[BatchHeader, Buffer]:
    """Check a client's bytes, exactly one batch, and return its header and the bytes to write.

    The bytes differ from ``data`` only where the topic sets the timestamp or another codec.
    ``min_zstd_ok``: the request is recent enough to carry zstd (Produce 7).

    Raises CorruptRecordError, InvalidRecordError, InvalidTimestampError, RecordTooLargeError,
    RecordListTooLargeError, UnsupportedCompressionError.
    """
    if len(data) > _MAGIC_POSITION and data[_MAGIC_POSITION] != MAGIC:
        magic = data[_MAGIC_POSITION]
        refusal = NotOneBatchError if magic < MAGIC else CorruptRecordError
        raise refusal(f"a batch of format {magic}, only 2 is accepted")
    if len(data) < HEADER_SIZE:
        raise NotOneBatchError(f"{len(data)} bytes are no batch")
    header = parse_header(data)
    size = header.size
    if size > len(data):
        raise NotOneBatchError(f"a batch of {size} bytes where {len(data)} are given")
    if size < len(data):
        raise NotOneBatchError("more than one batch for a partition")
    if header.base_offset != 0:
        raise InvalidRecordError(f"base offset {header.base_offset} where 0 is expected")
    if size > config.max_message_bytes:
        raise RecordTooLargeError(
            f"a batch of {size} bytes, max.message.bytes is {config.max_message_bytes}"
        )
    verify_crc(data, 0, header)
    _check_header(header, min_zstd_ok=min_zstd_ok)
    _check_times(data, header, config, now_ms)
    if config.is_compacted or config.message_timestamp_before_max_ms != MAX_INT64:
        _check_records(data, header, config, now_ms)
    if config.compression_type != "producer" or config.message_timestamp_type == LOG_APPEND_TIME:
        header, data = _rewrite(data, header, config, now_ms)
        size = header.size
    if size > config.segment_bytes:
        raise RecordListTooLargeError(
            f"a batch of {size} bytes, segment.bytes is {config.segment_bytes}"
        )
    return header, data


def _check_header(header: BatchHeader, *, min_zstd_ok: bool) -> None:
    count = header.record_count
    if count <= 0 or count != header.last_offset_delta + 1:
        raise InvalidRecordError(
            f"{count} records with a last offset delta of {header.last_offset_delta}"
        )
    # Offsets are given by the count, so a false one would burn them.
    room = DEFAULT_MAX_OUTPUT_BYTES if header.attributes & _CODEC_MASK else header.size
    if count * MIN_RECORD_SIZE > room:
        raise InvalidRecordError(f"{count} records can't stand in {header.size} bytes")
    if header.is_control:
        raise InvalidRecordError("clients may not write control records")
    if header.has_producer:
        if header.base_sequence < 0:
            raise InvalidRecordError(f"base sequence {header.base_sequence} with a producer id")
    elif header.is_transactional:
        raise InvalidRecordError("a transactional batch without producer id")
    codec = header.attributes & _CODEC_MASK
    if codec > Codec.ZSTD:
        raise UnsupportedCompressionError(f"unknown compression codec {codec}")
    if codec == Codec.ZSTD and not min_zstd_ok:
        raise UnsupportedCompressionError("this version of the request can't carry zstd")


def _timestamp_error(data: Buffer, header: BatchHeader, latest_ms: int) -> InvalidTimestampError:
    """Name the records whose time is too far ahead."""
    late = tuple(
        (index, f"timestamp {record.timestamp_ms} is after {latest_ms}")
        for index, record in enumerate(decode_records(data, 0, header))
        if record.timestamp_ms > latest_ms
    )
    return InvalidTimestampError(f"timestamp {header.max_timestamp} is after {latest_ms}", late)


def _check_times(data: Buffer, header: BatchHeader, config: LogConfig, now_ms: int) -> None:
    latest = header.max_timestamp
    append_time = config.message_timestamp_type == LOG_APPEND_TIME
    if header.is_log_append_time and (append_time or latest < 0):
        raise InvalidTimestampError("a producer may not set the timestamp type LogAppendTime")
    if not append_time and latest - now_ms > config.message_timestamp_after_max_ms:
        raise _timestamp_error(data, header, now_ms + config.message_timestamp_after_max_ms)


def _check_records(data: Buffer, header: BatchHeader, config: LogConfig, now_ms: int) -> None:
    earliest = now_ms - config.message_timestamp_before_max_ms
    check_times = config.message_timestamp_type != LOG_APPEND_TIME
    keyless: list[tuple[int, str]] = []
    for index, record in enumerate(decode_records(data, 0, header)):
        if record.offset != index:
            raise InvalidRecordError(f"record {index} has offset delta {record.offset}")
        if record.key is None and config.is_compacted:
            keyless.append((index, "a compacted topic needs a key"))
        if check_times and 0 <= record.timestamp_ms < earliest:
            reason = f"timestamp {record.timestamp_ms} is before {earliest}"
            raise InvalidTimestampError(reason, ((index, reason),))
    if keyless:
        raise InvalidRecordError(
            f"{len(keyless)} records have no key, which a compacted topic needs", tuple(keyless)
        )


def _rewrite(
    data: Buffer, header: BatchHeader, config: LogConfig, now_ms: int
) -> tuple[BatchHeader, Buffer]:
    target = _CODECS.get(config.compression_type, header.codec)
    if target is not header.codec:
        data = recompress(data, 0, header, target, level=_level(target, config))
        if len(data) > config.max_message_bytes:
            raise RecordTooLargeError(
                f"{len(data)} bytes as {target.name.lower()},"
                f" max.message.bytes is {config.max_message_bytes}"
            )
    if config.message_timestamp_type == LOG_APPEND_TIME:
        data = bytearray(data)
        stamp_log_append_time(data, 0, now_ms)
    return parse_header(data), data


def _level(codec: Codec, config: LogConfig) -> int | None:
    if codec is Codec.GZIP:
        return config.compression_gzip_level
    if codec is Codec.LZ4:
        return config.compression_lz4_level
    if codec is Codec.ZSTD:
        return config.compression_zstd_level
    return None
