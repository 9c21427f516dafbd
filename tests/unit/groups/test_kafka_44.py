"""Scenarios of group coordinator bugs that Apache Kafka 4.4 fixes.

The tests' names have the ids of Kafka's issues.
"""

from __future__ import annotations

import pytest

from fencepost.groups import consumer_records as cr
from fencepost.groups.classic_group import ClassicGroup
from fencepost.groups.consumer_commands import MigrationPolicy
from fencepost.groups.consumer_group import ConsumerGroup
from fencepost.groups.errors import (
    GroupIdNotFoundError,
    GroupMaxSizeReachedError,
    InconsistentGroupProtocolError,
    UnreleasedInstanceIdError,
)
from tests.unit.groups.churn import every_prefix_loads, every_variant_loads_back
from tests.unit.groups.consumer_driver import CONSUMER_SESSION, ConsumerDriver, T, settings
from tests.unit.groups.group_driver import Driver, G, subscription

STATIC_LEAVE, LEAVE = -2, -1


# --- KAFKA-20442 ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["leave", "expire", "static"])
def test_last_member_gone_writes_assignment_epoch_of_the_group(how):
    driver = ConsumerDriver()
    instance = {"instance_id": "i"} if how == "static" else {}
    epoch = driver.join("m", **instance).member_epoch
    before = len(driver.log)
    if how == "expire":
        driver.advance(CONSUMER_SESSION)
    else:
        driver.beat("m", LEAVE, **instance)
    group_epoch, assignment_epoch = (entry.record for entry in driver.log[before:][-2:])
    assert group_epoch.key == cr.group_epoch(G, cr.GroupEpochValue(epoch + 1)).key
    assert assignment_epoch == cr.assignment_epoch(G, cr.AssignmentEpochValue(epoch + 1, 0))


def test_other_members_left_leave_the_assignment_to_their_heartbeats():
    driver = ConsumerDriver()
    driver.join("m")
    driver.join("n")
    before = len(driver.log)
    driver.beat("m", LEAVE)
    assignment_key = cr.assignment_epoch(G, cr.AssignmentEpochValue(1)).key
    assert assignment_key not in {entry.record.key for entry in driver.log[before:]}


# --- KAFKA-20434 ----------------------------------------------------------------------------------


def rejoin(driver: ConsumerDriver, name: str, assignor: str) -> int:
    """Let a static member leave for a while, and come back with another assignor."""
    driver.beat(name, STATIC_LEAVE, instance_id=name)
    successor = f"{name}'"
    driver.join(successor, instance_id=name, server_assignor=assignor)
    return driver.consumer_group().epoch


def test_static_members_that_prefer_another_assignor_bump_the_epoch_as_a_majority():
    driver = ConsumerDriver()
    for name in ("one", "two", "three"):
        driver.join(name, instance_id=name, server_assignor="uniform")
    epoch = driver.consumer_group().epoch
    assert rejoin(driver, "one", "range") == epoch
    assert driver.describe().assignor_name == "uniform"
    assert rejoin(driver, "two", "range") == epoch + 1
    described = driver.describe()
    assert (described.assignor_name, described.assignment_epoch) == ("range", epoch + 1)
    assert rejoin(driver, "three", "range") == epoch + 1


def test_assignor_of_a_heartbeat_counts_like_one_of_a_join():
    driver = ConsumerDriver()
    epoch = driver.join("m").member_epoch
    # Naming the default assignor changes nothing.
    assert driver.beat("m", epoch, server_assignor="uniform").member_epoch == epoch
    assert driver.beat("m", epoch, server_assignor="range").member_epoch == epoch + 1
    assert driver.beat("m", epoch + 1, server_assignor="range").member_epoch == epoch + 1
    every_variant_loads_back(lambda: driver)


# --- KAFKA-20747 ----------------------------------------------------------------------------------


def test_member_that_changes_its_instance_id_gives_the_former_one_up():
    driver = ConsumerDriver()
    driver.join("m", instance_id="former")
    driver.join("m", instance_id="latter")
    assert driver.consumer_group().static_members == {"latter": "m"}
    assert driver.join("n", instance_id="former").member_epoch > 0
    with pytest.raises(UnreleasedInstanceIdError):
        driver.join("o", instance_id="latter")
    driver.beat("m", LEAVE, instance_id="latter")
    assert driver.consumer_group().static_members == {"former": "n"}
    driver.join("o", instance_id="latter")
    every_variant_loads_back(lambda: driver)


# --- KAFKA-20601 ----------------------------------------------------------------------------------


def test_static_member_rejoins_a_full_group_in_either_protocol():
    driver = ConsumerDriver(consumer=settings(max_size=2))
    driver.join("m", instance_id="i")
    driver.join("n")
    for fields in ({}, {"instance_id": "j"}):
        with pytest.raises(GroupMaxSizeReachedError):
            driver.join("o", **fields)
        with pytest.raises(GroupMaxSizeReachedError):
            driver.answer(Driver.join(driver, version=5, instance=fields.get("instance_id")))
    driver.beat("m", STATIC_LEAVE, instance_id="i")
    assert driver.join("p", instance_id="i").member_id == "p"
    joined = driver.answer(Driver.join(driver, version=5, instance="i"))
    assert set(driver.consumer_group().members) == {joined.member_id, "n"}


# --- KAFKA-20640 ----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", list(MigrationPolicy))
def test_classic_member_is_refused_by_a_consumer_group_if_migration_is_disabled(policy):
    driver = ConsumerDriver(consumer=settings(migration_policy=policy))
    driver.client("m")
    before = driver.machine.digest()
    token = Driver.join(driver, version=3)
    if policy is MigrationPolicy.DISABLED:
        with pytest.raises(InconsistentGroupProtocolError, match="migration is disabled"):
            driver.answer(token)
        assert driver.machine.digest() == before
    else:
        assert driver.answer(token).member_id in driver.consumer_group().members


# --- KAFKA-20662 ----------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [1, 3, 7])
def test_malformed_subscription_in_an_online_migration_is_inconsistent(cut):
    driver = ConsumerDriver()
    driver.client("m")
    before = driver.machine.digest()
    broken = (("range", subscription("t")[:-cut]),)
    with pytest.raises(InconsistentGroupProtocolError):
        driver.answer(Driver.join(driver, version=3, protocols=broken))
    assert driver.machine.digest() == before


def test_malformed_subscription_keeps_a_group_classic():
    driver = ConsumerDriver()
    token = Driver.join(driver, version=3, protocols=(("range", subscription("t")[:-1]),))
    driver.finish_initial_delay()
    joined = driver.answer(token)
    driver.sync(joined.member_id, joined.generation_id, [(joined.member_id, b"")])
    with pytest.raises(GroupIdNotFoundError, match="Cannot upgrade classic group"):
        driver.client("m")
    assert isinstance(driver.groups[G], ClassicGroup)


# --- KAFKA-20431 ----------------------------------------------------------------------------------


def test_described_assignment_includes_partitions_to_revoke():
    driver = ConsumerDriver()
    client = driver.client("m")
    driver.client("n")
    client.beat()
    current = driver.consumer_group().current("m")
    assert len(current.pending_revocation) == 2, "the member has not given them up yet"
    member = next(
        described for described in driver.describe().members if described.member_id == "m"
    )
    assert [(topic.topic_id, topic.partitions) for topic in member.assignment] == [
        (T, (0, 1, 2, 3))
    ]
    assert sum(len(topic.partitions) for topic in member.target_assignment) == 2


# --- KAFKA-20845 ----------------------------------------------------------------------------------


def test_large_conversion_is_refused_whole_or_replayed_whole():
    """A batch that is too large is refused before the conversion changes anything.

    Some changes of a conversion are in no record, so replay could not restore them.
    """
    kinds = set()
    for limit in range(200, 2_000, 25):
        driver = ConsumerDriver()
        consumer = driver.client("m")
        fat = subscription("t") + b"\0" * 200
        Driver.join(driver, version=3, protocols=(("range", fat),))
        driver.max_batch_bytes = limit
        consumer.leave()
        kind = type(driver.groups[G])
        kinds.add(kind)
        after = driver.machine.digest()
        every_prefix_loads(lambda driver=driver: driver)
        Driver.reload(driver)
        assert (type(driver.groups[G]), driver.machine.digest()) == (kind, after), limit
    assert kinds == {ClassicGroup, ConsumerGroup}
