"""Acquisition: the records that a fetch acquires, and their delivery counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fencepost.groups.share.acquire import sent_batches
from fencepost.groups.share.batches import StateBatch
from fencepost.groups.share.commands import (
    AbortedTransaction,
    AcquiredRange,
    AcquireMode,
    FetchedBatch,
    IsolationLevel,
    ShareSettings,
)
from fencepost.groups.share.errors import SharePartitionFailedError
from fencepost.groups.share.states import RecordState
from tests.unit.groups.share.driver import LOCK_MS, SETTINGS, Driver, log

ACCEPT, RELEASE = 1, 2
EXACT = AcquireMode.RECORD_LIMIT
ACKNOWLEDGED, AVAILABLE = RecordState.ACKNOWLEDGED, RecordState.AVAILABLE


def with_settings(**changes: object) -> Driver:
    return Driver(replace(SETTINGS, **changes))


def test_batch_that_exceeds_max_records_is_acquired_as_a_whole() -> None:
    driver = Driver()
    assert driver.fetch("m1", log((0, 49), (50, 99)), max_records=5) == [(0, 49, 1)]
    assert driver.partition.next_fetch_offset() == 50


def test_record_limit_acquires_exactly_max_records_of_a_batch() -> None:
    driver = Driver()
    assert driver.fetch("m1", log((0, 49)), max_records=5, mode=EXACT) == [(0, 4, 1)]
    assert driver.states()[4] == (RecordState.ACQUIRED, 1, "m1")
    assert driver.states()[5] == (AVAILABLE, 0, None)
    assert driver.partition.end_offset == 49
    assert driver.fetch("m2", log((0, 49)), max_records=3, mode=EXACT) == [(5, 7, 1)]
    assert driver.fetch("m3", log((0, 49)), max_records=100, mode=EXACT) == [(8, 49, 1)]


def test_ranges_are_cut_at_batch_boundaries_once_batch_size_is_reached() -> None:
    driver = Driver()
    batches = log((0, 3), (4, 7), (8, 11), (12, 13))
    assert driver.fetch("m1", batches, batch_size=6) == [(0, 7, 1), (8, 13, 1)]


def test_available_batch_is_acquired_again_as_a_whole_with_a_higher_count() -> None:
    driver = Driver()
    driver.fetch("m1", log((0, 9)))
    driver.release("m1")
    driver.settle()
    assert driver.fetch("m2", log((0, 9), (10, 19)), max_records=5) == [(0, 9, 2)]


def test_neighbours_with_equal_counts_are_one_range_kafka_19957() -> None:
    driver = Driver()
    driver.fetch("m1", log((0, 9)))
    driver.acknowledge("m1", (0, 9, (2, 2, 1, 2, 2, 2, 2, 2, 2, 2)))
    driver.settle()
    assert driver.fetch("m2", log((0, 9))) == [(0, 1, 2), (3, 9, 2)]


def test_acquisition_stops_once_the_in_flight_limit_is_reached() -> None:
    driver = with_settings(max_record_locks=10)
    assert driver.fetch("m1", log((0, 8), (9, 9), (10, 19))) == [(0, 9, 1)]
    assert not driver.partition.can_acquire()
    assert driver.fetch("m1", log((10, 19))) == []
    driver.acknowledge("m1", (0, 0, ACCEPT))
    driver.settle()
    assert driver.partition.can_acquire(), "one offset was finished"
    assert driver.fetch("m2", log((10, 19))) == [(10, 19, 1)], "the batch that crosses the limit"
    assert not driver.partition.can_acquire()


def test_released_records_are_acquired_at_the_limit_but_none_behind_them_kafka_19555() -> None:
    driver = with_settings(max_record_locks=30)
    driver.fetch("m1", log((0, 29)))
    driver.acknowledge("m1", (20, 20, RELEASE))
    driver.settle()
    assert driver.partition.next_fetch_offset() == 20
    assert driver.fetch("m2", log((0, 29), (30, 59))) == [(20, 20, 2)]
    assert driver.partition.end_offset == 29


def test_short_read_at_the_limit_does_not_stretch_to_the_end_offset_kafka_19808() -> None:
    driver = with_settings(max_record_locks=30)
    driver.fetch("m1", log((0, 9)))
    driver.fetch("m1", log((10, 29)))
    driver.acknowledge("m1", (0, 9, RELEASE))
    driver.settle()
    assert driver.fetch("m2", log((0, 4), (5, 9))) == [(0, 9, 2)]


def test_records_of_the_first_batch_below_the_start_offset_are_not_acquired() -> None:
    driver = Driver(start=5)
    assert driver.fetch("m1", log((0, 9))) == [(5, 9, 1)]


def test_records_of_a_read_batch_are_not_acquired_a_second_time_kafka_19954() -> None:
    driver = Driver(start=5)
    driver.fetch("m1", log((0, 9)))
    driver.acknowledge("m1", (5, 9, ACCEPT))
    driver.settle()
    assert driver.partition.start_offset == 10
    assert driver.fetch("m1", log((0, 99))) == [(10, 99, 1)]


@pytest.mark.parametrize("max_records", [1, 4, 50])
def test_gap_before_a_persisted_batch_is_acquired_without_overlap_kafka_19632(
    max_records: int,
) -> None:
    driver = Driver(start=10, batches=[StateBatch(15, 18, AVAILABLE, 1)])
    assert driver.partition.next_fetch_offset() == 10
    acquired = driver.fetch("m1", log((10, 19)), max_records=max_records)
    assert acquired[0] == (10, 14, 1)
    assert acquired[1:] == ([(15, 18, 2), (19, 19, 1)] if max_records == 50 else [])


def test_gap_keeps_the_start_offset_until_it_is_acknowledged_kafka_18494() -> None:
    batches = [StateBatch(0, 9, ACKNOWLEDGED, 1), StateBatch(20, 29, ACKNOWLEDGED, 1)]
    driver = Driver(batches=batches)
    assert driver.partition.start_offset == 10
    assert driver.partition.next_fetch_offset() == 10
    assert driver.fetch("m1", log((0, 14), (15, 29))) == [(10, 19, 1)]
    driver.acknowledge("m1", (10, 14, ACCEPT))
    driver.settle()
    assert driver.partition.start_offset == 15
    driver.acknowledge("m1", (15, 19, ACCEPT))
    driver.settle()
    assert (driver.partition.start_offset, driver.partition.end_offset) == (30, 30)


def test_gap_between_batches_is_acquired_with_the_next_batch() -> None:
    driver = Driver(batches=[StateBatch(0, 9, AVAILABLE, 1)])
    assert driver.fetch("m1", log((0, 9), (20, 29))) == [(0, 9, 2), (10, 29, 1)]
    driver.acknowledge("m1", (0, 9, ACCEPT), (10, 29, ACCEPT))
    driver.settle()
    assert driver.partition.start_offset == 30


def test_compacted_gap_that_fills_the_in_flight_limit_is_skipped() -> None:
    # In Kafka, the read after the end offset results in an empty range, and every fetch fails.
    driver = Driver(
        replace(SETTINGS, max_record_locks=10), batches=[StateBatch(5, 20, ACKNOWLEDGED, 1)]
    )
    assert driver.partition.next_fetch_offset() == 0
    assert driver.fetch("m1", log((30, 39))) == []
    assert driver.partition.start_offset == 21
    assert driver.fetch("m1", log((30, 39))) == [(30, 39, 1)]


def test_compacted_records_are_archived() -> None:
    driver = Driver()
    driver.fetch("m1", log((0, 9), (10, 19)), batch_size=5)
    driver.acknowledge("m1", (0, 9, RELEASE), (10, 19, RELEASE))
    driver.settle()
    assert driver.fetch("m1", log((10, 19))) == [(10, 19, 2)]
    assert driver.partition.start_offset == 10


def test_record_in_transition_is_not_fetched_kafka_19463() -> None:
    driver = Driver()
    driver.fetch("m1", log((0, 9)))
    driver.acknowledge("m1", (0, 9, RELEASE))
    assert driver.partition.next_fetch_offset() == 10
    assert driver.fetch("m2", log((0, 9)), at=0) == []
    driver.settle()
    assert driver.partition.next_fetch_offset() == 0


@pytest.mark.parametrize(
    ("acquired", "expected"),
    [
        ([(0, 29)], (0, 3)),
        ([(3, 4)], (0, 1)),
        ([(12, 12), (20, 25)], (1, 3)),
        ([(29, 29)], (2, 3)),
        ([(5, 10)], (0, 2)),
    ],
)
def test_response_has_the_batches_from_the_first_acquired_offset_to_the_last(
    acquired: list[tuple[int, int]], expected: tuple[int, int]
) -> None:
    ranges = [AcquiredRange(first, last, 1) for first, last in acquired]
    assert sent_batches(log((0, 9), (10, 19), (20, 29)), ranges) == expected


# --- records near the delivery limit -------------------------------------------------------------


def deliver(driver: Driver, times: int) -> None:
    for _ in range(times):
        driver.fetch("m1", log((0, 9)))
        driver.release("m1")
        driver.settle()


def test_poison_batch_is_delivered_in_halves_and_the_last_time_record_by_record() -> None:
    driver = Driver(ShareSettings(record_lock_duration_ms=LOCK_MS, delivery_count_limit=5))
    deliver(driver, 3)
    assert driver.fetch("m1", log((0, 9), (10, 19))) == [(0, 4, 4)], "half, and nothing follows"
    driver.release("m1")
    driver.settle()
    assert driver.fetch("m1", log((0, 9))) == [(0, 0, 5)]
    assert driver.fetch("m2", log((0, 9))) == [(1, 1, 5)]


def test_record_is_archived_at_the_delivery_limit_and_not_before() -> None:
    driver = with_settings(delivery_count_limit=2)
    deliver(driver, 1)
    assert driver.fetch("m1", log((0, 9))) == [(0, 9, 2)]
    driver.release("m1")
    driver.settle()
    assert driver.partition.start_offset == 10


# --- transactions --------------------------------------------------------------------------------

TRANSACTIONS = (
    FetchedBatch(0, 2, 7, is_transactional=True),
    FetchedBatch(3, 3, 7, is_transactional=True),
    FetchedBatch(4, 7, 7, is_transactional=True),
    FetchedBatch(8, 8, 7, is_transactional=True, is_abort_marker=True),
    FetchedBatch(9, 10, 7, is_transactional=True),
    FetchedBatch(11, 11, 7, is_transactional=True),
)
ABORTED = (AbortedTransaction(7, 4),)


def test_read_committed_omits_aborted_records_and_keeps_markers() -> None:
    driver = with_settings(isolation_level=IsolationLevel.READ_COMMITTED)
    assert driver.fetch("m1", TRANSACTIONS, aborted=ABORTED) == [(0, 3, 1), (8, 11, 1)]
    driver.acknowledge("m1", (0, 2, ACCEPT), (3, 3, 0), (8, 11, (0, 1, 1, 0)))
    driver.settle()
    assert driver.partition.start_offset == 12


def test_read_uncommitted_acquires_aborted_records() -> None:
    driver = Driver()
    assert driver.fetch("m1", TRANSACTIONS, aborted=ABORTED) == [(0, 11, 1)]


def test_aborted_records_that_fill_the_limit_do_not_stop_the_start_offset() -> None:
    # Kafka moves the start offset only after a write, and here no state needs writing.
    driver = with_settings(isolation_level=IsolationLevel.READ_COMMITTED, max_record_locks=4)
    assert driver.fetch("m1", TRANSACTIONS[2:3], aborted=ABORTED) == []
    assert driver.partition.start_offset == 8
    assert driver.partition.can_acquire()


# --- fetch lock and states -----------------------------------------------------------------------


def test_fetch_lock_is_held_by_one_fetch_and_released_only_by_it_kafka_20783() -> None:
    partition = Driver().partition
    first, second = object(), object()
    assert partition.take_fetch_lock(first)
    assert not partition.take_fetch_lock(second)
    partition.release_fetch_lock(second)
    assert partition.fetch_lock is first
    partition.release_fetch_lock(first)
    assert partition.take_fetch_lock(second)


def test_nothing_is_acquired_before_the_state_is_read_or_after_it_is_fenced() -> None:
    driver = Driver(start=None)
    assert driver.fetch("m1", log((0, 9)), at=0) == []
    assert not driver.partition.take_fetch_lock(object())
    driver.load(SharePartitionFailedError("no coordinator"))
    assert driver.fetch("m1", log((0, 9)), at=0) == []
    driver = Driver()
    driver.run(lambda decision: driver.partition.fence(decision, "leader moved"))
    assert driver.fetch("m1", log((0, 9)), at=0) == []
    assert not driver.partition.take_fetch_lock(object())
