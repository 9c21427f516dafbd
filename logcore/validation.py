"""Validation of a client's batch before the append.

The header must be valid, because its record count determines the offsets, and every record must be
readable (``record_check.py``), because a consumer gets stuck at a record that does not decode.

Source: ``UnifiedLog.analyzeAndValidateRecords``, ``LogValidator``.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from fencepost.logcore.batch import (
    DEFAULT_MAX_OUTPUT_BYTES,
    HEADER_SIZE,
    MAGIC,
    MIN_RECORD_SIZE,
    BatchHeader,
    Buffer,
    parse_header,
    recompress,
    stamp_log_append_time,
    verify_crc,
)
from fencepost.logcore.compression import Codec, compressed_pieces, inflated_pieces
from fencepost.logcore.config import LOG_APPEND_TIME, MAX_INT64, LogConfig
from fencepost.logcore.errors import (
    CorruptRecordError,
    InvalidRecordError,
    InvalidTimestampError,
    NotOneBatchError,
    RecordListTooLargeError,
    RecordTooLargeError,
    UnsupportedCompressionError,
)
from fencepost.logcore.record_check import (
    MAX_RECORD_ERRORS,
    CheckBudget,
    CheckBudgetExceededError,
    check_records,
    open_records,
    times_outside,
)
from fencepost.logcore.steps import Steps, finish

MAX_BATCH_RECORDS: Final = 2_000_000
"""The maximum number of records in a batch, twice librdkafka's maximum. Kafka has no limit; without
one, a request of 1 MB could keep a thread busy for a quarter of a minute."""

_MAGIC_POSITION: Final = 16
_CODEC_MASK: Final = 0x07
_TIMES_REJECTED: Final = "One or more records have been rejected due to invalid timestamp"
"""Apache Kafka's text, which clients show."""
_CODECS: Final = {
    "uncompressed": Codec.NONE,
    "gzip": Codec.GZIP,
    "snappy": Codec.SNAPPY,
    "lz4": Codec.LZ4,
    "zstd": Codec.ZSTD,
}


class ValidatedBatch(NamedTuple):
    """A validated batch of a client: its header, the bytes to write, and the time of the check."""

    header: BatchHeader
    data: Buffer
    now_ms: int


def validate(
    data: Buffer,
    config: LogConfig,
    *,
    now_ms: int,
    min_zstd_ok: bool,
    budget: CheckBudget | None = None,
) -> ValidatedBatch:
    """Check a client's bytes in one step: see :func:`validate_in_steps`."""
    return finish(
        validate_in_steps(data, config, now_ms=now_ms, min_zstd_ok=min_zstd_ok, budget=budget)
    )


def validate_in_steps(
    data: Buffer,
    config: LogConfig,
    *,
    now_ms: int,
    min_zstd_ok: bool,
    budget: CheckBudget | None = None,
) -> Steps[ValidatedBatch]:
    """Check, in steps, that a client's bytes are exactly one valid batch.

    The bytes to write differ from ``data`` only if the topic has log append time or another
    codec. ``min_zstd_ok``: the request's version allows zstd (Produce 7 or later). ``budget`` is a
    limit for the event loop, None on any other thread.

    Raises CorruptRecordError, InvalidRecordError, InvalidTimestampError, RecordTooLargeError,
    RecordListTooLargeError, UnsupportedCompressionError, and with a ``budget``
    CheckBudgetExceededError.
    """
    header = _one_batch(data)
    size = header.size
    if size > config.max_message_bytes:
        raise RecordTooLargeError(
            f"a batch of {size} bytes, max.message.bytes is {config.max_message_bytes}"
        )
    verify_crc(data, 0, header)
    _check_header(header, min_zstd_ok=min_zstd_ok)
    codec = header.codec
    target = _CODECS.get(config.compression_type, codec)
    if target is not codec and budget is not None:
        raise CheckBudgetExceededError
    window = open_records(data, header, budget, config.max_record_bytes)
    keyless = yield from check_records(window, header, budget, want_keys=config.is_compacted)
    yield from _check_times(data, header, config, now_ms)
    if keyless:
        reason = "a compacted topic needs a key"
        raise InvalidRecordError(
            f"records without a key, the first of them record {keyless[0]}: {reason}",
            tuple((index, reason) for index in keyless),
        )
    if target is not codec:
        data = yield from _recompressed(data, header, target, config, window.inflated)
        header = parse_header(data)
    if config.message_timestamp_type == LOG_APPEND_TIME:
        data = bytearray(data)
        stamp_log_append_time(data, 0, now_ms)
        header = parse_header(data)
    if header.size > config.segment_bytes:
        raise RecordListTooLargeError(
            f"a batch of {header.size} bytes, segment.bytes is {config.segment_bytes}"
        )
    return ValidatedBatch(header, data, now_ms)


def _recompressed(
    data: Buffer, header: BatchHeader, target: Codec, config: LogConfig, inflated: int
) -> Steps[bytes]:
    """Return the batch under another codec; it is decompressed again, since no output was kept.

    ``inflated`` is the decompressed size of the records.
    """
    stored = memoryview(data)[HEADER_SIZE:]
    pieces = inflated_pieces(header.codec, stored, DEFAULT_MAX_OUTPUT_BYTES)
    out: list[bytes] = []
    size = HEADER_SIZE
    for piece in compressed_pieces(target, pieces, _level(target, config), inflated):
        out.append(piece)
        size += len(piece)
        if size > config.max_message_bytes:
            raise RecordTooLargeError(
                f"{size} bytes or more as {target.name.lower()},"
                f" max.message.bytes is {config.max_message_bytes}"
            )
        yield
    return recompress(header, b"".join(out), target)


def _one_batch(data: Buffer) -> BatchHeader:
    if len(data) > _MAGIC_POSITION and data[_MAGIC_POSITION] != MAGIC:
        magic = data[_MAGIC_POSITION]
        refusal = NotOneBatchError if magic < MAGIC else CorruptRecordError
        raise refusal(f"a batch of format {magic}, only 2 is accepted")
    if len(data) < HEADER_SIZE:
        raise NotOneBatchError(f"{len(data)} bytes are not a batch")
    header = parse_header(data)
    if header.size > len(data):
        raise NotOneBatchError(f"a batch of {header.size} bytes where {len(data)} are given")
    if header.size < len(data):
        raise NotOneBatchError("more than one batch for a partition")
    if header.base_offset != 0:
        raise InvalidRecordError(f"base offset {header.base_offset} where 0 is expected")
    return header


def _check_header(header: BatchHeader, *, min_zstd_ok: bool) -> None:
    count = header.record_count
    if count <= 0 or count != header.last_offset_delta + 1:
        raise InvalidRecordError(
            f"{count} records with a last offset delta of {header.last_offset_delta}"
        )
    # The count determines the offsets, so a false one would waste them.
    room = DEFAULT_MAX_OUTPUT_BYTES if header.attributes & _CODEC_MASK else header.size
    if count * MIN_RECORD_SIZE > room:
        raise InvalidRecordError(f"{count} records can't stand in {header.size} bytes")
    if count > MAX_BATCH_RECORDS:
        raise InvalidRecordError(f"{count} records in a batch, at most {MAX_BATCH_RECORDS}")
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


def _check_times(data: Buffer, header: BatchHeader, config: LogConfig, now_ms: int) -> Steps[None]:
    """Check the timestamp type and the timestamps.

    Records are read only if the topic has a lower bound, or the header's maximum is too high.
    """
    latest = header.max_timestamp
    append_time = config.message_timestamp_type == LOG_APPEND_TIME
    if header.is_log_append_time and (append_time or latest < 0):
        reason = "a producer may not set the timestamp type LogAppendTime"
        listed = range(min(header.record_count, MAX_RECORD_ERRORS))
        raise InvalidTimestampError(_TIMES_REJECTED, tuple((index, reason) for index in listed))
    if append_time:
        return
    before_max_ms = config.message_timestamp_before_max_ms
    latest_ms = now_ms + config.message_timestamp_after_max_ms
    if latest <= latest_ms and before_max_ms == MAX_INT64:
        return
    earliest_ms = now_ms - before_max_ms
    window = open_records(data, header)
    outside = yield from times_outside(window, header, earliest_ms, latest_ms)
    if outside or latest > latest_ms:
        bounds = f"is not within [{earliest_ms}, {latest_ms}]"
        raise InvalidTimestampError(
            _TIMES_REJECTED,
            tuple((index, f"timestamp {time_ms} {bounds}") for index, time_ms in outside),
        )


def _level(codec: Codec, config: LogConfig) -> int | None:
    if codec is Codec.GZIP:
        return config.compression_gzip_level
    if codec is Codec.LZ4:
        return config.compression_lz4_level
    if codec is Codec.ZSTD:
        return config.compression_zstd_level
    return None
