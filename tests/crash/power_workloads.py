"""Workloads on one partition with all their file operations, and the durability promises.

A workload is a function on a :class:`Recorder`. For every batch that was ever written, the recorder
knows the step from which on recovery may find the batch, and the step from which on recovery must
find it. The recovery point promises that all batches below it are on disk, and ``flush.messages=1``
promises that every append is on disk.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from fencepost.logcore.batch import LogRecord, encode_batch, iter_headers
from fencepost.logcore.checkpoints import (
    LOG_START_CHECKPOINT,
    RECOVERY_POINT_CHECKPOINT,
    CheckpointError,
    read_offsets,
    take_clean_shutdown,
    write_clean_shutdown,
    write_offsets,
)
from fencepost.logcore.compaction import unthrottled
from fencepost.logcore.config import LogConfig
from fencepost.logcore.fs import FileSystem
from fencepost.logcore.machine import EndMarker, ProducerStamp, Record
from fencepost.logcore.partition import Partition
from fencepost.logcore.reading import Isolation
from tests.support.clock import ManualClock
from tests.support.memory_disk import MemoryDisk
from tests.support.partitions import append_batch, fetch_bytes, retain

T0 = 1_000_000
ROOT = "/data"
KEY = ("t", 0)
TOPIC_ID = uuid.UUID(int=7)
FORCED = LogConfig(
    segment_bytes=1_500,
    segment_index_bytes=240,
    index_interval_bytes=150,
    flush_messages=1,
    file_delete_delay_ms=0,
)
UNFORCED = replace(FORCED, flush_messages=9)
COMPACTED = replace(FORCED, cleanup_policy=frozenset({"compact"}), delete_retention_ms=1_000)
RETAINED = replace(FORCED, retention_bytes=3_500)


class Written(NamedTuple):
    """A batch as the log stores it, and the number of steps before it was written."""

    base_offset: int
    last_offset: int
    data: bytes
    begin: int


@dataclass(frozen=True)
class Promise:
    """From ``step`` on, the log up to ``end`` is on disk, and its log start is in this range."""

    step: int
    end: int
    lowest_start: int
    highest_start: int
    epoch: int


class Recorder:
    """Runs one workload on a separate simulated disk."""

    def __init__(self, config: LogConfig, seed: int, disk: MemoryDisk) -> None:
        self.config = config
        self.disk = disk
        self.choice = random.Random(seed)
        self.clock = ManualClock(T0)
        self.history: list[Written] = []
        self.epoch = 3
        self.sequences: dict[tuple[int, int], int] = {}
        disk.make_directory(ROOT)
        disk.sync_directory("")
        self.promises = [Promise(len(disk.steps), 0, 0, 0, self.epoch)]
        self.partition = open_log(disk, config, self.epoch)
        self.cleaned: int | None = None

    @property
    def is_forced(self) -> bool:
        """Return whether every append is on disk before it returns."""
        return self.config.flush_messages == 1

    # --- appends ---

    def put(
        self,
        producer_id: int = -1,
        *,
        epoch: int = 0,
        transactional: bool = False,
        keys: int = 0,
        size: int = 60,
    ) -> None:
        """Append a client's batch of one or two records."""
        now_ms = self.clock.advance(10)
        count = self.choice.randrange(1, 3)
        records = [
            LogRecord(
                at,
                now_ms + at,
                b"%d" % self.choice.randrange(keys or 1000),
                self.choice.randbytes(self.choice.randrange(1, size)),
            )
            for at in range(count)
        ]
        sequence = -1
        if producer_id >= 0:
            sequence = self.sequences.get((producer_id, epoch), 0)
            self.sequences[producer_id, epoch] = sequence + count
        data = encode_batch(
            records,
            producer_id=producer_id,
            producer_epoch=epoch if producer_id >= 0 else -1,
            base_sequence=sequence,
            transactional=transactional,
        )
        begin = len(self.disk.steps)
        append_batch(self.partition, data, now_ms=now_ms, transaction_verified=True)
        self._written(begin)

    def end(self, producer_id: int, *, commit: bool, epoch: int = 0) -> None:
        """Append an end marker."""
        now_ms = self.clock.advance(10)
        begin = len(self.disk.steps)
        self.partition.append_marker(
            EndMarker(ProducerStamp(producer_id, epoch), commit, 1), now_ms
        )
        self._written(begin)

    def record(self, key: bytes, value: bytes | None, producer_id: int = -1) -> None:
        """Append a coordinator's record."""
        now_ms = self.clock.advance(10)
        begin = len(self.disk.steps)
        stamp = ProducerStamp(producer_id, 0) if producer_id >= 0 else None
        self.partition.append_records([Record(key, value)], now_ms=now_ms, producer=stamp)
        self._written(begin)

    def _written(self, begin: int) -> None:
        known = self.history[-1].last_offset + 1 if self.history else 0
        read = fetch_bytes(self.partition, known, 1, Isolation.READ_UNCOMMITTED)
        for at, header in iter_headers(read.records):
            if header.base_offset >= known:
                data = bytes(read.records[at : at + header.size])
                self.history.append(Written(header.base_offset, header.last_offset, data, begin))
        self.promise(begin)

    # --- other operations of a broker ---

    def promise(self, begin: int) -> None:
        """Note the present promise; the log start offset may have moved since step ``begin``."""
        last, partition = self.promises[-1], self.partition
        highest = max(last.highest_start, partition.log_start_offset)
        if highest > last.highest_start:
            self.promises.append(replace(last, step=begin, highest_start=highest))
        self.promises.append(
            replace(
                self.promises[-1],
                step=len(self.disk.steps),
                end=max(last.end, partition.recovery_point),
                epoch=self.epoch,
            )
        )

    def checkpoint(self) -> None:
        """Write recovery point and log start offset, as the broker does periodically."""
        partition = self.partition
        point, start = partition.recovery_point, partition.log_start_offset
        for name, offset in ((RECOVERY_POINT_CHECKPOINT, point), (LOG_START_CHECKPOINT, start)):
            write_offsets(self.disk, ROOT, name, {KEY: offset} if offset else {}, copied=True)
        last = self.promises[-1]
        self.promises.append(replace(last, step=len(self.disk.steps), lowest_start=start))

    def delete_before(self, offset: int) -> None:
        """Delete records as a DeleteRecords request does: acknowledge after the checkpoint."""
        begin = len(self.disk.steps)
        self.partition.cleanup.delete_records_before(offset)
        self.promise(begin)
        self.checkpoint()

    def retain(self) -> None:
        begin = len(self.disk.steps)
        retain(self.partition, self.clock.now_ms())
        self.promise(begin)

    def compact(self) -> None:
        """Run one round of compaction."""
        partition, now_ms = self.partition, self.clock.now_ms()
        begin = len(self.disk.steps)
        dirty = partition.cleanup.dirty_range(self.cleaned, now_ms)
        compaction = partition.cleanup.plan_compaction(dirty, now_ms=now_ms, budget_bytes=1 << 20)
        if compaction is not None:
            partition.flushes.run(now_ms)
            compaction.map_keys(unthrottled)
            while compaction.clean_next(unthrottled):
                partition.cleanup.install_cleaned(compaction)
            self.cleaned = compaction.next_dirty_offset
        self.promise(begin)

    def restart(self, *, clean: bool) -> None:
        """Stop and start the broker; the leader epoch increases."""
        begin = len(self.disk.steps)
        if clean:
            self.partition.close()
            self.promise(begin)
            self.checkpoint()
            write_clean_shutdown(self.disk, ROOT)
        self.epoch += 1
        self.promises.append(replace(self.promises[-1], step=len(self.disk.steps)))
        self.partition = open_log(self.disk, self.config, self.epoch)
        self.promise(len(self.disk.steps))


def open_log(fs: FileSystem, config: LogConfig, epoch: int, **options: bool) -> Partition:
    """Open the partition as the broker does at startup, with the checkpointed offsets.

    ``options`` are a replica's arguments to ``Partition.open``.
    """
    clean = take_clean_shutdown(fs, ROOT)

    def known(name: str) -> int:
        try:
            return read_offsets(fs, ROOT, name).get(KEY, 0)
        except CheckpointError:
            return 0

    return Partition.open(
        fs,
        f"{ROOT}/t-0",
        topic="t",
        index=0,
        topic_id=TOPIC_ID,
        config=config,
        clock=ManualClock(T0),
        clean=clean,
        recovery_point=known(RECOVERY_POINT_CHECKPOINT),
        log_start_offset=known(LOG_START_CHECKPOINT),
        leader_epoch=epoch,
        **options,
    )


# --- the workloads -------------------------------------------------------------------------------


def producers(run: Recorder) -> None:
    """Run idempotent and transactional producers, with segment rolls, checkpoints and restarts."""
    for turn in range(14):
        run.put(1)
        run.put(2, transactional=True)
        run.put()
        if turn % 3 == 1:
            run.put(3, transactional=True)
        if turn % 2:
            run.end(2, commit=turn % 4 == 1)
        if turn % 6 == 4:
            run.end(3, commit=False)
        if turn % 5 == 2:
            run.checkpoint()
        if turn in {5, 10}:
            run.restart(clean=turn == 5)


def deletion(run: Recorder) -> None:
    """Run retention by size and DeleteRecords with active producers and an inactive producer."""
    run.put(5)
    for turn in range(20):
        run.put(1)
        run.put(2, transactional=True)
        run.end(2, commit=turn % 3 != 0)
        if turn % 5 == 3:
            run.delete_before(run.partition.log_end_offset - 9)
        if turn % 4 == 2:
            run.retain()
        if turn % 6 == 5:
            run.checkpoint()
        if turn == 12:
            run.restart(clean=True)


def compaction(run: Recorder) -> None:
    """Compact a keyed log with transactions again and again."""
    for turn in range(24):
        run.put(1, keys=6)
        run.put(2, transactional=True, keys=6)
        run.put(keys=12)
        run.end(2, commit=turn % 3 != 0)
        if turn % 6 == 5:
            run.compact()
            run.checkpoint()


def coordinators(run: Recorder) -> None:
    """Write records, tombstones and transactional commits as coordinators do, and compact."""
    for turn in range(30):
        run.record(b"group-%d" % (turn % 4), b"generation %d" % turn)
        run.record(b"offset-%d" % (turn % 5), b"%d" % turn if turn % 7 else None)
        if turn % 3 == 0:
            run.record(b"offset-%d" % (turn % 5), b"txn %d" % turn, producer_id=9)
            run.end(9, commit=turn % 2 == 0)
        if turn % 10 == 9:
            run.compact()
            run.checkpoint()
        if turn == 17:
            run.restart(clean=False)


WORKLOADS: dict[str, tuple[Callable[[Recorder], None], LogConfig]] = {
    "producers": (producers, FORCED),
    "producers, rarely forced": (producers, UNFORCED),
    "producers, preallocated": (producers, replace(FORCED, preallocate=True)),
    "producers, preallocated, rarely forced": (producers, replace(UNFORCED, preallocate=True)),
    "deletion": (deletion, RETAINED),
    "deletion, rarely forced": (deletion, replace(RETAINED, flush_messages=9)),
    "compaction": (compaction, COMPACTED),
    "compaction, rarely forced": (compaction, replace(COMPACTED, flush_messages=9)),
    "coordinators": (coordinators, COMPACTED),
}


def recorded(name: str, seed: int, disk: MemoryDisk | None = None) -> Recorder:
    """Run a workload to its end, and return its recorder."""
    workload, config = WORKLOADS[name]
    run = Recorder(config, seed, disk or MemoryDisk())
    workload(run)
    return run
