"""Acknowledgements, releases, expired locks, and the writes that confirm them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fencepost.groups.share import acknowledge as texts
from fencepost.groups.share.batches import StateBatch
from fencepost.groups.share.commands import Acknowledged, AcquireMode, WriteState
from fencepost.groups.share.errors import (
    FencedShareLeaderEpochError,
    FencedStateEpochError,
    InvalidRecordStateError,
    InvalidShareRequestError,
    ShareCoordinatorUnavailableError,
    ShareCoordinatorUnloadedError,
    SharePartitionFailedError,
    SharePartitionFencedError,
    UnknownSharePartitionError,
)
from fencepost.groups.share.states import Cause, PartitionState, RecordState
from fencepost.logcore.machine import DomainError
from tests.unit.groups.share.driver import KEY, LOCK_MS, SETTINGS, Driver, log

GAP, ACCEPT, RELEASE, REJECT, RENEW = range(5)
AVAILABLE, ACQUIRED, ACKNOWLEDGED, ARCHIVING, ARCHIVED = RecordState
SLOW = SharePartitionFailedError("the share coordinator is slow")


def acquired(*batches: tuple[int, int], **changes: object) -> Driver:
    """Return a share partition whose batches ``m1`` has acquired."""
    driver = Driver(replace(SETTINGS, **changes))
    driver.fetch("m1", log(*(batches or ((0, 9),))), batch_size=1)
    return driver


# --- success -------------------------------------------------------------------------------------


def test_acknowledgement_is_answered_after_its_write() -> None:
    driver = acquired()
    token = driver.acknowledge("m1", (0, 9, ACCEPT))
    assert token not in driver.replies
    assert driver.writes == [
        WriteState(KEY, 1, 0, 1, 0, 10, (StateBatch(0, 9, ACKNOWLEDGED, 1),))
    ], "the start offset is written as it was, with ten complete offsets behind it"
    driver.complete()
    assert driver.replies[token] == Acknowledged()
    assert (driver.partition.start_offset, driver.partition.end_offset) == (10, 10)
    assert driver.partition.delivery_complete_count == 0
    assert driver.wakes == 1


def test_later_write_carries_the_advanced_start_offset() -> None:
    driver = acquired((0, 9), (10, 19))
    driver.acknowledge("m1", (0, 9, ACCEPT))
    driver.complete()
    driver.acknowledge("m1", (10, 12, ACCEPT))
    write = driver.complete()
    assert (write.start_offset, write.delivery_complete_count) == (10, 3)


@pytest.mark.parametrize(
    ("kind", "state"),
    [(GAP, ARCHIVED), (ACCEPT, ACKNOWLEDGED), (RELEASE, AVAILABLE), (REJECT, ARCHIVED)],
)
def test_acknowledge_type_determines_the_record_state(kind: int, state: RecordState) -> None:
    driver = acquired((0, 4), (5, 9))
    driver.acknowledge("m1", (5, 9, kind))
    assert driver.writes[0].batches == (StateBatch(5, 9, state, 1),)
    driver.settle()
    assert driver.states()[5] == (state, 1, None)


def test_types_of_single_offsets_are_written_as_ranges() -> None:
    driver = acquired()
    driver.acknowledge("m1", (0, 9, (1, 1, 1, 2, 2, 3, 0, 1, 1, 1)))
    assert driver.writes[0].batches == (
        StateBatch(0, 2, ACKNOWLEDGED, 1),
        StateBatch(3, 4, AVAILABLE, 1),
        StateBatch(5, 6, ARCHIVED, 1),
        StateBatch(7, 9, ACKNOWLEDGED, 1),
    )
    driver.complete()
    assert driver.partition.start_offset == 3
    assert driver.partition.delivery_complete_count == 5


def test_start_offset_waits_for_the_first_unconfirmed_offset_kafka_19436() -> None:
    driver = acquired((0, 4), (5, 9))
    driver.acknowledge("m1", (0, 4, ACCEPT))
    driver.acknowledge("m1", (5, 9, ACCEPT))
    driver.complete(1)
    assert driver.partition.start_offset == 0
    driver.complete(0)
    assert driver.partition.start_offset == 10


def test_acknowledgement_below_the_start_offset_succeeds_for_every_member() -> None:
    driver = acquired((0, 4), (5, 9))
    driver.acknowledge("m1", (0, 4, ACCEPT))
    driver.settle()
    for member in ("m1", "m2"):
        assert driver.replies[driver.acknowledge(member, (0, 4, ACCEPT))] == Acknowledged()
    token = driver.acknowledge("m1", (3, 7, RELEASE))
    driver.settle()
    assert driver.replies[token] == Acknowledged(), "the offsets below it are skipped"
    assert driver.states()[7] == (AVAILABLE, 1, None)


def test_renewal_starts_a_full_lock_and_writes_nothing() -> None:
    driver = acquired()
    driver.advance(LOCK_MS - 1)
    assert driver.replies[driver.acknowledge("m1", (2, 3, RENEW))] == Acknowledged()
    assert not driver.writes
    driver.advance(1)
    assert {offset for offset, (state, *_) in driver.states().items() if state == ACQUIRED} == {
        2,
        3,
    }
    driver.advance(LOCK_MS - 1)
    assert driver.states()[2] == (AVAILABLE, 1, None)


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("member", "batch", "error", "message"),
    [
        ("m2", (0, 9, ACCEPT), InvalidRecordStateError, texts.BATCH_OF_ANOTHER_MEMBER),
        ("m2", (2, 3, ACCEPT), InvalidRecordStateError, texts.BATCH_OF_ANOTHER_MEMBER),
        ("m2", (2, 3, (1, 2)), InvalidRecordStateError, texts.BATCH_OF_ANOTHER_MEMBER),
        ("m1", (20, 21, ACCEPT), InvalidShareRequestError, texts.FIRST_PAST_END),
        ("m1", (5, 20, ACCEPT), InvalidShareRequestError, texts.LAST_PAST_END),
        ("m1", (0, 1, (1, 9)), InvalidShareRequestError, "Invalid acknowledge type: [1, 9]"),
        ("m1", (0, 9, RENEW), InvalidRecordStateError, texts.RENEW_DISABLED),
    ],
)
def test_invalid_acknowledgement_is_refused_and_changes_nothing(
    member: str, batch: tuple[int, int, int], error: type[DomainError], message: str
) -> None:
    driver = acquired(renew_acknowledge_enabled=False)
    reply = driver.replies[driver.acknowledge(member, batch)]
    assert type(reply) is error
    assert str(reply) == message
    assert driver.states()[0] == (ACQUIRED, 1, "m1")
    assert not driver.writes


def test_acknowledgement_of_unread_or_finished_records_is_refused() -> None:
    driver = Driver()
    reply = driver.replies[driver.acknowledge("m1", (0, 9, ACCEPT))]
    assert str(reply) == texts.NOT_CACHED
    driver = acquired((0, 4), (5, 9))
    driver.acknowledge("m1", (5, 9, ACCEPT))
    for _ in range(2):
        reply = driver.replies[driver.acknowledge("m1", (5, 9, ACCEPT))]
        assert str(reply) == texts.BATCH_NOT_ACQUIRED
        driver.settle()
    driver.acknowledge("m1", (2, 2, RELEASE))
    driver.settle()
    reply = driver.replies[driver.acknowledge("m1", (2, 2, RELEASE))]
    assert str(reply) == texts.OFFSET_NOT_ACQUIRED


def test_first_error_undoes_the_batches_before_it() -> None:
    driver = acquired((0, 4), (5, 9))
    reply = driver.replies[
        driver.acknowledge("m1", (0, 4, ACCEPT), (5, 7, (1, 2, 3)), (20, 20, ACCEPT))
    ]
    assert type(reply) is InvalidShareRequestError
    assert set(driver.states().values()) == {(ACQUIRED, 1, "m1")}
    assert driver.partition.delivery_complete_count == 0
    assert not driver.writes
    assert driver.replies[driver.acknowledge("m1", (0, 9, RENEW))] == Acknowledged()


def test_offset_acknowledged_twice_in_a_request_is_refused() -> None:
    driver = acquired()
    reply = driver.replies[driver.acknowledge("m1", (0, 4, ACCEPT), (4, 9, ACCEPT))]
    assert type(reply) is InvalidRecordStateError
    assert set(driver.states().values()) == {(ACQUIRED, 1, "m1")}


# --- writes that fail ----------------------------------------------------------------------------


def test_failed_write_gives_records_back_to_their_owner() -> None:
    driver = acquired()
    token = driver.acknowledge("m1", (0, 9, ACCEPT))
    driver.complete(error=SLOW)
    assert type(driver.replies[token]) is SharePartitionFailedError
    assert set(driver.states().values()) == {(ACQUIRED, 1, "m1")}
    assert driver.partition.delivery_complete_count == 0
    driver.advance(LOCK_MS)
    assert driver.states()[0] == (AVAILABLE, 1, None), "the lock kept running"


def test_lock_that_ends_during_a_failing_write_is_not_held_for_ever_kafka_19476() -> None:
    driver = acquired()
    driver.acknowledge("m1", (0, 9, ACCEPT))
    driver.advance(LOCK_MS * 2)
    assert driver.states()[0] == (ACKNOWLEDGED, 1, None), "a transition does not expire"
    driver.complete(error=SLOW)
    assert driver.states()[0] == (AVAILABLE, 1, None)
    assert driver.partition.next_fetch_offset() == 0
    assert driver.writes[-1].batches == (StateBatch(0, 9, AVAILABLE, 1),)


def test_lock_that_ends_during_a_failing_write_respects_the_limit_kafka_19476() -> None:
    driver = acquired(delivery_count_limit=1)
    driver.acknowledge("m1", (0, 9, RELEASE))
    driver.advance(LOCK_MS)
    driver.complete(error=SLOW)
    assert driver.writes[-1].batches == (StateBatch(0, 9, ARCHIVED, 1),)
    assert driver.partition.start_offset == 10


def test_expired_timer_does_not_touch_acknowledged_records_kafka_19476() -> None:
    driver = acquired((0, 4), (5, 9))
    driver.acknowledge("m1", (0, 4, ACCEPT))
    driver.complete()
    driver.advance(LOCK_MS)
    assert driver.partition.start_offset == 5
    assert driver.states() == dict.fromkeys(range(5, 10), (AVAILABLE, 1, None))


@pytest.mark.parametrize(
    ("error", "answer", "is_fenced"),
    [
        (FencedStateEpochError("x"), SharePartitionFencedError, True),
        (FencedShareLeaderEpochError("x"), SharePartitionFencedError, True),
        (UnknownSharePartitionError("x"), UnknownSharePartitionError, True),
        (ShareCoordinatorUnloadedError("x"), ShareCoordinatorUnavailableError, False),
        (InvalidShareRequestError("x"), SharePartitionFailedError, False),
    ],
)
def test_only_fencing_errors_of_the_share_coordinator_fence_the_partition(
    error: DomainError, answer: type[DomainError], is_fenced: bool
) -> None:
    driver = acquired()
    token = driver.acknowledge("m1", (0, 9, ACCEPT))
    driver.complete(error=error)
    assert type(driver.replies[token]) is answer
    assert (driver.partition.state is PartitionState.FENCED) == is_fenced
    assert driver.drops == is_fenced


def test_fenced_share_partition_answers_writes_under_way_and_refuses_new_requests() -> None:
    driver = acquired((0, 4), (5, 9))
    first = driver.acknowledge("m1", (0, 4, ACCEPT))
    driver.run(lambda decision: driver.partition.fence(decision, "leader moved"))
    second = driver.acknowledge("m1", (5, 9, ACCEPT))
    assert type(driver.replies[second]) is SharePartitionFencedError
    assert driver.replies[driver.release("m1")] == Acknowledged()
    assert len(driver.writes) == 1, "a fenced share partition begins no write"
    driver.complete()
    assert driver.replies[first] == Acknowledged()
    assert driver.deadline_ms is None


# --- releases and expired locks ------------------------------------------------------------------


def test_closed_session_releases_all_records_of_its_member_kafka_19953() -> None:
    driver = acquired()
    driver.acknowledge("m1", (0, 9, RELEASE))
    driver.settle()
    driver.fetch("m1", log((0, 9)), max_records=3, mode=AcquireMode.RECORD_LIMIT)
    driver.fetch("m2", log((0, 9)), max_records=3, mode=AcquireMode.RECORD_LIMIT)
    driver.fetch("m1", log((0, 9)), max_records=3, mode=AcquireMode.RECORD_LIMIT)
    token = driver.release("m1")
    driver.complete()
    assert driver.replies[token] == Acknowledged()
    owners = [owner for _, (_, _, owner) in sorted(driver.states().items())]
    assert owners == [None] * 3 + ["m2"] * 3 + [None] * 4


def test_closed_session_keeps_the_delivery_count_kafka_19972() -> None:
    driver = acquired(delivery_count_limit=2)
    driver.release("m1")
    driver.settle()
    driver.fetch("m1", log((0, 9)))
    driver.release("m1")
    driver.settle()
    assert driver.partition.start_offset == 10, "a crashing consumer does not get them for ever"


def test_release_without_records_is_answered_at_once() -> None:
    driver = acquired()
    assert driver.replies[driver.release("m2")] == Acknowledged()
    assert not driver.writes


def test_locks_end_after_their_duration_and_not_before() -> None:
    driver = acquired()
    driver.advance(LOCK_MS - 1)
    assert driver.states()[0] == (ACQUIRED, 1, "m1")
    driver.advance(1)
    assert driver.states()[0] == (AVAILABLE, 1, None)
    assert driver.wakes == 1
    assert driver.fetch("m2", log((0, 9))) == [(0, 9, 2)], "the write need not end first"
    driver.complete(error=SLOW)
    assert driver.states()[0] == (ACQUIRED, 2, "m2"), "an expiry is not undone"


def test_lock_of_a_divided_batch_keeps_its_end() -> None:
    driver = acquired()
    driver.advance(400)
    driver.acknowledge("m1", (4, 5, ACCEPT))
    driver.settle()
    driver.advance(LOCK_MS - 400)
    assert [driver.states()[offset][0] for offset in (3, 4, 6)] == [
        AVAILABLE, ACKNOWLEDGED, AVAILABLE,
    ]  # fmt: skip


def test_changed_lock_duration_applies_to_the_next_acquisition() -> None:
    driver = acquired((0, 9))
    driver.settings = replace(SETTINGS, record_lock_duration_ms=10 * LOCK_MS)
    driver.fetch("m1", log((10, 19)))
    driver.advance(LOCK_MS)
    assert driver.states()[0] == (AVAILABLE, 1, None)
    assert driver.states()[10] == (ACQUIRED, 1, "m1")


# --- the log's start -----------------------------------------------------------------------------


def test_records_below_the_log_start_are_dropped_kafka_19630() -> None:
    driver = acquired((0, 4), (5, 9), (10, 14), (15, 19))
    driver.release("m1")
    driver.settle()
    driver.move_log_start(17)
    assert driver.partition.start_offset == 17
    assert set(driver.states()) == {17, 18, 19}
    assert driver.partition.next_fetch_offset() == 17


def test_acknowledgement_below_the_log_start_has_no_effect_kafka_19859() -> None:
    driver = acquired((0, 4), (5, 9))
    driver.move_log_start(5)
    assert driver.replies[driver.acknowledge("m1", (0, 4, ACCEPT))] == Acknowledged()
    assert driver.partition.start_offset == 5
    assert driver.states() == dict.fromkeys(range(5, 10), (ACQUIRED, 1, "m1"))
    driver.advance(LOCK_MS)
    assert driver.partition.delivery_complete_count == 0


def test_records_in_transition_below_the_log_start_are_dropped_kafka_19476() -> None:
    driver = acquired((0, 9))
    token = driver.acknowledge("m1", (0, 9, RELEASE))
    driver.move_log_start(5)
    driver.complete()
    assert driver.replies[token] == Acknowledged()
    assert driver.states() == dict.fromkeys(range(5, 10), (AVAILABLE, 1, None))
    driver = acquired((0, 9))
    driver.acknowledge("m1", (0, 9, ACCEPT))
    driver.move_log_start(5)
    assert driver.partition.delivery_complete_count == 5
    driver.complete(error=SLOW)
    assert driver.partition.delivery_complete_count == 0


def test_log_start_behind_all_records_empties_the_share_partition() -> None:
    driver = acquired((0, 9))
    driver.move_log_start(15)
    assert (driver.partition.start_offset, driver.partition.end_offset) == (15, 15)
    assert driver.partition.next_fetch_offset() == 15
    assert driver.fetch("m2", log((12, 20))) == [(15, 20, 1)]


def test_log_start_advances_past_a_gap_of_the_loaded_state() -> None:
    # Kafka keeps the gap's start, and keeps fetching below the log start offset.
    driver = Driver(batches=[StateBatch(20, 29, AVAILABLE, 1)])
    driver.move_log_start(25)
    assert driver.partition.next_fetch_offset() == 25


# --- the dead-letter queue -----------------------------------------------------------------------


def test_rejected_records_go_to_the_dead_letter_queue_after_the_write() -> None:
    driver = acquired(dead_letter_queue=True)
    driver.acknowledge("m1", (0, 4, ACCEPT), (5, 7, REJECT), (8, 9, GAP))
    assert not driver.dead_letters
    driver.complete()
    assert driver.partition.start_offset == 5
    ((first, last, count, cause),) = [
        (dead_letter.first, dead_letter.last, dead_letter.delivery_count, dead_letter.cause)
        for dead_letter in driver.dead_letters
    ]
    assert (first, last, count, cause) == (5, 7, 1, Cause.REJECTED)
    driver.complete_dead_letter()
    assert driver.partition.start_offset == 5, "archiving must be written first"
    assert driver.writes[-1].batches == (StateBatch(5, 7, ARCHIVED, 1),)
    driver.complete(error=SLOW)
    assert driver.partition.start_offset == 10, "or the write must have failed"


def test_records_at_the_limit_go_to_the_dead_letter_queue_when_their_locks_end() -> None:
    driver = acquired(dead_letter_queue=True, delivery_count_limit=1)
    driver.advance(LOCK_MS)
    assert driver.states()[0] == (ARCHIVING, 1, None)
    driver.complete(error=SLOW)
    assert driver.dead_letters[0].cause is Cause.LOCK_EXPIRED
    driver.settle()
    assert driver.partition.start_offset == 10


def test_failed_write_of_a_rejection_sends_no_dead_letter() -> None:
    driver = acquired(dead_letter_queue=True)
    driver.acknowledge("m1", (0, 9, REJECT))
    driver.complete(error=SLOW)
    assert not driver.dead_letters
    assert driver.states()[0] == (ACQUIRED, 1, "m1")


def test_new_leader_resumes_archiving_kafka_20672() -> None:
    driver = Driver(
        replace(SETTINGS, dead_letter_queue=True),
        batches=[StateBatch(0, 4, ARCHIVING, 5), StateBatch(5, 9, ARCHIVING, 1)],
    )
    assert [dead_letter.cause for dead_letter in driver.dead_letters] == [
        Cause.LOCK_EXPIRED,
        Cause.REJECTED,
    ]
    driver.settle()
    assert driver.partition.start_offset == 10


# --- history -------------------------------------------------------------------------------------


def test_events_name_the_cause_of_returned_records() -> None:
    driver = acquired((0, 4), (5, 9), (10, 14))
    driver.acknowledge("m1", (0, 4, RELEASE))
    driver.complete()
    driver.advance(LOCK_MS)
    returned = [event.detail for event in driver.events if event.kind == "share-records-returned"]
    assert [
        (detail["first"], detail["last"], detail["cause"], detail["member"]) for detail in returned
    ] == [
        (0, 4, "released by its owner", "m1"),
        (5, 14, "acquisition lock expired", "m1"),  # two adjacent batches with the same cause
    ]
