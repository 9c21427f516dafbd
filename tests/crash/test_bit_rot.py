"""Flips one bit in every byte of a partition directory, before a broker opens the partition.

The byte may be in any file (log, indexes, transaction index, snapshot, leader epochs, identity).
The broker must refuse to start, or truncate the log at the damage and report it, or serve exactly
the written records. Recovery does not read the log below the recovery point, and after a clean stop
it reads no part of the log. In these parts only the CRC of a batch protects the reader, as in
Apache Kafka.
"""

from __future__ import annotations

import random
import uuid
from dataclasses import replace

import pytest

from fencepost.logcore.batch import iter_headers, verify_crc
from fencepost.logcore.checkpoints import (
    CLEAN_SHUTDOWN,
    COPIED_CHECKPOINTS,
    COPY_SUFFIX,
    LEADER_EPOCH_CHECKPOINT,
    LOG_START_CHECKPOINT,
    META_PROPERTIES,
    RECOVERY_POINT_CHECKPOINT,
    CheckpointError,
    MetaProperties,
    read_meta_properties,
    read_offsets,
    write_clean_shutdown,
    write_meta_properties,
    write_offsets,
)
from fencepost.logcore.dump import is_problem
from fencepost.logcore.errors import LogError, StorageError
from fencepost.logcore.verify import verify_partition
from tests.crash.power_judge import BrokenPromiseError, check_log
from tests.crash.power_workloads import FORCED, ROOT, Recorder, open_log
from tests.support.memory_disk import MemoryDisk

pytestmark = [pytest.mark.crash, pytest.mark.timeout(900)]


def several_segments() -> Recorder:
    """Return a log of several segments with an open transaction."""
    run = Recorder(replace(FORCED, segment_bytes=700), 3, MemoryDisk())
    for turn in range(5):
        run.put(1)
        run.put(2, transactional=True)
        run.end(2, commit=turn % 2 == 0)
    run.put(4, transactional=True)
    return run


@pytest.fixture(scope="module")
def stopped() -> Recorder:
    """Return a log of several segments with all their files, after a clean stop."""
    run = several_segments()
    run.restart(clean=True)
    run.partition.close()
    run.disk.remove(f"{ROOT}/{RECOVERY_POINT_CHECKPOINT}")
    run.disk.remove(f"{ROOT}/{CLEAN_SHUTDOWN}")
    return run


@pytest.mark.slow
def test_flipped_bit_in_any_byte_is_refused_truncated_or_harmless(stopped: Recorder) -> None:
    files = stopped.disk.names[f"{ROOT}/t-0"]
    assert {name.rpartition(".")[2] for name in files} >= {
        "log",
        "index",
        "timeindex",
        "txnindex",
        "snapshot",
        "metadata",
        "leader-epoch-checkpoint",
    }
    assert sum(name.endswith(".log") for name in files) >= 3
    promise = stopped.promises[-1]
    steps = len(stopped.disk.steps)
    whole = stopped.history[-1].last_offset + 1
    refused = cut = 0
    for name, inode in sorted(files.items()):
        for position in range(len(stopped.disk.contents[inode])):
            choice = random.Random(f"{name} {position}")
            rotten = stopped.disk.after_kill()
            rotten.contents[inode][position] ^= 1 << choice.randrange(8)
            try:
                partition = open_log(rotten, stopped.config, promise.epoch)
            except StorageError:
                assert name == "partition.metadata", (name, position)
                refused += 1
                continue
            is_cut = partition.log_end_offset < whole
            assert is_cut == name.endswith(".log"), (name, position)
            if is_cut:
                assert partition.recovery is not None
                assert partition.recovery.reason, (name, position)
                cut += 1
            check_log(stopped, steps, replace(promise, end=0), partition, choice)
    assert refused
    assert cut == sum(
        len(stopped.disk.contents[inode]) for name, inode in files.items() if name.endswith(".log")
    )


UNCOVERED = 16
"""Number of first bytes of a batch that its CRC does not cover: base offset, length, leader epoch.
(The magic byte, number seventeen, is checked.)
"""

BLIND = {"log", "index", "timeindex", "txnindex"}
"""Files whose damage may cause a wrong response after a clean stop, as in Apache Kafka."""


@pytest.mark.slow
def test_flipped_bit_after_a_clean_stop_is_noticed_except_in_known_files() -> None:
    """A start after a clean stop scans no log. The README states the effects of a flipped bit.

    In a log only the bytes outside the CRC can cause a wrong response, because a reader detects
    damage to all other bytes.
    ``fencepost log verify`` finds damage to an index.
    """
    run = several_segments()
    run.delete_before(3)
    run.restart(clean=True)
    run.partition.close()
    run.checkpoint()
    write_clean_shutdown(run.disk, ROOT)
    misled, kinds, files = set(), set(), 0
    for directory in (f"{ROOT}/t-0", ROOT):
        for name, inode in sorted(run.disk.names[directory].items()):
            files += 1
            kinds.add(name.rpartition(".")[2])
            for position in range(len(run.disk.contents[inode])):
                rotten = run.disk.after_kill()
                rotten.contents[inode][position] ^= 1 << random.Random(position).randrange(8)
                if not _is_noticed_or_harmless(run, rotten.after_kill(), position):
                    misled.add(name.rpartition(".")[2])
                    if name.endswith("index"):
                        found = verify_partition(rotten, directory)
                        assert any(is_problem(row) for row in found), (name, position)
                    if name.endswith(".log"):
                        raw = bytes(run.disk.contents[inode])
                        assert any(0 <= position - at < UNCOVERED for at, _ in iter_headers(raw))
    assert files > 10
    assert kinds >= BLIND | {
        "copy",
        "kafka_cleanshutdown",
        "metadata",
        "snapshot",
        LEADER_EPOCH_CHECKPOINT,
        LOG_START_CHECKPOINT,
        RECOVERY_POINT_CHECKPOINT,
    }
    assert misled == BLIND


def test_flipped_checkpoint_bit_after_a_kill_costs_no_valid_batch() -> None:
    """Recovery starts at the recovery point, and must not reject valid batches for their epochs."""
    run = _epochs_apart()
    _each_bit(run, f"{ROOT}/t-0", LEADER_EPOCH_CHECKPOINT, clean=False)
    _each_bit(run, ROOT, RECOVERY_POINT_CHECKPOINT, clean=False)
    _each_bit(run, ROOT, LOG_START_CHECKPOINT, clean=False)


def test_flipped_epoch_checkpoint_bit_after_a_clean_stop_is_harmless() -> None:
    run = _epochs_apart()
    run.partition.close()
    run.checkpoint()
    write_clean_shutdown(run.disk, ROOT)
    _each_bit(run, f"{ROOT}/t-0", LEADER_EPOCH_CHECKPOINT, clean=True)


def _epochs_apart() -> Recorder:
    """Return a log of several segments with non-consecutive epochs and a known flushed offset."""
    run = Recorder(replace(FORCED, segment_bytes=500), 3, MemoryDisk())
    for turn in range(5):
        run.put(1)
        run.put(2, transactional=True)
        if turn == 1:
            run.delete_before(1)
        run.end(2, commit=turn % 2 == 0)
        run.epoch += turn % 3
        run.restart(clean=True)
        run.put(1)
    run.checkpoint()
    return run


def _each_bit(run: Recorder, directory: str, name: str, *, clean: bool) -> None:
    """Check for each flipped bit of a file that no record is lost and no epoch's end changes."""
    whole = run.history[-1].last_offset + 1
    promise = run.promises[-1]
    sound = open_log(run.disk.after_kill(), run.config, promise.epoch)
    ends = [sound.reader.offset_for_leader_epoch(epoch) for epoch in range(promise.epoch + 2)]
    content = run.disk.contents[run.disk.names[directory][name]]
    for position in range(len(content)):
        for bit in range(8):
            rotten = run.disk.after_kill()
            rotten.contents[rotten.names[directory][name]][position] ^= 1 << bit
            partition = open_log(rotten, run.config, promise.epoch)
            where = name, position, bit, bytes(rotten.contents[rotten.names[directory][name]])
            assert (partition.recovery is None) == clean, where
            assert partition.log_end_offset == whole, where
            assert partition.log_start_offset == sound.log_start_offset, where
            found = [
                partition.reader.offset_for_leader_epoch(epoch)
                for epoch in range(promise.epoch + 2)
            ]
            assert found == ends, where
            check_log(run, len(run.disk.steps), promise, partition, random.Random(position))


@pytest.mark.parametrize("name", COPIED_CHECKPOINTS)
def test_flipped_bit_in_a_checkpoint_or_its_copy_keeps_its_values(name: str) -> None:
    """The undamaged file of the two has the last values or the previous values."""
    disk = MemoryDisk()
    disk.make_directory(ROOT)
    offsets = {("crc32c", 0): 17, ("t", 1): 1_000}
    write_offsets(disk, ROOT, name, {("t", 1): 5}, copied=True)
    write_offsets(disk, ROOT, name, offsets, copied=True)
    told: list[CheckpointError] = []
    for file_name in (name, name + COPY_SUFFIX):
        inode = disk.names[ROOT][file_name]
        for position in range(len(disk.contents[inode])):
            for bit in range(8):
                rotten = disk.after_kill()
                rotten.contents[rotten.names[ROOT][file_name]][position] ^= 1 << bit
                told.clear()
                assert read_offsets(rotten, ROOT, name, on_damage=told.append) == offsets
                assert bool(told) == (file_name == name), (file_name, position, bit)


def test_flipped_bit_in_meta_properties_never_changes_the_identity() -> None:
    """The broker refuses the damaged file, or reads the same values from this file."""
    disk = MemoryDisk()
    disk.make_directory(ROOT)
    meta = MetaProperties("cluster", 3, uuid.UUID(int=77))
    write_meta_properties(disk, ROOT, meta)
    refused = 0
    size = len(disk.contents[disk.names[ROOT][META_PROPERTIES]])
    for position in range(size):
        for bit in range(8):
            rotten = disk.after_kill()
            rotten.contents[rotten.names[ROOT][META_PROPERTIES]][position] ^= 1 << bit
            try:
                assert read_meta_properties(rotten, ROOT) == meta, (position, bit)
            except CheckpointError:
                refused += 1
    assert refused > 7 * size


def _is_noticed_or_harmless(run: Recorder, rotten: MemoryDisk, seed: int) -> bool:
    promise = replace(run.promises[-1], end=0)
    try:
        partition = open_log(rotten, run.config, promise.epoch)
        for header, batch in partition.reader.read_all():
            verify_crc(batch, 0, header)
        check_log(run, len(run.disk.steps), promise, partition, random.Random(seed))
    except BrokenPromiseError:
        return False
    except LogError:
        return True
    return True
