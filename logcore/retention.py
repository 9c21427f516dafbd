"""The segments that retention may delete: by log start, by size, by age.

Segments are deleted oldest first, up to the first one that must stay. A segment with data at or
above the high watermark always stays, as does an empty active segment. At most
:data:`REMOVED_AT_ONCE` segments are returned: the caller removes them and asks again.

Source: ``UnifiedLog.deleteOldSegments``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fencepost.logcore.log import Log
from fencepost.logcore.segment import Segment

REMOVED_AT_ONCE: Final = 64
"""The maximum number of segments that one turn removes, with a few milliseconds of checks and
renaming."""


def beyond_log_start(log: Log, log_start_offset: int, high_watermark: int) -> list[Segment]:
    """Return the segments that lie wholly below the log start offset."""
    active = log.active
    return _leading(
        log, high_watermark, lambda segment, end: segment is not active and end <= log_start_offset
    )


def beyond_size(log: Log, retention_bytes: int, high_watermark: int) -> list[Segment]:
    """Return the segments wholly before the last ``retention_bytes``; −1 for no limit."""
    if retention_bytes < 0:
        return []
    excess = log.size_bytes - retention_bytes

    def exceeds_size(segment: Segment, _end: int) -> bool:
        nonlocal excess
        if excess < segment.size:
            return False
        excess -= segment.size
        return True

    return _leading(log, high_watermark, exceeds_size)


def beyond_age(log: Log, retention_ms: int, high_watermark: int, now_ms: int) -> list[Segment]:
    """Return the segments whose youngest record is older than ``retention_ms``; −1 for no limit."""
    if retention_ms < 0:
        return []
    return _leading(
        log,
        high_watermark,
        lambda segment, _end: now_ms - segment.largest_timestamp_ms > retention_ms,
    )


def _leading(
    log: Log, high_watermark: int, is_deletable: Callable[[Segment, int], bool]
) -> list[Segment]:
    """Return the oldest segments for which ``is_deletable(segment, end offset)`` holds."""
    segments = log.segments
    ends = [segment.base_offset for segment in segments[1:]] + [log.log_end_offset]
    result: list[Segment] = []
    for segment, end in zip(segments[:REMOVED_AT_ONCE], ends, strict=False):
        is_empty_active = segment is segments[-1] and segment.size == 0
        if end > high_watermark or is_empty_active or not is_deletable(segment, end):
            break
        result.append(segment)
    return result
