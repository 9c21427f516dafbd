"""Initialization and inspection of a share partition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from fencepost.groups.share.batches import StateBatch
from fencepost.groups.share.commands import (
    EARLIEST_TIMESTAMP,
    LATEST_TIMESTAMP,
    Initialized,
    OffsetReset,
    ReadState,
    StateRead,
)
from fencepost.groups.share.errors import (
    FencedShareLeaderEpochError,
    ShareCoordinatorUnavailableError,
    SharePartitionFailedError,
    SharePartitionFencedError,
    UnknownSharePartitionError,
)
from fencepost.groups.share.in_flight import Run
from fencepost.groups.share.partition import SharePartition
from fencepost.groups.share.states import PartitionState, RecordState
from fencepost.logcore.machine import DomainError, InvariantViolation
from tests.unit.groups.share.driver import KEY, SETTINGS, Driver, log

AVAILABLE, ACQUIRED, ACKNOWLEDGED, ARCHIVING, ARCHIVED = RecordState


def test_state_is_read_once_for_all_waiting_fetches() -> None:
    driver = Driver(start=None, leader_epoch=7)
    tokens = [driver.token() for _ in range(3)]
    for token in tokens:
        driver.run(lambda decision, token=token: driver.partition.initialize(decision, token))
    assert driver.reads == [ReadState(KEY, 7)]
    assert not driver.replies
    state = StateRead(
        3, 10, (StateBatch(10, 14, ACKNOWLEDGED, 1), StateBatch(15, 19, AVAILABLE, 2))
    )
    driver.run(lambda decision: driver.partition.state_read(decision, state))
    assert [driver.replies[token] for token in tokens] == [Initialized()] * 3
    assert driver.partition.state is PartitionState.ACTIVE
    assert driver.partition.start_offset == 15, "the complete batch at the front is skipped"
    assert driver.fetch("m1", log((10, 19))) == [(15, 19, 3)]
    driver.acknowledge("m1", (15, 19, 1))
    assert (driver.writes[0].state_epoch, driver.writes[0].leader_epoch) == (3, 7)
    late = driver.token()
    driver.run(lambda decision: driver.partition.initialize(decision, late))
    assert driver.replies[late] == Initialized()


@pytest.mark.parametrize(
    ("reset", "timestamp"),
    [
        (OffsetReset.LATEST, LATEST_TIMESTAMP),
        (OffsetReset.EARLIEST, EARLIEST_TIMESTAMP),
        (OffsetReset.BY_DURATION, 1_000_000 - 60_000),
    ],
)
def test_unused_share_partition_starts_at_the_offset_of_the_reset_policy(
    reset: OffsetReset, timestamp: int
) -> None:
    settings = replace(SETTINGS, auto_offset_reset=reset, reset_duration_ms=60_000)
    driver = Driver(settings, start=None)
    token = driver.load(StateRead(0, -1, ()))
    assert [lookup.timestamp for lookup in driver.lookups] == [timestamp]
    assert token not in driver.replies
    driver.run(lambda decision: driver.partition.start_offset_found(decision, 42))
    assert driver.replies[token] == Initialized()
    assert (driver.partition.start_offset, driver.partition.next_fetch_offset()) == (42, 42)


def test_start_offset_that_cannot_be_looked_up_fails_the_share_partition() -> None:
    driver = Driver(start=None)
    token = driver.load(StateRead(0, -1, ()))
    error = UnknownSharePartitionError("the log is gone")
    driver.run(lambda decision: driver.partition.start_offset_found(decision, error))
    assert driver.replies[token] is error
    assert driver.drops == 1
    driver.run(lambda decision: driver.partition.start_offset_found(decision, 42))
    assert driver.partition.state is PartitionState.FAILED, "a late answer changes nothing"


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (ShareCoordinatorUnavailableError("x"), SharePartitionFailedError),
        (FencedShareLeaderEpochError("x"), SharePartitionFencedError),
        (UnknownSharePartitionError("x"), UnknownSharePartitionError),
    ],
)
def test_state_that_cannot_be_read_gives_an_error_that_clients_accept(
    error: DomainError, answer: type[DomainError]
) -> None:
    driver = Driver(start=None)
    assert type(driver.replies[driver.load(error)]) is answer
    assert driver.partition.state is PartitionState.FAILED
    assert driver.drops == 1
    late = driver.token()
    driver.run(lambda decision: driver.partition.initialize(decision, late))
    assert type(driver.replies[late]) is SharePartitionFailedError


@pytest.mark.parametrize(
    "batches",
    [
        (StateBatch(3, 9, AVAILABLE, 1),),
        (StateBatch(9, 7, AVAILABLE, 1),),
        (StateBatch(5, 9, ACQUIRED, 1),),
        (StateBatch(5, 9, AVAILABLE, 1), StateBatch(9, 12, AVAILABLE, 1)),
    ],
)
def test_impossible_state_is_refused(batches: tuple[StateBatch, ...]) -> None:
    driver = Driver(start=None)
    token = driver.load(StateRead(0, 5, batches))
    assert type(driver.replies[token]) is SharePartitionFailedError


def test_fetches_that_wait_for_a_fenced_share_partition_are_answered() -> None:
    driver = Driver(start=None)
    token = driver.token()
    driver.run(lambda decision: driver.partition.initialize(decision, token))
    driver.run(lambda decision: driver.partition.fence(decision, "leader moved"))
    assert type(driver.replies[token]) is SharePartitionFencedError
    driver.run(lambda decision: driver.partition.state_read(decision, StateRead(0, 0, ())))
    assert driver.partition.state is PartitionState.FENCED


def test_new_leader_delivers_acquired_records_again_with_the_persisted_count() -> None:
    # The new leader does not know offsets that were acquired but never acknowledged: their counts
    # start again at 1.
    driver = Driver(batches=[StateBatch(5, 9, AVAILABLE, 2)])
    assert driver.fetch("m1", log((0, 9))) == [(0, 4, 1), (5, 9, 3)]


def test_in_flight_ranges_show_state_owner_count_and_deadline() -> None:
    driver = Driver()
    driver.fetch("m1", log((0, 4), (5, 9)), batch_size=5)
    driver.acknowledge("m1", (2, 3, 1))
    entries = driver.partition.in_flight()
    assert [(entry.first, entry.last, entry.state.name, entry.member_id) for entry in entries] == [
        (0, 1, "ACQUIRED", "m1"),
        (2, 3, "ACKNOWLEDGED", None),
        (4, 4, "ACQUIRED", "m1"),
        (5, 9, "ACQUIRED", "m1"),
    ]
    assert {entry.deadline_ms for entry in entries} == {driver.now_ms + 1_000}
    assert [entry.is_in_transition for entry in entries] == [False, True, False, False]


def test_adjacent_ranges_of_equal_state_are_joined_after_the_write() -> None:
    driver = Driver(replace(SETTINGS, max_record_locks=10_000))
    driver.fetch("m1", log((0, 9_999)), max_records=10_000, batch_size=10_000)
    driver.acknowledge("m1", (0, 9_998, 2))
    driver.settle()
    driver.acknowledge("m1", (9_999, 9_999, 2))
    driver.settle()
    assert len(driver.partition.in_flight()) == 1, "equal neighbours are joined after the write"


@pytest.mark.parametrize(
    "change",
    [
        lambda partition: setattr(partition.records.first.runs[0], "member_id", None),
        lambda partition: setattr(partition.records.first.runs[0], "deadline_ms", None),
        lambda partition: setattr(partition.records.first.runs[0], "count", 0),
        lambda partition: setattr(partition.records.first.runs[0], "last", 8),
        lambda partition: setattr(partition, "start_offset", 5),
        lambda partition: setattr(partition, "end_offset", 12),
        lambda partition: setattr(partition, "delivery_complete_count", 1),
        lambda partition: setattr(partition, "_lock_deadline_ms", None),
        lambda partition: partition.records.add(Run(20, 29, AVAILABLE, 0)),
        lambda partition: partition.records.add(Run(5, 12, AVAILABLE, 0)),
    ],
)
def test_broken_invariant_is_found(change: Callable[[SharePartition], object]) -> None:
    driver = Driver()
    driver.fetch("m1", log((0, 9)))
    driver.partition.check()
    with pytest.raises(InvariantViolation):
        # Adding an overlapping batch is refused at once.
        (change(driver.partition), driver.partition.check())
