"""A small codec of record batches v2, so that tests share no code with the broker under test.

Layout: ``clients/…/record/DefaultRecordBatch`` of Apache Kafka. It does not support compression.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from crc32c import crc32c

HEADER = struct.Struct(">qiibIhiqqqhii")
TRANSACTIONAL, CONTROL = 0x10, 0x20
CODEC_MASK = 0x07
NOW_MS = time.time_ns() // 1_000_000
"""The create time of all batches of a test run. It is the present, because brokers delete records
and expire producers that are too old."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One decoded batch; ``values`` are the records' values, empty for a compressed batch."""

    base_offset: int
    last_offset: int
    leader_epoch: int
    attributes: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    values: tuple[bytes | None, ...]
    keys: tuple[bytes | None, ...]
    headers: tuple[tuple[tuple[bytes, bytes | None], ...], ...]
    """Names and values of each record's headers."""
    max_timestamp_ms: int
    size: int

    @property
    def is_control(self) -> bool:
        return bool(self.attributes & CONTROL)

    @property
    def is_transactional(self) -> bool:
        return bool(self.attributes & TRANSACTIONAL)


def _varint(value: int) -> bytes:
    raw = (value << 1) ^ (value >> 63)
    out = bytearray()
    while raw > 0x7F:
        out.append(raw & 0x7F | 0x80)
        raw >>= 7
    out.append(raw)
    return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    raw = shift = 0
    while True:
        byte = data[at]
        at += 1
        raw |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return (raw >> 1) ^ -(raw & 1), at


def _blob(value: bytes | None) -> bytes:
    return _varint(-1) if value is None else _varint(len(value)) + value


def batch(
    values: Sequence[bytes | None],
    *,
    producer_id: int = -1,
    producer_epoch: int = -1,
    sequence: int = -1,
    transactional: bool = False,
    attributes: int = 0,
    timestamp_ms: int = NOW_MS,
    key: bytes | None = None,
) -> bytes:
    """Encode one batch of ``values``; every record has ``key``, by default none."""
    records = b""
    for delta, value in enumerate(values):
        body = b"\0" + _varint(0) + _varint(delta) + _blob(key) + _blob(value) + _varint(0)
        records += _varint(len(body)) + body
    return seal(
        records,
        count=len(values),
        attributes=attributes | (TRANSACTIONAL if transactional else 0),
        timestamp_ms=timestamp_ms,
        producer=(producer_id, producer_epoch, sequence),
    )


def seal(
    records: bytes,
    *,
    count: int,
    attributes: int = 0,
    timestamp_ms: int = NOW_MS,
    producer: tuple[int, int, int] = (-1, -1, -1),
    magic: int = 2,
) -> bytes:
    """Prepend a header with the right CRC to encoded records."""
    checked = struct.pack(
        ">hiqqqhii", attributes, count - 1, timestamp_ms, timestamp_ms, *producer, count
    )
    checked += records
    head = struct.pack(">qiibI", 0, 9 + len(checked), -1, magic, crc32c(checked))
    return head + checked


_Headers = tuple[tuple[bytes, bytes | None], ...]


def _records(data: bytes, count: int) -> Iterator[tuple[bytes | None, bytes | None, _Headers]]:
    at = 0

    def blob() -> bytes | None:
        nonlocal at
        size, at = _read_varint(data, at)
        value = None if size < 0 else data[at : at + size]
        at += max(size, 0)
        return value

    for _ in range(count):
        _, at = _read_varint(data, at)
        at += 1
        _, at = _read_varint(data, at)
        _, at = _read_varint(data, at)
        key, value = blob(), blob()
        count_of_headers, at = _read_varint(data, at)
        headers = tuple([(blob() or b"", blob()) for _ in range(count_of_headers)])
        yield key, value, headers


def batches(data: bytes) -> list[Batch]:
    """Decode whole batches and check each CRC; ignore a torn last batch, as clients do."""
    decoded, at = [], 0
    while at + HEADER.size <= len(data):
        head = HEADER.unpack_from(data, at)
        base, size, leader_epoch, magic, crc, attributes, last_delta = head[:7]
        end = at + 12 + size
        if end > len(data):
            break
        assert magic == 2
        assert crc == crc32c(data[at + 21 : end]), f"CRC of the batch at offset {base}"
        records: list[tuple[bytes | None, bytes | None, _Headers]] = []
        if not attributes & CODEC_MASK:
            records = list(_records(data[at + HEADER.size : end], head[12]))
        decoded.append(
            Batch(
                base_offset=base,
                last_offset=base + last_delta,
                leader_epoch=leader_epoch,
                attributes=attributes,
                producer_id=head[9],
                producer_epoch=head[10],
                base_sequence=head[11],
                values=tuple(value for _, value, _ in records),
                keys=tuple(key for key, _, _ in records),
                headers=tuple(headers for _, _, headers in records),
                max_timestamp_ms=head[8],
                size=12 + size,
            )
        )
        at = end
    return decoded
