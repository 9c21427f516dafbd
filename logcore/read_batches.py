"""The batches of a read: their headers, and parts of the read that hold some of them.

Records stay where they are, in memory or in their file: only headers are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fencepost.logcore.batch import HEADER_SIZE, MAGIC, BatchHeader, parse_header
from fencepost.logcore.file_range import FileRange
from fencepost.logcore.legacy import MAGIC_POS, as_batch_header, magic_at, parse_message

CHUNK_BYTES: Final = 16_384
"""The number of bytes read from a file at once. They contain the headers of up to
a hundred small batches."""


def batch_headers(records: bytes | FileRange) -> Iterator[tuple[int, BatchHeader]]:
    """Yield position and header of each batch of a read.

    Raises OSError as :class:`FileRange`, and CorruptRecordError.
    """
    end, position, base = len(records), 0, 0
    chunk = records if isinstance(records, bytes) else b""
    while position < end:
        if position - base + HEADER_SIZE > len(chunk) and base + len(chunk) < end:
            base, chunk = position, part_bytes(records, position, CHUNK_BYTES)
        header = _header(chunk, position - base)
        yield position, header
        position += header.size


def _header(chunk: bytes, position: int) -> BatchHeader:
    # A message of an older format may be shorter than a batch header.
    if len(chunk) > position + MAGIC_POS and magic_at(chunk, position) < MAGIC:
        return as_batch_header(parse_message(chunk, position))
    return parse_header(chunk, position)


def part_bytes(records: bytes | FileRange, position: int, count: int) -> bytes:
    """Return up to ``count`` bytes of a read. Raises OSError as :class:`FileRange`."""
    if isinstance(records, bytes):
        return records[position : position + count]
    return records.at(position, count)


def part_of(records: bytes | FileRange, begin: int, end: int) -> bytes | FileRange:
    """Return a read from ``begin`` to ``end``, as a :class:`FileRange` if the read is one."""
    if begin == 0 and end == len(records):
        return records
    return records[begin:end] if isinstance(records, bytes) else records.part(begin, end)
