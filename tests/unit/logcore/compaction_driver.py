"""Logs with keyed and transactional records, and compaction rounds, for tests of compaction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from fencepost.logcore.batch import (
    LogRecord,
    decode_records,
    encode_batch,
    iter_headers,
    verify_crc,
)
from fencepost.logcore.compaction import unthrottled
from fencepost.logcore.compression import Codec
from fencepost.logcore.config import LogConfig
from fencepost.logcore.machine import EndMarker, ProducerStamp, Record
from fencepost.logcore.partition import Partition
from fencepost.logcore.reading import Isolation
from tests.support.partitions import append_batch, fetch_bytes
from tests.unit.logcore.partition_driver import T0, config

Pairs = Sequence[tuple[bytes, bytes | None]]

COMPACTED = config(
    cleanup_policy=frozenset({"compact"}),
    segment_bytes=600,
    segment_index_bytes=4096,
    index_interval_bytes=100,
    delete_retention_ms=1_000,
    file_delete_delay_ms=0,
)


def put(
    partition: Partition,
    pairs: Pairs,
    *,
    producer_id: int = -1,
    epoch: int = 0,
    transactional: bool = False,
    codec: Codec = Codec.NONE,
    now_ms: int = T0,
) -> None:
    """Append a client's batch, with the next sequence."""
    sequence = -1
    if producer_id >= 0:
        known = {producer.producer_id: producer for producer in partition.producers.view()}.get(
            producer_id
        )
        sequence = 0
        if known is not None and known.producer_epoch == epoch:
            sequence = known.last_sequence + 1
    data = encode_batch(
        [LogRecord(at, now_ms, key, value) for at, (key, value) in enumerate(pairs)],
        codec=codec,
        producer_id=producer_id,
        producer_epoch=epoch if producer_id >= 0 else -1,
        base_sequence=sequence,
        transactional=transactional,
    )
    append_batch(partition, data, now_ms=now_ms, transaction_verified=True)


def commit_offsets(partition: Partition, producer_id: int, pairs: Pairs, epoch: int = 0) -> None:
    """Append a coordinator's records in a producer's transaction."""
    partition.append_records(
        [Record(key, value) for key, value in pairs],
        now_ms=T0,
        producer=ProducerStamp(producer_id, epoch),
    )


def end(
    partition: Partition, producer_id: int, *, commit: bool, epoch: int = 0, now_ms: int = T0
) -> None:
    partition.append_marker(EndMarker(ProducerStamp(producer_id, epoch), commit, 3), now_ms)


def fill_active(partition: Partition) -> None:
    """Append records until the segment rolls, so that all earlier records can be cleaned."""
    count = len(partition.log.segments)
    while len(partition.log.segments) == count:
        put(partition, [(b"filler", b"f" * 100)])


def compact(
    partition: Partition,
    checkpoint: int | None = None,
    *,
    now_ms: int = T0,
    budget_bytes: int = 1 << 20,
    throttle: Callable[[int], None] = unthrottled,
) -> int | None:
    """Run a round; return the next dirty offset, or None if no round ran or completed."""
    dirty = partition.cleanup.dirty_range(checkpoint, now_ms)
    compaction = partition.cleanup.plan_compaction(dirty, now_ms=now_ms, budget_bytes=budget_bytes)
    if compaction is None:
        return None
    partition.flushes.run(now_ms)
    compaction.map_keys(throttle)
    while compaction.clean_next(throttle):
        if not partition.cleanup.install_cleaned(compaction):
            return None
    return compaction.next_dirty_offset


def committed(partition: Partition) -> dict[int, tuple[bytes | None, bytes | None]]:
    """Return offset → (key, value) of committed records, filtered as a consumer does."""
    seen: dict[int, tuple[bytes | None, bytes | None]] = {}
    offset = partition.log_start_offset
    while True:
        fetched = fetch_bytes(partition, offset, 1 << 20, Isolation.READ_COMMITTED)
        if not fetched.records:
            return seen
        waiting = sorted((first, producer) for producer, first in fetched.aborted or ())
        hidden: set[int] = set()
        for pos, header in iter_headers(fetched.records):
            verify_crc(fetched.records, pos, header)
            while waiting and waiting[0][0] <= header.last_offset:
                hidden.add(waiting.pop(0)[1])
            records = decode_records(fetched.records, pos, header)
            if header.is_control:
                if records and records[0].key == b"\x00\x00\x00\x00":
                    hidden.discard(header.producer_id)
            elif not (header.is_transactional and header.producer_id in hidden):
                seen.update({record.offset: (record.key, record.value) for record in records})
            offset = header.next_offset


def last_values(seen: dict[int, tuple[bytes | None, bytes | None]]) -> dict[bytes, bytes]:
    """Return the last value of each key that has no tombstone after it."""
    table: dict[bytes, bytes] = {}
    for _, (key, value) in sorted(seen.items()):
        if key is not None:
            table.pop(key, None)
            if value is not None:
                table[key] = value
    return table


def essence(partition: Partition) -> tuple[object, ...]:
    """Return the state that neither compaction, nor a kill meanwhile, may change."""
    return (
        partition.log_start_offset,
        partition.log_end_offset,
        partition.last_stable_offset,
        last_values(committed(partition)),
        sorted(
            (
                producer.producer_id,
                producer.producer_epoch,
                producer.last_sequence,
                producer.coordinator_epoch,
                producer.current_txn_first_offset,
            )
            for producer in partition.producers.view()
        ),
    )


def names(directory: str | Path) -> list[str]:
    return sorted(path.name for path in Path(directory).iterdir())


def small(**changes: object) -> LogConfig:
    return LogConfig(**{**COMPACTED.__dict__, **changes})
