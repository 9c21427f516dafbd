"""DescribeGroups, ListGroups, DeleteGroups; loading, unloading, foreign records."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fencepost.groups import records
from fencepost.groups.commands import (
    CommitOffsets,
    DeleteGroup,
    DescribeGroup,
    FetchOffsets,
    Heartbeat,
    JoinGroup,
    LeaveGroup,
    LeavingMember,
    ListGroups,
    SyncGroup,
)
from fencepost.groups.errors import (
    GroupDeadError,
    GroupIdNotFoundError,
    NonEmptyGroupError,
    NotGroupCoordinatorError,
    UnknownMemberIdError,
)
from fencepost.groups.machine import GroupMachine
from fencepost.groups.shard import PendingInstall
from fencepost.logcore.errors import CorruptRecordError
from fencepost.logcore.machine import InvariantViolation, Record
from tests.unit.groups.group_driver import (
    NOW,
    RANGE,
    SESSION,
    Driver,
    Entry,
    G,
    completing,
    empty,
    initial,
    preparing,
    stable,
)

# --- describing ----------------------------------------------------------------------------------


def test_describe_of_an_unknown_group_fails_with_group_id_not_found():
    with pytest.raises(GroupIdNotFoundError):
        Driver().ask(DescribeGroup("nope"))


def test_described_stable_group_has_protocol_members_and_assignments():
    driver, ids = stable(1, static=["i1"])
    result = driver.ask(DescribeGroup(G))
    assert (result.state, result.protocol_type, result.protocol_name) == (
        "Stable",
        "consumer",
        "range",
    )
    first, second = result.members
    assert (first.member_id, first.group_instance_id) == (ids[0], None)
    assert (second.member_id, second.group_instance_id) == (ids[1], "i1")
    assert (first.client_id, first.client_host) == ("c", "/127.0.0.1")
    assert (first.metadata, first.assignment) == (RANGE[0][1], f"to {ids[0]}".encode())


@pytest.mark.parametrize(
    ("build", "state"),
    [
        (initial, "PreparingRebalance"),
        (completing, "CompletingRebalance"),
        (preparing, "PreparingRebalance"),
    ],
)
def test_described_rebalancing_group_has_neither_protocol_nor_metadata(build, state):
    driver, *_ = build()
    result = driver.ask(DescribeGroup(G))
    assert (result.state, result.protocol_type, result.protocol_name) == (state, "consumer", "")
    assert {member.metadata for member in result.members} == {b""}


def test_described_simple_or_empty_group_has_no_members():
    driver = empty()
    driver.commit(group_id="simple")
    for group_id, protocol_type in ((G, "consumer"), ("simple", "")):
        result = driver.ask(DescribeGroup(group_id))
        assert (result.state, result.protocol_type, result.members) == ("Empty", protocol_type, ())


# --- listing -------------------------------------------------------------------------------------


def zoo() -> Driver:
    driver, _ = stable(1)
    driver.commit(group_id="simple")
    driver.join(version=3, group_id="a")
    return driver


@pytest.mark.parametrize(
    ("states", "types", "expected"),
    [
        ((), (), ["a", "g", "simple"]),
        (("Stable",), (), ["g"]),
        (("sTaBlE", "empty"), (), ["g", "simple"]),
        (("PreparingRebalance",), ("CLASSIC",), ["a"]),
        ((), ("consumer",), []),
        ((), ("consumer", "Classic"), ["a", "g", "simple"]),
        (("Dead",), (), []),
        (("nonsense",), (), []),
    ],
)
def test_listed_groups_match_state_and_type_filters_in_any_case(states, types, expected):
    result = zoo().ask(ListGroups(states, types))
    assert [group.group_id for group in result.groups] == expected


def test_listed_group_has_state_type_and_protocol_type():
    first, second, third = zoo().ask(ListGroups()).groups
    assert (first.state, first.group_type, first.protocol_type) == (
        "PreparingRebalance",
        "classic",
        "consumer",
    )
    assert (second.state, third.state, third.protocol_type) == ("Stable", "Empty", "")


# --- deleting ------------------------------------------------------------------------------------


def test_delete_of_an_unknown_group_fails_with_group_id_not_found():
    with pytest.raises(GroupIdNotFoundError):
        Driver().ask(DeleteGroup("nope"))


@pytest.mark.parametrize("build", [initial, completing, stable, preparing])
def test_group_with_members_is_not_deleted(build):
    driver, *_ = build()
    with pytest.raises(NonEmptyGroupError):
        driver.ask(DeleteGroup(G))


@pytest.mark.parametrize("commit", [True, False])
def test_deleted_group_loses_its_committed_and_pending_offsets(commit):
    driver = empty()
    driver.commit(("t", 0, 1), ("t", 1, 1))
    driver.commit(("t", 1, 2), ("t", 2, 2), producer=7)
    before = len(driver.log)
    driver.ask(DeleteGroup(G))
    assert len(driver.log) == before + 4
    assert driver.state() == "Dead"
    driver.marker(7, commit=commit)
    assert driver.state() == "Dead"
    assert driver.ask(FetchOffsets(G, None)).topics == ()
    driver.reload()
    assert not driver.groups


def test_deleted_group_loses_its_pending_members_and_timers():
    driver = Driver()
    driver.join()
    driver.ask(DeleteGroup(G))
    assert not driver.timers
    with pytest.raises(UnknownMemberIdError):
        driver.answer(driver.join("c-1"))


def test_deleted_group_starts_from_scratch():
    driver = empty()
    driver.ask(DeleteGroup(G))
    token = driver.join(version=3)
    driver.finish_initial_delay()
    assert driver.answer(token).generation_id == 1


# --- loading and unloading -----------------------------------------------------------------------


def test_stable_group_keeps_members_and_assignments_after_reload():
    driver, ids = stable(2, static=["i1"])
    driver.advance(SESSION - 1)
    driver.reload()
    assert driver.state() == "Stable"
    assert driver.group().leader_id == ids[0]
    assert driver.answer(driver.sync(ids[1])).assignment == f"to {ids[1]}".encode()
    driver.advance(SESSION - 1)
    for member_id in ids:
        driver.heartbeat(member_id)
    driver.advance(SESSION)
    assert driver.state() == "Empty"


def test_crash_during_a_rebalance_restores_the_last_written_generation():
    for build in (preparing, completing):
        driver, ids, *_ = build(2)
        if build is completing:
            driver.reload()
            assert driver.state() == "Empty"
            assert driver.group().generation_id == 0
        else:
            driver.rejoin_all()
            assert driver.group().generation_id == 2
            driver.reload()
            assert (driver.state(), driver.group().generation_id) == ("Stable", 1)
            driver.heartbeat(ids[1])


def test_empty_group_keeps_generation_and_protocol_type_after_reload():
    driver = empty()
    driver.reload()
    assert (driver.state(), driver.group().generation_id) == ("Empty", 2)
    assert driver.group().protocol_type == "consumer"


def test_unloading_answers_waiting_requests_with_not_coordinator():
    driver, ids, token = preparing(2)
    newcomer = driver.join(version=3)
    driver.reload()
    for parked in (token, newcomer):
        with pytest.raises(NotGroupCoordinatorError):
            driver.answer(parked)
    driver, ids = completing(2)
    waiting = driver.sync(ids[1])
    driver.reload()
    with pytest.raises(NotGroupCoordinatorError):
        driver.answer(waiting)


def test_unloading_writes_nothing_and_keeps_the_durable_state():
    driver, _ = stable(2)
    digest = driver.machine.digest()
    decision = driver.machine.on_unloaded()
    assert (decision.records, decision.replies) == ((), ())
    assert driver.machine.digest() == digest


@pytest.mark.parametrize("build", [initial, completing, stable, preparing])
def test_request_after_unloading_fails_with_group_dead(build):
    driver, (member_id, *_), *_ = build()
    driver.machine.on_unloaded()
    driver.machine.check()
    join = JoinGroup(
        group_id=G,
        member_id="",
        group_instance_id=None,
        client_id="c",
        client_host="/h",
        session_timeout_ms=SESSION,
        rebalance_timeout_ms=SESSION,
        protocol_type="consumer",
        protocols=RANGE,
        require_known_member_id=True,
        supports_skip_assignment=True,
        new_member_id="new",
    )
    for command in (
        join,
        replace(join, member_id=member_id),
        SyncGroup(G, 1, member_id, None, None, None),
        Heartbeat(G, 1, member_id, None),
        LeaveGroup(G, (LeavingMember(member_id),)),
        CommitOffsets(G, 1, member_id, None, ()),
    ):
        with pytest.raises(GroupDeadError):
            driver.machine.decide(999, command, NOW)


def foreign(*values: records.GroupMetadataValue) -> Driver:
    """Return a machine loaded from another broker's records of one group."""
    log = [
        Entry(offset, records.group_metadata(G, value), None) for offset, value in enumerate(values)
    ]
    return Driver(log=log)


def member(member_id: str) -> records.MemberMetadata:
    return records.MemberMetadata(member_id, None, "c", "/h", 60_000, SESSION, b"s", b"a")


def test_newest_group_record_wins_on_load():
    first = records.GroupMetadataValue("consumer", 3, "range", "a", NOW, (member("a"),))
    second = records.GroupMetadataValue("consumer", 4, "range", "b", NOW, (member("b"),))
    driver = foreign(first, second)
    assert list(driver.group().members) == ["b"]
    assert driver.group().leader_id == "b"


def test_group_record_without_leader_loads_with_the_first_member_as_leader():
    value = records.GroupMetadataValue(
        "consumer", 3, "range", None, NOW, (member("a"), member("b"))
    )
    driver = foreign(value)
    assert driver.group().leader_id == "a"
    driver.heartbeat("b", 3)


def test_group_record_with_members_but_no_protocol_is_corrupt():
    value = records.GroupMetadataValue("consumer", 3, None, None, NOW, (member("a"),))
    with pytest.raises(CorruptRecordError):
        foreign(value)


def test_group_tombstone_keeps_offsets_that_were_not_deleted():
    driver = Driver()
    driver.commit(("t", 0, 1))
    log = [*driver.log, Entry(1, records.group_tombstone(G), None)]
    driver = Driver(log=log)
    assert driver.fetch().offset == 1
    assert driver.state() == "Empty"


def test_unknown_record_types_are_skipped_and_counted_in_events():
    log = [
        Entry(0, Record(b"\x00\x09whatever", b"\x00\x00"), None),
        Entry(1, Record(b"\x00\x09again", None), None),
        Entry(2, Record(b"\x00\x63", b""), None),
    ]
    driver = Driver(log=log)
    skipped = [event.detail for event in driver.events if event.kind == "records-skipped"]
    assert skipped == [{"record_type": 9, "count": 2}, {"record_type": 99, "count": 1}]


# --- bugs in the coordinator ----------------------------------------------------------------------


def test_unknown_command_or_timer_key_is_an_invariant_violation():
    machine = GroupMachine()
    with pytest.raises(InvariantViolation):
        machine.decide(1, object(), NOW)
    for key in (object(), (), ("session",), (1, 2)):
        with pytest.raises(InvariantViolation):
            machine.fire(key, NOW)
    driver, _ = stable(1)
    for key in (("session", G), ("nonsense", G), ("join", G, "more")):
        with pytest.raises(InvariantViolation):
            driver.machine.fire(key, NOW)


@pytest.mark.parametrize("build", [completing, stable, preparing])
def test_replay_of_a_record_without_a_decision_is_an_invariant_violation(build):
    driver, *_ = build(2)
    value = records.GroupMetadataValue("consumer", 9, "range", "a", NOW, (member("a"),))
    with pytest.raises(InvariantViolation):
        driver.machine.replay(records.group_metadata(G, value), 99, NOW, None)
    with pytest.raises(InvariantViolation):
        driver.machine.replay(records.group_metadata("other", value), 99, NOW, None)


BREAKAGES = {
    "leader": lambda d: setattr(d.group(), "leader_id", "stranger"),
    "waiting joins": lambda d: setattr(d.group(), "waiting_joins", 1),
    "instance ids": lambda d: d.group().static_members.update(i9="c-1"),
    "support": lambda d: d.group()._support.update(["range"]),
    "due syncs": lambda d: d.group().pending_sync.add("stranger"),
    "pending": lambda d: d.group().pending_members.update({"c-1": None}),
    "pending of the shard": lambda d: d.machine._shard.totals.pending.update({(G, "x"): None}),
    "memory of the groups": lambda d: d.machine._shard.totals.memory.add(1),
    "memory of the offsets": lambda d: d.machine.offsets.memory.add(1),
    "assignment": lambda d: setattr(d.group().members["c-1"], "assignment", b"other"),
    "generation": lambda d: setattr(d.group(), "generation_id", 9),
    "parked sync": lambda d: setattr(d.group().members["c-1"], "sync_token", 1),
    "record": lambda d: setattr(d.group(), "saved", None),
    "group id": lambda d: setattr(d.group(), "group_id", "h"),
    "orphaned offsets": lambda d: d.groups.clear(),
    "pending_install": lambda d: setattr(
        d.machine._shard, "pending_install", PendingInstall(d.group())
    ),
}


@pytest.mark.parametrize("what", BREAKAGES)
def test_check_detects_broken_group_state(what):
    driver, ids = stable(2)
    driver.commit(generation=1, member_id=ids[0])
    BREAKAGES[what](driver)
    with pytest.raises(InvariantViolation):
        driver.machine.check()


def test_check_detects_inconsistent_pending_offsets():
    for change in ("open", "pending"):
        driver = Driver()
        driver.commit(producer=7)
        store = driver.machine._shard.offsets
        if change == "open":
            store._open.clear()
        else:
            store._groups[G].pending.clear()
        with pytest.raises(InvariantViolation):
            driver.machine.check()
