"""An encoder of the message formats v0 and v1, which a broker reads but no longer writes."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

from fencepost.logcore.batch import LogRecord
from fencepost.logcore.compression import Codec, compress, xxh32_short
from fencepost.logcore.legacy import _INT32, _LOG_APPEND_TIME, _checksum_pos


def encode_message_set(
    records: Sequence[LogRecord],
    magic: int,
    *,
    codec: Codec = Codec.NONE,
    level: int | None = None,
    log_append_time_ms: int | None = None,
) -> bytes:
    """Encode ``records``, ascending in offset, in format ``magic`` (0 or 1).

    With a codec they become one wrapper message, otherwise a message each. Headers are lost, and so
    are timestamps in v0. Raise ValueError for zstd and for another magic.
    """
    if magic not in {0, 1} or codec is Codec.ZSTD:
        raise ValueError(f"format {magic} with {codec.name} can't be written")
    if codec is Codec.NONE:
        return b"".join(
            _encode_message(record, magic, Codec.NONE, log_append_time_ms) for record in records
        )
    base = records[0].offset if magic else 0
    inner = b"".join(
        _encode_message(record._replace(offset=record.offset - base), magic, Codec.NONE, None)
        for record in records
    )
    value = compress(codec, inner, level)
    if codec is Codec.LZ4 and magic == 0:
        value = _with_old_checksum(value)
    newest = max(record.timestamp_ms for record in records)
    wrapper = LogRecord(records[-1].offset, newest, None, value)
    return _encode_message(wrapper, magic, codec, log_append_time_ms)


def _encode_message(
    record: LogRecord, magic: int, codec: Codec, log_append_time_ms: int | None
) -> bytes:
    body = bytearray((magic, codec))
    if magic:
        timestamp = record.timestamp_ms
        if log_append_time_ms is not None:
            body[1] |= _LOG_APPEND_TIME
            timestamp = log_append_time_ms
        body += struct.pack(">q", timestamp)
    for field in (record.key, record.value):
        body += _INT32.pack(-1 if field is None else len(field))
        body += field or b""
    return struct.pack(">qiI", record.offset, len(body) + 4, zlib.crc32(body)) + body


def _with_old_checksum(frame: bytes) -> bytes:
    at = _checksum_pos(frame)
    checksum = xxh32_short(frame[:at]) >> 8 & 0xFF
    return b"".join((frame[:at], bytes((checksum,)), frame[at + 1 :]))
