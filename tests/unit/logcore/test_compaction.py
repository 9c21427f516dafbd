"""Compaction on real files: cleanable ranges, kept records, choice of logs, failures."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from fencepost.logcore.cleaner_choice import CleanerChoice
from fencepost.logcore.compaction import CleanerThrottle, CompactionCancelled
from fencepost.logcore.compression import Codec
from fencepost.logcore.errors import CorruptRecordError, InvalidRecordError
from fencepost.logcore.partition import Partition
from fencepost.logcore.reading import Isolation
from fencepost.logcore.record_retention import BYTES_PER_KEY
from tests.support.clock import ManualClock
from tests.support.faults import MortalDisk
from tests.support.partitions import fetch_bytes, retain
from tests.unit.logcore.compaction_driver import (
    COMPACTED,
    commit_offsets,
    committed,
    compact,
    end,
    essence,
    fill_active,
    last_values,
    names,
    put,
    small,
)
from tests.unit.logcore.partition_driver import T0, marker, open_partition

DAY = 86_400_000


def opened(root: Path, **changes: object) -> Partition:
    return open_partition(root, config=small(**changes), fs=MortalDisk())


def bases(partition: Partition) -> list[int]:
    return [segment.base_offset for segment in partition.log.segments]


def updates(partition: Partition, count: int = 12, key: bytes = b"k") -> None:
    for turn in range(count):
        put(partition, [(key, b"%03d" % turn + b"." * 100)])


def test_compaction_keeps_the_last_value_of_each_key(tmp_path: Path) -> None:
    partition = opened(tmp_path)
    put(partition, [(b"once", b"1")])
    updates(partition)
    fill_active(partition)
    before, size = essence(partition), partition.log.size_bytes
    end_offset = bases(partition)[-1]
    assert compact(partition) == end_offset
    assert essence(partition) == before
    assert partition.log.size_bytes < size / 2
    cleaned = [offset for offset in committed(partition) if offset < end_offset]
    assert cleaned == sorted({0, 12, end_offset - 1})
    # A round groups segments by their sizes before the round, so the next round merges more.
    assert compact(partition, 0) == end_offset
    assert bases(partition) == [0, end_offset]
    assert essence(partition) == before
    assert not [
        name for name in names(partition.log.directory) if "swap" in name or "cleaned" in name
    ]
    # There are no dirty records now. A round without superseded records writes nothing.
    assert compact(partition, end_offset) is None
    fill_active(partition)
    assert compact(partition, end_offset) == bases(partition)[-1]
    partition.close()
    again = open_partition(tmp_path, config=COMPACTED)
    assert last_values(committed(again)).keys() == {b"once", b"k", b"filler"}


def test_compaction_skips_segments_without_superseded_records(tmp_path: Path) -> None:
    partition = opened(tmp_path, segment_bytes=500)
    for turn in itertools.count():
        put(partition, [(b"%d" % turn, b"." * 150)])
        if len(bases(partition)) == 4:
            break
    before = partition.log.segments
    assert compact(partition) == bases(partition)[-1]
    assert partition.log.segments == before


def test_small_segments_are_merged_and_their_snapshots_removed(tmp_path: Path) -> None:
    partition = opened(tmp_path)
    for turn in range(30):
        put(partition, [(b"k%d" % (turn % 4), b"v" * 100)], producer_id=5)
    fill_active(partition)
    before = essence(partition)
    offsets = set(partition.producers.snapshot_offsets)
    compact(partition)
    assert essence(partition) == before
    kept = set(bases(partition))
    assert partition.producers.snapshot_offsets == offsets & kept
    files = {
        int(name[:20]) for name in names(partition.log.directory) if name.endswith(".snapshot")
    }
    assert files == offsets & kept


def test_open_transaction_bounds_the_dirty_range(tmp_path: Path) -> None:
    partition = opened(tmp_path)
    updates(partition, 8)
    first = partition.log_end_offset
    commit_offsets(partition, 1, [(b"k", b"open")])
    updates(partition, 12)
    dirty = partition.cleanup.dirty_range(None, T0)
    assert dirty.end_offset == max(base for base in bases(partition) if base <= first)
    marker(partition, 1, commit=True)
    fill_active(partition)
    assert partition.cleanup.dirty_range(None, T0).end_offset == bases(partition)[-1]


def test_segments_within_the_min_compaction_lag_are_not_cleaned(tmp_path: Path) -> None:
    partition = opened(tmp_path, min_compaction_lag_ms=1_000)
    updates(partition, 8)
    young = partition.log_end_offset
    put(partition, [(b"k", b"young" * 30)], now_ms=T0 + 500)
    fill_active(partition)
    dirty = partition.cleanup.dirty_range(None, T0 + 1_200)
    assert dirty.end_offset == max(base for base in bases(partition) if base <= young)
    assert partition.cleanup.dirty_range(None, T0 + 2_000).end_offset == bases(partition)[-1]


def test_cleaner_checkpoint_outside_of_the_log_is_ignored(tmp_path: Path) -> None:
    partition = opened(tmp_path)
    updates(partition)
    for checkpoint in (None, -5, 10_000):
        assert partition.cleanup.dirty_range(checkpoint, T0).first_dirty_offset == 0
    partition.cleanup.delete_records_before(3)
    assert partition.cleanup.dirty_range(2, T0).first_dirty_offset == 3
    assert partition.cleanup.dirty_range(5, T0).first_dirty_offset == 5


def test_offset_map_that_is_too_small_needs_several_rounds(tmp_path: Path) -> None:
    partition = opened(tmp_path)
    for turn in range(40):
        put(partition, [(b"k%d" % (turn % 10), b"%d" % turn * 20)])
    fill_active(partition)
    before = essence(partition)
    checkpoint, rounds = None, 0
    while (reached := compact(partition, checkpoint, budget_bytes=4 * BYTES_PER_KEY)) is not None:
        assert checkpoint is None or reached > checkpoint
        checkpoint = reached
        rounds += 1
        assert essence(partition) == before
    assert rounds > 3
    assert checkpoint == bases(partition)[-1]


def test_tombstone_is_removed_one_retention_time_after_its_first_round(tmp_path: Path) -> None:
    partition = opened(tmp_path)
    put(partition, [(b"k", b"v"), (b"k", None)])
    fill_active(partition)
    compact(partition)
    assert committed(partition)[1] == (b"k", None)
    fill_active(partition)
    compact(partition, 0, now_ms=T0 + 999)
    assert committed(partition)[1] == (b"k", None)
    fill_active(partition)
    compact(partition, 0, now_ms=T0 + 1_000)
    assert 1 not in committed(partition)


def test_aborted_records_are_removed_and_the_transaction_index_is_kept(tmp_path: Path) -> None:
    partition = opened(tmp_path)
    put(partition, [(b"k", b"good")])
    commit_offsets(partition, 1, [(b"k", b"bad")])
    end(partition, 1, commit=False)
    fill_active(partition)
    assert [path for path in names(partition.log.directory) if path.endswith(".txnindex")]
    before = essence(partition)
    compact(partition)
    assert essence(partition) == before
    entries = partition.log.segments[0].txn_index.entries
    assert [entry[:3] for entry in entries] == [(1, 1, 2)]
    everything = fetch_bytes(partition, 0, 1 << 20, Isolation.READ_UNCOMMITTED)
    assert b"bad" not in everything.records


def test_reader_of_replaced_segments_still_sees_their_records(tmp_path: Path) -> None:
    partition = opened(tmp_path)
    updates(partition, 30)
    fill_active(partition)
    expected = [(header.base_offset, bytes(batch)) for header, batch in partition.reader.read_all()]
    old = partition.log.segments
    reader = partition.reader.read_all()
    seen = [next(reader) for _ in range(2)]
    files = len(names(partition.log.directory))
    compact(partition)
    compact(partition, 0)
    put(partition, [(b"other", b"content" * 20)])
    assert [segment.locate(segment.base_offset) for segment in old[:-1]] == [0] * (len(old) - 1)
    assert old[0].max_timestamp == T0
    seen += reader
    found = [(header.base_offset, bytes(batch)) for header, batch in seen]
    assert found[: len(expected)] == expected
    # No replaced file has reappeared on disk.
    assert len(names(partition.log.directory)) < files
    assert bases(partition) == sorted(
        int(name[:20]) for name in names(partition.log.directory) if name.endswith(".log")
    )


def test_replaced_files_are_deleted_after_the_delay(tmp_path: Path) -> None:
    partition = opened(tmp_path, file_delete_delay_ms=500)
    updates(partition)
    fill_active(partition)
    compact(partition)
    assert [name for name in names(partition.log.directory) if name.endswith(".log.deleted")]
    retain(partition, T0 + 499)
    assert [name for name in names(partition.log.directory) if name.endswith(".log.deleted")]
    retain(partition, T0 + 500)
    assert not [name for name in names(partition.log.directory) if name.endswith(".deleted")]


@pytest.mark.parametrize("what", ["cut", "restarted", "closed"])
def test_truncated_restarted_or_closed_log_cancels_the_compaction(
    tmp_path: Path, what: str
) -> None:
    partition = opened(tmp_path)
    updates(partition, 20)
    fill_active(partition)
    dirty = partition.cleanup.dirty_range(None, T0)
    compaction = partition.cleanup.plan_compaction(dirty, now_ms=T0)
    assert compaction is not None
    partition.flushes.run(T0)
    compaction.map_keys()
    assert compaction.clean_next()
    if what == "cut":
        partition.truncate_to(7)
    elif what == "restarted":
        partition.cleanup.delete_records_before(5)
        partition.truncate_to(5)
        partition.log.restart_at(0, T0)
    else:
        partition.close()
        compaction.discard()
        with pytest.raises(CompactionCancelled):
            compaction.clean_next()
        return
    assert not partition.cleanup.install_cleaned(compaction)
    assert not [name for name in names(partition.log.directory) if name.endswith(".cleaned")]
    with pytest.raises(CompactionCancelled):
        compaction.map_keys()


@pytest.mark.parametrize("when", range(5))
@pytest.mark.parametrize("gone", ["one", "a group", "all"])
def test_retention_during_a_round_removes_its_segments_from_the_round(
    tmp_path: Path, when: int, gone: str
) -> None:
    """Retention runs before the key map is built, before cleaning, or before or after install."""
    partition = opened(tmp_path, cleanup_policy=frozenset({"compact", "delete"}))
    put(partition, [(b"once", b"1")])
    updates(partition, 30)
    fill_active(partition)
    groups = {"one": 1, "a group": 2, "all": len(bases(partition)) - 1}
    start = bases(partition)[groups[gone]]
    end_offset = bases(partition)[-1]
    choice = CleanerChoice({})
    choice.consider(partition, T0)
    found = choice.next_round(T0)
    assert found is not None
    compaction = found[1]
    partition.flushes.run(T0)

    def remove(point: int) -> None:
        if point == when:
            partition.cleanup.delete_records_before(start)
            retain(partition, T0)

    remove(0)
    compaction.map_keys()
    remove(1)
    installs = 0
    while compaction.clean_next():
        installs += 1
        remove(2 * installs)
        assert partition.cleanup.install_cleaned(compaction)
        remove(2 * installs + 1)
    choice.finished(partition, compaction)
    assert compaction.next_dirty_offset == end_offset
    assert partition.log_start_offset == start
    assert not choice.uncleanable
    seen = committed(partition)
    # The last batch of a segment keeps its superseded records.
    assert last_values(seen).get(b"k") == (b"029" + b"." * 100 if gone != "all" else None)
    assert sum(key == b"k" for key, _ in seen.values()) <= 4
    assert not [
        name for name in names(partition.log.directory) if "cleaned" in name or "swap" in name
    ]
    before = essence(partition)
    partition.close()
    again = open_partition(tmp_path, config=COMPACTED, clean=False, log_start_offset=start)
    assert essence(again) == before
    assert again.recovery is None or not again.recovery.reason
    again.close()


def test_segment_removed_by_another_process_fails_the_compaction(tmp_path: Path) -> None:
    partition = opened(tmp_path)
    updates(partition, 20)
    fill_active(partition)
    dirty = partition.cleanup.dirty_range(None, T0)
    compaction = partition.cleanup.plan_compaction(dirty, now_ms=T0)
    assert compaction is not None
    partition.flushes.run(T0)
    Path(partition.log.segments[1].path).unlink()
    with pytest.raises(FileNotFoundError):
        compaction.map_keys()


def test_corrupt_log_is_reported_as_uncleanable_and_not_rewritten(tmp_path: Path) -> None:
    partition = opened(tmp_path)
    updates(partition)
    fill_active(partition)
    path = Path(partition.log.segments[0].path)
    raw = bytearray(path.read_bytes())
    raw[-20] ^= 1
    path.write_bytes(raw)
    dirty = partition.cleanup.dirty_range(None, T0)
    compaction = partition.cleanup.plan_compaction(dirty, now_ms=T0)
    assert compaction is not None
    partition.flushes.run(T0)
    with pytest.raises(CorruptRecordError):
        compaction.map_keys()
    compaction.discard()
    assert path.read_bytes() == raw
    told: list[Partition] = []
    choice = CleanerChoice({}, lambda failed, _error: told.append(failed))
    assert chosen(choice, partition) is partition
    choice.failed(partition, CorruptRecordError("wrong"))
    assert chosen(choice, partition) is None
    assert choice.uncleanable == {("orders", 0): "CorruptRecordError: wrong"}
    assert told == [partition]
    choice.forget("orders", 0)
    assert chosen(choice, partition) is partition


def test_record_above_the_decompressed_bound_stops_compaction(tmp_path: Path) -> None:
    partition = opened(tmp_path)
    for turn in range(12):
        pairs = [(b"k", b"%03d" % turn + b"." * 100), (b"l", b"x")]
        put(partition, pairs, codec=Codec.GZIP)
    fill_active(partition)
    before, config = essence(partition), partition.log.config
    body = 103 + 8  # attributes, timestamp, offset, key and its length, value's length, headers
    partition.log.config = replace(config, max_decompressed_message_bytes=body - 1)
    with pytest.raises(InvalidRecordError, match=f"{body} exceeds"):
        compact(partition)
    assert essence(partition) == before
    partition.log.config = replace(config, max_decompressed_message_bytes=body)
    assert compact(partition) == bases(partition)[-1]
    assert last_values(committed(partition))[b"k"].startswith(b"011")


def chosen(choice: CleanerChoice, *partitions: Partition, now_ms: int = T0) -> Partition | None:
    for partition in partitions:
        choice.consider(partition, now_ms)
    found = choice.next_round(now_ms)
    return None if found is None else found[0]


def test_damaged_log_does_not_prevent_the_choice_of_another(tmp_path: Path) -> None:
    damaged, whole = (
        open_partition(tmp_path, name=name, config=small(), fs=MortalDisk())
        for name in ("damaged", "whole")
    )
    for partition in (damaged, whole):
        updates(partition, 10)
        fill_active(partition)
    damaged.close()
    path = Path(damaged.log.directory, f"{0:020}.log")
    path.write_bytes(b"\xff" * 61 + path.read_bytes()[61:])
    damaged = open_partition(tmp_path, name="damaged", config=small(), fs=MortalDisk())
    choice = CleanerChoice({})
    assert chosen(choice, damaged, whole) is whole
    assert list(choice.uncleanable) == [("damaged", 0)]
    assert damaged.offline is None


def test_dirtiest_partition_above_its_ratio_is_chosen(tmp_path: Path) -> None:
    partitions = [
        open_partition(tmp_path, name=name, config=small(**changes), fs=MortalDisk())
        for name, changes in (
            ("clean", {}),
            ("dirty", {}),
            ("plain", {"cleanup_policy": frozenset({"delete"})}),
        )
    ]
    for partition in partitions:
        updates(partition, 10)
        fill_active(partition)
    clean, dirty, _ = partitions
    offsets: dict[tuple[str, int], int] = {}
    choice = CleanerChoice(offsets)
    choice.consider(clean, T0)
    found = choice.next_round(T0)
    assert found is not None
    compaction = found[1]
    clean.flushes.run(T0)
    compaction.map_keys()
    while compaction.clean_next():
        assert clean.cleanup.install_cleaned(compaction)
    choice.finished(clean, compaction)
    assert offsets == {("clean", 0): bases(clean)[-1]}
    fill_active(clean)
    assert chosen(choice, *partitions) is dirty
    # A log below the dirty ratio is due when its oldest dirty record exceeds the compaction lag.
    clean.log.config = small(min_cleanable_dirty_ratio=0.99)
    assert chosen(choice, clean) is None
    clean.log.config = small(min_cleanable_dirty_ratio=0.99, max_compaction_lag_ms=1_000)
    assert chosen(choice, clean, now_ms=T0 + 1_000) is None
    assert chosen(choice, clean, now_ms=T0 + 1_001) is clean


def test_compacted_log_rolls_within_the_max_compaction_lag() -> None:
    settings = small(max_compaction_lag_ms=5_000)
    assert settings.roll_after_ms("orders-0", 0) == 5_000
    assert small().roll_after_ms("orders-0", 0) == small().segment_ms


def test_cleaner_throttle_sleeps_for_past_io_and_accumulates_no_credit() -> None:
    clock, slept = ManualClock(), []

    def wait(seconds: float) -> bool:
        slept.append(round(seconds, 3))
        clock.advance(round(seconds * 1000))
        return len(slept) == 3

    throttle = CleanerThrottle(lambda: 1_000, clock, wait)
    throttle(5)
    assert slept == []
    throttle(495)
    assert slept == [0.5]
    clock.advance(60_000)
    throttle(1_000)
    assert slept == [0.5, 1.0]
    with pytest.raises(CompactionCancelled):
        throttle(100)


def test_waiting_cleaner_throttle_follows_a_raised_rate() -> None:
    clock, slept, rates = ManualClock(), [], [1.0]

    def wait(seconds: float) -> bool:
        slept.append(seconds)
        clock.advance(round(seconds * 1000))
        if len(slept) == 3:
            rates[0] = 1_000_000.0
        return False

    CleanerThrottle(lambda: rates[0], clock, wait)(3_600)
    assert slept == [1.0, 1.0, 1.0]
