from __future__ import annotations

from pathlib import Path

import pytest

from fencepost.logcore.errors import OffsetOutOfRangeError
from fencepost.logcore.partition import Partition
from fencepost.logcore.reading import Isolation
from tests.support.partitions import fetch_bytes, retain
from tests.unit.logcore.partition_driver import (
    T0,
    append,
    client_batch,
    config,
    open_partition,
    read_log,
)

SIZE = len(client_batch())
DAY_MS = 86_400_000


def segments(root: Path, count: int = 4, **changes: object) -> Partition:
    """Return a log with one batch per segment, a day apart."""
    partition = open_partition(root, config=config(segment_bytes=SIZE, **changes))
    for at in range(count):
        append(partition, timestamp_ms=T0 + at * DAY_MS, now_ms=T0 + at * DAY_MS)
    return partition


def bases(partition: Partition) -> list[int]:
    return [segment.base_offset for segment in partition.log.segments]


def test_segments_older_than_retention_ms_are_deleted(tmp_path: Path) -> None:
    partition = segments(tmp_path, retention_ms=2 * DAY_MS)
    assert retain(partition, T0 + 3 * DAY_MS) == 1
    assert (bases(partition), partition.log_start_offset) == ([1, 2, 3], 1)
    with pytest.raises(OffsetOutOfRangeError):
        fetch_bytes(partition, 0, 100, Isolation.READ_UNCOMMITTED)


def test_segment_with_a_recent_record_keeps_all_later_segments(tmp_path: Path) -> None:
    partition = open_partition(tmp_path, config=config(segment_bytes=SIZE, retention_ms=DAY_MS))
    append(partition, timestamp_ms=T0)
    append(partition, timestamp_ms=T0 + 9 * DAY_MS, now_ms=T0 + 9 * DAY_MS)
    append(partition, timestamp_ms=T0)
    assert retain(partition, T0 + 8 * DAY_MS) == 1
    assert bases(partition) == [1, 2]


def test_expired_log_keeps_one_empty_segment(tmp_path: Path) -> None:
    partition = segments(tmp_path, retention_ms=DAY_MS)
    assert retain(partition, T0 + 90 * DAY_MS) == 4
    assert (bases(partition), partition.log.size_bytes) == ([4], 0)
    assert (partition.log_start_offset, partition.log_end_offset) == (4, 4)
    assert retain(partition, T0 + 900 * DAY_MS) == 0
    assert append(partition).base_offset == 4


def test_segments_beyond_retention_bytes_are_deleted(tmp_path: Path) -> None:
    partition = segments(tmp_path, retention_bytes=2 * SIZE, retention_ms=-1)
    assert retain(partition, T0 + 90 * DAY_MS) == 2
    assert bases(partition) == [2, 3]
    assert retain(partition, T0) == 0


def test_retention_bytes_keeps_at_least_the_limit(tmp_path: Path) -> None:
    partition = segments(tmp_path, retention_bytes=2 * SIZE - 1, retention_ms=-1)
    assert retain(partition, T0) == 2
    other = segments(tmp_path / "other", retention_bytes=2 * SIZE + 1, retention_ms=-1)
    assert retain(other, T0) == 1


def test_log_without_retention_limits_keeps_all_segments(tmp_path: Path) -> None:
    partition = segments(tmp_path, retention_ms=-1)
    assert retain(partition, T0 + 9000 * DAY_MS) == 0


@pytest.mark.parametrize("policy", [frozenset(), frozenset({"compact"})])
def test_log_without_delete_policy_loses_only_segments_below_its_start(
    tmp_path: Path, policy: frozenset[str]
) -> None:
    partition = segments(tmp_path, retention_ms=1, retention_bytes=1, cleanup_policy=policy)
    assert retain(partition, T0 + 90 * DAY_MS) == 0
    assert partition.cleanup.delete_records_before(2) == 2
    assert retain(partition, T0) == 2
    assert bases(partition) == [2, 3]


def test_delete_records_moves_the_start_and_retention_takes_whole_segments(tmp_path: Path) -> None:
    partition = open_partition(tmp_path, config=config(segment_bytes=2 * SIZE))
    for _ in range(5):
        append(partition)
    assert partition.cleanup.delete_records_before(3) == 3
    assert partition.cleanup.delete_records_before(1) == 3
    assert bases(partition) == [0, 2, 4]
    assert retain(partition, T0) == 1
    assert bases(partition) == [2, 4]
    # A batch that contains the log start is read completely.
    assert [base for base, _ in read_log(partition)] == [3, 4]
    assert partition.cleanup.delete_records_before(-1) == 5
    with pytest.raises(OffsetOutOfRangeError):
        partition.cleanup.delete_records_before(6)
    with pytest.raises(OffsetOutOfRangeError):
        partition.cleanup.delete_records_before(-2)


def test_log_start_survives_a_restart_by_its_checkpoint(tmp_path: Path) -> None:
    partition = segments(tmp_path)
    partition.cleanup.delete_records_before(2)
    partition.close()
    again = open_partition(tmp_path, log_start_offset=2)
    assert (again.log_start_offset, again.log_end_offset) == (2, 4)
    again.close()
    # The checkpoint may be older than the files.
    assert open_partition(tmp_path).log_start_offset == 0


def test_deleted_files_are_renamed_first_and_removed_after_the_delay(tmp_path: Path) -> None:
    partition = segments(tmp_path, retention_ms=2 * DAY_MS, file_delete_delay_ms=60_000)
    now_ms = T0 + 2 * DAY_MS + 1
    retain(partition, now_ms)
    directory = tmp_path / "orders-0"
    names = sorted(path.name for path in directory.iterdir() if path.suffix == ".deleted")
    assert names == [f"{0:020d}{kind}.deleted" for kind in (".index", ".log", ".timeindex")]
    retain(partition, now_ms + 59_999)
    assert len(list(directory.glob("*.deleted"))) == 3
    retain(partition, now_ms + 60_000)
    assert not list(directory.glob("*.deleted"))


def test_renamed_files_are_removed_at_the_next_start(tmp_path: Path) -> None:
    partition = segments(tmp_path, retention_ms=2 * DAY_MS)
    retain(partition, T0 + 3 * DAY_MS)
    partition.log.close()
    again = open_partition(tmp_path, clean=False)
    assert not list((tmp_path / "orders-0").glob("*.deleted"))
    assert (again.log_start_offset, again.log_end_offset) == (1, 4)


def test_producers_outlive_their_segments(tmp_path: Path) -> None:
    partition = open_partition(tmp_path, config=config(segment_bytes=150))
    append(partition, producer_id=1, transactional=True)
    append(partition, 3)
    append(partition, 3)
    partition.cleanup.delete_records_before(2)
    assert retain(partition, T0) == 1
    # The open transaction began below the log start, so the last stable offset is the log start.
    assert partition.last_stable_offset == partition.log_start_offset == 2
    assert [producer.producer_id for producer in partition.producers.view()] == [1]
    partition.close()
    again = open_partition(tmp_path, log_start_offset=2)
    assert again.last_stable_offset == 2
    assert [producer.producer_id for producer in again.producers.view()] == [1]


def test_batches_appended_during_retention_are_left_to_the_next_call(
    tmp_path: Path,
) -> None:
    partition = segments(tmp_path, retention_bytes=SIZE, retention_ms=-1)
    waits = 0
    for wait in partition.cleanup.delete_old_segments(T0):
        wait()
        append(partition)
        waits += 1
        assert waits < 10
    assert (partition.log_start_offset, partition.log_end_offset) == (4, 4 + waits)
    assert retain(partition, T0) == partition.log_end_offset - 1 - 4
