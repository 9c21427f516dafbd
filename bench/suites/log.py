"""The log by itself, in this process: no socket, no broker."""

from __future__ import annotations

import os
import random
import resource
import statistics
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.suite import Figures, Local, Suite
from fencepost.logcore.batch import LogRecord, encode_batch
from fencepost.logcore.clock import SystemClock
from fencepost.logcore.compaction import DEDUPE_BUFFER_BYTES
from fencepost.logcore.config import LogConfig
from fencepost.logcore.fs import OsFileSystem
from fencepost.logcore.partition import Partition
from fencepost.logcore.reading import Isolation
from tests.support.partitions import append_batch, fetch_bytes

MIB = 1 << 20
LOG_BYTES = 256 * MIB
"""The size that is written, read and recovered; seconds per GiB are scaled up from it."""

LOOKUPS = 5_000


def _open(home: Path, config: LogConfig, *, clean: bool = True) -> Partition:
    return Partition.open(
        OsFileSystem(),
        home / "bench-0",
        topic="bench",
        index=0,
        topic_id=uuid.UUID(int=7),
        config=config,
        clock=SystemClock(),
        clean=clean,
    )


def batch(records: int, value_bytes: int = 1024, first_key: int | None = None) -> bytes:
    now = int(time.time() * 1000)
    value = random.Random(7).randbytes(value_bytes)
    return bytes(
        encode_batch(
            [
                LogRecord(at, now, None if first_key is None else b"%12d" % (first_key + at), value)
                for at in range(records)
            ]
        )
    )


def _raw(home: Path, size: int) -> Figures:
    """Measure the same bytes with plain writes and reads, with and without a sync."""
    piece, path = os.urandom(size), home / "raw"
    handle = os.open(path, os.O_RDWR | os.O_CREAT)
    count = LOG_BYTES // size
    begin = time.perf_counter()
    for at in range(count):
        os.pwrite(handle, piece, at * size)
    written = time.perf_counter()
    os.fdatasync(handle)
    synced = time.perf_counter()
    for at in range(count):
        os.pread(handle, size, at * size)
    read = time.perf_counter()
    os.close(handle)
    path.unlink()
    megabytes = count * size / 1e6
    return {
        "plain writes to the page cache (MB/s)": megabytes / (written - begin),
        "plain writes and fdatasync (MB/s)": megabytes / (synced - begin),
        "plain reads from the page cache (MB/s)": megabytes / (read - synced),
    }


def append_and_read(records: int) -> Callable[[Path], Figures]:
    """Measure batches of ``records`` of 1 KiB: appended one by one, read back 2 MiB at a time."""

    def run(home: Path) -> Figures:
        data = batch(records)
        figures = _raw(home, len(data))
        partition = _open(home, LogConfig())
        count = LOG_BYTES // len(data)
        clock = SystemClock()
        begin = time.perf_counter()
        for _ in range(count):
            append_batch(partition, data, now_ms=clock.now_ms())
        appended = time.perf_counter()
        partition.flushes.run(clock.now_ms())
        flushed = time.perf_counter()
        offset = got = 0
        while offset < partition.log_end_offset:
            read = fetch_bytes(partition, offset, 2 * MIB, Isolation.READ_UNCOMMITTED).records
            got += len(read)
            offset += len(read) // len(data) * records
        done = time.perf_counter()
        partition.close()
        megabytes = count * len(data) / 1e6
        if got != count * len(data):
            raise RuntimeError(f"{got} bytes came back of {count * len(data)}")
        return figures | {
            "appends to the log (MB/s)": megabytes / (appended - begin),
            "appends to the log and a flush (MB/s)": megabytes / (flushed - begin),
            "reads from the log (MB/s)": megabytes / (done - flushed),
            "time of an append (µs)": (appended - begin) / count * 1e6,
        }

    return run


def lookup(segments: int) -> Callable[[Path], Figures]:
    """Measure finding the batch of a random offset, in a log of 160 MiB with that many segments."""

    def run(home: Path) -> Figures:
        total = 160 * MIB
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        size = total // segments
        config = LogConfig(segment_bytes=size, segment_index_bytes=max(4096, size // 256))
        partition = _open(home, config)
        data = batch(1)
        clock = SystemClock()
        while partition.log_end_offset * len(data) < total:
            append_batch(partition, data, now_ms=clock.now_ms())
        rng = random.Random(7)
        end = partition.log_end_offset
        offsets = [rng.randrange(end) for _ in range(LOOKUPS)]
        _time_lookups(partition, range(0, end, max(1, end // (2 * segments))))  # map every index
        samples = _time_lookups(partition, offsets)
        partition.mark_deleted()  # a close would sync every segment
        OsFileSystem().remove_tree(partition.rename_deleted())
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return {
            "median time (µs)": statistics.median(samples) * 1e6,
            "p99 time (µs)": statistics.quantiles(samples, n=100)[98] * 1e6,
        }

    return run


def _time_lookups(partition: Partition, offsets: Iterator[int] | list[int] | range) -> list[float]:
    samples = []
    for offset in offsets:
        begin = time.perf_counter()
        partition.reader.fetch(offset, 0, Isolation.READ_UNCOMMITTED, at_least_one=False)
        samples.append(time.perf_counter() - begin)
    return samples


def recovery(home: Path) -> Figures:
    """Measure opening a log of batches of 16 records, after a clean stop and after a kill."""
    config = LogConfig(segment_bytes=64 * MIB)
    partition = _open(home, config)
    data = batch(16)
    clock = SystemClock()
    for _ in range(LOG_BYTES // len(data)):
        append_batch(partition, data, now_ms=clock.now_ms())
    end, size = partition.log_end_offset, partition.log.size_bytes
    partition.close()
    seconds = {}
    for how, clean in (("clean stop", True), ("kill", False)):
        begin = time.perf_counter()
        partition = _open(home, config, clean=clean)
        seconds[how] = time.perf_counter() - begin
        if partition.log_end_offset != end:
            raise RuntimeError(f"{partition.log_end_offset} records of {end}")
        partition.close()
    return {f"time after a {how} (s/GiB)": s * 1024 * MIB / size for how, s in seconds.items()}


def compaction(home: Path) -> Figures:
    """Measure one round over a log that has each key four times, in small and large records."""
    return {
        f"{shown} (MB/s)": _cleaned(home / str(size), size, keys)
        for shown, size, keys in (
            ("records of 100 bytes", 80, 200_000),
            ("records of 1 KiB", 1_024, 40_000),
        )
    }


def _cleaned(home: Path, value_bytes: int, keys: int) -> float:
    config = LogConfig(
        segment_bytes=16 * MIB, cleanup_policy=frozenset({"compact"}), file_delete_delay_ms=0
    )
    partition = _open(home, config)
    clock = SystemClock()
    each = 40
    pieces = [batch(each, value_bytes, first) for first in range(0, keys, each)]
    for _ in range(4):
        for piece in pieces:
            append_batch(partition, piece, now_ms=clock.now_ms())
    before = partition.log.size_bytes
    begin = time.perf_counter()
    dirty = partition.cleanup.dirty_range(0, clock.now_ms())
    compacting = partition.cleanup.plan_compaction(
        dirty, now_ms=clock.now_ms(), budget_bytes=DEDUPE_BUFFER_BYTES
    )
    if compacting is None:
        raise RuntimeError("nothing to compact")
    partition.flushes.run(clock.now_ms())
    compacting.map_keys()
    while compacting.clean_next():
        partition.cleanup.install_cleaned(compacting)
    seconds = time.perf_counter() - begin
    figures = compacting.figures
    partition.close()
    if figures.records_kept >= figures.records_read:
        raise RuntimeError("nothing was removed")
    return before / 1e6 / seconds


LOG = Suite(
    "log",
    "The log without a broker: 256 MiB of records of 1 KiB, beside plain reads and writes of the "
    "same size.",
    (
        Local("batches of 16 records", append_and_read(16)),
        Local("batches of 900 records", append_and_read(900)),
        *(
            Local(
                f"search for an offset in {count:,} segment{'s' if count > 1 else ''}",
                lookup(count),
            )
            for count in (1, 100, 10_000)
        ),
        Local("opening a log", recovery),
        Local("compaction of a log", compaction),
    ),
)
