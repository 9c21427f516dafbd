"""Offsets of consumer groups, deletion, and group ids that change their group type."""

from __future__ import annotations

import contextlib

import pytest

from fencepost.groups.classic_group import ClassicGroup
from fencepost.groups.commands import (
    DeleteGroup,
    DeleteOffsets,
    ExpireOffsets,
    FetchOffsets,
    FetchTopic,
    JoinGroup,
)
from fencepost.groups.consumer_group import ConsumerGroup
from fencepost.groups.errors import (
    GroupIdNotFoundError,
    GroupLimitExceededError,
    GroupSubscribedToTopicError,
    IllegalGenerationError,
    InconsistentGroupProtocolError,
    MemberIdRequiredError,
    NonEmptyGroupError,
    OffsetMetadataTooLargeError,
    StaleMemberEpochError,
    UnknownMemberIdError,
    UnsupportedGroupRequestError,
)
from tests.unit.groups.consumer_driver import CONSUMER_SESSION, ConsumerDriver, T
from tests.unit.groups.group_driver import RETENTION, Driver, G, empty, stable


def commit(driver, epoch, member_id="m", *offsets, **fields):
    fields.setdefault("knows_member_epochs", True)
    driver.commit(*offsets, generation=epoch, member_id=member_id, **fields)


def at(partition, offset=5):
    """Return a commit for a partition of ``t``, with the topic id that the handler adds."""
    return ("t", partition, offset, -1, "", T)


def two_members() -> ConsumerDriver:
    """Return a group at epoch 3: m keeps t-0 and t-1 from epoch 2, n has t-2 and t-3."""
    driver = ConsumerDriver()
    driver.join("m")
    driver.join("n")
    driver.beat("m", 2, owned=((T, (0, 1)),))
    driver.beat("n", 3)
    return driver


def test_commit_with_unknown_member_or_stale_epoch_is_refused():
    driver = two_members()
    commit(driver, 3)
    for epoch, member_id, error in [
        (3, "stranger", UnknownMemberIdError),
        (-1, "", UnknownMemberIdError),
        (4, "m", StaleMemberEpochError),
        (-1, "m", StaleMemberEpochError),
    ]:
        with pytest.raises(error):
            commit(driver, epoch, member_id)
    with pytest.raises(UnsupportedGroupRequestError):
        commit(driver, 3, knows_member_epochs=False)


def test_static_member_that_left_temporarily_may_still_commit():
    driver = ConsumerDriver()
    driver.join("m", instance_id="i")
    driver.beat("m", -2, instance_id="i")
    commit(driver, -2, "m", at(0))
    assert driver.fetch("t", 0).offset == 5
    for epoch in (2, -1):
        with pytest.raises(StaleMemberEpochError):
            commit(driver, epoch, "m", at(0))
    driver.join("n", instance_id="i")
    with pytest.raises(UnknownMemberIdError):
        commit(driver, -2, "m", at(0))


def test_older_epoch_commits_only_partitions_it_was_assigned():
    driver = two_members()
    commit(driver, 2, "m", at(0), at(1))
    for member_id, partition in (("m", 2), ("n", 2), ("n", 3)):
        with pytest.raises(StaleMemberEpochError):
            commit(driver, 2, member_id, at(partition))
    with pytest.raises(StaleMemberEpochError):
        commit(driver, 2, "m", at(0, 6), ("unknown", 0, 6))
    assert driver.fetch("t", 0).offset == 5
    too_large = ("t", 2, 5, -1, "x" * 4_097, T)
    fields = {"generation": 2, "member_id": "m", "knows_member_epochs": True}
    (_, _, kept), (_, _, refused) = driver.commit(at(0), too_large, **fields).partitions
    assert kept is None
    assert isinstance(refused, OffsetMetadataTooLargeError)
    driver.reload()
    commit(driver, 2, "m", at(0, 7))


def test_offsets_of_partitions_to_revoke_may_still_be_committed():
    driver = ConsumerDriver()
    driver.join("m")
    driver.join("n")
    driver.beat("m", 2)
    commit(driver, 2, "m", at(3))
    driver.beat("m", 2, owned=((T, (0, 1)),))
    with pytest.raises(StaleMemberEpochError):
        commit(driver, 2, "m", at(3, 6))


def test_transactional_commit_checks_the_member_epoch():
    driver = two_members()
    driver.commit(("t", 0, 5), generation=3, member_id="m", producer=1)
    driver.marker(1, commit=True)
    assert driver.fetch("t", 0).offset == 5
    driver.commit(at(0, 6), generation=2, member_id="m", producer=1, knows_member_epochs=True)
    with pytest.raises(IllegalGenerationError):
        driver.commit(at(3, 6), generation=2, member_id="m", producer=1)
    with pytest.raises(StaleMemberEpochError):
        driver.commit(at(3, 6), generation=2, member_id="m", producer=1, knows_member_epochs=True)


def test_transactional_commit_without_member_data_is_accepted_beside_members():
    driver = two_members()
    driver.commit(("t", 0, 5), producer=1)
    driver.marker(1, commit=True)
    assert driver.fetch("t", 0).offset == 5
    for fields, error in (
        ({"instance": "i"}, UnknownMemberIdError),
        ({"generation": 3}, UnknownMemberIdError),
        ({"generation": -2}, UnknownMemberIdError),
        ({"member_id": "m"}, IllegalGenerationError),
    ):
        with pytest.raises(error):
            driver.commit(("t", 0, 6), producer=1, **fields)


def test_empty_group_accepts_offsets_of_any_client():
    driver = ConsumerDriver()
    driver.join("m")
    driver.beat("m", -1)
    commit(driver, -1, "")
    assert driver.fetch().offset == 5


def test_fetch_with_unknown_member_or_stale_epoch_is_refused():
    driver = two_members()
    commit(driver, 3)
    topics = (FetchTopic("t", (0,)),)

    def fetch(member_id, epoch):
        return driver.ask(FetchOffsets(G, topics, False, member_id, epoch)).topics[0][1][0].offset

    assert fetch(None, -1) == 5
    assert fetch("m", 3) == 5
    with pytest.raises(UnknownMemberIdError):
        fetch("stranger", 3)
    with pytest.raises(UnknownMemberIdError):
        fetch("", -1)
    for epoch in (2, 4):
        with pytest.raises(StaleMemberEpochError):
            fetch("m", epoch)


def test_offsets_of_subscribed_topics_are_neither_deleted_nor_expired():
    driver = ConsumerDriver()
    driver.join("m", "t")
    commit(driver, 2, "m", ("t", 0, 5), ("u", 0, 5))
    result = driver.ask(DeleteOffsets(G, (("t", (0,)), ("u", (0,)))))
    assert isinstance(result.partitions[0][2], GroupSubscribedToTopicError)
    assert result.partitions[1][2] is None
    commit(driver, 2, "m", ("u", 0, 5))
    driver.now += RETENTION
    driver.ask(ExpireOffsets())
    assert driver.fetch("t", 0).offset == 5
    assert driver.fetch("u", 0).offset == -1


def test_consumer_group_is_deleted_or_expires_once_it_is_empty():
    driver = ConsumerDriver()
    driver.join("m", subscribed_topic_regex="t")
    commit(driver, 2)
    with pytest.raises(NonEmptyGroupError):
        driver.ask(DeleteGroup(G))
    driver.beat("m", -1)
    driver.ask(DeleteGroup(G))
    assert G not in driver.groups
    driver.reload()
    assert G not in driver.groups
    driver.join("m")
    driver.advance(CONSUMER_SESSION)
    driver.ask(ExpireOffsets())
    assert G not in driver.groups


# --- group ids that change their group type -------------------------------------------------------


def test_consumer_joins_a_group_that_has_only_offsets():
    driver = ConsumerDriver()
    driver.commit(("t", 0, 5))
    driver.join("m")
    assert driver.fetch().offset == 5
    driver.reload()
    assert isinstance(driver.groups[G], ConsumerGroup)


def classic(driver: Driver, **fields):
    """Send a classic JoinGroup to a ConsumerDriver."""
    return Driver.join(driver, version=3, **fields)


def test_empty_classic_group_becomes_a_consumer_group():
    was = empty()
    driver = ConsumerDriver(log=was.log)
    result = driver.join("m")
    assert result.member_epoch == 2
    driver.reload()
    assert isinstance(driver.groups[G], ConsumerGroup)


def test_classic_group_with_undecodable_assignments_refuses_consumers():
    driver = ConsumerDriver(log=stable(1)[0].log)
    with pytest.raises(GroupIdNotFoundError):
        driver.join("m")
    with pytest.raises(GroupIdNotFoundError):
        driver.beat("m", -1)


def test_empty_consumer_group_becomes_classic_and_keeps_its_offsets():
    driver = ConsumerDriver()
    driver.join("m")
    driver.commit(("t", 0, 5), generation=2, member_id="m", knows_member_epochs=True)
    with pytest.raises(InconsistentGroupProtocolError):
        driver.answer(classic(driver, protocol_type="connect"))
    driver.beat("m", -1)
    with pytest.raises(UnknownMemberIdError):
        driver.answer(classic(driver, member_id="c-1"))
    token = classic(driver)
    assert driver.parked(token)
    assert isinstance(driver.groups[G], ClassicGroup)
    driver.finish_initial_delay()
    driver.sync_all()
    driver.reload()
    assert isinstance(driver.groups[G], ClassicGroup)
    assert driver.fetch().offset == 5


def test_classic_join_with_undecodable_subscription_is_inconsistent():
    driver = ConsumerDriver()
    driver.join("m")
    with pytest.raises(InconsistentGroupProtocolError):
        driver.ask(
            JoinGroup(
                *(G, "c-1", None, "c", "h", 10_000, 10_000, "consumer"),
                (("range", b""),),
                require_known_member_id=True,
                supports_skip_assignment=True,
                new_member_id="x",
            )
        )


def test_pending_classic_member_is_forgotten_when_a_consumer_joins():
    driver = ConsumerDriver()
    token = Driver.join(driver)  # receives a member id
    with contextlib.suppress(MemberIdRequiredError):
        driver.answer(token)
    assert driver.timers
    driver.join("m")
    assert driver.consumer_group().epoch == 2
    tiny = ConsumerDriver(max_batch_bytes=100)
    Driver.join(tiny)
    with pytest.raises(GroupLimitExceededError):
        tiny.join("m")
    assert isinstance(tiny.groups[G], ClassicGroup)
    assert tiny.groups[G].pending_members
