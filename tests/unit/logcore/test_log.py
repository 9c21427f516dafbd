from __future__ import annotations

from pathlib import Path

import pytest

from fencepost.logcore.batch import iter_headers
from fencepost.logcore.config import LogConfig
from fencepost.logcore.errors import RecordListTooLargeError
from fencepost.logcore.partition import Partition
from fencepost.logcore.reading import Isolation
from tests.support.clock import ManualClock
from tests.support.partitions import fetch_bytes
from tests.unit.logcore.partition_driver import (
    T0,
    append,
    client_batch,
    config,
    fetch_all,
    open_partition,
    read_log,
)

SIZE = len(client_batch())


def bases(partition: Partition) -> list[int]:
    return [segment.base_offset for segment in partition.log.segments]


# --- rolls ---


def test_roll_by_size_counts_the_incoming_batch(tmp_path: Path) -> None:
    partition = open_partition(tmp_path, config=config(segment_bytes=3 * SIZE))
    for _ in range(3):
        append(partition)
    assert bases(partition) == [0]
    append(partition)
    assert bases(partition) == [0, 3]


def test_batch_of_exactly_the_segment_size_is_accepted_one_byte_more_is_refused(
    tmp_path: Path,
) -> None:
    partition = open_partition(tmp_path, config=config(segment_bytes=SIZE))
    append(partition)
    append(partition)
    assert bases(partition) == [0, 1]
    with pytest.raises(RecordListTooLargeError):
        append(partition, size=11)


def test_roll_by_time_compares_timestamps_of_first_and_incoming_batch(tmp_path: Path) -> None:
    partition = open_partition(tmp_path, config=config(segment_ms=1000))
    append(partition, timestamp_ms=T0)
    append(partition, timestamp_ms=T0 + 1000, now_ms=T0 + 50_000)
    assert bases(partition) == [0]
    append(partition, timestamp_ms=T0 + 1001)
    assert bases(partition) == [0, 2]
    # A record with an old timestamp never rolls the segment.
    append(partition, timestamp_ms=T0 - 5, now_ms=T0 + 90_000)
    assert bases(partition) == [0, 2]


def test_roll_by_time_without_timestamps_uses_the_clock(tmp_path: Path) -> None:
    clock = ManualClock(T0)
    partition = open_partition(tmp_path, config=config(segment_ms=1000), clock=clock)
    append(partition, timestamp_ms=-1)
    append(partition, timestamp_ms=-1, now_ms=T0 + 1000)
    assert bases(partition) == [0]
    append(partition, timestamp_ms=-1, now_ms=T0 + 1001)
    assert bases(partition) == [0, 2]


def test_empty_segment_is_not_rolled_by_time(tmp_path: Path) -> None:
    partition = open_partition(tmp_path, config=config(segment_ms=1000))
    append(partition, timestamp_ms=-1, now_ms=T0 + 5000)
    assert bases(partition) == [0]


def test_full_time_index_rolls_the_segment(tmp_path: Path) -> None:
    # Room for 3 offset entries and 2 time entries; one time entry is reserved for the roll.
    partition = open_partition(
        tmp_path, config=config(segment_index_bytes=24, index_interval_bytes=0)
    )
    append(partition)
    append(partition, timestamp_ms=T0 + 1)
    assert bases(partition) == [0]
    append(partition, timestamp_ms=T0 + 2)
    assert bases(partition) == [0, 2]


def test_full_offset_index_rolls_the_segment(tmp_path: Path) -> None:
    partition = open_partition(
        tmp_path, config=config(segment_index_bytes=24, index_interval_bytes=0)
    )
    for _ in range(4):
        append(partition, timestamp_ms=-1)
    assert bases(partition) == [0]
    append(partition, timestamp_ms=-1)
    assert bases(partition) == [0, 4]


def test_offset_that_does_not_fit_the_index_rolls_the_segment(tmp_path: Path) -> None:
    partition = open_partition(tmp_path)
    append(partition)
    assert not partition.log.must_roll(100, 0x7FFFFFFF, T0, T0)
    assert partition.log.must_roll(100, 0x7FFFFFFF + 1, T0, T0)


def test_roll_jitter_is_bounded_and_fixed_for_each_segment() -> None:
    jittered = LogConfig(segment_ms=1000, segment_jitter_ms=400)
    values = {jittered.roll_after_ms("orders-0", base) for base in range(200)}
    assert len(values) > 100
    assert min(values) > 600
    assert max(values) <= 1000
    assert jittered.roll_after_ms("orders-0", 7) == jittered.roll_after_ms("orders-0", 7)
    assert LogConfig(segment_ms=1000).roll_after_ms("orders-0", 7) == 1000


def test_roll_leaves_the_same_files_as_kafka(tmp_path: Path) -> None:
    partition = open_partition(tmp_path)
    append(partition, 4, producer_id=5)
    partition.flushes.roll(T0)
    append(partition, producer_id=5, sequence=4)
    partition.flushes.run(T0)
    names = {path.name for path in (tmp_path / "orders-0").iterdir()}
    first, second = f"{0:020d}", f"{4:020d}"
    assert names == {
        *(first + suffix for suffix in (".log", ".index", ".timeindex")),
        *(second + suffix for suffix in (".log", ".index", ".timeindex", ".snapshot")),
        "partition.metadata",
        "leader-epoch-checkpoint",
    }


# --- reading across segments ---


@pytest.fixture
def three_segments(tmp_path: Path) -> Partition:
    partition = open_partition(tmp_path, config=config(segment_bytes=2 * SIZE))
    for at in range(6):
        append(partition, timestamp_ms=T0 + at)
    assert bases(partition) == [0, 2, 4]
    return partition


def test_fetch_ends_with_its_segment(three_segments: Partition) -> None:
    for offset, expected in [(0, [0, 1]), (1, [1]), (2, [2, 3]), (5, [5]), (6, [])]:
        fetched = fetch_bytes(
            three_segments, offset, 1 << 20, Isolation.READ_UNCOMMITTED, at_least_one=False
        )
        assert [header.base_offset for _, header in iter_headers(fetched.records)] == expected
    assert fetch_all(three_segments) == b"".join(data for _, data in read_log(three_segments))


def test_available_bytes_counts_all_segments(three_segments: Partition) -> None:
    for offset in range(8):
        expected = max(6 - offset, 0) * SIZE
        assert three_segments.reader.available_bytes(offset, Isolation.READ_UNCOMMITTED) == expected


def test_truncation_across_segments_keeps_only_earlier_batches(three_segments: Partition) -> None:
    expected = read_log(three_segments)
    three_segments.truncate_to(6)
    assert three_segments.log_end_offset == 6
    three_segments.truncate_to(3)
    assert bases(three_segments) == [0, 2]
    assert (three_segments.log_end_offset, three_segments.high_watermark) == (3, 3)
    assert read_log(three_segments) == expected[:3]
    three_segments.truncate_to(2)
    assert (bases(three_segments), three_segments.log.active.size) == ([0, 2], 0)
    assert append(three_segments).base_offset == 2


def test_truncation_below_the_first_segment_restarts_the_log_there(tmp_path: Path) -> None:
    partition = open_partition(tmp_path, log_start_offset=50)
    assert append(partition).base_offset == 50
    partition.truncate_to(20)
    assert (bases(partition), partition.log_end_offset, partition.log_start_offset) == (
        [20],
        20,
        20,
    )
    assert append(partition).base_offset == 20


def test_truncation_restores_producers_epochs_and_aborted_transactions(tmp_path: Path) -> None:
    from tests.unit.logcore.partition_driver import marker, state_of

    partition = open_partition(tmp_path)
    append(partition, producer_id=1, transactional=True)
    marker(partition, 1, commit=False)
    append(partition, producer_id=1, sequence=1, transactional=True)
    partition.flushes.roll(T0)
    before = state_of(partition)
    partition.marks.leader_epoch = 3
    append(partition, producer_id=2, transactional=True)
    marker(partition, 1, commit=False)
    marker(partition, 2, commit=False)
    assert partition.reader.offset_for_leader_epoch(0) == (0, 3)
    partition.truncate_to(3)
    assert state_of(partition) == before
    assert partition.reader.offset_for_leader_epoch(0) == (0, 3)
    assert partition.last_stable_offset == 2
    partition.close()
    again = open_partition(tmp_path)
    assert state_of(again) == before
