"""ShareGroupHeartbeat: validation, epochs, assignment, initialization, sessions."""

from __future__ import annotations

from typing import Any

import pytest

from fencepost.groups import records
from fencepost.groups.commands import CommitOffsets, DeleteOffsets, ListGroups, OffsetToCommit
from fencepost.groups.consumer_commands import ConsumerHeartbeat, ShareSettings
from fencepost.groups.errors import (
    FencedMemberEpochError,
    GroupIdNotFoundError,
    GroupMaxSizeReachedError,
    InconsistentGroupProtocolError,
    InvalidGroupRequestError,
    UnknownMemberIdError,
)
from fencepost.groups.share_commands import ShareStateInitialized
from fencepost.groups.share_records import ShareRecordType as Kind
from tests.unit.groups.group_driver import Driver, G
from tests.unit.groups.share_driver import ShareDriver, T, U


def kinds_since(driver: ShareDriver, start: int) -> list[int]:
    found = [entry.record for entry in driver.log[start:] if entry.record is not None]
    return [records.record_type(record.key) for record in found]


@pytest.mark.parametrize(
    ("member_id", "epoch", "fields"),
    [
        ("", 0, {"subscribed_topic_names": ("t",)}),
        ("m", 0, {"subscribed_topic_names": ("t",), "group_id": ""}),
        ("m", 0, {"subscribed_topic_names": ("t",), "rack_id": ""}),
        ("m", 0, {}),
        ("m", -2, {}),
    ],
)
def test_heartbeat_with_an_invalid_field_is_refused(
    member_id: str, epoch: int, fields: dict[str, Any]
) -> None:
    driver = ShareDriver()
    with pytest.raises(InvalidGroupRequestError):
        driver.beat(member_id, epoch, **fields)
    assert not driver.groups


def test_first_join_writes_the_records_in_kafkas_order() -> None:
    driver = ShareDriver()
    joined = driver.join("m")
    assert (joined.member_epoch, joined.assignment) == (2, ())
    assert joined.to_initialize is not None
    assert joined.to_initialize.state_epoch == 2
    assert joined.to_initialize.offsets == tuple((T, index, -1) for index in range(4))
    assert kinds_since(driver, 0) == [10, 11, 13, 12, 14, 15]
    driver.initialize(joined.to_initialize)
    driver.advance(5_000)
    second = driver.beat("m", 2)
    assert (second.member_epoch, second.assignment) == (3, ((T, (0, 1, 2, 3)),))
    assert driver.beat("m", 3).assignment is None
    driver.reload()


def test_second_target_waits_for_the_assignment_interval() -> None:
    driver = ShareDriver()
    driver.initialize(driver.join("m").to_initialize)
    early = driver.beat("m", 2)
    assert (early.member_epoch, early.assignment) == (2, None)
    driver.advance(1_000)
    assert driver.beat("m", 2).assignment == ((T, (0, 1, 2, 3)),)


def test_members_share_partitions_when_there_are_more_members() -> None:
    driver = ShareDriver()
    names = [f"m{index}" for index in range(4)]
    for name in names:
        driver.join(name, "u")
    assigned = driver.settle(*names)
    assert sorted(len(mine[U]) for mine in assigned.values()) == [1, 1, 1, 1]
    assert {index for mine in assigned.values() for index in mine[U]} == {0, 1}


def test_partitions_added_to_a_known_topic_start_at_zero() -> None:
    """KAFKA-20742: if they started at the latest offset, earlier records would be lost."""
    driver = ShareDriver()
    driver.join("m")
    driver.settle("m")
    driver.change_topics(t=(T, 6))
    wanted = driver.beat("m", driver.share_group.current("m").member_epoch).to_initialize
    assert wanted is not None
    assert wanted.offsets == ((T, 4, 0), (T, 5, 0))


def test_initialization_without_an_answer_is_repeated_after_the_retry_interval() -> None:
    """KAFKA-19204: a topic whose initialization request was lost must not stay without state."""
    driver = ShareDriver()
    assert driver.join("m").to_initialize is not None
    driver.advance(29_999)
    assert driver.beat("m", 2).to_initialize is None
    driver.advance(1)
    assert driver.beat("m", 2).to_initialize is not None


def test_failed_initialization_is_repeated_by_the_next_heartbeat() -> None:
    driver = ShareDriver()
    driver.join("m")
    failed = frozenset((T, index) for index in range(4))
    driver.ask(ShareStateInitialized(G, frozenset(), failed))
    assert driver.share_group.state.initializing == ()
    assert driver.beat("m", 2).to_initialize is not None


def test_topic_that_is_no_longer_subscribed_leaves_the_assignment_at_once() -> None:
    """KAFKA-19431: the target assignment of the former subscription still has the topic."""
    driver = ShareDriver()
    driver.join("m", "t", "u")
    assert driver.settle("m") == {"m": {T: (0, 1, 2, 3), U: (0, 1)}}
    epoch = driver.share_group.epoch
    changed = driver.beat("m", epoch, subscribed_topic_names=("u",))
    assert changed.assignment == ((U, (0, 1)),)


def test_previous_epoch_is_accepted_and_the_assignment_is_not_repeated() -> None:
    driver = ShareDriver()
    driver.join("m")
    driver.settle("m")
    epoch = driver.share_group.current("m").member_epoch
    assert driver.beat("m", epoch - 1).member_epoch == epoch
    assert driver.beat("m", epoch - 1).assignment is None
    told = driver.beat("m", epoch - 1, subscribed_topic_names=("t",))
    assert told.assignment == ((T, (0, 1, 2, 3)),)
    for wrong in (epoch + 1, epoch - 2):
        with pytest.raises(FencedMemberEpochError):
            driver.beat("m", wrong)


def test_heartbeat_of_an_unknown_group_or_member_is_refused() -> None:
    driver = ShareDriver()
    with pytest.raises(GroupIdNotFoundError):
        driver.beat("m", 1)
    driver.join("m")
    for epoch in (1, -1):
        with pytest.raises(UnknownMemberIdError):
            driver.beat("stranger", epoch)


def test_full_group_refuses_new_members_only() -> None:
    driver = ShareDriver(ShareSettings(max_size=1))
    driver.join("m")
    with pytest.raises(GroupMaxSizeReachedError):
        driver.join("n")
    assert driver.join("m").member_epoch == 2


def test_leaving_writes_tombstones_and_the_last_member_ends_the_assignment() -> None:
    driver = ShareDriver()
    driver.join("m")
    driver.join("n")
    driver.settle("m", "n")
    start = len(driver.log)
    assert driver.beat("m", -1).member_epoch == -1
    assert kinds_since(driver, start) == [14, 13, 10, 11]
    driver.settle("n")
    start = len(driver.log)
    driver.beat("n", -1)
    assert kinds_since(driver, start) == [14, 13, 10, 11, 12]
    assert driver.share_group.state_name == "Empty"
    driver.reload()


def test_member_without_heartbeats_expires_with_its_session() -> None:
    driver = ShareDriver()
    driver.join("m")
    driver.advance(44_999)
    driver.beat("m", 2)
    driver.advance(44_999)
    assert "m" in driver.share_group.members
    driver.advance(1)
    assert driver.share_group.is_empty
    assert "member-expired" in driver.kinds()


def test_sessions_restart_after_reload() -> None:
    driver = ShareDriver()
    driver.join("m")
    driver.advance(30_000)
    driver.reload()
    driver.advance(44_999)
    assert "m" in driver.share_group.members
    driver.advance(1)
    assert driver.share_group.is_empty


def test_unchanged_heartbeat_writes_nothing_and_reads_no_topic() -> None:
    driver = ShareDriver()
    driver.join("m")
    driver.settle("m")
    before, epoch = len(driver.log), driver.share_group.epoch
    for _ in range(3):
        driver.advance(1_000)
        assert driver.beat("m", epoch).member_epoch == epoch
    assert len(driver.log) == before
    driver.change_topics(u=(U, 3))
    driver.beat("m", epoch)
    assert len(driver.log) == before, "another topic changed"


def test_share_group_refuses_requests_of_other_protocols() -> None:
    driver = ShareDriver()
    driver.join("m")
    with pytest.raises(GroupIdNotFoundError, match="not a consumer group"):
        driver.ask(
            ConsumerHeartbeat(
                G,
                "c",
                0,
                "client",
                "/127.0.0.1",
                rebalance_timeout_ms=1,
                subscribed_topic_names=("t",),
                owned=(),
            )
        )
    with pytest.raises(InconsistentGroupProtocolError):
        driver.answer(Driver.join(driver))
    offsets = (OffsetToCommit("t", 0, 7, -1, "", None),)
    with pytest.raises(GroupIdNotFoundError):
        driver.ask(CommitOffsets(G, -1, "", None, offsets))
    with pytest.raises(GroupIdNotFoundError):
        driver.ask(DeleteOffsets(G, (("t", (0,)),)))
    (listed,) = driver.ask(ListGroups()).groups
    assert (listed.protocol_type, listed.group_type, listed.state) == ("share", "share", "Stable")


def test_share_member_cannot_join_an_empty_classic_group() -> None:
    driver = ShareDriver()
    offsets = (OffsetToCommit("t", 0, 7, -1, "", None),)
    driver.ask(CommitOffsets(G, -1, "", None, offsets))
    with pytest.raises(GroupIdNotFoundError, match="not a share group"):
        driver.join("m")


def test_current_assignment_of_a_deleted_topic_is_dropped() -> None:
    driver = ShareDriver()
    driver.join("m", "t", "u")
    driver.settle("m")
    driver.change_topics(u=None)  # type: ignore[arg-type]
    assert driver.settle("m") == {"m": {T: (0, 1, 2, 3)}}
    assert Kind.CURRENT_MEMBER_ASSIGNMENT in kinds_since(driver, 0)
