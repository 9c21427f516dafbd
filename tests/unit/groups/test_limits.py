"""Each limit is tested with the largest accepted value and the next one; floods stay bounded."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from fencepost.groups import limits as limits_module
from fencepost.groups.commands import DeleteGroup, JoinGroup, OffsetToCommit, TxnCommitOffsets
from fencepost.groups.errors import (
    FencedMemberEpochError,
    GroupLimitExceededError,
    GroupMaxSizeReachedError,
    MemberIdRequiredError,
    UnknownMemberIdError,
)
from fencepost.groups.limits import GroupLimits
from fencepost.groups.machine import GroupMachine
from fencepost.groups.records import batch_bytes
from fencepost.logcore.budget import Budget
from fencepost.logcore.machine import ProducerStamp
from tests.unit.groups.consumer_driver import ConsumerDriver
from tests.unit.groups.group_driver import NOW, Driver, G, stable


def refused(driver: Driver, token: int) -> bool:
    return isinstance(driver.answers[token], GroupLimitExceededError)


LONGEST = "x" * GroupLimits().max_string_bytes
"""The longest string that a record can hold."""


@pytest.mark.parametrize(
    "fits",
    [
        {"group_id": LONGEST},
        {"client_id": LONGEST, "new_member_id": "m"},
        {"new_member_id": LONGEST},
        {"instance": LONGEST, "new_member_id": "m"},
        {"protocol_type": LONGEST},
        {"protocols": ((LONGEST, b""),)},
        {"client_host": LONGEST},
        {"member_id": LONGEST},
    ],
)
def test_classic_member_with_a_string_too_long_for_a_record_is_refused(fits):
    driver = Driver()
    longer = {
        name: ((LONGEST + "x", b""),) if name == "protocols" else text + "x" * (text == LONGEST)
        for name, text in fits.items()
    }
    assert refused(driver, driver.join(**longer))
    assert not driver.groups
    assert not refused(driver, driver.join(**fits))


def test_classic_member_with_too_many_protocols_is_refused():
    driver = Driver(GroupLimits(max_protocols=2))
    offers = (("a", b""), ("b", b""), ("c", b""))
    assert refused(driver, driver.join(protocols=offers))
    assert not refused(driver, driver.join(protocols=offers[:2]))


def test_metadata_of_each_protocol_is_limited_separately():
    driver = Driver(max_batch_bytes=500)
    assert refused(driver, driver.join(protocols=(("a", b"x" * 501),)))
    assert not refused(driver, driver.join(protocols=(("a", b"x" * 500), ("b", b"x" * 500))))
    driver.max_batch_bytes = 501  # the setting changes while the broker runs
    assert not refused(driver, driver.join(protocols=(("a", b"x" * 501),)))


@pytest.mark.parametrize(
    "fits",
    [
        {"member_id": LONGEST},
        {"names": ("t", LONGEST)},
        {"rack_id": LONGEST},
        {"instance_id": LONGEST},
        {"client_id": LONGEST},
        {"client_host": LONGEST},
        {"subscribed_topic_regex": "(" + LONGEST[2:] + ")"},
    ],
)
def test_consumer_with_a_string_too_long_for_a_record_is_refused(fits):
    def joins(*, member_id: str = "m", names: tuple[str, ...] = ("t",), **more: str) -> None:
        driver.join(member_id, *names, **{"client_host": "/h", **more})

    driver = ConsumerDriver()
    longer = {
        name: (*text[:-1], text[-1] + "x") if name == "names" else text + "x"
        for name, text in fits.items()
    }
    with pytest.raises(GroupLimitExceededError, match="max_string_bytes"):
        joins(**longer)
    assert not driver.groups
    joins(**fits)


def test_subscription_of_a_consumer_is_bounded():
    driver = ConsumerDriver(GroupLimits(max_subscribed_topics=2), max_batch_bytes=600)
    with pytest.raises(GroupLimitExceededError, match="max_subscribed_topics"):
        driver.join("m", "a", "b", "c")
    with pytest.raises(GroupLimitExceededError, match=r"max\.message\.bytes"):
        driver.join("m", "a" * 300, "b" * 301)
    driver.join("m", "a", "b")


# --- existing members -----------------------------------------------------------------------------


def test_known_member_beyond_a_limit_must_rejoin_and_its_former_id_expires():
    driver, ids = stable(2, max_batch_bytes=600)
    large = (("range", b"x" * 601),)
    with pytest.raises(UnknownMemberIdError, match=r"max\.message\.bytes"):
        driver.answer(driver.join(ids[0], protocols=large))
    assert ids[0] in driver.group().members
    # The client joins as a new member without partitions. Its former member stays in the group
    # until the session ends, and until then the join phase waits for it.
    again = driver.join(version=3)
    waiting = driver.join(ids[1])
    assert driver.parked(again)
    assert driver.parked(waiting)
    driver.advance(driver.group().members[ids[0]].session_timeout_ms)
    assert not driver.parked(again)
    assert ids[0] not in driver.group().members


def test_join_without_member_id_beyond_a_limit_is_refused():
    driver, _ = stable(2, max_batch_bytes=600)
    assert refused(driver, driver.join(protocols=(("range", b"x" * 601),)))


def test_consumer_whose_heartbeat_exceeds_a_limit_is_fenced_but_keeps_partitions():
    driver = ConsumerDriver()
    driver.client("m")
    held = driver.consumer_group().current("m")
    driver.max_batch_bytes = 100
    for fields in ({"subscribed_topic_names": ("t", "u" * 101)}, {"subscribed_topic_regex": "u.*"}):
        with pytest.raises(FencedMemberEpochError, match=r"max\.message\.bytes"):
            driver.beat("m", held.member_epoch, **fields)
    assert driver.consumer_group().current("m") == held
    with pytest.raises(GroupLimitExceededError, match=r"max\.message\.bytes"):
        driver.join("m", "t", "u" * 101)
    driver.beat("m", held.member_epoch)


def test_regexes_loaded_beyond_the_limit_keep_members_but_refuse_new_regexes():
    driver = ConsumerDriver()
    for name in ("a", "b", "c"):
        driver.join(name, subscribed_topic_names=None, subscribed_topic_regex=f"{name}.*")
    driver.settings["limits"] = GroupLimits(max_group_regexes=2)
    driver.reload()
    for name in ("a", "b", "c"):
        driver.beat(name, driver.consumer_group().current(name).member_epoch)
    with pytest.raises(GroupLimitExceededError, match="max_group_regexes"):
        driver.join("d", subscribed_topic_names=None, subscribed_topic_regex="d.*")


# --- broker-wide budgets --------------------------------------------------------------------------


def test_two_shards_share_one_budget():
    budget = Budget("fencepost.groups.max.bytes", 1 << 20)
    one, other = Driver(budget=budget), Driver(budget=budget)
    member = (("range", b"x" * 300_000),)
    for driver in (one, other, one):
        assert driver.parked(driver.join(version=3, protocols=member))
    used = budget.used
    other.reload()
    assert budget.used < used - 300_000
    assert one.parked(one.join(version=3, protocols=member))
    for driver in (one, other):
        token = driver.join(version=3, protocols=member)
        with pytest.raises(GroupLimitExceededError, match=r"fencepost\.groups\.max\.bytes=1048576"):
            driver.answer(token)


def test_member_of_exactly_the_budget_is_accepted_one_byte_more_is_refused():
    probe = Budget()
    Driver(budget=probe).join(version=3)
    for limit, fits in ((probe.used, True), (probe.used - 1, False)):
        budget = Budget("key", limit)
        driver = Driver(budget=budget)
        assert driver.parked(driver.join(version=3)) == fits
        assert budget.used == (limit if fits else 0)


def test_log_beyond_the_budget_loads_and_only_additional_memory_is_refused():
    driver, ids = stable(2)
    driver.commit(generation=1, member_id=ids[0])
    driver.settings |= {"budget": Budget("key", 1), "offset_budget": Budget("key", 1)}
    driver.reload()
    assert driver.settings["budget"].used > 1
    driver.heartbeat(ids[0])
    driver.commit(generation=1, member_id=ids[0])  # takes no additional memory
    assert refused(driver, driver.join(version=3))
    with pytest.raises(GroupLimitExceededError):
        driver.commit(("t", 9, 1), generation=1, member_id=ids[0])
    driver.rejoin_all()
    driver.sync_all()


def test_known_member_beyond_the_budget_fails_with_unknown_member_id():
    driver, ids = stable(1)
    driver.settings["budget"] = Budget("key", 1)
    driver.reload()
    with pytest.raises(UnknownMemberIdError, match="key=1"):
        driver.answer(driver.join(ids[0], protocols=(("range", b"x" * 100),)))


@pytest.mark.parametrize("producer", [None, 7])
def test_offsets_of_all_shards_share_a_budget(producer):
    budget = Budget("fencepost.offsets.max.bytes", 1_000)
    one, other = Driver(offset_budget=budget), Driver(offset_budget=budget)
    one.commit(("t", 0, 1))
    other.commit(("t", 0, 1), producer=producer)
    for driver in (one, other):
        with pytest.raises(GroupLimitExceededError, match=r"fencepost\.offsets\.max\.bytes=1000"):
            driver.commit(("t", 1, 1), producer=producer)
    one.commit(("t", 0, 2))
    other.commit(("t", 0, 2), producer=producer)
    one.ask(DeleteGroup(G))
    other.commit(("t", 1, 1), producer=producer)


def test_group_beyond_the_limit_of_a_shard_is_refused():
    driver = Driver(GroupLimits(max_groups=2))
    driver.join(group_id="a")
    driver.commit(group_id="b")
    assert refused(driver, driver.join(group_id="c"))
    for producer in (None, 7):
        with pytest.raises(GroupLimitExceededError, match="max_groups"):
            driver.commit(group_id="c", producer=producer)
    driver.commit(group_id="a")
    driver.join(group_id="b")


def test_commit_with_a_group_id_too_long_for_a_record_is_refused():
    driver = Driver()
    driver.commit(group_id=LONGEST)
    with pytest.raises(GroupLimitExceededError):
        driver.commit(group_id=LONGEST + "x")


def test_static_replacement_too_large_for_the_record_is_refused():
    driver, ids = stable(0, static=["i1"])
    driver.max_batch_bytes = batch_bytes([driver.log[-1].record]) + 8  # type: ignore[list-item]
    longer = (("range", b"x" * 40),)
    assert refused(driver, driver.join(instance="i1", protocols=longer))
    driver.heartbeat(ids[0], instance="i1")


def test_commit_of_exactly_the_batch_limit_is_accepted_one_byte_more_is_refused():
    probe = Driver()
    probe.commit(("t", 0, 1), ("t", 1, 1))
    size = batch_bytes([entry.record for entry in probe.log if entry.record])
    for limit, fits in ((size, True), (size - 1, False)):
        driver = Driver(max_batch_bytes=limit)
        if fits:
            driver.commit(("t", 0, 1), ("t", 1, 1))
        else:
            with pytest.raises(GroupLimitExceededError):
                driver.commit(("t", 0, 1), ("t", 1, 1))
            assert not driver.log


@pytest.mark.parametrize("producer", [None, 7])
def test_commit_beyond_the_offset_limit_of_a_group_is_refused(producer):
    driver = Driver(GroupLimits(max_group_offsets=3))
    driver.commit(("t", 0, 1))
    driver.commit(("t", 0, 1), ("t", 1, 1), producer=8)
    driver.commit(("t", 2, 1), ("t", 2, 2), ("t", 1, 3), producer=producer)
    with pytest.raises(GroupLimitExceededError):
        driver.commit(("t", 0, 5), ("t", 3, 1), producer=producer)
    driver.commit(("t", 0, 5), ("t", 2, 5), producer=producer)


def test_pending_member_beyond_the_group_limit_evicts_the_oldest():
    driver = Driver(GroupLimits(max_pending_members=2))
    for _ in range(3):
        assert isinstance(driver.answers[driver.join()], MemberIdRequiredError)
    assert list(driver.group().pending_members) == ["c-2", "c-3"]
    assert driver.event("pending-member-evicted")["member"] == "c-1"
    with pytest.raises(UnknownMemberIdError):
        driver.answer(driver.join("c-1"))
    assert driver.parked(driver.join("c-3"))


def test_pending_member_beyond_the_shard_limit_evicts_the_oldest_of_any_group():
    driver = Driver(GroupLimits(max_shard_pending_members=2))
    for group_id in ("a", "b", "c"):
        driver.join(group_id=group_id)
    assert not driver.group("a").pending_members
    assert driver.group("c").pending_members


def test_eviction_of_the_pending_member_completes_the_join_phase():
    driver, _ = stable(1, limits=GroupLimits(max_shard_pending_members=1))
    driver.join()
    (token,) = driver.rejoin_all().values()
    assert driver.parked(token)
    driver.join(group_id="other")
    assert driver.answer(token).generation_id == 2


FLOOD = 20_000
"""The number of commands of a flood; every limit is at most a tenth of it."""


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


def test_pending_members_stay_bounded_under_a_flood_of_joins():
    machine = GroupMachine()
    machine.on_loaded(NOW)
    alive: set[object] = set()
    for number in range(FLOOD):
        decision = machine.decide(number, flood_command(number, known=True), NOW)
        for record in decision.records:
            machine.replay(record, 0, NOW, None)
        for timer in decision.timers:
            (alive.discard if timer.deadline_ms is None else alive.add)(timer.key)
    machine.check()
    assert len(machine._shard.totals.pending) == GroupLimits().max_pending_members
    assert len(alive) == GroupLimits().max_pending_members


def test_members_stay_bounded_under_a_flood_of_old_clients():
    machine = GroupMachine()
    machine.on_loaded(NOW)
    refusals = 0
    for number in range(FLOOD):
        decision = machine.decide(number, flood_command(number, known=False), NOW)
        for record in decision.records:
            machine.replay(record, 0, NOW, None)
        refusals += any(
            isinstance(reply.response, GroupMaxSizeReachedError) for reply in decision.replies
        )
    machine.check()
    assert len(machine.groups[G].members) == GroupLimits().max_group_size  # type: ignore[union-attr]
    assert refusals == FLOOD - GroupLimits().max_group_size


def test_groups_stay_bounded_under_a_flood_of_group_ids():
    machine = GroupMachine(GroupLimits(max_groups=100))
    machine.on_loaded(NOW)
    refusals = 0
    for number in range(FLOOD):
        command = flood_command(number, known=True, group_id=f"g{number}")
        try:
            decision = machine.decide(number, command, NOW)
        except GroupLimitExceededError:
            refusals += 1
            continue
        for record in decision.records:
            machine.replay(record, 0, NOW, None)
    assert refusals == FLOOD - 100


def test_pending_offsets_count_toward_the_offset_limit_of_a_group():
    driver = Driver(GroupLimits(max_group_offsets=50))
    for producer in range(50):
        items = (OffsetToCommit("t", producer, 1),)
        driver.ask(TxnCommitOffsets(G, -1, "", None, items, ProducerStamp(producer, 0)))
    with pytest.raises(GroupLimitExceededError):
        driver.commit(("t", 50, 1), producer=50)


def test_every_limit_is_documented():
    source = inspect.getsource(limits_module)
    for field in dataclasses.fields(GroupLimits):
        after = source.split(f"    {field.name}: int = ")[1]
        assert after.split("\n")[1].strip().startswith('"""'), field.name
