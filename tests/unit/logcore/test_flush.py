"""Flushes of sealed segments, and log changes during a flush."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from fencepost.logcore.durable import SEALED_AT_ONCE
from fencepost.logcore.errors import StorageError
from fencepost.logcore.partition import Partition
from tests.support.faults import FaultyDisk
from tests.support.partitions import retain
from tests.unit.logcore.partition_driver import (
    T0,
    LateFlusher,
    append,
    config,
    crash_image,
    delete,
    marker,
    open_partition,
    read_log,
)

SMALL = config(segment_bytes=500, index_interval_bytes=100)


def rolled(partition: Partition, segments: int) -> Partition:
    """Append until the log has ``segments`` segments, the last with a batch."""
    while len(partition.log.segments) < segments:
        append(partition, 2, size=90)
    return partition


def late(root: Path, segments: int = 4) -> tuple[Partition, LateFlusher, FaultyDisk]:
    """Return a partition whose flush is queued but has not begun."""
    disk, flusher = FaultyDisk(), LateFlusher()
    partition = open_partition(root, config=SMALL, fs=disk, flusher=flusher)
    rolled(partition, segments)
    assert partition.recovery_point == 0
    assert list(flusher.sealed) == [partition.flushes]
    disk.steps.clear()
    return partition, flusher, disk


def active_base(partition: Partition) -> int:
    return partition.log.active.base_offset


def test_roll_advances_the_recovery_point_to_the_new_segment(tmp_path: Path) -> None:
    partition = open_partition(tmp_path, config=SMALL)
    assert partition.recovery_point == 0
    for segments in (2, 3, 4):
        rolled(partition, segments)
        assert partition.recovery_point == active_base(partition)
        assert partition.recovery_point < partition.log_end_offset


def test_flush_syncs_all_files_of_sealed_segments_but_not_the_active_one(
    tmp_path: Path,
) -> None:
    partition, flusher, disk = late(tmp_path, segments=3)
    append(partition, producer_id=2, transactional=True)
    marker(partition, 2, commit=False)
    rolled(partition, 4)
    disk.steps.clear()
    flusher.run()
    first, second, third, active = (segment.base_offset for segment in partition.log.segments)
    synced = {Path(step.path).name for step in disk.steps if step.kind == "sync"}
    assert synced == {
        *(
            f"{base:020d}{suffix}"
            for base in (first, second, third)
            for suffix in (".log", ".index", ".timeindex")
        ),
        *(f"{base:020d}.snapshot" for base in (second, third, active)),
        f"{third:020d}.txnindex",
        "leader-epoch-checkpoint.tmp",
        "partition.metadata",
    }
    assert partition.recovery_point == active
    disk.steps.clear()
    rolled(partition, 5)
    flusher.run()
    synced = {Path(step.path).name for step in disk.steps if step.kind == "sync"}
    assert synced == {
        f"{active:020d}.log",
        f"{active:020d}.index",
        f"{active:020d}.timeindex",
        f"{active:020d}.snapshot",  # from the roll after the previous flush
        f"{active_base(partition):020d}.snapshot",
    }


def test_damaged_batch_in_a_sealed_segment_loses_no_later_batch(tmp_path: Path) -> None:
    """A broker with twenty segments is killed, and a bit of the second segment flips."""
    partition = rolled(open_partition(tmp_path / "whole", config=SMALL), 20)
    before = read_log(partition)
    root = crash_image(partition, tmp_path / "crash")
    path = root / "orders-0" / f"{partition.log.segments[1].base_offset:020d}.log"
    raw = bytearray(path.read_bytes())
    raw[100] ^= 1
    path.write_bytes(raw)
    again = open_partition(root, clean=False, recovery_point=partition.recovery_point)
    assert again.log_end_offset == partition.log_end_offset
    assert again.recovery is not None
    assert again.recovery.scanned_segments == 1
    found = read_log(again)
    assert [base for base, _ in found] == [base for base, _ in before]
    assert sum(one != other for one, other in zip(found, before, strict=True)) == 1


def test_recovery_point_advances_with_each_of_several_flushes(
    tmp_path: Path,
) -> None:
    count = 2 * SEALED_AT_ONCE + 1
    partition, flusher, _ = late(tmp_path, segments=count + 1)
    points = []
    while flusher.sealed:
        flusher.run_one()
        points.append(partition.recovery_point)
        if partition.flushes.has_sealed:
            assert partition.flushes.run_if_due(T0)
    bases = [segment.base_offset for segment in partition.log.segments]
    assert points == [bases[SEALED_AT_ONCE], bases[2 * SEALED_AT_ONCE], bases[-1]]


@pytest.mark.parametrize(("flush_messages", "recovery_point"), [(1, 3), (3, 3), (4, 0)])
def test_records_that_a_killed_process_did_not_flush_are_flushed_at_the_start(
    tmp_path: Path, flush_messages: int, recovery_point: int
) -> None:
    flushed = config(flush_messages=flush_messages)
    partition = open_partition(tmp_path / "killed", config=flushed, flusher=LateFlusher())
    append(partition, 3)
    assert partition.recovery_point == 0
    image, disk = crash_image(partition, tmp_path / "started"), FaultyDisk()
    started = open_partition(image, config=flushed, clean=False, fs=disk, flusher=LateFlusher())
    assert (started.log_end_offset, started.high_watermark) == (3, 3)
    assert started.recovery_point == recovery_point
    synced = {Path(step.path).name for step in disk.steps if step.kind == "sync"}
    assert (f"{0:020d}.log" in synced) == (recovery_point == 3)


def test_recovered_log_is_due_for_a_flush(tmp_path: Path) -> None:
    root = crash_image(late(tmp_path / "whole")[0], tmp_path / "crash")
    flusher = LateFlusher()
    again = open_partition(root, config=SMALL, clean=False, flusher=flusher)
    assert (again.recovery_point, flusher.sealed) == (0, {})
    assert again.flushes.run_if_due(T0)
    flusher.run()
    assert again.recovery_point == active_base(again)
    assert not again.flushes.run_if_due(T0)


# --- changes during a flush ---


def retention_takes_all(partition: Partition) -> None:
    partition.log.config = config(segment_bytes=500, retention_bytes=0, file_delete_delay_ms=0)
    assert retain(partition, T0) > 2


@pytest.mark.parametrize(
    ("meanwhile", "expected"),
    [
        (lambda partition: partition.truncate_to(4), 4),
        (lambda partition: partition.truncate_to(3), 3),
        (lambda partition: partition.truncate_to(0), 0),
        (retention_takes_all, None),
        (lambda partition: rolled(partition, 9), None),
        (lambda partition: partition.flushes.run(T0), None),
    ],
    ids=["truncated", "truncated inside a batch", "emptied", "deleted", "rolled", "flushed"],
)
@pytest.mark.parametrize("when", ["before it is planned", "before it runs", "before it ends"])
def test_log_that_changes_during_a_flush_keeps_a_valid_recovery_point(
    tmp_path: Path, when: str, meanwhile: Callable[[Partition], object], expected: int | None
) -> None:
    """``expected`` is the highest recovery point that the log may have after a truncation.

    If the flush was planned before the truncation, the recovery point becomes exactly this offset.
    """
    partition, flusher, _ = late(tmp_path / "whole")
    flusher.run_one(**{when.replace(" ", "_"): lambda: meanwhile(partition)})
    assert partition.offline is None
    end = partition.log_end_offset if expected is None else expected
    assert partition.recovery_point <= end
    if expected is not None and when != "before it is planned":
        assert partition.recovery_point == expected
    append(partition)
    flusher.run()
    again = open_partition(
        crash_image(partition, tmp_path / "crash"),
        config=SMALL,
        clean=False,
        recovery_point=partition.recovery_point,
        log_start_offset=partition.log_start_offset,
    )
    assert read_log(again) == read_log(partition)
    partition.close()


@pytest.mark.parametrize("meanwhile_appended", [0, 1])
def test_appends_awaiting_a_flush_are_committed_after_a_truncation(
    tmp_path: Path, meanwhile_appended: int
) -> None:
    """The flush commits the records below the truncation; another flush commits later appends."""
    flusher = LateFlusher()
    partition = open_partition(tmp_path, config=config(flush_messages=1), flusher=flusher)
    for _ in range(4):
        append(partition)
    assert (partition.high_watermark, partition.flushes.is_awaited) == (0, True)

    def cut() -> None:
        partition.truncate_to(3)
        for _ in range(meanwhile_appended):
            append(partition)

    flusher.run_one(before_it_runs=cut)
    assert (partition.recovery_point, partition.high_watermark) == (3, 3)
    assert partition.flushes.is_awaited == bool(meanwhile_appended) == bool(flusher.joined)
    flusher.run()
    assert partition.high_watermark == partition.log_end_offset == 3 + meanwhile_appended


@pytest.mark.parametrize("when", ["before it is planned", "before it runs", "before it ends"])
@pytest.mark.parametrize("how", [Partition.close, delete])
def test_partition_closed_or_deleted_during_a_flush_leaves_no_open_file(
    tmp_path: Path, when: str, how: Callable[[Partition], None]
) -> None:
    partition, flusher, disk = late(tmp_path)
    flusher.run_one(**{when.replace(" ", "_"): lambda: how(partition)})
    assert partition.offline is None
    assert not disk.open_paths
    assert (tmp_path / "orders-0").exists() == (how is Partition.close)


def test_failed_sync_of_a_sealed_segment_takes_the_partition_offline(tmp_path: Path) -> None:
    partition, flusher, disk = late(tmp_path)
    disk.sync_fails = lambda path: path.endswith(f"{0:020d}.log")
    flusher.run()
    assert partition.offline is not None
    assert partition.recovery_point == 0
    with pytest.raises(StorageError, match=r"off line.*Input/output"):
        append(partition)


@pytest.mark.parametrize(
    "refused", [".snapshot", ".txnindex", ".index", "leader-epoch", "metadata"]
)
@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOSPC])
def test_flush_without_descriptors_or_disk_space_is_due_again(
    tmp_path: Path, refused: str, number: int
) -> None:
    partition, flusher, disk = late(tmp_path)
    append(partition, producer_id=2, transactional=True)
    marker(partition, 2, commit=False)
    rolled(partition, 6)

    def before(kind: str, path: str) -> None:
        if kind == "open" and refused in path:
            raise OSError(number, "refused", path)

    disk.before = before
    flusher.run()
    assert partition.offline is None
    assert partition.recovery_point == 0
    disk.before = lambda _kind, _path: None
    disk.steps.clear()
    assert partition.flushes.run_if_due(T0)
    flusher.run()
    assert partition.recovery_point == active_base(partition)
    assert any(refused in step.path for step in disk.steps if step.kind == "sync")


def test_sync_that_fails_for_lack_of_space_takes_the_partition_offline(tmp_path: Path) -> None:
    """After the failed sync, the kernel marks the unwritten pages as clean."""
    partition, flusher, disk = late(tmp_path)

    def before(kind: str, path: str) -> None:
        if kind == "sync" and path.endswith(".snapshot"):
            raise OSError(errno.ENOSPC, "No space left on device")

    disk.before = before
    flusher.run()
    assert partition.offline is not None
