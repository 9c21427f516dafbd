"""Offset look-ups by timestamp, in steps.

A log may have thousands of segments, and a batch may have a million records. Therefore a look-up is
a generator that yields, so that other tasks can run, and returns the result. The log may roll, be
truncated or compacted meanwhile. So the generator takes one segment at a time from the log, keeps
the segment's file open during the search, and searches the successor of a replaced segment.

Source: ``LogSegment.findOffsetByTimestamp``, ``UnifiedLog.fetchOffsetByTimestamp``.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from typing import NamedTuple

from fencepost.logcore.batch import BatchHeader, record_window
from fencepost.logcore.log import Log
from fencepost.logcore.record_check import record_times
from fencepost.logcore.segment import NO_TIMESTAMP, Segment


class TimestampOffset(NamedTuple):
    """The result of a search by timestamp."""

    offset: int
    timestamp_ms: int
    leader_epoch: int


Search = Generator[None, None, TimestampOffset | None]


def first_not_before(log: Log, timestamp_ms: int, start_offset: int) -> Search:
    """Find the first record at or after ``start_offset`` that is not older than the target."""
    for segment in _iter_segments(log):
        match = yield from first_in(
            segment, timestamp_ms, start_offset, log.config.max_record_bytes
        )
        if match is not None and log.holds((segment,)):
            return match
        yield
    return None


def latest(log: Log, start_offset: int) -> Search:
    """Find the first of the records with the largest timestamp.

    After a move of the log start or a compaction, a batch's header may have a larger timestamp than
    its remaining records. Then the segment is walked; Kafka returns no offset.
    """
    bounds: list[tuple[int, Segment]] = []
    for segment in _iter_segments(log):
        bound = yield from _bound(segment, start_offset)
        bounds.append((bound, segment))
        yield
    result: TimestampOffset | None = None
    for bound, segment in sorted(bounds, key=lambda candidate: -candidate[0]):
        if bound < (0 if result is None else result.timestamp_ms):
            break
        candidate = None
        if log.holds((segment,)):
            most_bytes = log.config.max_record_bytes
            candidate = yield from first_in(segment, bound, start_offset, most_bytes)
            if candidate is None:
                candidate = yield from _latest_in(segment, start_offset, most_bytes)
        if not log.holds((segment,)):
            return (yield from latest(log, start_offset))
        if candidate is not None and (result is None or _rank(candidate) > _rank(result)):
            result = candidate
        yield
    return result


def _rank(timestamp_offset: TimestampOffset) -> tuple[int, int]:
    return timestamp_offset.timestamp_ms, -timestamp_offset.offset


def _iter_segments(log: Log) -> Iterator[Segment]:
    """Yield the segments of ``log``, oldest first, each as it is at that moment.

    If a segment was replaced before the next one is requested, its replacement is yielded.
    """
    offset = 0
    while not log.is_empty and offset < log.log_end_offset:
        segment = log.from_offset(offset)[0]
        yield segment
        if log.holds((segment,)):
            offset = log.end_of(segment)


def first_in(
    segment: Segment, timestamp_ms: int, start_offset: int, max_record_bytes: int | None = None
) -> Search:
    """Find the first record in one segment that is not older than ``timestamp_ms``.

    Raises InvalidRecordError if a batch on the way has a record of more than ``max_record_bytes``.
    """
    if segment.max_timestamp < timestamp_ms:
        return None
    _, offset = segment.time_index.lookup(timestamp_ms)
    position = segment.locate(max(offset, start_offset))
    if position is None:
        return None
    with segment.file.pinned():
        for _, header, batch in segment.batches(position):
            if header.max_timestamp < timestamp_ms or header.last_offset < start_offset:
                yield
                continue
            for chunk in _times(header, batch, start_offset, max_record_bytes):
                for offset, time_ms in chunk:
                    if time_ms >= timestamp_ms:
                        return TimestampOffset(offset, time_ms, header.leader_epoch)
                yield
    return None


def _times(
    header: BatchHeader, batch: memoryview, start_offset: int, max_record_bytes: int | None
) -> Iterator[Iterable[tuple[int, int]]]:
    """Yield offset and time of each record of a batch at or after ``start_offset``, in chunks."""
    base = header.base_offset
    window = record_window(batch, 0, header, max_record_bytes=max_record_bytes)
    for chunk in record_times(header, window):
        yield ((base + delta, time) for delta, time in chunk if base + delta >= start_offset)


def _latest_in(segment: Segment, start_offset: int, max_record_bytes: int | None) -> Search:
    """Find the first record with the largest timestamp in a segment, from the log start on."""
    result: TimestampOffset | None = None
    with segment.file.pinned():
        for _, header, batch in segment.batches():
            yield
            most = NO_TIMESTAMP if result is None else result.timestamp_ms
            if header.max_timestamp <= most or header.last_offset < start_offset:
                continue
            for chunk in _times(header, batch, start_offset, max_record_bytes):
                for offset, time_ms in chunk:
                    if time_ms > most:
                        most = time_ms
                        result = TimestampOffset(offset, most, header.leader_epoch)
                yield
    return result


def _bound(segment: Segment, start_offset: int) -> Generator[None, None, int]:
    """Return the largest timestamp in the headers of a segment's batches from the log start on."""
    if segment.base_offset >= start_offset:
        return segment.max_timestamp
    position = segment.locate(start_offset)
    bound = NO_TIMESTAMP
    if position is not None:
        with segment.file.pinned():
            for _, header, _ in segment.batches(position, with_payload=False):
                bound = max(bound, header.max_timestamp)
                yield
    return bound
