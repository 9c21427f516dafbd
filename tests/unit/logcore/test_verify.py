"""Checks a directory's consistency, repairs it from its log, or truncates the log reversibly."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fencepost.logcore.checkpoints import (
    COPY_SUFFIX,
    LOG_START_CHECKPOINT,
    RECOVERY_POINT_CHECKPOINT,
    read_offsets,
    write_epochs,
    write_offsets,
)
from fencepost.logcore.config import LogConfig
from fencepost.logcore.errors import CorruptRecordError, OffsetOutOfRangeError
from fencepost.logcore.fs import OsFileSystem
from fencepost.logcore.repair import plan_truncation, rebuild_indexes, stale_indexes, truncate
from fencepost.logcore.verify import verify_data_directory, verify_partition
from tests.support.clock import ManualClock
from tests.unit.logcore.compaction_driver import (
    COMPACTED,
    commit_offsets,
    compact,
    end,
    fill_active,
    put,
)
from tests.unit.logcore.partition_driver import (
    CONFIG,
    T0,
    append,
    crash_image,
    marker,
    open_partition,
    read_log,
)

FS = OsFileSystem()
SMALL = LogConfig(**{**CONFIG.__dict__, "segment_bytes": 2_000, "index_interval_bytes": 300})
CLOCK = ManualClock(T0)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return a closed partition with segments, producers and transactions of every state."""
    partition = open_partition(tmp_path, config=SMALL)
    for turn in range(20):
        append(partition, 2, size=60, producer_id=7, sequence=2 * turn, timestamp_ms=T0 + turn)
        append(partition, 1, size=60, producer_id=8, sequence=turn, transactional=True)
        if turn % 4 == 3:
            marker(partition, 8, commit=turn % 8 == 3)
    append(partition, 1, producer_id=9, transactional=True)
    partition.close()
    return tmp_path / "orders-0"


def problems(directory: Path) -> list[tuple[str, str]]:
    rows = verify_partition(FS, str(directory))
    return [(Path(str(row["file"])).name, str(row["problem"])) for row in rows]


def files(directory: Path, suffix: str) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.name.endswith(suffix))


def test_verification_of_a_closed_or_killed_directory_finds_no_problem(
    directory: Path, tmp_path: Path
) -> None:
    assert len(files(directory, ".log")) > 3
    assert problems(directory) == []
    reopened = open_partition(tmp_path, config=SMALL)
    killed = crash_image(reopened, tmp_path / "killed")
    assert problems(killed / "orders-0") == []
    before = {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}
    assert problems(directory) == []
    assert {path.name: path.stat().st_mtime_ns for path in directory.iterdir()} == before


def test_verification_of_a_compacted_directory_finds_no_problem(tmp_path: Path) -> None:
    partition = open_partition(tmp_path, config=COMPACTED)
    for turn in range(30):
        put(partition, [(b"k%d" % (turn % 3), b"v" * 90)], producer_id=4)
        if turn % 5 == 0:
            commit_offsets(partition, 5, [(b"t", b"%d" % turn)])
            end(partition, 5, commit=turn % 2 == 0)
    fill_active(partition)
    assert compact(partition) is not None
    partition.close()
    assert problems(tmp_path / "orders-0") == []


def test_verification_names_each_damaged_file(directory: Path) -> None:
    def damaged(name: str, position: int) -> list[tuple[str, str]]:
        path = directory / name
        raw = path.read_bytes()
        path.write_bytes(raw[:position] + bytes([raw[position] ^ 0x41]) + raw[position + 1 :])
        found = problems(directory)
        path.write_bytes(raw)
        return found

    second = files(directory, ".log")[1].name
    for suffix, position in ((".log", 100), (".index", 6), (".timeindex", 5), (".txnindex", 12)):
        name = files(directory, suffix)[-2 if suffix != ".txnindex" else 0].name
        found = damaged(name, position)
        assert name in {file for file, _ in found}, (name, found)
    snapshot = files(directory, ".snapshot")[0].name
    assert damaged(snapshot, 20)[0][0] == snapshot
    assert damaged(second, 8)
    assert problems(directory) == []


def test_verification_names_missing_and_unknown_files(directory: Path) -> None:
    index, aborted = files(directory, ".index")[0], files(directory, ".txnindex")[0]
    index.unlink()
    aborted.unlink()
    found = problems(directory)
    assert (index.name, "the index is missing") in found
    assert any(name == aborted.name and "missing" in text for name, text in found)
    write_epochs(FS, str(directory), [])
    (directory / "notes.txt").write_text("mine")
    found = problems(directory)
    assert any("epoch 0" in text for _, text in found)
    assert ("notes.txt", "not a log file") in found


def test_files_that_the_next_start_removes_are_not_checked(directory: Path) -> None:
    (log, *_) = files(directory, ".log")
    for name in ("leader-epoch-checkpoint.tmp", f"{log.name}.cleaned", f"{log.name}.deleted"):
        (directory / name).write_bytes(b"half of it")
    assert problems(directory) == []


def test_epochs_below_the_log_start_are_not_reported_as_missing(tmp_path: Path) -> None:
    """The log starts in the first segment, which still has batches of earlier epochs."""
    for epoch in (0, 1, 2):
        partition = open_partition(tmp_path, leader_epoch=epoch)
        append(partition, 4)
        if epoch < 2:
            partition.close()
    partition.cleanup.delete_records_before(6)
    partition.close()
    directory = tmp_path / "orders-0"
    assert (directory / "leader-epoch-checkpoint").read_text() == "0\n2\n1 6\n2 8\n"
    assert {text for _, text in problems(directory)} == {
        "epoch 0, from offset 0 on, is missing",
        "epoch 1 begins at 6, the log has it at 4",
    }
    write_offsets(FS, str(tmp_path), LOG_START_CHECKPOINT, {("orders", 0): 6})
    assert problems(directory) == []
    write_epochs(FS, str(directory), [(2, 8)])
    assert problems(directory) == [
        ("leader-epoch-checkpoint", "epoch 1, from offset 6 on, is missing")
    ]


def test_snapshot_with_other_producers_is_reported(directory: Path) -> None:
    first, *_, last = files(directory, ".snapshot")
    last.write_bytes(first.read_bytes())
    texts = [text for name, text in problems(directory) if name == last.name]
    assert any("producer 7 is at sequence" in text for text in texts)
    assert any("producer 9 with a transaction" in text for text in texts)
    beyond = directory / f"{10**6:020d}.snapshot"
    shutil.copy(first, beyond)
    assert any(name == beyond.name and "ends" in text for name, text in problems(directory))


def test_overlapping_segments_are_reported(directory: Path) -> None:
    first, second, *_ = files(directory, ".log")
    with first.open("ab") as log:
        log.write(second.read_bytes())
    assert any("segment before" in text for _, text in problems(directory))


def test_checkpoint_beyond_the_log_end_is_reported(directory: Path) -> None:
    root = str(directory.parent)
    write_offsets(FS, root, RECOVERY_POINT_CHECKPOINT, {("orders", 0): 66, ("gone", 3): 9})
    assert list(verify_data_directory(FS, root)) == []
    write_offsets(FS, root, RECOVERY_POINT_CHECKPOINT, {("orders", 0): 67})
    (found,) = verify_data_directory(FS, root)
    assert "orders-0 at offset 67, its log ends at 66" in str(found["problem"])
    (directory.parent / RECOVERY_POINT_CHECKPOINT).write_text("0\nmany\n")
    assert [row["kind"] for row in verify_data_directory(FS, root)] == ["problem"]


def test_stale_indexes_are_rebuilt_unless_the_log_is_corrupt(directory: Path) -> None:
    was = {path.name: path.read_bytes() for path in directory.iterdir()}
    for file in files(directory, ".index")[:2] + files(directory, ".txnindex")[:1]:
        file.unlink()
    time_index = files(directory, ".timeindex")[0]
    time_index.write_bytes(b"\1" * len(time_index.read_bytes()))
    assert len(stale_indexes(FS, str(directory))) >= 4
    rebuild_indexes(FS, str(directory), SMALL, CLOCK)
    assert stale_indexes(FS, str(directory)) == []
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == was
    log = files(directory, ".log")[0]
    raw = bytearray(log.read_bytes())
    raw[100] ^= 1
    log.write_bytes(raw)
    with pytest.raises(CorruptRecordError, match="truncate"):
        rebuild_indexes(FS, str(directory), SMALL, CLOCK)
    assert log.read_bytes() == raw


def test_truncated_log_is_restored_from_its_copies(directory: Path, tmp_path: Path) -> None:
    was = {path.name: path.read_bytes() for path in directory.iterdir()}
    write_offsets(FS, str(tmp_path), RECOVERY_POINT_CHECKPOINT, {("orders", 0): 66})
    planned = plan_truncation(FS, str(directory), 30)
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == was
    undo = tmp_path.with_name("undo") / "orders-0.1"
    cut = truncate(FS, str(directory), 30, str(undo), SMALL, CLOCK)
    assert cut == planned
    assert cut.first_offset <= 30 < cut.first_offset + 3
    assert cut.log_end_offset == 66
    assert problems(directory) == []
    assert read_offsets(FS, str(tmp_path), RECOVERY_POINT_CHECKPOINT) == {
        ("orders", 0): cut.first_offset
    }
    partition = open_partition(tmp_path, config=SMALL)
    assert partition.log_end_offset == cut.first_offset
    assert read_log(partition)[-1][0] < cut.first_offset
    partition.close()
    # To undo the truncation, remove all files from the first copied segment and restore the copies.
    first = min(path.name for path in undo.iterdir())
    for path in directory.iterdir():
        if path.name[:20].isdecimal() and path.name >= first[:20]:
            path.unlink()
    for path in undo.iterdir():
        shutil.copy(path, directory)
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == was


@pytest.mark.parametrize("offset", [66, 1000])
def test_truncation_beyond_the_log_end_is_refused(directory: Path, offset: int) -> None:
    with pytest.raises(OffsetOutOfRangeError, match="from 0 to 65"):
        plan_truncation(FS, str(directory), offset)


def test_truncation_above_a_damaged_batch_is_refused(directory: Path) -> None:
    log = files(directory, ".log")[0]
    raw = bytearray(log.read_bytes())
    raw[100] ^= 1
    log.write_bytes(raw)
    with pytest.raises(CorruptRecordError):
        plan_truncation(FS, str(directory), 60)
    assert plan_truncation(FS, str(directory), 0).first_offset == 0


def test_checkpoint_that_differs_from_its_copy_is_reported(tmp_path: Path) -> None:
    offsets = {("orders", 0): 5}
    write_offsets(FS, str(tmp_path), LOG_START_CHECKPOINT, offsets, copied=True)
    assert not list(verify_data_directory(FS, str(tmp_path)))
    for name, said in (
        (LOG_START_CHECKPOINT, "its copy is taken"),
        (LOG_START_CHECKPOINT + COPY_SUFFIX, "does not match its checksum"),
    ):
        path = tmp_path / name
        sound = path.read_bytes()
        path.write_bytes(sound.replace(b"orders 0 5", b"orders 0 7"))
        (found,) = verify_data_directory(FS, str(tmp_path))
        assert found["file"] == str(path)
        assert said in str(found["problem"])
        path.write_bytes(sound)
