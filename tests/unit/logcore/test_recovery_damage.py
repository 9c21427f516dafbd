"""Damage that recovery finds: which records it may truncate or must keep, and its report."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from fencepost.logcore.batch import iter_headers, parse_header
from fencepost.logcore.dump import dump_file
from fencepost.logcore.errors import CorruptRecordError, StorageError
from fencepost.logcore.fs import OsFileSystem
from fencepost.logcore.machine import Record
from fencepost.logcore.partition import Partition
from fencepost.logcore.reading import Isolation
from fencepost.logcore.strays import is_stray
from fencepost.logcore.verify import verify_partition
from tests.support.faults import CHANGES, FaultyDisk, Killed, MortalDisk
from tests.support.partitions import fetch_bytes, retain
from tests.unit.logcore.partition_driver import (
    T0,
    append,
    config,
    crash_image,
    delete,
    fetch_all,
    open_partition,
    state_of,
)
from tests.unit.logcore.test_recovery import damage, last_batches, segments

FS = OsFileSystem()
LOG = f"orders-0/{0:020d}.log"


def strays(root: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in (root / "orders-0").iterdir()
        if is_stray(path.name)
    }


def bases(partition: Partition) -> list[int]:
    return [header.base_offset for header, _ in partition.reader.read_all()]


# --- below the recovery point: damage is skipped --------------------------------------------------


MASKS = [0xFF, *(pytest.param(mask, marks=pytest.mark.slow) for mask in (0x01, 0x80))]


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
def test_damaged_byte_below_the_recovery_point_loses_no_other_batch(
    tmp_path: Path, mask: int
) -> None:
    """Damage each byte of the flushed batches, and of an unflushed batch after them."""
    whole = open_partition(tmp_path / "whole", config=config(index_interval_bytes=100))
    last_batches(whole)
    whole.flushes.run(T0)
    flushed = whole.recovery_point
    append(whole, 2)
    root = crash_image(whole, tmp_path / "crash")
    raw = (root / LOG).read_bytes()
    starts = dict(iter_headers(raw))
    ends = [header.next_offset for header in starts.values()]
    for position in range(len(raw)):
        at = max(start for start in starts if start <= position)
        rotten = bytearray(raw)
        rotten[position] ^= mask
        (root / LOG).write_bytes(rotten)
        partition = open_partition(root, clean=False, recovery_point=flushed)
        report = partition.recovery
        assert report is not None
        if starts[at].base_offset >= flushed:
            # This batch has not been flushed.
            assert partition.log_end_offset == starts[at].base_offset, position
            partition.log.close()
            break
        assert (root / LOG).read_bytes() == rotten, position
        assert partition.log_end_offset == ends[-1], position
        # One batch is reported, or two if the damage is in a leader epoch, which no reader checks.
        assert 1 <= len(report.damaged) <= 2, (position, report.damaged)
        assert not report.is_loss
        # A fetch finds the next batch by its last offset, like the index.
        behind = at + starts[at].size
        offset, size = starts[behind].last_offset, starts[behind].size
        read = fetch_bytes(partition, offset, 1, Isolation.READ_UNCOMMITTED)
        assert read.records[:size] == raw[behind : behind + size], position
        assert append(partition).base_offset == ends[-1]
        partition.log.close()
    else:
        pytest.fail("the batch that was not flushed has bytes as well")
    assert strays(root)


@pytest.mark.parametrize("mask", [0x80, pytest.param(0x02, marks=pytest.mark.slow)])
def test_damaged_header_in_a_sealed_segment_affects_no_other_segment(
    tmp_path: Path, mask: int
) -> None:
    """Recovery does not scan the segment; damaged offsets and epochs must not mislead readers."""
    whole = segments(tmp_path / "whole")
    root = crash_image(whole, tmp_path / "crash")
    point, end = whole.recovery_point, whole.log_end_offset
    sealed, active = (segment.base_offset for segment in whole.log.segments[-2:])
    assert active == point < end
    path = root / "orders-0" / f"{sealed:020d}.log"
    raw = path.read_bytes()
    starts = [at for at, _ in iter_headers(raw)]
    files = {file: file.read_bytes() for file in (root / "orders-0").iterdir()}
    # Header fields up to last_offset_delta: an index is built from them.
    for position in (at + byte for at in starts for byte in range(27)):
        for file, content in files.items():
            file.write_bytes(content)
        path.write_bytes(raw[:position] + bytes([raw[position] ^ mask]) + raw[position + 1 :])
        partition = open_partition(root, clean=False, recovery_point=point)
        assert partition.log_end_offset == end, position
        assert partition.recovery is not None
        assert not partition.recovery.reason
        for offset in range(sealed, active):
            with suppress(CorruptRecordError):
                fetch_bytes(partition, offset, 1, Isolation.READ_UNCOMMITTED)
        assert partition.offline is None, position
        assert fetch_bytes(partition, active, 1, Isolation.READ_UNCOMMITTED).records
        partition.log.close()


@pytest.mark.parametrize("mask", [0x40, 0x80])
def test_impossible_batch_offset_does_not_take_the_partition_offline(
    tmp_path: Path, mask: int
) -> None:
    """The damaged offset contradicts the index, which is rebuilt from the neighbouring batches."""
    whole = open_partition(tmp_path / "whole", config=config(index_interval_bytes=1))
    for at in range(4):
        whole.append_records([Record(b"k", b"v")] * 2, now_ms=T0 + at)
    whole.flushes.roll(T0)
    append(whole, 2)
    root = crash_image(whole, tmp_path / "crash")
    raw = bytearray((root / LOG).read_bytes())
    last = max(at for at, _ in iter_headers(raw))
    raw[last] ^= mask
    (root / LOG).write_bytes(raw)
    again = open_partition(root, clean=False, recovery_point=8)
    assert (again.log_end_offset, again.recovery and again.recovery.reason) == (10, "")
    for offset in range(6):
        read = fetch_bytes(again, offset, 1, Isolation.READ_UNCOMMITTED)
        assert parse_header(read.records).base_offset == offset // 2 * 2
    assert fetch_bytes(again, 8, 1, Isolation.READ_UNCOMMITTED).records


def test_index_of_a_damaged_segment_is_rebuilt_without_truncation(tmp_path: Path) -> None:
    """The segment itself is damaged. It is below the recovery point, or the shutdown was clean."""
    whole = segments(tmp_path / "whole")
    end = whole.log_end_offset
    whole.close()
    for clean in (True, False):
        root = tmp_path / str(clean)
        shutil.copytree(tmp_path / "whole", root)
        (root / "orders-0" / f"{9:020d}.index").unlink()
        damage(root / "orders-0" / f"{9:020d}.log", 500)
        # Damage the last batch of a segment as well: the next batch is in the next segment.
        damage(root / "orders-0" / f"{18:020d}.log", -1)
        again = open_partition(root, clean=clean, recovery_point=27)
        assert again.log_end_offset == end
        assert again.recovery is not None
        assert [stretch.offset for stretch in again.recovery.damaged] == [12, 26]
        assert not strays(root)
        assert fetch_bytes(again, 27, 1, Isolation.READ_UNCOMMITTED).records


def test_producer_state_is_rebuilt_across_a_damaged_batch(tmp_path: Path) -> None:
    """Without a segment's snapshot, recovery reads the previous segments."""
    whole = segments(tmp_path / "whole")
    root = crash_image(whole, tmp_path / "crash")
    for base in (9, 18, 27):
        (root / "orders-0" / f"{base:020d}.snapshot").unlink()
    # The damaged length of the segment's second batch hides all later headers.
    raw = bytearray((root / "orders-0" / f"{9:020d}.log").read_bytes())
    second = parse_header(raw).size
    raw[second + 9] ^= 0x40
    (root / "orders-0" / f"{9:020d}.log").write_bytes(raw)
    again = open_partition(root, clean=False, recovery_point=27)
    assert again.log_end_offset == whole.log_end_offset
    assert list(again.producers.view()) == list(whole.producers.view())
    assert again.recovery is not None
    assert [(stretch.offset, stretch.next_offset) for stretch in again.recovery.damaged] == [
        (12, 18)
    ]
    with pytest.raises(CorruptRecordError):
        fetch_all(again)


def test_retention_and_rolls_continue_after_a_damaged_batch(tmp_path: Path) -> None:
    """The damaged length of the first batch hides all other headers of the only segment."""
    small = config(segment_bytes=1000, retention_ms=10, file_delete_delay_ms=0)
    whole = open_partition(tmp_path, config=small)
    for _ in range(4):
        append(whole, 2)
    whole.close()
    raw = bytearray((tmp_path / LOG).read_bytes())
    raw[9] ^= 0x40
    (tmp_path / LOG).write_bytes(raw)
    again = open_partition(tmp_path, config=small, recovery_point=8, clean=False)
    assert again.log_end_offset == 8
    for _ in range(20):
        append(again, 2)
    assert retain(again, T0 + 1000) > 1
    assert again.log_start_offset == again.log_end_offset


def test_damage_without_valid_batches_after_it_truncates_the_log(tmp_path: Path) -> None:
    """The file is truncated below the checkpointed recovery point."""
    whole = open_partition(tmp_path / "whole")
    for _ in range(4):
        append(whole, 2)
    whole.flushes.run(T0)
    root = crash_image(whole, tmp_path / "crash")
    raw = (root / LOG).read_bytes()
    (root / LOG).write_bytes(raw[: len(raw) // 4 * 3 - 5])
    again = open_partition(root, clean=False, recovery_point=8)
    assert again.log_end_offset == 4
    report = again.recovery
    assert report is not None
    assert (report.lost_offsets, report.is_loss, report.valid_data_removed) == (4, True, False)


# --- holes ---------------------------------------------------------------------------------------


def with_holes(root: Path) -> Path:
    """Return a partition with a compacted segment and a later segment, both perhaps not on disk."""
    whole = open_partition(root)
    for _ in range(6):
        append(whole, 2)
    whole.flushes.roll(T0)
    append(whole, 2)
    whole.log.close()
    raw = (root / LOG).read_bytes()
    size = len(raw) // 6
    kept = (0, 2, 4, 5)
    (root / LOG).write_bytes(b"".join(raw[at * size : (at + 1) * size] for at in kept))
    return root


def test_compacted_segment_does_not_become_active_after_a_truncation(tmp_path: Path) -> None:
    """Recovery removes a damaged last batch and the next segment; appends begin a new segment."""
    root = with_holes(tmp_path / "a")
    damage(root / LOG, -1)
    partition = open_partition(root, clean=False)
    assert bases(partition) == [0, 4, 8]
    assert partition.log_end_offset == 10
    for _ in range(10):
        append(partition)
    again = open_partition(crash_image(partition, tmp_path / "b"), clean=False)
    assert again.log_end_offset == 20
    assert bases(again) == [0, 4, 8, *range(10, 20)]
    assert again.recovery is not None
    assert not again.recovery.reason


def test_compacted_segment_does_not_become_active_if_later_ones_overlap(tmp_path: Path) -> None:
    root = with_holes(tmp_path / "a")
    name = f"orders-0/{12:020d}"
    for suffix in (".log", ".index", ".timeindex", ".snapshot"):
        (root / f"{name}{suffix}").rename(root / f"orders-0/{11:020d}{suffix}")
    partition = open_partition(root, clean=False)
    assert [segment.base_offset for segment in partition.log.segments] == [0, 12]
    assert partition.recovery is not None
    assert "overlaps" in partition.recovery.reason
    append(partition)
    again = open_partition(crash_image(partition, tmp_path / "b"), clean=False)
    assert bases(again) == [0, 4, 8, 10, 12]


@pytest.mark.parametrize(
    ("known", "end"),
    [
        ({"recovery_point": 14}, 14),
        ({"compacted_below": 12}, 14),
        ({"is_replica": True}, 14),
        # The first hole ends at the recovery point; the second hole is above it.
        ({"recovery_point": 3}, 6),
        ({}, 2),
    ],
)
def test_offset_gap_in_the_active_segment_is_kept_below_a_known_offset(
    tmp_path: Path, known: dict[str, object], end: int
) -> None:
    """Older versions left compacted segments active, and Kafka's replicas fetch such batches."""
    root = with_holes(tmp_path)
    last = root / f"orders-0/{12:020d}.log"
    (root / LOG).write_bytes((root / LOG).read_bytes() + last.read_bytes())
    for path in (root / "orders-0").glob(f"{12:020d}.*"):
        path.unlink()
    partition = open_partition(root, clean=False, **known)
    assert partition.log_end_offset == end


def test_damaged_batch_before_a_gap_at_the_recovery_point_is_kept(tmp_path: Path) -> None:
    """The damaged batch's length leads to a batch above the recovery point, which is kept."""
    root = with_holes(tmp_path)
    damage(root / LOG, 22)
    partition = open_partition(root, clean=False, recovery_point=2)
    assert partition.log_end_offset == 14
    report = partition.recovery
    assert report is not None
    assert not report.reason
    assert [(stretch.offset, stretch.next_offset) for stretch in report.damaged] == [(0, 4)]


# --- copies of truncated data ---------------------------------------------------------------------


def test_truncated_batches_are_kept_as_stray_files(tmp_path: Path) -> None:
    root = crash_image(segments(tmp_path / "whole"), tmp_path / "crash")
    files = {base: (root / "orders-0" / f"{base:020d}.log") for base in (9, 18, 27)}
    damage(files[9], 500)
    before = {base: path.read_bytes() for base, path in files.items()}
    partition = open_partition(root, clean=False)
    assert partition.log_end_offset == 12
    at = files[9].stat().st_size
    assert strays(root) == {
        f"{12:020d}.log.1-stray": before[9][at:],
        f"{18:020d}.log.1-stray": before[18],
        f"{27:020d}.log.1-stray": before[27],
    }
    report = partition.recovery
    assert report is not None
    assert set(report.kept) == set(strays(root))
    assert report.truncated_bytes == sum(map(len, strays(root).values()))
    assert report.removed_records == 36 - 12
    # Another truncation takes the next number and does not overwrite an earlier copy.
    kept = strays(root)
    append(partition, 3)
    again_root = crash_image(partition, tmp_path / "again")
    damage(again_root / "orders-0" / f"{12:020d}.log", -1)
    again = open_partition(again_root, clean=False)
    assert again.log_end_offset == 12
    assert strays(again_root).keys() - kept.keys() == {f"{12:020d}.log.2-stray"}
    assert kept.items() <= strays(again_root).items()
    again.close()
    # The copies can be dumped like log files, but verification of the log ignores them.
    directory = str(again_root / "orders-0")
    dumped = dump_file(FS, directory, f"{18:020d}.log.1-stray", verify=True)
    assert [row["base_offset"] for row in dumped if row["kind"] == "batch"] == [18, 21, 24, 26]
    assert not list(verify_partition(FS, directory))
    # A restarted broker ignores the copies, and deleting the partition deletes them.
    last = open_partition(again_root)
    assert last.recovery is None
    delete(last)
    assert not list(again_root.iterdir())


def test_torn_tail_is_kept_as_a_stray_file_but_zeros_are_not(tmp_path: Path) -> None:
    whole = open_partition(tmp_path / "whole")
    append(whole)
    append(whole)
    root = crash_image(whole, tmp_path / "crash")
    raw = (root / LOG).read_bytes()
    for tail in (raw[:50], bytes(5000)):
        (root / LOG).write_bytes(raw + tail)
        partition = open_partition(root, clean=False)
        report = partition.recovery
        assert report is not None
        assert report.truncated_bytes == len(tail)
        assert not report.is_loss
        assert list(strays(root).values()) == ([] if not any(tail) else [tail])
        partition.log.close()
        for name in strays(root):
            (root / "orders-0" / name).unlink()


def test_recovery_without_space_for_stray_files_truncates_no_valid_batch(tmp_path: Path) -> None:
    disk = FaultyDisk()
    root = crash_image(segments(tmp_path / "whole"), tmp_path / "crash")
    torn = crash_image(segments(tmp_path / "whole-2"), tmp_path / "torn")
    damage(root / "orders-0" / f"{9:020d}.log", 500)
    damage(torn / "orders-0" / f"{27:020d}.log", -1)
    before = {path: path.read_bytes() for path in (root / "orders-0").glob("*.log")}

    def full(kind: str, path: str) -> None:
        if kind == "write" and "stray" in path:
            raise OSError(errno.ENOSPC, "No space left on device")

    disk.before = full
    with pytest.raises(StorageError, match="No space left"):
        open_partition(root, clean=False, fs=disk)
    assert {path: path.read_bytes() for path in (root / "orders-0").glob("*.log")} == before
    # An unacknowledged write needs no copy.
    partition = open_partition(torn, clean=False, fs=disk)
    assert partition.log_end_offset == 35
    assert not strays(torn)
    assert partition.recovery is not None
    assert partition.recovery.kept == []
    partition.log.close()
    assert open_partition(root, clean=False).log_end_offset == 12
    assert not disk.open_paths


def test_recovery_without_keeps_removed_writes_no_stray_files(tmp_path: Path) -> None:
    root = crash_image(segments(tmp_path / "whole"), tmp_path / "crash")
    damage(root / "orders-0" / f"{9:020d}.log", 500)
    partition = open_partition(root, clean=False, keeps_removed=False)
    assert partition.log_end_offset == 12
    assert not strays(root)


def broken_after_compaction(root: Path) -> Path:
    with_holes(root)
    damage(root / LOG, -1)
    return root


def broken_in_the_middle(root: Path) -> Path:
    crash_image(segments(root / "whole"), root)
    damage(root / "orders-0" / f"{9:020d}.log", 500)
    return root


@pytest.mark.parametrize("build", [broken_after_compaction, broken_in_the_middle])
def test_kill_at_any_step_of_recovery_loses_nothing(
    tmp_path: Path, build: Callable[[Path], Path]
) -> None:
    """The log and the copies lose no data, and a compacted segment never becomes active."""
    source = build(tmp_path / "source")
    shutil.copytree(source / "orders-0", tmp_path / "straight" / "orders-0")
    straight = open_partition(tmp_path / "straight", clean=False)
    expected, kept = state_of(straight), set(strays(tmp_path / "straight").values())
    for steps in range(200):
        root = tmp_path / f"again-{steps}"
        shutil.copytree(source / "orders-0", root / "orders-0")
        try:
            open_partition(root, clean=False, fs=MortalDisk(steps, torn=True, kinds=CHANGES))
        except Killed:
            partition = open_partition(root, clean=False)
            assert state_of(partition) == expected, steps
            assert kept <= set(strays(root).values()), steps
            append(partition)
            end = partition.log_end_offset
            third = open_partition(crash_image(partition, tmp_path / f"third-{steps}"), clean=False)
            assert third.log_end_offset == end, steps
        else:
            break
        shutil.rmtree(root)
    assert steps > 10
