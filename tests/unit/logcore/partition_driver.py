"""Partitions in a temporary directory, clients' batches, and crash images."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fencepost.logcore.batch import LogRecord, encode_batch
from fencepost.logcore.compression import Codec
from fencepost.logcore.config import LogConfig
from fencepost.logcore.durable import FlushState
from fencepost.logcore.errors import StorageError
from fencepost.logcore.fs import FileSystem, OsFileSystem
from fencepost.logcore.machine import EndMarker, ProducerStamp
from fencepost.logcore.partition import Appended, Partition
from fencepost.logcore.reading import Isolation
from tests.support.clock import ManualClock
from tests.support.partitions import append_batch, fetch_bytes

T0 = 1_000_000
TOPIC_ID = uuid.UUID(int=0x0102030405060708090A0B0C0D0E0F10)
CONFIG = LogConfig()


def client_batch(
    count: int = 1,
    *,
    timestamp_ms: int = T0,
    size: int = 10,
    producer_id: int = -1,
    epoch: int = 0,
    sequence: int = 0,
    transactional: bool = False,
    codec: Codec = Codec.NONE,
    key: bytes | None = b"k",
) -> bytes:
    """Return a batch with base offset 0; timestamps grow by 1 ms."""
    has_producer = producer_id >= 0
    return encode_batch(
        [LogRecord(at, timestamp_ms + at, key, bytes([at % 256]) * size) for at in range(count)],
        codec=codec,
        producer_id=producer_id,
        producer_epoch=epoch if has_producer else -1,
        base_sequence=sequence if has_producer else -1,
        transactional=transactional,
    )


def open_partition(
    root: Path,
    *,
    name: str = "orders",
    clean: bool = True,
    config: LogConfig = CONFIG,
    fs: FileSystem | None = None,
    clock: ManualClock | None = None,
    **options: Any,
) -> Partition:
    return Partition.open(
        fs or OsFileSystem(),
        root / f"{name}-0",
        topic=name,
        index=0,
        topic_id=TOPIC_ID,
        config=config,
        clock=clock or ManualClock(T0),
        clean=clean,
        **options,
    )


def delete(partition: Partition) -> None:
    """Delete the partition as the daemon does, all steps at once."""
    partition.mark_deleted()
    OsFileSystem().remove_tree(partition.rename_deleted())


def config(**changes: object) -> LogConfig:
    return replace(CONFIG, **changes)


def append(partition: Partition, count: int = 1, *, now_ms: int = T0, **fields: object) -> Appended:
    data = client_batch(count, **fields)
    return append_batch(partition, data, now_ms=now_ms, transaction_verified=True)


def marker(
    partition: Partition, producer_id: int, epoch: int = 0, *, commit: bool, version: int = 0
) -> Appended:
    return partition.append_marker(
        EndMarker(ProducerStamp(producer_id, epoch), commit, 0, version), T0
    )


def read_log(partition: Partition) -> list[tuple[int, bytes]]:
    """Return base offset and bytes of every batch from the log start to the log end."""
    return [(header.base_offset, bytes(batch)) for header, batch in partition.reader.read_all()]


def fetch_all(partition: Partition, isolation: Isolation = Isolation.READ_UNCOMMITTED) -> bytes:
    """Return all bytes from the log start to the reader's limit, read by several fetches."""
    offset = partition.log_start_offset
    parts = []
    while True:
        fetched = fetch_bytes(partition, offset, 1 << 20, isolation)
        if not fetched.records:
            return b"".join(parts)
        parts.append(fetched.records)
        offset = last_offset(fetched.records) + 1


def last_offset(records: bytes) -> int:
    from fencepost.logcore.batch import iter_headers

    *_, (_, header) = iter_headers(records)
    return header.last_offset


def crash_image(partition: Partition, root: Path) -> Path:
    """Copy the files as ``kill -9`` would leave them now, and return the new root."""
    shutil.copytree(partition.log.directory, root / Path(partition.log.directory).name)
    return root


def state_of(partition: Partition) -> tuple[object, ...]:
    """Return all state that a restart must restore, except older batches of the producers."""
    return (
        partition.log_start_offset,
        partition.log_end_offset,
        partition.last_stable_offset,
        read_log(partition),
        sorted(partition.producers.view()),
        partition._epochs.entries,
        [entry for segment in partition.log.segments for entry in segment.txn_index.entries],
    )


class LateFlusher:
    """A flusher that queues partitions until the test calls ``run`` or ``run_one``."""

    def __init__(self) -> None:
        self.joined: dict[FlushState, None] = {}
        self.sealed: dict[FlushState, None] = {}

    def join(self, flushes: FlushState) -> None:
        self.joined[flushes] = None

    def join_sealed(self, flushes: FlushState) -> None:
        self.sealed[flushes] = None

    def run(self) -> None:
        while self.sealed or self.joined:
            self.run_one()

    def run_one(
        self,
        *,
        before_it_is_planned: Callable[[], object] = lambda: None,
        before_it_runs: Callable[[], object] = lambda: None,
        before_it_ends: Callable[[], object] = lambda: None,
    ) -> None:
        """Run one flush, and call each hook at its stage."""
        is_sealed = not self.joined
        flushes, _ = (self.sealed if is_sealed else self.joined).popitem()
        before_it_is_planned()
        try:
            flush = flushes.plan_sealed() if is_sealed else flushes.plan(T0)
        except StorageError:
            return
        before_it_runs()
        if flush is not None:
            failure = flush.run()
            before_it_ends()
            flushes.finish(flush, failure)
