"""Recovery from the states that a crash may leave."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from fencepost.logcore.batch import LogRecord, encode_batch, iter_headers
from fencepost.logcore.compression import Codec
from fencepost.logcore.machine import ProducerStamp, Record
from fencepost.logcore.partition import Partition
from fencepost.logcore.reading import Isolation
from tests.support.faults import CHANGES, Killed, MortalDisk
from tests.support.partitions import fetch_bytes, retain
from tests.unit.logcore.partition_driver import (
    T0,
    append,
    config,
    crash_image,
    fetch_all,
    marker,
    open_partition,
    read_log,
    state_of,
)

LOG = f"orders-0/{0:020d}.log"


def last_batches(partition: Partition) -> None:
    """Append some batches, then plain, compressed and transactional batches and both markers."""
    append(partition, 3)
    append(partition, producer_id=9, transactional=True)
    append(partition, 2)
    append(partition, 2, producer_id=5, sequence=0)
    for codec in Codec:
        append(partition, 4, size=30, codec=codec)
    append(partition, 2, producer_id=7, sequence=0, transactional=True, codec=Codec.ZSTD)
    append(partition, producer_id=8, sequence=0, transactional=True)
    marker(partition, 7, commit=True)
    marker(partition, 8, commit=False)
    partition.append_records([Record(b"k", b"v")], now_ms=T0, producer=ProducerStamp(7, 1))


def states_after_each_batch(build: Callable[[Partition], None], root: Path) -> dict[int, object]:
    """Return log size → the state after each batch, by replaying one batch at a time."""
    whole = open_partition(root / "whole")
    build(whole)
    raw = (root / "whole" / LOG).read_bytes()
    states: dict[int, object] = {}
    for size in [0, *(position + header.size for position, header in iter_headers(raw))]:
        copy = crash_image(whole, root / f"prefix-{size}")
        (copy / LOG).write_bytes(raw[:size])
        partition = open_partition(copy, clean=False)
        states[size] = state_of(partition)
        partition.log.close()
    whole.close()
    return states


@pytest.mark.slow
def test_log_cut_at_any_byte_recovers_all_batches_before_it(tmp_path: Path) -> None:
    states = states_after_each_batch(last_batches, tmp_path)
    raw = (tmp_path / "whole" / LOG).read_bytes()
    root = tmp_path / "cut"
    for size in range(len(raw) + 1):
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(tmp_path / "whole", root)
        # The index, epochs and snapshot of the whole log still exist.
        (root / LOG).write_bytes(raw[:size])
        partition = open_partition(root, clean=False)
        kept = max(state for state in states if state <= size)
        assert state_of(partition) == states[kept], size
        assert (root / LOG).stat().st_size == kept
        report = partition.recovery
        assert report is not None
        assert (report.truncated_bytes, report.removed_segments) == (size - kept, 0)
        assert not report.valid_data_removed
        if kept != len(raw):
            assert append(partition).base_offset == partition.log_end_offset - 1
        partition.log.close()


def test_every_flipped_byte_of_the_last_batch_truncates_it(tmp_path: Path) -> None:
    whole = open_partition(tmp_path / "whole")
    last_batches(whole)
    whole.close()
    raw = (tmp_path / "whole" / LOG).read_bytes()
    *_, (start, _) = iter_headers(raw)
    root = tmp_path / "flipped"
    shutil.copytree(tmp_path / "whole", root)
    for position in range(start, len(raw)):
        for mask in (0x01, 0x80, 0xFF):
            damaged = bytearray(raw)
            damaged[position] ^= mask
            (root / LOG).write_bytes(damaged)
            partition = open_partition(root, clean=False)
            assert (root / LOG).read_bytes() == raw[:start], (position, mask)
            assert fetch_all(partition) == raw[:start]
            partition.log.close()


def test_flipped_byte_in_an_earlier_batch_truncates_there_and_is_reported(tmp_path: Path) -> None:
    whole = open_partition(tmp_path / "whole")
    last_batches(whole)
    whole.log.close()
    raw = (tmp_path / "whole" / LOG).read_bytes()
    starts = [position for position, _ in iter_headers(raw)]
    for index, start in enumerate(starts[:-1]):
        root = tmp_path / f"flip-{index}"
        shutil.copytree(tmp_path / "whole", root)
        damaged = bytearray(raw)
        damaged[start + 61] ^= 0x10
        (root / LOG).write_bytes(damaged)
        partition = open_partition(root, clean=False)
        assert (root / LOG).read_bytes() == raw[:start]
        assert partition.recovery is not None
        assert partition.recovery.valid_data_removed
        assert "CRC" in partition.recovery.reason
        partition.log.close()


# --- several segments ---


def segments(root: Path, count: int = 4) -> Partition:
    partition = open_partition(root, config=config(index_interval_bytes=100))
    for at in range(count):
        if at:
            partition.flushes.roll(T0)
        append(partition, 3, producer_id=1, sequence=6 * at, size=90)
        append(partition, 3, producer_id=1, sequence=6 * at + 3, size=90)
        append(partition, 2, producer_id=2, sequence=2 * at, transactional=True)
        marker(partition, 2, commit=at % 2 == 0)
    return partition


def damage(path: Path, position: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[position] ^= 0x01
    path.write_bytes(raw)


def test_corrupt_batch_removes_the_later_segments(tmp_path: Path) -> None:
    root = crash_image(segments(tmp_path / "whole"), tmp_path / "crash")
    damage(root / "orders-0" / f"{9:020d}.log", 500)
    partition = open_partition(root, clean=False)
    assert partition.log_end_offset == 12
    # The truncated segment may have been compacted, so a new segment becomes active.
    assert [segment.base_offset for segment in partition.log.segments] == [0, 9, 12]
    report = partition.recovery
    assert report is not None
    assert (report.scanned_segments, report.removed_segments) == (2, 2)
    assert report.valid_data_removed
    names = {
        int(path.stem) for path in (root / "orders-0").glob("0*[a-z]") if "stray" not in path.name
    }
    assert names == {0, 9, 12}
    # The producer state corresponds to the remaining records.
    assert append(partition, producer_id=1, sequence=9).base_offset == 12


def test_segments_below_the_recovery_point_are_not_scanned(tmp_path: Path) -> None:
    whole = segments(tmp_path / "whole")
    before = state_of(whole)
    root = crash_image(whole, tmp_path / "crash")
    damage(root / "orders-0" / f"{0:020d}.log", 300)
    partition = open_partition(root, clean=False, recovery_point=9)
    assert partition.recovery is not None
    assert partition.recovery.scanned_segments == 3
    assert partition.log_end_offset == 36
    partition.log.close()
    # The active segment is scanned even if the recovery point is above it.
    last = open_partition(root, clean=False, recovery_point=1000)
    assert last.recovery is not None
    assert last.recovery.scanned_segments == 1
    assert sorted(last.producers.view()) == sorted(before[5 - 1])


def test_clean_open_scans_nothing_and_unclean_open_recovers_the_same_state(tmp_path: Path) -> None:
    whole = segments(tmp_path / "whole")
    before = state_of(whole)
    crashed = crash_image(whole, tmp_path / "crash")
    whole.close()
    clean = open_partition(tmp_path / "whole")
    unclean = open_partition(crashed, clean=False)
    assert clean.recovery is None
    assert state_of(clean) == state_of(unclean) == before


def test_rebuilt_indexes_equal_those_that_were_written(tmp_path: Path) -> None:
    whole = segments(tmp_path / "whole")
    whole.close()
    root = tmp_path / "copy"
    shutil.copytree(tmp_path / "whole", root)
    directory = root / "orders-0"
    expected = {
        path.name: path.read_bytes()
        for path in directory.iterdir()
        if path.suffix in {".index", ".timeindex", ".txnindex", ".snapshot"}
    }
    assert sum(name.endswith(".txnindex") for name in expected) == 2
    assert all(data for name, data in expected.items() if name.endswith(".index"))
    for name in expected:
        (directory / name).unlink()
    again = open_partition(root, clean=False, config=config(index_interval_bytes=100))
    again.close()
    assert {name: (directory / name).read_bytes() for name in expected} == expected


def test_snapshots_beyond_the_log_end_are_discarded(tmp_path: Path) -> None:
    partition = open_partition(tmp_path)
    append(partition, producer_id=1, sequence=0)
    append(partition, producer_id=1, sequence=1)
    partition.close()
    raw = (tmp_path / LOG).read_bytes()
    (tmp_path / LOG).write_bytes(raw[: len(raw) // 2])
    again = open_partition(tmp_path, clean=False, high_watermark=2)
    assert next(again.producers.view()).last_sequence == 0
    assert not list((tmp_path / "orders-0").glob("*.snapshot"))
    # The checkpointed high watermark shows that acknowledged records are lost.
    assert again.recovery is not None
    assert again.recovery.lost_offsets == 1
    assert again.high_watermark == 1


# --- unexpected files ---


def test_index_without_a_log_is_removed(tmp_path: Path) -> None:
    segments(tmp_path).close()
    directory = tmp_path / "orders-0"
    for suffix in (".index", ".timeindex", ".txnindex"):
        (directory / f"{99:020d}{suffix}").write_bytes(b"")
    open_partition(tmp_path)
    assert not list(directory.glob(f"{99:020d}.*"))


def test_missing_index_or_corrupt_transaction_index_is_rebuilt_even_if_clean(
    tmp_path: Path,
) -> None:
    whole = segments(tmp_path)
    before = state_of(whole)
    whole.close()
    directory = tmp_path / "orders-0"
    (directory / f"{18:020d}.index").unlink()
    again = open_partition(tmp_path)
    assert again.recovery is not None
    assert again.recovery.scanned_segments == 2
    assert state_of(again) == before
    again.close()
    path = directory / f"{9:020d}.txnindex"
    path.write_bytes(path.read_bytes()[:-3])
    again = open_partition(tmp_path)
    assert again.recovery is not None
    assert again.recovery.scanned_segments == 3
    assert state_of(again) == before


def test_torn_tail_is_truncated_even_after_a_clean_shutdown(tmp_path: Path) -> None:
    partition = open_partition(tmp_path)
    append(partition)
    append(partition)
    partition.close()
    raw = (tmp_path / LOG).read_bytes()
    (tmp_path / LOG).write_bytes(raw[:-1])
    again = open_partition(tmp_path)
    assert again.log_end_offset == 1
    assert fetch_all(again) == raw[: len(raw) // 2]


def test_leftover_deleted_cleaned_and_swap_files_are_removed(tmp_path: Path) -> None:
    segments(tmp_path).close()
    directory = tmp_path / "orders-0"
    names = [
        f"{0:020d}.log.deleted",
        f"{5:020d}.log.cleaned",
        f"{5:020d}.index.cleaned",
        f"{5:020d}.log.swap",  # at or after a .cleaned file, whose compaction was not complete
        "leader-epoch-checkpoint.tmp",
    ]
    for name in names:
        (directory / name).write_bytes(b"rubbish")
    before = state_of(open_partition(tmp_path))
    assert not [name for name in names if (directory / name).exists()]
    assert before[1] == 36


def test_finished_compaction_is_rolled_forward(tmp_path: Path) -> None:
    whole = segments(tmp_path)
    whole.close()
    directory = tmp_path / "orders-0"
    # One segment that replaces the first two segments, with a hole instead of removed batches.
    kept = [
        (base, data) for base, data in read_log(open_partition(tmp_path)) if base in {3, 12, 17}
    ]
    (directory / f"{0:020d}.log.swap").write_bytes(b"".join(data for _, data in kept))
    for suffix in (".index", ".timeindex"):
        (directory / f"{0:020d}{suffix}.swap").write_bytes(b"")
    again = open_partition(tmp_path)
    assert [segment.base_offset for segment in again.log.segments] == [0, 18, 27]
    assert [base for base, _ in read_log(again)][:4] == [3, 12, 17, 18]
    again.close()
    unclean = open_partition(tmp_path, clean=False)
    assert [base for base, _ in read_log(unclean)][:4] == [3, 12, 17, 18]
    fetched = fetch_bytes(unclean, 6, 1, Isolation.READ_UNCOMMITTED)
    assert fetched.records == kept[1][1]


def test_log_start_beyond_the_log_end_restarts_the_log_there(tmp_path: Path) -> None:
    whole = segments(tmp_path)
    count = sum(header.record_count for header, _ in whole.reader.read_all())
    whole.close()
    again = open_partition(tmp_path, log_start_offset=50)
    assert (again.log_start_offset, again.log_end_offset, again.log.size_bytes) == (50, 50, 0)
    # A request deleted the records, so they are neither kept nor reported as lost.
    report = again.recovery
    assert report is not None
    assert (report.removed_records, report.kept, report.is_loss) == (count, [], False)
    assert list(again.producers.view()) == []
    assert append(again).base_offset == 50
    again.close()
    assert open_partition(tmp_path, clean=False, log_start_offset=50).log_end_offset == 51


def test_offset_gap_in_the_active_segment_truncates_the_log(tmp_path: Path) -> None:
    partition = open_partition(tmp_path)
    for _ in range(3):
        append(partition)
    partition.close()
    raw = (tmp_path / LOG).read_bytes()
    third = len(raw) // 3
    (tmp_path / LOG).write_bytes(raw[:third] + raw[2 * third :])
    assert open_partition(tmp_path, clean=False).log_end_offset == 1


def test_leader_epochs_are_rebuilt_from_the_batches(tmp_path: Path) -> None:
    partition = open_partition(tmp_path)
    append(partition)
    partition.marks.leader_epoch = 4
    append(partition)
    partition.flushes.run(T0)
    root = crash_image(partition, tmp_path / "crash")
    for text in (None, "rubbish"):
        path = root / "orders-0" / "leader-epoch-checkpoint"
        path.unlink()
        if text is not None:
            path.write_text(text)
        again = open_partition(root, clean=False)
        assert again._epochs.entries == [(0, 0), (4, 1)]
        # The leader epoch is not below the last epoch in the log.
        assert again.marks.leader_epoch == 4
        again.close()


@pytest.mark.parametrize(("leader_epoch", "end"), [(-1, 2), (4, 2), (3, 1)])
def test_batch_of_epoch_missing_in_checkpoint_stays_unless_epoch_is_impossible(
    tmp_path: Path, leader_epoch: int, end: int
) -> None:
    """With ZooKeeper, a broker opens its logs before it knows the leader epochs (-1)."""
    partition = open_partition(tmp_path)
    append(partition)
    partition.marks.leader_epoch = 4
    append(partition)
    partition.flushes.run(T0)
    root = crash_image(partition, tmp_path / "crash")
    (root / "orders-0" / "leader-epoch-checkpoint").write_text("0\n1\n0 0\n")
    again = open_partition(root, clean=False, leader_epoch=leader_epoch)
    assert again.log_end_offset == end
    again.close()


# --- a kill at every step ---


def workload(partition: Partition, acknowledged: list[tuple[int, bytes]]) -> None:
    """Append data and transactions, roll, retain; record each acknowledgement at once."""

    def note(base: int) -> None:
        acknowledged.append((base, b""))

    for at in range(4):
        note(append(partition, 2, producer_id=1, sequence=2 * at, size=60).base_offset)
        note(append(partition, producer_id=2, sequence=at, transactional=True).base_offset)
        note(marker(partition, 2, commit=at % 2 == 0).base_offset)
        if at == 2:
            partition.cleanup.delete_records_before(4)
            retain(partition, T0)
    partition.close()


def run_until_killed(root: Path, steps: int, *, half_write: bool) -> list[tuple[int, bytes]] | None:
    """Return the acknowledged base offsets, or None if the workload completed."""
    acknowledged: list[tuple[int, bytes]] = []
    fs = MortalDisk(steps, torn=half_write, kinds=CHANGES)
    settings = config(segment_bytes=500, index_interval_bytes=50, file_delete_delay_ms=0)
    try:
        workload(open_partition(root, fs=fs, config=settings), acknowledged)
    except Killed:
        return acknowledged
    return None


@pytest.mark.parametrize("half_write", [False, True])
def test_kill_before_any_step_loses_no_acknowledged_batch(tmp_path: Path, half_write: bool) -> None:
    steps = 0
    while True:
        root = tmp_path / str(steps)
        acknowledged = run_until_killed(root, steps, half_write=half_write)
        if acknowledged is None:
            break
        partition = open_partition(root, clean=False)
        offsets = [base for base, _ in read_log(partition)]
        wanted = [base for base, _ in acknowledged if base >= partition.log_start_offset]
        # The log has every acknowledged append, and at most the append in progress.
        assert offsets[: len(wanted)] == wanted, steps
        assert len(offsets) <= len(wanted) + 1
        assert partition.log_start_offset <= 4
        recovered = state_of(partition)
        assert append(partition, producer_id=3).base_offset == recovered[1]
        partition.log.close()
        shutil.rmtree(root)
        steps += 1
    assert steps > 60


def test_kill_during_recovery_does_not_change_its_result(tmp_path: Path) -> None:
    whole = crash_image(segments(tmp_path / "whole"), tmp_path / "crash")
    damage(whole / "orders-0" / f"{9:020d}.log", 500)
    shutil.copytree(whole, tmp_path / "straight")
    expected = state_of(open_partition(tmp_path / "straight", clean=False))
    for steps in range(200):
        root = tmp_path / f"again-{steps}"
        shutil.copytree(whole, root)
        try:
            open_partition(root, clean=False, fs=MortalDisk(steps, torn=True, kinds=CHANGES))
        except Killed:
            assert state_of(open_partition(root, clean=False)) == expected, steps
        else:
            break
        shutil.rmtree(root)
    assert steps > 10


def test_empty_and_unknown_control_batches_are_recovered(tmp_path: Path) -> None:
    """Only compaction or KRaft writes such batches, which have no records or an unknown type."""
    open_partition(tmp_path).close()
    empty = encode_batch(
        [], base_offset=0, last_offset_delta=4, producer_id=3, producer_epoch=1, base_sequence=0
    )
    marker_gone = encode_batch(
        [],
        base_offset=5,
        last_offset_delta=0,
        producer_id=3,
        producer_epoch=1,
        transactional=True,
        control=True,
    )
    key = struct.pack(">hh", 0, 2)
    leader_change = encode_batch([LogRecord(6, T0, key, b"\x00\x00")], control=True)
    (tmp_path / LOG).write_bytes(empty + marker_gone + leader_change)
    partition = open_partition(tmp_path, clean=False)
    assert partition.log_end_offset == 7
    state = next(partition.producers.view())
    assert (state.producer_epoch, state.last_sequence) == (1, 4)
