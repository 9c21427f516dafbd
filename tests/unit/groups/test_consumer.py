"""ConsumerGroupHeartbeat, case by case: validation, fencing, epochs, states, timers."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest

from fencepost.groups import records
from fencepost.groups.commands import DescribeGroup, ListGroups
from fencepost.groups.consumer_commands import ConsumerHeartbeatResult, TopicsImage
from fencepost.groups.consumer_group import flat
from fencepost.groups.errors import (
    FencedInstanceIdError,
    FencedMemberEpochError,
    GroupIdNotFoundError,
    GroupLimitExceededError,
    GroupMaxSizeReachedError,
    InvalidGroupRequestError,
    UnknownMemberIdError,
    UnreleasedInstanceIdError,
    UnsupportedAssignorError,
)
from fencepost.groups.limits import GroupLimits
from fencepost.groups.reconcile import MemberState
from fencepost.logcore.machine import InvalidRegularExpressionError
from tests.unit.groups.consumer_driver import (
    CONSUMER_SESSION,
    IMAGE,
    REBALANCE,
    SETTINGS,
    ConsumerDriver,
    T,
    U,
    V,
    changed,
    settings,
    settle,
)
from tests.unit.groups.group_driver import G

ALL_T = ((T, (0, 1, 2, 3)),)


# --- validation ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"group_id": ""},
        {"member_id": ""},
        {"instance_id": ""},
        {"rack_id": ""},
        {"member_epoch": -3},
        {"member_epoch": -2},
        {"rebalance_timeout_ms": -1},
        {"rebalance_timeout_ms": -2},
        {"owned": None},
        {"owned": ALL_T},
        {"subscribed_topic_names": None},
        {"member_epoch": 1, "member_id": "", "client_makes_member_id": False},
        {"member_epoch": -1, "member_id": "", "client_makes_member_id": False},
        {"member_epoch": -2, "member_id": "", "client_makes_member_id": False},
        {"group_id": " \t"},
        {"member_id": "\n"},
    ],
)
def test_heartbeat_with_an_invalid_field_is_refused_without_creating_a_group(fields):
    driver = ConsumerDriver()
    asked = {
        "rebalance_timeout_ms": REBALANCE,
        "subscribed_topic_names": ("t",),
        "owned": (),
        "member_epoch": 0,
        "member_id": "m",
        **fields,
    }
    with pytest.raises(InvalidGroupRequestError):
        driver.beat(asked.pop("member_id"), asked.pop("member_epoch"), **asked)
    assert not driver.groups


def test_unknown_assignor_or_invalid_regex_is_refused():
    driver = ConsumerDriver()
    with pytest.raises(UnsupportedAssignorError, match="uniform, range"):
        driver.join("m", server_assignor="magic")
    with pytest.raises(InvalidRegularExpressionError):
        driver.join("m", subscribed_topic_names=None, subscribed_topic_regex="(")
    assert not driver.groups


def test_join_of_version_0_without_member_id_receives_a_generated_one():
    driver = ConsumerDriver()
    result = driver.join("", client_makes_member_id=False, new_member_id="made")
    assert result == ConsumerHeartbeatResult("made", 2, 5_000, ALL_T)


def test_heartbeat_beyond_a_limit_is_refused_and_names_the_limit():
    driver = ConsumerDriver(GroupLimits(max_subscribed_topics=2, max_group_regexes=1))
    driver.join("m", "t", "uuuuu")
    with pytest.raises(GroupLimitExceededError, match="max_subscribed_topics"):
        driver.join("n", "t", "u", "v")
    with pytest.raises(GroupLimitExceededError, match="max_string_bytes"):
        driver.join("n" * 32_768)
    driver.beat("m", 2, subscribed_topic_regex="t")
    with pytest.raises(GroupLimitExceededError, match="regexes"):
        driver.join("n", subscribed_topic_regex="u")
    tiny = ConsumerDriver(max_batch_bytes=100)
    with pytest.raises(GroupLimitExceededError, match=r"max\.message\.bytes"):
        tiny.join("m", "t")
    assert not tiny.groups
    shard = ConsumerDriver(GroupLimits(max_groups=1))
    shard.join("m")
    with pytest.raises(GroupLimitExceededError, match="max_groups"):
        shard.join("n", group_id="other")


# --- fencing, by epoch ---------------------------------------------------------------------------


@pytest.mark.parametrize("epoch", [1, -1])
def test_heartbeat_in_an_unknown_group_fails_with_group_id_not_found(epoch):
    with pytest.raises(GroupIdNotFoundError):
        ConsumerDriver().beat("m", epoch)


@pytest.mark.parametrize("epoch", [1, -1])
def test_heartbeat_of_an_unknown_member_is_refused(epoch):
    driver = ConsumerDriver()
    driver.join("m")
    with pytest.raises(UnknownMemberIdError):
        driver.beat("stranger", epoch)


def test_epoch_0_of_a_known_member_is_a_rejoin():
    driver = ConsumerDriver()
    driver.join("m")
    before = driver.machine.digest()
    assert driver.join("m") == ConsumerHeartbeatResult("m", 2, 5_000, ALL_T)
    assert driver.machine.digest() == before


def test_member_epoch_above_the_current_one_is_fenced():
    driver = ConsumerDriver()
    driver.join("m")
    with pytest.raises(FencedMemberEpochError):
        driver.beat("m", 3)


def test_previous_member_epoch_is_accepted_only_with_assigned_partitions():
    driver = ConsumerDriver()
    driver.join("m")
    driver.join("n")
    driver.beat("m", 2, owned=((T, (0, 1)),))  # member epoch 3, and the response is lost
    assert driver.consumer_group().current("m").member_epoch == 3
    for owned in (None, ALL_T):
        with pytest.raises(FencedMemberEpochError):
            driver.beat("m", 2, owned=owned)
    assert driver.beat("m", 2, owned=((T, (0,)),)).member_epoch == 3
    driver.join("o")
    driver.beat("m", 3, owned=())
    with pytest.raises(FencedMemberEpochError):
        driver.beat("m", 2, owned=())


def test_full_group_refuses_new_members_but_not_static_replacements():
    driver = ConsumerDriver(consumer=settings(max_size=2))
    driver.join("m")
    driver.join("n", instance_id="i")
    with pytest.raises(GroupMaxSizeReachedError):
        driver.join("o")
    driver.join("m")
    driver.beat("n", -2, instance_id="i")
    assert driver.join("n2", instance_id="i").member_id == "n2"


# --- static members ------------------------------------------------------------------------------


def test_static_member_that_returns_gets_its_assignment_without_a_new_epoch():
    driver = ConsumerDriver()
    driver.join("s1", instance_id="i")
    driver.join("m")
    assert driver.beat("s1", -2, instance_id="i") == ConsumerHeartbeatResult("s1", -2)
    assert driver.consumer_group().current("s1").member_epoch == -2
    assert driver.describe().state == "Reconciling"
    driver.reload()
    epoch = driver.consumer_group().epoch
    result = driver.join("s2", instance_id="i")
    assert result.member_epoch == epoch
    assert result.assignment == ((T, (0, 1)),)
    assert driver.consumer_group().epoch == epoch
    assert driver.event("member-fenced")["successor"] == "s2"
    for who in ("s1", "other"):
        with pytest.raises(FencedInstanceIdError):
            driver.beat(who, 2, instance_id="i")
    with pytest.raises(UnknownMemberIdError):
        driver.beat("s2", 2, instance_id="unknown")


def test_static_member_that_did_not_leave_keeps_its_instance_id():
    driver = ConsumerDriver()
    driver.join("s1", instance_id="i")
    with pytest.raises(UnreleasedInstanceIdError):
        driver.join("s2", instance_id="i")
    with pytest.raises(FencedInstanceIdError):
        driver.beat("s2", -1, instance_id="i")
    driver.beat("s1", -1, instance_id="i")
    assert driver.join("s2", instance_id="i").member_epoch == 4


def test_static_member_that_does_not_return_expires_with_its_session():
    driver = ConsumerDriver()
    driver.join("s1", instance_id="i")
    driver.beat("s1", -2, instance_id="i")
    driver.advance(CONSUMER_SESSION)
    assert driver.state_of_consumers() == "Empty"


def test_static_member_that_left_temporarily_keeps_its_partitions():
    driver = ConsumerDriver()
    driver.join("s1", instance_id="i")
    driver.beat("s1", -2, instance_id="i")
    assert driver.join("m").assignment == ()
    assert driver.consumer_group().current("m").state is MemberState.UNRELEASED_PARTITIONS
    # The member had to revoke two partitions. It returns without partitions, so it has revoked
    # both.
    result = driver.join("s2", instance_id="i")
    assert result.assignment == ((T, (0, 1)),)
    assert driver.beat("m", 3).assignment == ((T, (2, 3)),)


def test_static_member_that_returns_with_its_member_id_keeps_its_assignment():
    driver = ConsumerDriver()
    driver.join("s1", instance_id="i")
    driver.beat("s1", -2, instance_id="i")
    assert driver.join("s1", instance_id="i").assignment == ALL_T
    driver.reload()
    assert driver.consumer_group().static_members == {"i": "s1"}


def test_member_may_adopt_and_change_its_instance_id():
    driver = ConsumerDriver()
    driver.join("s")
    for name in ("i", "j"):
        assert driver.join("s", instance_id=name).assignment == ALL_T
        driver.reload()
        assert driver.consumer_group().static_members == {name: "s"}
    with pytest.raises(UnknownMemberIdError):
        driver.beat("s", 2, instance_id="i")
    driver.join("m", instance_id="i")
    with pytest.raises(UnreleasedInstanceIdError):
        driver.join("m", instance_id="j")


def test_partitions_of_an_abandoned_instance_id_are_reassigned():
    driver = ConsumerDriver()
    one, two, three = (driver.client(name, instance_id=name) for name in "abc")
    settle(one, two, three)
    one.leave(epoch=-2)
    two.fields["instance_id"] = "a"
    two.rejoin()
    settle(two, three)
    assert two.owned | three.owned == flat(ALL_T)


# --- lifecycle ------------------------------------------------------------------------------------


def test_second_member_receives_partitions_after_the_first_revokes_them():
    driver = ConsumerDriver()
    assert driver.join("m") == ConsumerHeartbeatResult("m", 2, 5_000, ALL_T)
    assert driver.describe().state == "Stable"
    assert driver.join("n") == ConsumerHeartbeatResult("n", 3, 5_000, ())
    assert driver.describe().state == "Reconciling"
    assert driver.beat("m", 2) == ConsumerHeartbeatResult("m", 2, 5_000, ((T, (0, 1)),))
    assert driver.consumer_group().current("m").state is MemberState.UNREVOKED_PARTITIONS
    assert driver.beat("n", 3).assignment is None
    assert driver.beat("m", 2, owned=ALL_T).assignment is None
    assert driver.beat("m", 2, owned=((T, (0, 1)),)) == ConsumerHeartbeatResult("m", 3, 5_000)
    assert driver.beat("n", 3) == ConsumerHeartbeatResult("n", 3, 5_000, ((T, (2, 3)),))
    assert driver.describe().state == "Stable"
    assert driver.beat("m", 3).assignment is None
    full = driver.beat(
        "m",
        2,
        owned=((T, (0, 1)),),
        rebalance_timeout_ms=REBALANCE,
        subscribed_topic_names=("t",),
    )
    assert full.assignment == ((T, (0, 1)),)
    driver.beat("n", -1)
    assert driver.consumer_group().epoch == 4
    assert driver.describe().state == "Assigning"
    assert driver.beat("m", 3) == ConsumerHeartbeatResult("m", 4, 5_000, ALL_T)
    assert driver.beat("m", -1) == ConsumerHeartbeatResult("m", -1)
    assert driver.describe().state == "Empty"
    assert driver.consumer_group().assignment_epoch == driver.consumer_group().epoch


def test_member_without_heartbeats_expires_and_is_then_unknown():
    driver = ConsumerDriver()
    driver.join("m")
    driver.advance(CONSUMER_SESSION - 1)
    driver.join("n")
    driver.advance(1)
    assert list(driver.consumer_group().members) == ["n"]
    assert driver.event("member-expired")["reason"] == "no heartbeat came"
    with pytest.raises(UnknownMemberIdError):
        driver.beat("m", 2)
    assert driver.beat("n", 3).assignment == ALL_T


def test_member_that_does_not_revoke_in_time_is_removed():
    driver = ConsumerDriver()
    driver.join("m", rebalance_timeout_ms=1_000)
    driver.join("n")
    driver.beat("m", 2)
    driver.advance(999)
    driver.beat("m", 2)
    driver.advance(1)
    assert list(driver.consumer_group().members) == ["n"]
    assert driver.event("member-expired")["reason"] == "did not revoke in time"


def test_rebalance_timer_survives_a_reload_and_ends_with_the_revocation():
    driver = ConsumerDriver()
    driver.join("m", rebalance_timeout_ms=1_000)
    driver.join("n")
    driver.beat("m", 2)
    driver.reload()
    driver.beat("m", 2, owned=())
    driver.advance(1_000)
    assert len(driver.consumer_group().members) == 2


def test_expired_member_rejoins_with_epoch_0():
    driver = ConsumerDriver()
    driver.join("m")
    driver.advance(CONSUMER_SESSION)
    assert driver.join("m") == ConsumerHeartbeatResult("m", 4, 5_000, ALL_T)


def test_group_and_assignment_epoch_are_equal_after_the_last_member_expires():
    driver = ConsumerDriver()
    driver.join("m")
    driver.advance(CONSUMER_SESSION)
    group = driver.consumer_group()
    assert group.epoch == group.assignment_epoch == 3
    assert driver.describe().state == "Empty"


def test_target_is_computed_at_most_once_per_assignment_interval():
    driver = ConsumerDriver(consumer=settings(assignment_interval_ms=1_000))
    driver.join("m")
    assert driver.join("n") == ConsumerHeartbeatResult("n", 2, 5_000, ())
    assert driver.describe().state == "Assigning"
    driver.advance(999)
    driver.beat("n", 2)
    assert driver.consumer_group().assignment_epoch == 2
    driver.advance(1)
    assert driver.beat("n", 2).member_epoch == 3
    assert driver.consumer_group().assignment_epoch == 3


def test_idle_groups_do_not_retain_former_topic_images():
    driver = ConsumerDriver()
    former = []
    for number in range(20):
        driver.image = changed(driver.image, w=(V, number + 1))
        former.append(id(driver.image.topics))
        driver.join("m", "w", group_id=f"idle-{number}")
    gc.collect()
    alive = [image for image in gc.get_objects() if isinstance(image, TopicsImage)]
    assert sum(id(image.topics) in former for image in alive) <= 1


def test_clock_that_goes_back_does_not_delay_the_assignment():
    driver = ConsumerDriver(consumer=settings(assignment_interval_ms=1_000))
    driver.join("m")
    driver.jump(-3_600_000)
    assert driver.join("n").member_epoch == 3


def test_clock_that_goes_back_does_not_delay_regex_resolution():
    driver = ConsumerDriver()
    driver.join("m", subscribed_topic_names=None, subscribed_topic_regex="t|w")
    driver.jump(-3_600_000)
    driver.image = changed(driver.image, w=(V, 1))
    driver.beat("m", 2)
    assert driver.consumer_group().subscribed_topics() == {"t", "w"}


def test_group_config_overrides_session_timeout_and_heartbeat_interval():
    driver = ConsumerDriver()
    driver.own[G] = settings(session_timeout_ms=1_000, heartbeat_interval_ms=100)
    assert driver.join("m").heartbeat_interval_ms == 100
    driver.advance(1_000)
    assert not driver.consumer_group().members


# --- subscriptions -------------------------------------------------------------------------------


def test_changed_subscription_bumps_the_epoch_and_a_reordered_one_does_not():
    driver = ConsumerDriver()
    driver.join("m", "t", "u")
    driver.beat("m", 2, subscribed_topic_names=("u", "t"))
    assert driver.consumer_group().epoch == 2
    result = driver.beat("m", 2, subscribed_topic_names=("u",))
    assert result.assignment == ((U, (0, 1)),)
    assert driver.consumer_group().epoch == 3
    assert driver.beat("m", 2, owned=((U, (0, 1)),)).member_epoch == 3


def test_changed_rack_host_or_assignor_name_does_not_bump_the_epoch():
    driver = ConsumerDriver()
    driver.join("m")
    driver.beat("m", 2, rack_id="r", client_host="/10.0.0.1", server_assignor="uniform")
    assert driver.consumer_group().epoch == 2
    member = driver.consumer_group().members["m"]
    assert (member.rack_id, member.client_host, member.server_assignor) == (
        "r",
        "/10.0.0.1",
        "uniform",
    )


def test_expiry_together_with_a_topic_change_bumps_the_epoch_once():
    driver = ConsumerDriver()
    driver.join("m")
    driver.join("n")
    driver.advance(CONSUMER_SESSION - 1)
    epoch = driver.consumer_group().epoch
    driver.beat("m", 2)
    driver.image = changed(driver.image, t=(T, 5))
    driver.advance(1)
    assert set(driver.consumer_group().members) == {"m"}
    assert driver.consumer_group().epoch == epoch + 1
    driver.beat("m", driver.consumer_group().current("m").member_epoch)
    assert driver.consumer_group().epoch == epoch + 1, "the removal has taken note of the topic"


def test_assignment_follows_created_grown_and_deleted_topics():
    driver = ConsumerDriver()
    client = driver.client("m", "t", "new")
    driver.image = changed(driver.image, new=(V, 1))
    settle(client)
    assert client.owned == {(T, 0), (T, 1), (T, 2), (T, 3), (V, 0)}
    driver.image = changed(driver.image, t=(T, 5))
    settle(client)
    assert (T, 4) in client.owned
    driver.image = changed(driver.image, new=None)
    settle(client)
    assert {topic_id for topic_id, _ in client.owned} == {T}
    epoch = driver.consumer_group().epoch
    driver.image = changed(driver.image, other=(b"o" * 16, 3))
    settle(client)
    assert driver.consumer_group().epoch == epoch
    again = b"2" * 16
    driver.image = changed(driver.image, t=(again, 1))
    settle(client)
    assert client.owned == {(again, 0)}


def test_regex_subscription_follows_new_topics_after_its_interval():
    image = TopicsImage({"orders.eu": (T, 1), "orders.us": (U, 1), "orders": (V, 1)}, 7)
    driver = ConsumerDriver(image=image)
    client = driver.client("m", subscribed_topic_names=None, subscribed_topic_regex=r"orders\..+")
    assert client.owned == {(T, 0), (U, 0)}
    assert driver.consumer_group().regexes[r"orders\..+"].version == 7
    assert driver.consumer_group().is_subscribed_to("orders.eu")
    assert not driver.consumer_group().is_subscribed_to("orders")
    driver.image = changed(image, **{"orders.jp": (b"j" * 16, 1)})
    settle(client)
    assert len(client.owned) == 2, "too early to look again"
    driver.advance(1_000)
    settle(client)
    assert len(client.owned) == 3
    driver.reload()
    client.beat(subscribed_topic_regex="", subscribed_topic_names=("orders",))
    client.catch_up()
    settle(client)
    assert client.owned == {(V, 0)}
    assert driver.consumer_group().regexes == {}


def test_regex_is_removed_with_its_last_subscriber():
    driver = ConsumerDriver()
    driver.join("m", subscribed_topic_names=None, subscribed_topic_regex="t")
    driver.join("n", subscribed_topic_regex="t")
    driver.beat("m", -1)
    assert list(driver.consumer_group().regexes) == ["t"]
    driver.advance(CONSUMER_SESSION)
    assert driver.consumer_group().regexes == {}


def test_regex_is_resolved_at_most_once_per_interval():
    driver = ConsumerDriver()
    driver.join("m", subscribed_topic_names=None, subscribed_topic_regex="x.*")
    for number in range(3):
        driver.advance(1_000)
        driver.image = changed(driver.image, **{f"x{number}": (bytes([number]) * 16, 1)})
        driver.beat("m", driver.consumer_group().current("m").member_epoch)
        driver.image = changed(driver.image, **{f"xx{number}": (bytes([99 + number]) * 16, 1)})
        driver.beat("m", driver.consumer_group().current("m").member_epoch)
        topics = driver.consumer_group().regexes["x.*"].topics
        assert f"x{number}" in topics
        assert f"xx{number}" not in topics


def test_assignor_is_chosen_by_vote_of_the_members():
    driver = ConsumerDriver()
    driver.join("m", server_assignor="range")
    assert driver.describe().assignor_name == "range"
    driver.join("n", server_assignor="uniform")
    assert driver.describe().assignor_name == "uniform"
    driver.join("o", server_assignor="range")
    driver.join("p")
    assert driver.describe().assignor_name == "range"


def test_member_without_subscribed_topics_is_stable_without_partitions():
    driver = ConsumerDriver()
    assert driver.join("m", subscribed_topic_names=()).assignment == ()
    assert driver.describe().state == "Stable"


# --- describing -----------------------------------------------------------------------------------


def test_description_and_listing_show_state_epochs_and_assignment():
    driver = ConsumerDriver()
    driver.join("m", "t", "gone", instance_id="i", rack_id="r")
    described = driver.describe()
    assert (described.state, described.group_epoch, described.assignment_epoch) == ("Stable", 2, 2)
    member = described.members[0]
    assert (member.member_id, member.metadata.instance_id, member.metadata.rack_id) == (
        "m",
        "i",
        "r",
    )
    assert member.metadata.subscribed_topic_names == ("gone", "t")
    assert member.assignment == member.target_assignment
    assert member.assignment[0].topic == "t"
    assert member.assignment[0].partitions == (0, 1, 2, 3)
    listed = driver.ask(ListGroups(types=("Consumer",), states=("stable",))).groups
    assert [(item.group_id, item.state, item.protocol_type) for item in listed] == [
        (G, "Stable", "consumer")
    ]
    with pytest.raises(GroupIdNotFoundError):
        driver.ask(DescribeGroup(G))
    driver.image = TopicsImage({}, 2)
    assert driver.describe().members[0].assignment == ()


def test_epoch_bump_events_name_member_client_and_reason():
    driver = ConsumerDriver()
    driver.join("m")
    assert driver.kinds() == [
        "group-created",
        "member-joined",
        "group-epoch-bumped",
        "target-assigned",
        "member-reconciled",
    ]
    bumped = {"old_epoch": 1, "epoch": 2, "reason": "member m joined"}
    who = {"member": "m", "client_id": "c", "client_host": "/127.0.0.1"}
    assert driver.event("group-epoch-bumped") == {**bumped, **who}
    driver.advance(CONSUMER_SESSION)
    bumped = {"old_epoch": 2, "epoch": 3, "reason": "m: no heartbeat came"}
    assert driver.event("group-epoch-bumped") == {**bumped, **who}


def test_epoch_bump_by_a_topic_change_names_no_member():
    driver = ConsumerDriver()
    epoch = driver.join("m").member_epoch
    driver.image = changed(IMAGE, t=(T, 5))
    driver.beat("m", epoch)
    bumped = {"old_epoch": 2, "epoch": 3, "reason": "subscribed topics changed"}
    assert driver.event("group-epoch-bumped") == bumped


@pytest.mark.parametrize("own_ms", [CONSUMER_SESSION - 1, CONSUMER_SESSION + 1])
def test_session_timeout_of_the_group_config_applies_after_reload(own_ms):
    driver = ConsumerDriver()
    driver.own[G] = replace(SETTINGS, session_timeout_ms=own_ms)
    driver.join("m")
    driver.join("n", group_id="other")
    driver.reload()
    driver.advance(own_ms - 1)
    assert "m" in driver.consumer_group().members
    driver.advance(1)
    assert G not in driver.groups or not driver.consumer_group().members


def test_old_partition_metadata_record_is_tombstoned_by_the_next_join():
    driver = ConsumerDriver()
    driver.join("m")
    log = [entry.record for entry in driver.log]
    old = bytes.fromhex("0004") + log[0].key[2:5]
    driver.machine.replay(records.Record(old, b"\0\0\2"), 99, 0, None)
    assert driver.consumer_group().has_partition_metadata
    driver.join("n")
    assert not driver.consumer_group().has_partition_metadata


def test_default_session_timeout_equals_kafkas():
    assert SETTINGS.session_timeout_ms == 45_000
    assert IMAGE.names() == {T: "t", U: "u"}
