"""JoinGroup, case by case: the order of checks, the join phase, protocol choice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fencepost.groups.commands import JoinGroupResult
from fencepost.groups.errors import (
    FencedInstanceIdError,
    GroupMaxSizeReachedError,
    InconsistentGroupProtocolError,
    InvalidGroupIdError,
    InvalidSessionTimeoutError,
    MemberIdRequiredError,
    RebalanceInProgressError,
    UnknownMemberIdError,
)
from fencepost.groups.limits import GroupLimits
from fencepost.groups.records import GroupMetadataValue
from fencepost.logcore.machine import InvariantViolation
from tests.unit.groups.group_driver import (
    DELAY,
    NOW,
    PARKED,
    RANGE,
    REBALANCE,
    SESSION,
    Driver,
    completing,
    empty,
    initial,
    preparing,
    stable,
    subscription,
)

BOTH = (("a", b"1"), ("b", b"2"))


def protocols(*names: str) -> tuple[tuple[str, bytes], ...]:
    return tuple((name, b"m-" + name.encode()) for name in names)


# --- checks before anything changes --------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"group_id": ""}, InvalidGroupIdError),
        ({"session_timeout_ms": 5_999}, InvalidSessionTimeoutError),
        ({"session_timeout_ms": 1_800_001}, InvalidSessionTimeoutError),
        ({"member_id": "x"}, UnknownMemberIdError),
        ({"protocols": ()}, InconsistentGroupProtocolError),
        ({"protocol_type": ""}, InconsistentGroupProtocolError),
    ],
)
def test_invalid_join_is_refused_without_creating_a_group(fields, error):
    driver = Driver()
    with pytest.raises(error):
        driver.answer(driver.join(**fields))
    assert not driver.groups
    assert not driver.log


def test_group_id_is_checked_before_the_session_timeout():
    driver = Driver()
    with pytest.raises(InvalidGroupIdError):
        driver.answer(driver.join(group_id="", session_timeout_ms=1))


@pytest.mark.parametrize("timeout", [6_000, 1_800_000])
def test_session_timeout_at_either_bound_is_accepted(timeout):
    driver = Driver()
    assert isinstance(
        driver.answers[driver.join(session_timeout_ms=timeout)], MemberIdRequiredError
    )


@pytest.mark.parametrize("build", [initial, completing, stable, preparing])
@pytest.mark.parametrize(
    "fields",
    [
        {"protocol_type": "connect"},
        {"protocols": protocols("roundrobin")},
        {"protocols": ()},
    ],
)
def test_join_with_inconsistent_protocol_is_refused_in_every_state(build, fields):
    driver, ids, *_ = build()
    for member_id in ("", ids[-1]):
        with pytest.raises(InconsistentGroupProtocolError):
            driver.answer(driver.join(member_id, **fields))


@pytest.mark.parametrize("build", [initial, completing, stable, preparing])
def test_join_with_unknown_member_id_is_refused_in_every_state(build):
    driver, *_ = build()
    with pytest.raises(UnknownMemberIdError):
        driver.answer(driver.join("stranger"))


def test_protocols_are_checked_before_the_member_id():
    driver, _ = stable()
    with pytest.raises(InconsistentGroupProtocolError):
        driver.answer(driver.join("stranger", protocols=()))


def test_empty_group_accepts_any_protocol_type():
    driver = empty()
    token, _ = driver.join_dynamic(protocol_type="connect", protocols=protocols("x"))
    driver.finish_initial_delay()
    assert driver.answer(token).protocol_type == "connect"


@pytest.mark.parametrize("fields", [{"protocol_type": ""}, {"protocols": ()}])
def test_empty_group_refuses_a_join_without_protocol(fields):
    driver = empty()
    with pytest.raises(InconsistentGroupProtocolError):
        driver.answer(driver.join(**fields))


def test_former_member_id_is_unknown_to_an_empty_group():
    driver, ids = stable(1)
    driver.leave(ids[0])
    with pytest.raises(UnknownMemberIdError):
        driver.answer(driver.join(ids[0]))


@pytest.mark.parametrize(
    ("member_id", "instance", "error"),
    [
        ("i1-2", "nobody", UnknownMemberIdError),
        ("c-1", "i1", FencedInstanceIdError),
        ("stranger", "i1", FencedInstanceIdError),
        ("i1-9", "i2", UnknownMemberIdError),
    ],
)
def test_join_with_mismatched_member_and_instance_id_is_refused(member_id, instance, error):
    driver, _ = stable(1, static=["i1"])
    with pytest.raises(error):
        driver.answer(driver.join(member_id, instance=instance))


def test_static_member_rejoins_with_its_member_id_alone():
    driver, ids = stable(1, static=["i1"])
    assert driver.answer(driver.join(ids[1])).generation_id == 1


# --- MEMBER_ID_REQUIRED --------------------------------------------------------------------------


def test_first_join_without_member_id_writes_one_empty_group_record():
    driver = Driver()
    token = driver.join()
    assert driver.answers[token].member_id == "c-1"
    assert driver.state() == "Empty"
    assert driver.last_group_record() == GroupMetadataValue("", 0, None, None, NOW, ())
    driver.join()
    assert len(driver.log) == 1


def test_join_before_version_4_does_not_require_a_member_id():
    driver = Driver()
    token = driver.join(version=3)
    assert driver.parked(token)
    assert driver.state() == "PreparingRebalance"
    assert len(driver.log) == 1


def test_join_of_a_static_member_does_not_require_a_member_id():
    driver = Driver()
    token = driver.join(instance="i1")
    driver.finish_initial_delay()
    assert driver.answer(token).member_id == "i1-1"


def test_pending_member_expires_after_its_session_timeout():
    driver = Driver()
    driver.join(session_timeout_ms=SESSION)
    driver.advance(SESSION - 1)
    assert driver.group().pending_members
    driver.advance(1)
    assert not driver.group().pending_members
    assert "pending-member-expired" in driver.kinds()
    with pytest.raises(UnknownMemberIdError):
        driver.answer(driver.join("c-1"))


def test_pending_member_delays_the_join_phase_until_it_expires():
    driver, ids = stable(2)
    driver.join()
    tokens = driver.rejoin_all()
    assert all(driver.parked(token) for token in tokens.values())
    driver.advance(SESSION)
    assert driver.answer(tokens[ids[0]]).generation_id == 2


def test_leave_of_the_pending_member_completes_the_join_phase():
    driver, ids = stable(2)
    driver.join()
    pending = next(iter(driver.group().pending_members))
    tokens = driver.rejoin_all()
    assert driver.leave(pending) == ((pending, None, None),)
    assert driver.answer(tokens[ids[0]]).generation_id == 2


def test_pending_member_id_cannot_join_with_an_instance_id():
    driver = Driver()
    driver.join()
    with pytest.raises(UnknownMemberIdError):
        driver.answer(driver.join("c-1", instance="i1"))


def test_pending_member_id_is_unknown_after_reload():
    driver = Driver()
    driver.join()
    driver.reload()
    assert driver.state() == "Empty"
    with pytest.raises(UnknownMemberIdError):
        driver.answer(driver.join("c-1"))


def test_generated_member_id_already_in_use_is_an_invariant_violation():
    driver, ids = stable(1)
    with pytest.raises(InvariantViolation):
        driver.join(new_member_id=ids[0])


# --- the initial rebalance -----------------------------------------------------------------------


def test_first_join_is_answered_after_the_initial_rebalance_delay():
    driver, _, tokens = initial()
    driver.advance(DELAY - 1)
    assert driver.parked(tokens[0])
    driver.advance(1)
    assert driver.answer(tokens[0]).generation_id == 1
    assert driver.state() == "CompletingRebalance"


def test_new_members_extend_the_initial_rebalance_delay_once():
    driver, _, tokens = initial()
    driver.advance(1_000)
    tokens.append(driver.join_dynamic()[0])
    driver.advance(1_000)
    tokens.append(driver.join_dynamic()[0])
    driver.advance(1_000)
    assert all(driver.parked(token) for token in tokens)
    driver.advance(DELAY - 1)
    assert all(driver.parked(token) for token in tokens)
    driver.advance(1)
    assert [driver.answer(token).generation_id for token in tokens] == [1, 1, 1]


def test_initial_delay_is_extended_at_most_to_the_rebalance_timeout():
    driver = Driver()
    tokens = [driver.join(version=3, rebalance_timeout_ms=7_000)]
    deadlines = []
    for _ in range(8):
        driver.advance(1_000)
        if driver.state() != "PreparingRebalance":
            deadlines.append(driver.now - NOW)
            break
        tokens.append(driver.join(version=3, rebalance_timeout_ms=7_000))
    assert deadlines == [7_000]


def test_join_phase_without_initial_delay_ends_when_its_timer_fires():
    driver = Driver(initial_rebalance_delay_ms=0)
    token = driver.join(version=3, rebalance_timeout_ms=0)
    assert driver.parked(token)
    driver.advance(0)
    assert driver.answer(token).generation_id == 1


def test_initial_delay_applies_even_if_the_rebalance_timeout_is_shorter():
    driver = Driver()
    token = driver.join(version=3, rebalance_timeout_ms=1_000)
    driver.advance(DELAY - 1)
    assert driver.parked(token)
    driver.advance(1)
    assert driver.answer(token).generation_id == 1


def test_initial_phase_ends_by_its_timer_and_not_by_the_last_leave():
    driver, ids, tokens = initial()
    driver.leave(ids[0])
    with pytest.raises(UnknownMemberIdError):
        driver.answer(tokens[0])
    assert driver.state() == "PreparingRebalance"
    driver.advance(DELAY)
    assert driver.state() == "Empty"
    record = driver.last_group_record()
    assert record is not None
    assert (record.generation_id, record.members) == (1, ())


def test_later_rebalance_has_no_initial_delay():
    driver, ids = stable(1)
    token, _ = driver.join_dynamic()
    first = driver.join(ids[0])
    assert driver.answer(token).generation_id == 2
    assert driver.answer(first).generation_id == 2


def test_initial_delay_applies_again_to_a_group_that_was_empty():
    driver = empty()
    token = driver.join(version=3)
    assert driver.parked(token)
    driver.advance(DELAY)
    assert driver.answer(token).generation_id == 3


# --- rejoining -----------------------------------------------------------------------------------


def test_rejoin_with_same_metadata_in_completing_rebalance_is_answered_at_once():
    driver, ids = completing(2)
    leader, follower = (driver.answer(driver.join(member_id)) for member_id in ids)
    assert [member.member_id for member in leader.members] == ids
    assert leader.members[0].metadata == RANGE[0][1]
    assert follower.members == ()
    assert {leader.leader, follower.leader} == {ids[0]}
    assert driver.state() == "CompletingRebalance"


@pytest.mark.parametrize("who", [0, 1])
def test_rejoin_with_other_metadata_in_completing_rebalance_rebalances(who):
    driver, ids = completing(2)
    waiting = driver.sync(ids[1])
    token = driver.join(ids[who], protocols=(("range", subscription("u")),))
    assert driver.parked(token)
    with pytest.raises(RebalanceInProgressError):
        driver.answer(waiting)
    assert driver.state() == "PreparingRebalance"


def test_stable_follower_with_the_same_metadata_gets_the_current_generation():
    driver, ids = stable(2)
    result = driver.answer(driver.join(ids[1]))
    assert result == JoinGroupResult(ids[1], 1, "consumer", "range", ids[0])
    assert driver.state() == "Stable"


def test_stable_follower_with_other_metadata_rebalances():
    driver, ids = stable(2)
    assert driver.parked(driver.join(ids[1], protocols=(("range", subscription("u")),)))
    assert driver.state() == "PreparingRebalance"


def test_stable_follower_with_reordered_protocols_rebalances():
    driver, ids = stable(1)
    newcomer, _ = driver.join_dynamic(protocols=(*RANGE, *protocols("b")))
    driver.rejoin_all()
    driver.sync_all()
    follower = driver.answer(newcomer).member_id
    assert driver.parked(driver.join(follower, protocols=(*protocols("b"), *RANGE)))
    assert follower != ids[0]


def test_stable_leader_rebalances_with_the_same_metadata():
    driver, ids, token = preparing(2)
    assert driver.parked(token)
    other = driver.join(ids[1])
    assert driver.answer(token).generation_id == driver.answer(other).generation_id == 2
    assert driver.event("rebalance-started")["reason"] == f"leader {ids[0]} rejoins"


def test_rejoin_of_the_only_member_is_answered_at_once():
    driver, ids = stable(1)
    assert driver.answer(driver.join(ids[0])).generation_id == 2


def test_rejoin_in_preparing_rebalance_replaces_the_metadata():
    driver, ids, token = preparing(2)
    driver.join(ids[1], protocols=(("range", b"new"),))
    assert [member.metadata for member in driver.answer(token).members] == [RANGE[0][1], b"new"]


def test_repeated_join_replaces_the_waiting_one():
    driver, ids, token = preparing(2)
    again = driver.join(ids[0])
    with pytest.raises(RebalanceInProgressError):
        driver.answer(token)
    driver.join(ids[1])
    assert driver.answer(again).generation_id == 2


def test_rebalance_timeout_of_version_0_is_the_session_timeout():
    driver = Driver()
    driver.join(version=0, rebalance_timeout_ms=-1)
    assert driver.group().rebalance_timeout_ms == SESSION


def test_group_record_holds_timeouts_and_client_of_each_member():
    driver, ids = stable(1)
    record = driver.last_group_record()
    assert record is not None
    member = record.members[0]
    assert (member.member_id, member.client_id, member.client_host) == (ids[0], "c", "/127.0.0.1")
    assert (member.session_timeout_ms, member.rebalance_timeout_ms) == (SESSION, REBALANCE)
    assert (record.protocol_type, record.protocol_name, record.leader) == (
        "consumer",
        "range",
        ids[0],
    )


# --- the end of the join phase -------------------------------------------------------------------


def test_dynamic_member_that_does_not_rejoin_in_time_is_removed():
    driver, ids, token = preparing(3)
    for _ in range(REBALANCE // 5_000):
        for member_id in ids[1:]:
            with pytest.raises(RebalanceInProgressError):
                driver.heartbeat(member_id)
        driver.advance(5_000)
    assert [member.member_id for member in driver.answer(token).members] == ids[:1]
    gone = [event for event in driver.events if event.kind == "member-expired"]
    assert [event.detail["member"] for event in gone] == ids[1:]


def test_static_member_that_does_not_rejoin_in_time_stays_in_the_group():
    driver, ids, token = preparing(1, static=["i1"])
    for _ in range(REBALANCE // 5_000):
        with pytest.raises(RebalanceInProgressError):
            driver.heartbeat(ids[1], instance="i1")
        driver.advance(5_000)
    members = driver.answer(token).members
    assert [(member.member_id, member.group_instance_id) for member in members] == [
        (ids[0], None),
        (ids[1], "i1"),
    ]


def test_join_phase_restarts_if_only_static_members_are_left():
    driver = Driver()
    driver.join(version=3)
    for name in ("i1", "i2"):
        driver.join(instance=name, session_timeout_ms=1_800_000)
    driver.finish_initial_delay()
    driver.sync_all()
    driver.leave("c-1")
    for _ in range(3):
        driver.advance(REBALANCE)
        assert driver.state() == "PreparingRebalance"
        assert driver.group().generation_id == 1
    token = driver.join("i2-3", instance="i2")
    driver.advance(REBALANCE)
    result = driver.answer(token)
    assert (result.generation_id, result.leader, len(result.members)) == (2, "i2-3", 2)


def test_leader_that_leaves_during_a_rebalance_is_replaced():
    driver, ids = stable(3)
    token = driver.join(ids[1], protocols=(("range", b"x"),))
    driver.join(ids[2])
    driver.leave(ids[0])
    result = driver.answer(token)
    assert result.leader == ids[1]
    assert len(result.members) == 2


def test_leader_that_rejoins_stays_leader():
    driver, ids = stable(2)
    token = driver.join(ids[1], protocols=(("range", b"x"),))
    driver.join(ids[0])
    assert driver.answer(token).leader == ids[0]


@pytest.mark.parametrize(
    ("offers", "chosen"),
    [
        ([["a", "b"], ["a", "b"]], "a"),
        ([["a", "b"], ["b", "a"], ["b", "a"]], "b"),
        ([["a", "b", "c"], ["c", "b"]], "b"),
        ([["a", "b", "c"], ["c", "b"], ["c", "b"]], "c"),
        ([["a"], ["b", "a"], ["b", "a"]], "a"),
        ([["a", "b"], ["b", "a"]], "a"),
        ([["b", "a"], ["a", "b"]], "b"),
        ([["a", "a"], ["a"]], "a"),
    ],
)
def test_protocol_is_chosen_by_vote_of_the_members(offers, chosen):
    driver = Driver()
    tokens = [driver.join_dynamic(protocols=protocols(*names))[0] for names in offers]
    driver.finish_initial_delay()
    result = driver.answer(tokens[0])
    assert result.protocol_name == chosen
    assert {member.metadata for member in result.members} == {b"m-" + chosen.encode()}


# --- size ----------------------------------------------------------------------------------------

TWO = GroupLimits(max_group_size=2)


@pytest.mark.parametrize("build", [completing, stable])
def test_full_group_refuses_new_members(build):
    driver, ids = build(2, limits=TWO)
    before = driver.state()
    for version in (3, 9):
        with pytest.raises(GroupMaxSizeReachedError):
            driver.answer(driver.join(version=version))
    with pytest.raises(GroupMaxSizeReachedError):
        driver.answer(driver.join("stranger"))
    assert driver.state() == before
    assert driver.answer(driver.join(ids[1])).member_id == ids[1]


def test_group_one_below_its_max_size_accepts_a_member():
    driver, _ = stable(1, limits=TWO)
    assert driver.parked(driver.join(version=3))


def test_join_phase_counts_waiting_members_against_the_max_size():
    driver = Driver(TWO)
    tokens = [driver.join(version=3) for _ in range(3)]
    assert [driver.parked(token) for token in tokens] == [True, True, False]
    with pytest.raises(GroupMaxSizeReachedError):
        driver.answer(tokens[2])


def test_pending_member_of_a_full_group_is_refused_and_forgotten():
    driver = Driver(TWO)
    driver.join()
    driver.join(version=3)
    driver.join(version=3)
    with pytest.raises(GroupMaxSizeReachedError):
        driver.answer(driver.join("c-1"))
    assert not driver.group().pending_members


def test_group_above_its_max_size_removes_the_last_member_to_rejoin():
    driver, ids = stable(3)
    driver.settings["limits"] = TWO
    driver.reload()
    assert driver.state() == "PreparingRebalance"
    tokens = [driver.join(member_id) for member_id in ids]
    with pytest.raises(UnknownMemberIdError, match="is full"):
        driver.answer(tokens[2])
    with pytest.raises(GroupMaxSizeReachedError):
        driver.answer(driver.join())
    driver.advance(REBALANCE)
    assert len(driver.answer(tokens[0]).members) == 2


def test_waiting_member_may_repeat_its_join_in_a_full_group():
    driver = Driver(TWO)
    driver.join(version=3)
    driver.join(version=3)
    assert driver.parked(driver.join("c-1"))


# --- members that never receive a response --------------------------------------------------------


def test_new_member_whose_join_is_not_answered_expires_after_five_minutes():
    driver = Driver()
    patient = {"session_timeout_ms": 1_800_000, "rebalance_timeout_ms": 400_000, "version": 3}
    driver.join(**patient)
    driver.finish_initial_delay()
    driver.sync_all()
    token = driver.join(**patient)
    driver.advance(299_999)
    assert driver.parked(token)
    driver.advance(1)
    with pytest.raises(UnknownMemberIdError):
        driver.answer(token)
    assert driver.event("member-expired")["reason"] == "JoinGroup timed out"


def test_member_waiting_in_the_join_phase_does_not_expire():
    driver, ids, token = preparing(2)
    driver.advance(SESSION - 1)
    with pytest.raises(RebalanceInProgressError):
        driver.heartbeat(ids[1])
    driver.advance(SESSION - 1)
    assert driver.parked(token)
    assert ids[0] in driver.group().members


def test_rebalance_events_name_member_client_and_reason():
    driver, ids = stable(1)
    token, newcomer = driver.join_dynamic(reason="r" * 999)
    assert driver.answers[token] is PARKED
    event = driver.event("rebalance-started")
    assert event["member"] == newcomer
    assert event["client_id"] == "c"
    assert event["client_host"] == "/127.0.0.1"
    assert event["old_generation"] == 1
    assert event["state"] == "Stable"
    assert len(event["reason"]) == 256
    driver.join(ids[0])
    event = driver.event("generation-started")
    assert (event["old_generation"], event["new_generation"]) == (1, 2)


def test_protocol_support_counts_only_current_protocols():
    driver, ids = stable(1)
    member = driver.group().members[ids[0]]
    assert replace(member, protocols=BOTH).protocol_names == {"a", "b"}
    for index in range(50):
        driver.join(ids[0], protocols=(*RANGE, (f"p{index}", b"")))
    assert len(driver.group()._support) == 2
