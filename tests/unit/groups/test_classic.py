"""SyncGroup, Heartbeat and LeaveGroup, case by case."""

from __future__ import annotations

import pytest

from fencepost.groups.commands import Heartbeat, HeartbeatResult, LeaveGroup, SyncGroup
from fencepost.groups.errors import (
    FencedInstanceIdError,
    GroupLimitExceededError,
    IllegalGenerationError,
    InconsistentGroupProtocolError,
    InvalidGroupIdError,
    RebalanceInProgressError,
    UnknownMemberIdError,
)
from fencepost.groups.records import batch_bytes
from tests.unit.groups.group_driver import (
    REBALANCE,
    SESSION,
    Driver,
    G,
    completing,
    empty,
    initial,
    preparing,
    stable,
)


def sync_command(group_id: str, generation: int, member_id: str, instance: str | None):
    return SyncGroup(group_id, generation, member_id, instance, None, None)


BOTH = pytest.mark.parametrize("command", [sync_command, Heartbeat])


@BOTH
def test_sync_or_heartbeat_with_empty_group_id_is_refused(command):
    with pytest.raises(InvalidGroupIdError):
        Driver().ask(command("", 1, "m", None))


@BOTH
def test_sync_or_heartbeat_in_unknown_group_fails_with_unknown_member_id(command):
    with pytest.raises(UnknownMemberIdError):
        Driver().ask(command("nope", 1, "m", None))


@BOTH
@pytest.mark.parametrize("build", [completing, stable, preparing])
@pytest.mark.parametrize(
    ("generation", "who", "instance", "error"),
    [
        (1, "stranger", None, UnknownMemberIdError),
        (1, 0, "i9", UnknownMemberIdError),
        (1, 0, "i1", FencedInstanceIdError),
        (0, 0, None, IllegalGenerationError),
        (2, 0, None, IllegalGenerationError),
        (-1, 0, None, IllegalGenerationError),
        (9, "stranger", None, UnknownMemberIdError),
    ],
)
def test_sync_or_heartbeat_with_wrong_member_or_generation_is_refused(
    command, build, generation, who, instance, error
):
    driver, ids, *_ = build(2, static=["i1"])
    member_id = ids[who] if isinstance(who, int) else who
    with pytest.raises(error):
        driver.ask(command(G, generation, member_id, instance))


@BOTH
def test_sync_or_heartbeat_in_empty_group_fails_with_unknown_member_id(command):
    driver = empty()
    with pytest.raises(UnknownMemberIdError):
        driver.ask(command(G, 2, "c-1", None))


# --- SyncGroup -----------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [completing, stable])
@pytest.mark.parametrize(
    ("told", "fits"),
    [
        (("consumer", "range"), True),
        ((None, None), True),
        (("connect", "range"), False),
        (("consumer", "sticky"), False),
        ((None, "sticky"), False),
        (("connect", None), False),
    ],
)
def test_sync_with_another_protocol_type_or_name_is_refused(build, told, fits):
    driver, ids = build(2)
    token = driver.sync(ids[1], protocol=told)
    if fits:
        assert driver.parked(token) == (build is completing)
    else:
        with pytest.raises(InconsistentGroupProtocolError):
            driver.answer(token)


def test_sync_in_preparing_rebalance_fails_with_rebalance_in_progress():
    driver, ids, _ = preparing(2)
    with pytest.raises(RebalanceInProgressError):
        driver.answer(driver.sync(ids[1]))


def test_sync_of_a_follower_waits_for_the_leaders_assignment():
    driver, ids = completing(3)
    first, second = driver.sync(ids[1]), driver.sync(ids[2])
    assert driver.parked(first)
    assert driver.parked(second)
    leader = driver.sync(ids[0], assignments=((ids[0], b"0"), (ids[1], b"1"), ("ghost", b"?")))
    assert driver.answer(leader).assignment == b"0"
    assert driver.answer(first).assignment == b"1"
    assert driver.answer(second).assignment == b""
    assert driver.answer(first).protocol_type == "consumer"
    assert driver.answer(first).protocol_name == "range"
    assert driver.state() == "Stable"
    record = driver.last_group_record()
    assert record is not None
    assert [member.assignment for member in record.members] == [b"0", b"1", b""]


def test_sync_of_a_follower_after_the_leaders_is_answered_at_once():
    driver, ids = completing(2)
    driver.answer(driver.sync(ids[0], assignments=((ids[1], b"1"),)))
    assert driver.state() == "Stable"
    assert driver.answer(driver.sync(ids[1])).assignment == b"1"
    assert driver.answer(driver.sync(ids[1])).assignment == b"1"


def test_assignments_sent_by_a_follower_are_ignored():
    driver, ids = completing(2)
    driver.sync(ids[1], assignments=((ids[1], b"mine"),))
    assert driver.state() == "CompletingRebalance"


def test_repeated_sync_replaces_the_waiting_one():
    driver, ids = completing(2)
    first, second = driver.sync(ids[1]), driver.sync(ids[1])
    with pytest.raises(RebalanceInProgressError):
        driver.answer(first)
    driver.sync(ids[0], assignments=((ids[1], b"1"),))
    assert driver.answer(second).assignment == b"1"


def test_assignment_too_large_for_a_record_is_refused_and_group_rebalances():
    driver, ids = completing(2, max_batch_bytes=1_000)
    waiting = driver.sync(ids[1])
    leader = driver.sync(ids[0], assignments=((ids[0], b"x" * 1_000),))
    for token in (waiting, leader):
        with pytest.raises(GroupLimitExceededError):
            driver.answer(token)
    assert driver.state() == "PreparingRebalance"
    assert "assignment-refused" in driver.kinds()
    driver.rejoin_all()
    driver.sync_all()
    assert driver.state() == "Stable"


@pytest.mark.parametrize(("size", "fits"), [(0, True), (1, False)])
def test_group_record_of_exactly_the_limit_is_accepted_one_byte_more_is_refused(size, fits):
    probe, ids = stable(1)
    record = probe.log[-1].record
    assert record is not None
    driver, ids = completing(1, max_batch_bytes=batch_bytes([record]))
    mine = f"to {ids[0]}".encode() + b"x" * size
    driver.sync(ids[0], assignments=((ids[0], mine),))
    assert (driver.state() == "Stable") == fits


def test_member_that_does_not_sync_in_time_is_removed():
    driver, ids = completing(3)
    waiting = driver.sync(ids[1])
    for _ in range(REBALANCE // 5_000):
        driver.heartbeat(ids[0])
        driver.heartbeat(ids[2])
        driver.advance(5_000)
    assert list(driver.group().members) == [ids[1]]
    with pytest.raises(RebalanceInProgressError):
        driver.answer(waiting)
    assert driver.state() == "PreparingRebalance"
    assert driver.event("rebalance-started")["reason"].startswith("no SyncGroup in time")


def test_member_of_a_stable_group_that_does_not_sync_is_removed():
    driver, ids = completing(2)
    driver.answer(driver.sync(ids[0]))
    for _ in range(REBALANCE // 5_000):
        for member_id in ids:
            driver.heartbeat(member_id)
        driver.advance(5_000)
    assert list(driver.group().members) == [ids[0]]
    assert driver.state() == "PreparingRebalance"


def test_group_becomes_empty_if_no_member_syncs():
    driver, ids = completing(2)
    for _ in range(REBALANCE // 5_000):
        for member_id in ids:
            driver.heartbeat(member_id)
        driver.advance(5_000)
    assert driver.state() == "Empty"
    assert driver.group().generation_id == 2


def test_member_waiting_for_its_assignment_does_not_expire():
    driver, ids = completing(2)
    waiting = driver.sync(ids[1])
    driver.advance(SESSION - 1)
    driver.heartbeat(ids[0])
    driver.advance(SESSION - 1)
    assert driver.parked(waiting)
    driver.answer(driver.sync(ids[0], assignments=((ids[1], b"1"),)))
    assert driver.answer(waiting).assignment == b"1"
    driver.advance(SESSION - 1)
    driver.heartbeat(ids[1])


# --- Heartbeat -----------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [completing, stable])
def test_heartbeat_resets_the_session_timeout(build):
    driver, ids = build(1)
    for _ in range(3):
        driver.advance(SESSION - 1)
        assert driver.heartbeat(ids[0]) == HeartbeatResult()
    driver.advance(SESSION)
    assert driver.state() == "Empty"


def test_heartbeat_during_a_rebalance_resets_the_session_timeout():
    driver, ids, _ = preparing(2)
    for _ in range(3):
        driver.advance(SESSION - 1)
        with pytest.raises(RebalanceInProgressError):
            driver.heartbeat(ids[1])
    driver.advance(SESSION - 1)
    assert ids[1] in driver.group().members
    driver.advance(1)
    assert ids[1] not in driver.group().members


@pytest.mark.parametrize("build", [completing, stable])
def test_member_without_heartbeats_expires_and_group_rebalances(build):
    driver, ids = build(2)
    driver.advance(SESSION - 1)
    driver.heartbeat(ids[0])
    driver.advance(1)
    assert list(driver.group().members) == [ids[0]]
    assert driver.state() == "PreparingRebalance"
    event = driver.event("member-expired")
    assert (event["member"], event["reason"]) == (ids[1], "session timed out")
    assert (event["client_id"], event["client_host"]) == ("c", "/127.0.0.1")


def test_group_becomes_empty_when_its_last_member_expires():
    driver, _ = stable(1)
    driver.advance(SESSION)
    assert driver.state() == "Empty"
    record = driver.last_group_record()
    assert record is not None
    assert (record.generation_id, record.protocol_type, record.protocol_name, record.leader) == (
        2,
        "consumer",
        None,
        None,
    )
    assert record.state_timestamp_ms == driver.now


def test_expiry_of_the_last_missing_member_completes_the_join_phase():
    driver, ids, token = preparing(2)
    driver.advance(SESSION)
    assert [member.member_id for member in driver.answer(token).members] == [ids[0]]


def test_expiry_of_a_stale_timer_has_no_effect():
    driver, ids = stable(1)
    for key in (
        ("session", G, "stranger"),
        ("session", "nope", "stranger"),
        ("join", G),
        ("sync", G),
        ("join", "nope"),
    ):
        decision = driver.machine.fire(key, driver.now)
        assert not decision.records
        assert not decision.events
    driver.heartbeat(ids[0])


# --- LeaveGroup ----------------------------------------------------------------------------------


def test_leave_with_empty_group_id_is_refused():
    with pytest.raises(InvalidGroupIdError):
        Driver().ask(LeaveGroup("", ()))


def test_leave_of_an_unknown_group_fails_for_each_member():
    answers = Driver().leave("a", "b")
    assert [(member_id, type(error)) for member_id, _, error in answers] == [
        ("a", UnknownMemberIdError),
        ("b", UnknownMemberIdError),
    ]


@pytest.mark.parametrize("build", [completing, stable])
def test_leaving_member_starts_a_rebalance(build):
    driver, ids = build(3)
    waiting = driver.sync(ids[1]) if build is completing else None
    assert driver.leave(ids[2]) == ((ids[2], None, None),)
    assert driver.state() == "PreparingRebalance"
    if waiting is not None:
        with pytest.raises(RebalanceInProgressError):
            driver.answer(waiting)


def test_leave_fails_the_waiting_sync_of_the_member():
    driver, ids = completing(2)
    waiting = driver.sync(ids[1])
    driver.leave(ids[1])
    with pytest.raises(UnknownMemberIdError):
        driver.answer(waiting)


def test_leave_of_a_waiting_leader_fails_its_join_and_replaces_it():
    driver, ids, token = preparing(2)
    driver.leave(ids[0])
    with pytest.raises(UnknownMemberIdError):
        driver.answer(token)
    assert driver.group().leader_id == ids[1]


def test_leave_of_the_last_missing_member_completes_the_join_phase():
    driver, ids, token = preparing(2)
    driver.leave(ids[1])
    assert driver.answer(token).generation_id == 2


def test_leave_of_several_members_starts_one_rebalance():
    driver, ids = stable(4)
    driver.events.clear()
    answers = driver.leave(ids[1], "stranger", ids[2], ids[1])
    assert [None if error is None else type(error) for *_, error in answers] == [
        None,
        UnknownMemberIdError,
        None,
        UnknownMemberIdError,
    ]
    assert driver.kinds() == ["member-left", "member-left", "rebalance-started", "rebalance-waits"]
    waits = driver.event("rebalance-waits")
    assert (waits["missing"], waits["awaited"]) == (2, [ids[0], ids[3]])


@pytest.mark.parametrize(("count", "told"), [(4, [3, 2, 1]), (10, [8, 4, 3, 2, 1])])
def test_rebalance_waits_events_name_members_that_have_not_rejoined(count: int, told: list[int]):
    driver, ids = stable(count)
    driver.events.clear()
    for member_id in ids:
        driver.join(member_id)
    waits = [event.detail for event in driver.events if event.kind == "rebalance-waits"]
    assert [wait["missing"] for wait in waits] == told
    assert waits[-1]["awaited"] == [ids[-1]]
    assert len(waits[-1]["clients"]) == 1


def test_group_becomes_empty_when_all_members_leave():
    driver, ids = stable(3)
    driver.leave(*ids)
    assert driver.state() == "Empty"
    assert driver.group().generation_id == 2


def test_leave_of_an_unknown_member_keeps_the_group_stable():
    driver, _ = stable(1)
    driver.leave("stranger")
    assert driver.state() == "Stable"


def test_leave_of_a_pending_member_rebalances_a_stable_group_as_in_kafka():
    driver, _ = stable(1)
    driver.join()
    pending = next(iter(driver.group().pending_members))
    driver.leave(pending)
    assert driver.state() == "PreparingRebalance"


def test_leave_of_a_pending_member_keeps_an_empty_group_without_timers():
    driver = Driver()
    driver.join()
    driver.leave("c-1")
    assert driver.state() == "Empty"
    assert not driver.timers


def test_leave_of_the_leader_in_the_initial_phase_elects_another_leader():
    driver, ids, tokens = initial()
    second, other = driver.join_dynamic()
    driver.leave(ids[0])
    driver.finish_initial_delay()
    assert driver.answer(second).leader == other
    assert not driver.parked(tokens[0])
