"""The accepted batches that take a broker the most time."""

from __future__ import annotations

import functools
import time
from typing import Final

import cramjam

from fencepost.logcore.batch import batch_of_payload
from fencepost.logcore.compression import Codec, compress
from fencepost.logcore.varint import encode

MOST_RECORDS: Final = 1_250_000
"""Number of empty records, about as many as a megabyte of zstd holds; the limit is 2,000,000."""

MOST_BYTES: Final = 100_000_000
"""Bytes in records of a megabyte each; the limit is 128 MiB decompressed."""

FIRST_MS: Final = int(time.time() * 1000) - 1_000_000
"""The timestamp of all records except the last one."""

MAX_MESSAGE_BYTES: Final = 16_000_000
"""A value of ``max.message.bytes`` that allows all of these batches."""


@functools.cache
def empty_records(count: int, later_ms: int = 0) -> bytes:
    """Return ``count`` records without key and value; the last one is ``later_ms`` later."""
    records = []
    for delta in range(count):
        time_ms = later_ms if delta == count - 1 else 0
        body = b"\0" + encode(time_ms) + encode(delta) + b"\1\1\0"
        records.append(encode(len(body)) + body)
    return b"".join(records)


@functools.cache
def keyed_records(count: int) -> bytes:
    """Return ``count`` records of one key with empty values: compaction keeps the last one."""
    records = []
    for delta in range(count):
        body = b"\0\0" + encode(delta) + encode(1) + b"k" + b"\0\0"
        records.append(encode(len(body)) + body)
    return b"".join(records)


@functools.cache
def large_records(size: int, each: int = 1_000_000) -> bytes:
    """Return records of ``each`` bytes of one letter, ``size`` bytes in total."""
    records = []
    for delta in range(size // each):
        body = b"\0\0" + encode(delta) + encode(1) + b"k" + encode(each) + b"a" * each + b"\0"
        records.append(encode(len(body)) + body)
    return b"".join(records)


def batch_of(
    records: bytes, count: int, codec: Codec, later_ms: int = 0, stored: bytes | None = None
) -> bytes:
    """Return a batch of encoded records as from a producer; ``stored`` is their compressed form."""
    return batch_of_payload(
        compress(codec, records) if stored is None else stored,
        count,
        codec=codec,
        base_timestamp_ms=FIRST_MS,
        max_timestamp_ms=FIRST_MS + later_ms,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        transactional=False,
    )


@functools.cache
def most_records(codec: Codec, count: int = MOST_RECORDS) -> bytes:
    """Return a batch of the most records; only the last one has the largest timestamp."""
    return batch_of(empty_records(count, later_ms=1), count, codec, later_ms=1)


@functools.cache
def most_bytes(codec: Codec, size: int = MOST_BYTES) -> bytes:
    """Return a batch with the largest decompressed size."""
    return batch_of(large_records(size), size // 1_000_000, codec)


@functools.cache
def one_snappy_block(size: int = 20_000_000) -> bytes:
    """Return a batch below the default ``max.message.bytes`` that one codec call decompresses."""
    records = large_records(size)
    stored = bytes(cramjam.snappy.compress_raw(records))
    return batch_of(records, size // 1_000_000, Codec.SNAPPY, stored=stored)
