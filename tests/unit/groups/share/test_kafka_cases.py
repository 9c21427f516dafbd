"""Acquisitions with the results that Kafka's ``SharePartitionTest`` expects."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fencepost.groups.share.batches import StateBatch
from fencepost.groups.share.commands import AcquireMode
from fencepost.groups.share.states import RecordState
from tests.unit.groups.share.driver import LOCK_MS, SETTINGS, Driver, log

AVAILABLE, ACQUIRED, ACKNOWLEDGED, ARCHIVING, ARCHIVED = RecordState
BATCHED, EXACT = AcquireMode
ALL = 500


def state(*batches: tuple[int, int, RecordState, int]) -> list[StateBatch]:
    return [StateBatch(*batch) for batch in batches]


GAP_FIRST = state((21, 30, ACKNOWLEDGED, 2), (31, 40, ARCHIVED, 1))
GAP_FIRST_AVAILABLE = state((21, 30, AVAILABLE, 2), (31, 40, ARCHIVED, 1))
GAP_BETWEEN = state((11, 20, ACKNOWLEDGED, 2), (31, 40, ARCHIVED, 1))
TWO_GAPS = state((21, 30, ACKNOWLEDGED, 2), (41, 50, ARCHIVED, 1))
FOUR_GAPS = state(
    (21, 30, ACKNOWLEDGED, 2),
    (41, 50, AVAILABLE, 1),
    (61, 70, ARCHIVED, 1),
    (81, 90, AVAILABLE, 1),
)

CASES = {
    "fetched inside the first gap": (
        *(11, GAP_FIRST, log((11, 15)), ALL, BATCHED),
        *([(11, 15, 1)], 11, 40, 16, 20),
    ),
    "fetched over the first gap": (
        *(11, GAP_FIRST, log((11, 25)), ALL, BATCHED),
        *([(11, 20, 1)], 11, 40, 41, 20),
    ),
    "fetched into an available batch": (
        *(11, GAP_FIRST_AVAILABLE, log((11, 25)), ALL, BATCHED),
        *([(11, 20, 1), (21, 25, 3)], 11, 40, 26, 10),
    ),
    "fetched into a later gap": (
        *(11, state((11, 20, AVAILABLE, 2), (31, 40, ARCHIVED, 1)), log((11, 25)), ALL, BATCHED),
        *([(11, 20, 3), (21, 25, 1)], 11, 40, 26, 10),
    ),
    "one read over four gaps": (
        *(11, FOUR_GAPS, log((11, 85)), ALL, BATCHED),
        [(11, 20, 1), (31, 40, 1), (41, 50, 2), (51, 60, 1), (71, 80, 1), (81, 85, 2)],
        *(11, 90, 86, 20),
    ),
    "one read that ends in the fourth gap": (
        *(11, FOUR_GAPS, log((11, 75)), ALL, BATCHED),
        [(11, 20, 1), (31, 40, 1), (41, 50, 2), (51, 60, 1), (71, 75, 1)],
        *(11, 90, 76, 20),
    ),
    "the limit ends in a gap": (
        *(11, GAP_BETWEEN, log((21, 23), (24, 26), (27, 28)), 6, BATCHED),
        *([(21, 26, 1)], 21, 40, 27, 10),
    ),
    "the limit is exceeded by a gap": (
        *(11, GAP_FIRST_AVAILABLE, log((11, 20), (21, 30)), 8, BATCHED),
        *([(11, 20, 1)], 11, 40, 21, 10),
    ),
    "the limit is exceeded before a gap": (
        11,
        state((11, 20, AVAILABLE, 2), (31, 40, AVAILABLE, 1)),
        *(log((11, 20), (21, 40)), 8, BATCHED),
        *([(11, 20, 3)], 11, 40, 21, 0),
    ),
    "a hole in the log within a gap": (
        10,
        state((15, 20, ACKNOWLEDGED, 2), (30, 40, ARCHIVED, 1)),
        *(log((10, 20), (30, 50)), ALL, BATCHED),
        *([(10, 14, 1), (21, 29, 1), (41, 50, 1)], 10, 50, 51, 17),
    ),
    # Kafka's start offset stays at 11 here: see the README's differences.
    "the first gap is a hole in the log": (
        *(11, TWO_GAPS, log((21, 35), (36, 60)), ALL, BATCHED),
        *([(31, 40, 1), (51, 60, 1)], 31, 60, 61, 10),
    ),
    "the first gap begins with a hole": (
        *(11, TWO_GAPS, log((16, 35), (36, 60)), ALL, BATCHED),
        *([(16, 20, 1), (31, 40, 1), (51, 60, 1)], 16, 60, 61, 20),
    ),
    "the second gap ends with a hole": (
        *(11, TWO_GAPS, log((11, 20), (21, 35), (41, 60)), ALL, BATCHED),
        *([(11, 20, 1), (31, 40, 1), (51, 60, 1)], 11, 60, 61, 20),
    ),
    "gaps up to a record limit": (
        *(11, TWO_GAPS, log((16, 35), (36, 60)), 20, EXACT),
        *([(16, 20, 1), (31, 40, 1), (51, 55, 1)], 16, 60, 56, 20),
    ),
    "a record limit within a gap": (
        *(11, TWO_GAPS, log((11, 20), (21, 35), (41, 60)), 15, EXACT),
        *([(11, 20, 1), (31, 35, 1)], 11, 50, 36, 20),
    ),
    "a record limit within a batch that begins below the start offset": (
        *(5, state((5, 99, AVAILABLE, 1)), log((0, 99)), 10, EXACT),
        *([(5, 14, 2)], 5, 99, 15, 0),
    ),
    "a batch that begins below the start offset and ends before a known one": (
        *(5, state((15, 20, ARCHIVED, 1)), log((0, 9)), 10, EXACT),
        *([(5, 9, 1)], 5, 20, 10, 6),
    ),
    "a record limit over several batches": (
        *(10, [], log((10, 14), (15, 29), (30, 44)), 10, EXACT),
        *([(10, 19, 1)], 10, 29, 20, 0),
    ),
    "a throttled batch ends the response": (
        5,
        state((15, 19, AVAILABLE, 2), (20, 22, ARCHIVED, 3), (26, 30, AVAILABLE, 3)),
        *(log((7, 19), (20, 27)), ALL, BATCHED),
        *([(7, 14, 1), (15, 19, 3), (23, 25, 1)], 7, 30, 26, 3),
    ),
}


@pytest.mark.parametrize(
    (
        *("start", "batches", "read", "max_records", "mode"),
        *("acquired", "start_offset", "end_offset", "next_fetch_offset", "complete"),
    ),
    CASES.values(),
    ids=CASES,
)
def test_acquisition_has_the_result_of_kafka(
    start: int,
    batches: list[StateBatch],
    read: tuple,
    max_records: int,
    mode: AcquireMode,
    acquired: list[tuple[int, int, int]],
    start_offset: int,
    end_offset: int,
    next_fetch_offset: int,
    complete: int,
) -> None:
    driver = Driver(start=start, batches=batches)
    assert driver.fetch("m1", read, max_records=max_records, mode=mode) == acquired
    partition = driver.partition
    assert (partition.start_offset, partition.end_offset) == (start_offset, end_offset)
    assert partition.next_fetch_offset() == next_fetch_offset
    assert partition.delivery_complete_count == complete


def test_failing_batch_is_halved_until_its_records_are_delivered_alone() -> None:
    driver = Driver(
        replace(SETTINGS, delivery_count_limit=7), start=5, batches=state((15, 34, AVAILABLE, 4))
    )
    read = log((15, 34))
    assert driver.fetch("m1", read) == [(15, 24, 5)]
    driver.advance(LOCK_MS)
    assert driver.fetch("m1", read) == [(15, 19, 6)]
    driver.advance(LOCK_MS)
    for offset in range(15, 20):
        assert driver.fetch("m1", read) == [(offset, offset, 7)]
    assert driver.fetch("m1", read) == [(20, 24, 6)]
    assert driver.fetch("m1", read) == [(25, 34, 5)]


def test_record_on_its_last_attempt_waits_for_a_response_of_its_own() -> None:
    driver = Driver(start=15, batches=state((15, 34, AVAILABLE, 2)))
    read = log((15, 34))
    driver.fetch("m1", read)
    driver.acknowledge("m1", (17, 17, 2), (20, 20, 2))
    driver.settle()
    assert driver.fetch("m1", read, at=15) == [(17, 17, 4), (20, 20, 4)]
    driver.acknowledge("m1", (15, 34, 2))
    driver.settle()
    assert driver.fetch("m1", read) == [(15, 16, 4)]
    assert driver.fetch("m1", read) == [(17, 17, 5)]


def test_records_in_transition_do_not_throttle_and_are_passed_over() -> None:
    counts = {15: 1, 20: 2, 25: 2, 30: 2, 35: 2, 45: 1}
    batches = state(
        *((first, first + 4, AVAILABLE, count) for first, count in counts.items() if first < 40),
        (40, 44, ARCHIVED, 5),
        (45, 49, AVAILABLE, 1),
    )
    driver = Driver(start=15, batches=batches)
    driver.fetch("m1", log((20, 24)), at=20)
    driver.fetch("m1", log((36, 37)), at=36)
    driver.acknowledge("m1", (20, 24, 2), (36, 37, 2))
    read = log(*((first, first + 4) for first in range(15, 50, 5)))
    assert driver.fetch("m1", read, max_records=10) == [(15, 19, 2), (25, 29, 3)]
    assert driver.fetch("m1", read) == [(30, 34, 3), (35, 35, 3), (38, 39, 3), (45, 49, 2)]


def test_compacted_batches_inside_a_range_are_acquired_with_it() -> None:
    driver = Driver()
    driver.fetch("m1", log((0, 4), (5, 19), (20, 34)))
    for batch in ((40, 44), (45, 49), (50, 64)):
        driver.fetch("m1", log(batch))
    driver.release("m1")
    driver.settle()
    acquired = driver.fetch("m1", log((0, 2), (20, 34), (40, 44), (50, 63)))
    assert acquired == [(0, 34, 2), (40, 44, 2), (45, 49, 2), (50, 63, 2)]
    assert driver.partition.next_fetch_offset() == 64


def test_lowered_delivery_limit_archives_on_the_next_release() -> None:
    driver = Driver(replace(SETTINGS, delivery_count_limit=10))
    driver.fetch("m1", log((0, 9)))
    driver.settings = replace(SETTINGS, delivery_count_limit=1)
    driver.acknowledge("m1", (0, 9, 2))
    driver.settle()
    assert driver.partition.next_fetch_offset() == 10


def test_lowered_lock_limit_stops_new_records_only() -> None:
    driver = Driver()
    driver.fetch("m1", log((0, 9)))
    driver.settings = replace(SETTINGS, max_record_locks=5)
    assert not driver.partition.can_acquire()
    driver.release("m1")
    driver.settle()
    assert driver.partition.can_acquire()
    assert driver.fetch("m1", log((0, 9), (10, 19))) == [(0, 9, 2)]
