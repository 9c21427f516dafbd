"""A coordinator's log on a real partition, compacted by the real cleaner up to each of its offsets.

A step of a log is (record, producer, marker). It is a record, which may belong to a producer's
transaction, or the marker that ends a transaction. Compaction keeps the offsets of the steps.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence

from fencepost.logcore.batch import ControlType, decode_records, parse_control
from fencepost.logcore.compaction import unthrottled
from fencepost.logcore.config import LogConfig
from fencepost.logcore.machine import EndMarker, ProducerStamp, Record
from fencepost.logcore.partition import Partition
from tests.support.clock import ManualClock
from tests.support.memory_disk import MemoryDisk

Step = tuple[int, Record | None, ProducerStamp | None, bool | None]
"""Offset; record or None; producer or None; for a marker, True if it commits."""

ROOT = "/data"
NOW_MS = 1_700_000_000_000
RETENTION_MS = 1_000
CONFIG = LogConfig(
    cleanup_policy=frozenset({"compact"}),
    delete_retention_ms=RETENTION_MS,
    file_delete_delay_ms=0,
    segment_index_bytes=4096,
    flush_messages=1 << 60,
)


def cleaned_logs(steps: Sequence[Step], ends: Iterable[int] = ()) -> Iterator[list[Step]]:
    """Yield the log compacted up to each offset (or of ``ends``), with and without tombstones."""
    for end in ends or range(1, len(steps) + 1):
        disk = MemoryDisk()
        disk.make_directory(ROOT)
        partition = Partition.open(
            disk,
            f"{ROOT}/coordinator-0",
            topic="coordinator",
            index=0,
            topic_id=uuid.UUID(int=7),
            config=CONFIG,
            clock=ManualClock(NOW_MS),
            clean=True,
        )
        for number, step in enumerate(steps):
            if number == end:
                partition.flushes.roll(NOW_MS)
            _append(partition, step)
        if end == len(steps):
            partition.flushes.roll(NOW_MS)
        for now_ms in (NOW_MS, NOW_MS + RETENTION_MS):
            if _compact(partition, now_ms):
                yield list(_steps(partition))


def some_ends(length: int, most: int) -> list[int]:
    """Return at most ``most`` offsets to compact up to: evenly spread, with the log's end."""
    return sorted({length - length * number // most for number in range(most)} - {0})


def _append(partition: Partition, step: Step) -> None:
    _, record, producer, commit = step
    if commit is None:
        assert record is not None
        partition.append_records([record], now_ms=NOW_MS, producer=producer)
    else:
        assert producer is not None
        partition.append_marker(EndMarker(producer, commit), NOW_MS)


def _compact(partition: Partition, now_ms: int) -> bool:
    dirty = partition.cleanup.dirty_range(None, now_ms)
    compaction = partition.cleanup.plan_compaction(dirty, now_ms=now_ms)
    if compaction is None:
        return False
    partition.flushes.run(now_ms)
    compaction.map_keys(unthrottled)
    while compaction.clean_next(unthrottled):
        assert partition.cleanup.install_cleaned(compaction)
    return True


def _steps(partition: Partition) -> Iterator[Step]:
    for header, batch in partition.reader.read_all():
        producer = ProducerStamp(header.producer_id, header.producer_epoch)
        for record in decode_records(batch, 0, header):
            if header.is_control:
                commit = parse_control(record).type is ControlType.COMMIT
                yield record.offset, None, producer, commit
            else:
                stamp = producer if header.is_transactional else None
                yield record.offset, Record(record.key or b"", record.value), stamp, None
