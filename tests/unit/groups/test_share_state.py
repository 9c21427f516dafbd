"""Start offsets of share groups, and the deletion of their state and of groups."""

from __future__ import annotations

import pytest

from fencepost.groups.commands import DeleteGroup, ListGroups
from fencepost.groups.consumer_commands import NamedPartitions
from fencepost.groups.errors import GroupIdNotFoundError, NonEmptyGroupError
from fencepost.groups.share_commands import (
    AlterShareOffsets,
    DeleteShareOffsets,
    DeleteShareState,
    DescribeShareGroup,
    ListShareState,
    ShareStateDeleted,
    ShareStateInitialized,
    ShareTopicsDeleted,
)
from tests.unit.groups.group_driver import G
from tests.unit.groups.share_driver import ShareDriver, T, U

ALL_T = NamedPartitions(T, "t", (0, 1, 2, 3))
ALL_U = NamedPartitions(U, "u", (0, 1))


def with_state(*topics: str) -> ShareDriver:
    """Return a shard with an empty group that has state for topics."""
    driver = ShareDriver()
    driver.join("m", *topics)
    driver.settle("m")
    driver.beat("m", -1)
    return driver


def test_altering_offsets_creates_the_group_at_epoch_1() -> None:
    driver = ShareDriver()
    altered = driver.ask(
        AlterShareOffsets(G, (("t", 0, 7), ("t", 9, 7), ("x", 0, 7), ("u", 1, -5)))
    )
    assert altered.unknown == {("t", 9), ("x", 0)}
    assert altered.to_initialize.state_epoch == 1
    assert altered.to_initialize.offsets == ((T, 0, 7), (U, 1, -5))
    assert driver.share_group.saved_epoch is None, "record 15 alone makes the group"
    driver.initialize(altered.to_initialize)
    assert driver.ask(ListShareState(G)).partitions == (
        NamedPartitions(T, "t", (0,)),
        NamedPartitions(U, "u", (1,)),
    )
    driver.reload()


def test_altered_offset_keeps_its_state_if_the_share_coordinator_fails() -> None:
    driver = with_state("t")
    altered = driver.ask(AlterShareOffsets(G, (("t", 0, 7),)))
    assert altered.to_initialize.state_epoch == driver.share_group.epoch
    driver.ask(ShareStateInitialized(G, frozenset(), frozenset({(T, 0)})))
    assert driver.ask(ListShareState(G)).partitions == (ALL_T,)
    assert driver.share_group.state.initializing == ()


def test_offsets_and_state_of_a_group_with_members_cannot_be_changed() -> None:
    driver = ShareDriver()
    driver.join("m")
    for command in (
        AlterShareOffsets(G, (("t", 0, 7),)),
        DeleteShareOffsets(G, ("t",)),
        DeleteShareState(G),
        DeleteGroup(G),
    ):
        with pytest.raises(NonEmptyGroupError):
            driver.ask(command)


def test_deleted_offsets_are_listed_until_the_share_coordinator_reports() -> None:
    driver = with_state("t", "u")
    deleted = driver.ask(DeleteShareOffsets(G, ("t", "x", "t")))
    assert (deleted.partitions, deleted.unknown) == ((ALL_T,), ("x",))
    assert driver.ask(ListShareState(G)).partitions == (ALL_U,)
    again = driver.ask(DeleteShareOffsets(G, ("t",)))
    assert again.partitions == (ALL_T,), "the deletion may be repeated"
    driver.ask(ShareStateDeleted(G, frozenset({T})))
    assert driver.share_group.state.deleting == ()
    assert driver.ask(DeleteShareOffsets(G, ("t",))).without_state == ("t",)
    driver.reload()


def test_new_member_initializes_a_topic_whose_deletion_failed() -> None:
    driver = with_state("t")
    driver.ask(DeleteShareOffsets(G, ("t",)))
    wanted = driver.join("m").to_initialize
    assert wanted is not None
    assert wanted.offsets == tuple((T, index, -1) for index in range(4))
    assert driver.share_group.state.deleting == ()


def test_group_is_deleted_with_all_its_state() -> None:
    driver = with_state("t", "u")
    assert driver.ask(DeleteShareState(G)).partitions == (ALL_T, ALL_U)
    assert driver.ask(DeleteShareState(G)).partitions == (ALL_T, ALL_U), "it may be repeated"
    driver.ask(DeleteGroup(G))
    assert not driver.groups
    driver.reload()
    with pytest.raises(GroupIdNotFoundError):
        driver.ask(DeleteShareState(G))


def test_deleted_topic_is_removed_from_all_state_lists() -> None:
    driver = with_state("t", "u")
    driver.ask(DeleteShareOffsets(G, ("u",)))
    before = len(driver.log)
    driver.ask(ShareTopicsDeleted(frozenset({b"x" * 16})))
    assert len(driver.log) == before
    driver.ask(ShareTopicsDeleted(frozenset({T, U})))
    assert (driver.share_group.state.initialized, driver.share_group.state.deleting) == ((), ())


def test_description_has_epochs_and_assignments() -> None:
    driver = ShareDriver()
    with pytest.raises(GroupIdNotFoundError, match=r"Group g not found\."):
        driver.ask(DescribeShareGroup(G))
    driver.join("m", "t", "u")
    driver.settle("m")
    described = driver.ask(DescribeShareGroup(G))
    assert (described.state, described.assignor_name) == ("Stable", "simple")
    assert described.group_epoch == described.assignment_epoch == 3
    (member,) = described.members
    assert (member.member_id, member.member_epoch) == ("m", 3)
    assert member.assignment == (ALL_T, ALL_U)
    driver.change_topics(u=None)
    (member,) = driver.ask(DescribeShareGroup(G)).members
    assert member.assignment == (ALL_T,)


def test_listing_state_of_an_unknown_group_is_empty_and_creates_no_group() -> None:
    driver = ShareDriver()
    assert driver.ask(ListShareState(G)).partitions == ()
    assert driver.ask(ListGroups()).groups == ()


def test_topic_deletion_too_large_for_a_batch_runs_in_several_passes() -> None:
    driver = ShareDriver(max_batch_bytes=400)
    for number in range(5):
        driver.ask(AlterShareOffsets(f"g{number}", (("t", 0, 7),)))
        driver.ask(ShareStateInitialized(f"g{number}", frozenset({(T, 0)})))
    passes = 1
    while driver.ask(ShareTopicsDeleted(frozenset({T}))).more:
        passes += 1
    assert passes > 1
    for number in range(5):
        assert driver.ask(ListShareState(f"g{number}")).partitions == ()
        assert driver.groups[f"g{number}"].state.initialized == ()
    before = len(driver.log)
    assert not driver.ask(ShareTopicsDeleted(frozenset({T, U}))).more
    assert len(driver.log) == before


def test_events_record_altered_initialized_and_deleted_offsets() -> None:
    driver = ShareDriver()
    altered = driver.ask(AlterShareOffsets(G, (("t", 0, 7), ("u", 1, 8))))
    driver.initialize(altered.to_initialize)
    driver.ask(DeleteShareOffsets(G, ("t",)))
    driver.ask(ShareStateDeleted(G, frozenset({T})))
    driver.ask(ShareTopicsDeleted(frozenset({U})))
    told = [(event.kind, event.detail.get("topics")) for event in driver.events]
    assert told == [
        ("group-created", None),
        ("share-offsets-altered", ["t", "u"]),
        ("share-state-initialized", ["t", "u"]),
        ("share-state-deleted", ["t"]),
        ("share-state-deleted", ["u"]),
    ]
