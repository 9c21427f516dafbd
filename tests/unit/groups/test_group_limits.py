"""Every limit, at it and one past it; floods stay bounded."""

from __future__ import annotations

import dataclasses
import inspect
import uuid

import pytest
from consumer_driver import ConsumerDriver
from group_driver import NOW, Driver, G, stable

from fencepost.groups import limits as limits_module
from fencepost.groups.commands import JoinGroup, OffsetToCommit, TxnCommitOffsets
from fencepost.groups.errors import (
    GroupLimitExceededError,
    GroupMaxSizeReachedError,
    MemberIdRequiredError,
    UnknownMemberIdError,
)
from fencepost.groups.limits import GroupLimits
from fencepost.groups.machine import GroupMachine
from fencepost.logcore.machine import ProducerStamp


def refused(driver: Driver, token: int) -> bool:
    return isinstance(driver.answers[token], GroupLimitExceededError)


@pytest.mark.parametrize(
    ("limits", "fits", "exceeds"),
    [
        (
            {"max_metadata_bytes": 10},
            {"protocols": (("a", b"x" * 4), ("b", b"x" * 6))},
            {"protocols": (("a", b"x" * 4), ("b", b"x" * 7))},
        ),
        (
            {"max_protocols": 2},
            {"protocols": (("a", b""), ("b", b""))},
            {"protocols": (("a", b""), ("b", b""), ("c", b""))},
        ),
        ({"max_identifier_bytes": 16}, {"group_id": "ü" * 8}, {"group_id": "ü" * 8 + "x"}),
        ({"max_identifier_bytes": 16}, {"client_id": "x" * 16}, {"client_id": "x" * 17}),
        ({"max_identifier_bytes": 16}, {"instance": "x" * 16}, {"instance": "x" * 17}),
        ({"max_identifier_bytes": 16}, {"protocol_type": "x" * 16}, {"protocol_type": "x" * 17}),
        (
            {"max_identifier_bytes": 16},
            {"protocols": (("x" * 16, b""),)},
            {"protocols": (("x" * 17, b""),)},
        ),
        ({"max_identifier_bytes": 16}, {"client_host": "x" * 16}, {"client_host": "x" * 17}),
        ({"max_member_id_bytes": 9}, {"member_id": "x" * 9}, {"member_id": "x" * 10}),
    ],
)
def test_what_a_member_may_bring(limits, fits, exceeds):
    driver = Driver(GroupLimits(**limits))
    assert refused(driver, driver.join(**exceeds))
    assert not driver.groups
    assert not refused(driver, driver.join(**fits))


@pytest.mark.parametrize(
    ("limits", "fits", "exceeds"),
    [
        ({"max_member_id_bytes": 9}, {"member_id": "m" * 9}, {"member_id": "m" * 10}),
        ({"max_topic_name_bytes": 4}, {"names": ("ab", "üü")}, {"names": ("ab", "üüx")}),
        ({"max_subscribed_topics": 2}, {"names": ("a", "b")}, {"names": ("a", "b", "c")}),
        (
            {"max_metadata_bytes": 30},
            {"names": ("a" * 15, "b" * 15)},
            {"names": ("a" * 15, "b" * 16)},
        ),
        ({"max_identifier_bytes": 10}, {"rack_id": "r" * 10}, {"rack_id": "r" * 11}),
        ({"max_identifier_bytes": 9}, {"instance_id": "i" * 9}, {"instance_id": "i" * 10}),
        ({"max_identifier_bytes": 9}, {"client_id": "c" * 9}, {"client_id": "c" * 10}),
        ({"max_identifier_bytes": 9}, {"client_host": "h" * 9}, {"client_host": "h" * 10}),
        (
            {"max_identifier_bytes": 9},
            {"subscribed_topic_regex": "r" * 9},
            {"subscribed_topic_regex": "r" * 10},
        ),
    ],
)
def test_what_a_consumer_may_bring(limits, fits, exceeds):
    def joins(*, member_id: str = "m", names: tuple[str, ...] = ("t",), **more: str) -> None:
        driver.join(member_id, *names, **{"client_host": "/h", **more})

    driver = ConsumerDriver(GroupLimits(**limits))
    with pytest.raises(GroupLimitExceededError, match=next(iter(limits))):
        joins(**exceeds)
    assert not driver.groups
    joins(**fits)


def test_the_longest_member_id_that_is_handed_out_comes_back():
    driver = Driver()
    long = "c" * GroupLimits().max_identifier_bytes
    made = f"{long}-{uuid.uuid4()}"
    token = driver.join(client_id=long, new_member_id=made)
    assert isinstance(driver.answers[token], MemberIdRequiredError)
    assert driver.parked(driver.join(made, client_id=long))
    assert len(made) == GroupLimits().max_member_id_bytes


def test_groups_of_a_shard():
    driver = Driver(GroupLimits(max_groups=2))
    driver.join(group_id="a")
    driver.commit(group_id="b")
    assert refused(driver, driver.join(group_id="c"))
    for producer in (None, 7):
        with pytest.raises(GroupLimitExceededError, match="max_groups"):
            driver.commit(group_id="c", producer=producer)
    driver.commit(group_id="a")
    driver.join(group_id="b")


def test_a_group_id_of_a_commit():
    driver = Driver(GroupLimits(max_identifier_bytes=4))
    driver.commit(group_id="abcd")
    with pytest.raises(GroupLimitExceededError):
        driver.commit(group_id="abcde")


def test_members_of_a_shard():
    driver = Driver(GroupLimits(max_shard_members=2))
    driver.join(version=3, group_id="a")
    driver.join(version=3, group_id="b")
    assert refused(driver, driver.join(version=3, group_id="a"))
    assert refused(driver, driver.join(instance="i", group_id="c"))
    driver.leave("c-1", group_id="a")
    assert driver.parked(driver.join(version=3, group_id="c"))


def test_metadata_of_a_shard():
    driver = Driver(GroupLimits(max_shard_metadata_bytes=100))
    small, large = (("range", b"x" * 50),), (("range", b"x" * 51),)
    assert driver.parked(driver.join(instance="a", protocols=small))
    assert refused(driver, driver.join(instance="b", protocols=large))
    assert driver.parked(driver.join(instance="b", protocols=small))
    assert refused(driver, driver.join("b-3", instance="b", protocols=large))
    assert refused(driver, driver.join(instance="b", protocols=large))
    assert driver.parked(driver.join("b-3", instance="b", protocols=small))


def test_a_static_replacement_must_fit_the_record_too():
    driver, ids = stable(0, static=["i1"])
    size = len(driver.log[-1].record.value or b"")  # type: ignore[union-attr]
    driver.settings["limits"] = GroupLimits(max_group_record_bytes=size + 8)
    driver.reload()
    longer = (("range", b"x" * 40),)
    assert refused(driver, driver.join(instance="i1", protocols=longer))
    driver.heartbeat(ids[0], instance="i1")


def test_the_size_of_one_commit():
    probe = Driver()
    probe.commit(("t", 0, 1), ("t", 1, 1))
    size = sum(len(e.record.key) + len(e.record.value or b"") for e in probe.log if e.record)
    for limit, fits in ((size, True), (size - 1, False)):
        driver = Driver(GroupLimits(max_commit_bytes=limit))
        if fits:
            driver.commit(("t", 0, 1), ("t", 1, 1))
        else:
            with pytest.raises(GroupLimitExceededError):
                driver.commit(("t", 0, 1), ("t", 1, 1))
            assert not driver.log


@pytest.mark.parametrize("producer", [None, 7])
def test_the_offsets_of_one_group(producer):
    driver = Driver(GroupLimits(max_group_offsets=3))
    driver.commit(("t", 0, 1))
    driver.commit(("t", 0, 1), ("t", 1, 1), producer=8)
    driver.commit(("t", 2, 1), ("t", 2, 2), ("t", 1, 3), producer=producer)
    with pytest.raises(GroupLimitExceededError):
        driver.commit(("t", 0, 5), ("t", 3, 1), producer=producer)
    driver.commit(("t", 0, 5), ("t", 2, 5), producer=producer)


def test_pending_members_of_a_group_evict_the_oldest():
    driver = Driver(GroupLimits(max_pending_members=2))
    for _ in range(3):
        assert isinstance(driver.answers[driver.join()], MemberIdRequiredError)
    assert list(driver.group().pending_members) == ["c-2", "c-3"]
    assert driver.event("pending-member-evicted")["member"] == "c-1"
    with pytest.raises(UnknownMemberIdError):
        driver.answer(driver.join("c-1"))
    assert driver.parked(driver.join("c-3"))


def test_pending_members_of_a_shard_evict_the_oldest_of_any_group():
    driver = Driver(GroupLimits(max_shard_pending_members=2))
    for group_id in ("a", "b", "c"):
        driver.join(group_id=group_id)
    assert not driver.group("a").pending_members
    assert driver.group("c").pending_members


def test_an_eviction_may_end_the_join_phase_it_held_up():
    driver, _ = stable(1, limits=GroupLimits(max_shard_pending_members=1))
    driver.join()
    (token,) = driver.rejoin_all().values()
    assert driver.parked(token)
    driver.join(group_id="other")
    assert driver.answer(token).generation_id == 2


def flood_command(number: int, *, known: bool, group_id: str = G) -> JoinGroup:
    return JoinGroup(
        group_id=group_id,
        member_id="",
        group_instance_id=None,
        client_id="flood",
        client_host="/127.0.0.1",
        session_timeout_ms=1_800_000,
        rebalance_timeout_ms=300_000,
        protocol_type="consumer",
        protocols=(("range", b""),),
        require_known_member_id=known,
        supports_skip_assignment=True,
        new_member_id=f"flood-{number}",
    )


def test_a_hundred_thousand_joins_that_never_return():
    machine = GroupMachine()
    machine.loaded(NOW)
    alive: set[object] = set()
    for number in range(100_000):
        decision = machine.decide(number, flood_command(number, known=True), NOW)
        for record in decision.records:
            machine.replay(record, 0, NOW, None)
        for timer in decision.timers:
            (alive.discard if timer.deadline_ms is None else alive.add)(timer.key)
    machine.check()
    assert len(machine._shard.totals.pending) == GroupLimits().max_pending_members
    assert len(alive) == GroupLimits().max_pending_members


def test_a_hundred_thousand_old_clients_that_never_return():
    machine = GroupMachine()
    machine.loaded(NOW)
    refusals = 0
    for number in range(100_000):
        decision = machine.decide(number, flood_command(number, known=False), NOW)
        for record in decision.records:
            machine.replay(record, 0, NOW, None)
        refusals += any(
            isinstance(reply.response, GroupMaxSizeReachedError) for reply in decision.replies
        )
    machine.check()
    assert machine._shard.totals.members == GroupLimits().max_group_size
    assert refusals == 100_000 - GroupLimits().max_group_size


def test_a_hundred_thousand_groups():
    machine = GroupMachine(GroupLimits(max_groups=100))
    machine.loaded(NOW)
    refusals = 0
    for number in range(100_000):
        command = flood_command(number, known=True, group_id=f"g{number}")
        try:
            decision = machine.decide(number, command, NOW)
        except GroupLimitExceededError:
            refusals += 1
            continue
        for record in decision.records:
            machine.replay(record, 0, NOW, None)
    assert refusals == 99_900


def test_a_thousand_groups_under_many_transactions():
    driver = Driver(GroupLimits(max_group_offsets=50))
    for producer in range(50):
        items = (OffsetToCommit("t", producer, 1),)
        driver.ask(TxnCommitOffsets(G, -1, "", None, items, ProducerStamp(producer, 0)))
    with pytest.raises(GroupLimitExceededError):
        driver.commit(("t", 50, 1), producer=50)


def test_every_limit_says_why():
    source = inspect.getsource(limits_module)
    for field in dataclasses.fields(GroupLimits):
        after = source.split(f"    {field.name}: int = ")[1]
        assert after.split("\n")[1].strip().startswith('"""'), field.name
