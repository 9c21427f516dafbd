"""Full checks of batches, and the search for the next good batch after a bad one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain
from typing import Final

from fencepost.logcore.batch import (
    HEADER_SIZE,
    LOG_OVERHEAD,
    MAGIC,
    BatchHeader,
    parse_header,
    verify_crc,
)
from fencepost.logcore.errors import CorruptRecordError, LogError
from fencepost.logcore.index import MAX_RELATIVE_OFFSET
from fencepost.logcore.legacy import (
    MAGIC_POS,
    as_batch_header,
    magic_at,
    parse_message,
    verify_message_crc,
)
from fencepost.logcore.segment import SCAN_BYTES, Segment

_HIGH_BYTES: Final = 4
"""The number of leading bytes of a base offset that hardly change within a segment."""


def verified(
    segment: Segment, chunk: memoryview, start: int, position: int
) -> tuple[memoryview, int, BatchHeader]:
    """Return a chunk of the file, its position, and the header of the whole batch at ``position``.

    ``chunk`` and ``start`` are the previous batch's, or empty. Raises CorruptRecordError when the
    file ends before the batch does, or its CRC is wrong.
    """
    # A message of an older format may be shorter than a batch header.
    count = min(HEADER_SIZE, segment.size - position)
    chunk, start = _cover(segment, chunk, start, position, count)
    if magic_at(chunk, position - start) < MAGIC:
        message = parse_message(chunk, position - start)
        chunk, start = _cover(segment, chunk, start, position, message.size)
        verify_message_crc(chunk, position - start, message)
        return chunk, start, as_batch_header(message)
    header = parse_header(chunk, position - start)
    chunk, start = _cover(segment, chunk, start, position, header.size)
    verify_crc(chunk, position - start, header)
    return chunk, start, header


def _cover(
    segment: Segment, chunk: memoryview, start: int, position: int, count: int
) -> tuple[memoryview, int]:
    """Return a chunk of the file with ``count`` bytes at ``position``, and the chunk's position.

    Raises CorruptRecordError if the file ends before these bytes do.
    """
    if position + count > segment.size:
        raise CorruptRecordError(f"the file ends inside the batch at position {position}")
    if position - start + count <= len(chunk):
        return chunk, start
    end = min(position + max(count, SCAN_BYTES), segment.size)
    return memoryview(segment.file.read(position, end)), position


def is_intact(segment: Segment, position: int) -> bool:
    """Return whether a whole batch with a valid CRC is at ``position``."""
    try:
        verified(segment, memoryview(b""), position, position)
    except LogError:
        return False
    return True


def end_by_length(segment: Segment, position: int) -> int:
    """Return the end of a batch according to its length field, which may be damaged."""
    raw = segment.file.read(position, min(position + LOG_OVERHEAD, segment.size))
    return position + LOG_OVERHEAD + int.from_bytes(raw[8:LOG_OVERHEAD], "big")


def next_intact(
    segment: Segment, position: int, low: int, high: int, flushed: int
) -> tuple[int, int] | None:
    """Return position and base offset of the first intact batch after the bad one at ``position``.

    The bad batch's length is tried first, then every later position, because the length itself may
    be damaged. The base offset of the result is above ``low`` and at most ``high``. If the batch
    was found by the search, its base offset is at most ``flushed``: bytes inside a record that look
    like a batch rarely satisfy that. If the batch was found by the length, a gap may precede it,
    and its base offset may be above ``flushed``.
    """
    by_length = ((end_by_length(segment, position), high),)
    searched = ((at, min(high, flushed)) for at in _candidates(segment, position + 1, low))
    for candidate, highest in chain(by_length, searched):
        raw = segment.file.read(candidate, candidate + 8) if candidate < segment.size else b""
        base_offset = int.from_bytes(raw, "big", signed=True)
        if low < base_offset <= highest and is_intact(segment, candidate):
            return candidate, base_offset
    return None


def _candidates(segment: Segment, position: int, low: int) -> Iterator[int]:
    """Yield possible positions of v2 batches whose base offset is in the segment of ``low``."""
    highs = {offset.to_bytes(8, "big")[:_HIGH_BYTES] for offset in (low, low + MAX_RELATIVE_OFFSET)}
    between = MAGIC_POS - _HIGH_BYTES
    pattern = re.compile(
        b"(?=(?:%b).{%d}\\x02)" % (b"|".join(map(re.escape, sorted(highs))), between), re.DOTALL
    )
    while position + HEADER_SIZE <= segment.size:
        chunk = segment.file.read(position, min(position + SCAN_BYTES, segment.size))
        for match in pattern.finditer(chunk):
            yield position + match.start()
        # A match across two chunks is found in the second.
        position += len(chunk) - MAGIC_POS
