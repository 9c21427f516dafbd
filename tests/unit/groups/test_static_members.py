"""Static members (KIP-345, KIP-814): replacement in each group state, fencing, removal."""

from __future__ import annotations

import pytest

from fencepost.groups.commands import JoinMember, LeavingMember
from fencepost.groups.errors import (
    FencedInstanceIdError,
    RebalanceInProgressError,
    UnknownMemberIdError,
)
from tests.unit.groups.group_driver import (
    REBALANCE,
    SESSION,
    Driver,
    completing,
    stable,
    subscription,
)

OTHER = (("range", subscription("u")),)


def replaced(driver: Driver, instance: str = "i1", **fields: object):
    return driver.answer(driver.join(instance=instance, **fields))


def test_replacement_of_a_static_follower_does_not_rebalance():
    driver, ids = stable(1, static=["i1"])
    result = replaced(driver)
    assert result.member_id != ids[1]
    assert (result.generation_id, result.leader, result.skip_assignment) == (1, ids[0], False)
    assert result.members == ()
    assert driver.state() == "Stable"
    record = driver.last_group_record()
    assert record is not None
    assert [member.member_id for member in record.members] == [ids[0], result.member_id]
    assert driver.answer(driver.sync(result.member_id)).assignment == f"to {ids[1]}".encode()


@pytest.mark.parametrize("version", [5, 9])
def test_replacement_of_a_static_leader_must_skip_the_assignment(version):
    driver, ids = stable(0, static=["i1", "i2"])
    result = replaced(driver, version=version)
    new = result.member_id
    assert driver.group().leader_id == new
    if version >= 9:
        assert (result.leader, result.skip_assignment) == (new, True)
        assert {member.member_id for member in result.members} == {new, ids[1]}
        assert isinstance(result.members[0], JoinMember)
    else:
        assert (result.leader, result.skip_assignment, result.members) == (ids[0], False, ())
    record = driver.last_group_record()
    assert record is not None
    assert record.leader == new


def test_static_replacement_with_another_subscription_does_not_rebalance():
    driver, _ = stable(1, static=["i1"])
    result = replaced(driver, protocols=OTHER)
    assert driver.state() == "Stable"
    record = driver.last_group_record()
    assert record is not None
    assert record.members[-1].subscription == OTHER[0][1]
    assert driver.group().is_subscribed_to("u")
    assert driver.group().members[result.member_id].protocols == OTHER


def test_static_replacement_that_changes_the_protocol_rebalances():
    both = (("range", b"r"), ("sticky", b"s"))
    driver = Driver()
    for name in ("i1", "i2"):
        driver.join(instance=name, protocols=both)
    driver.finish_initial_delay()
    driver.sync_all()
    assert driver.parked(driver.join(instance="i1", protocols=both[1:]))
    assert driver.state() == "PreparingRebalance"
    assert driver.group().generation_id == 1
    driver.rejoin_all()
    assert driver.group().protocol_name == "sticky"


def test_replaced_member_id_is_fenced_in_every_request():
    driver, ids = stable(1, static=["i1"])
    replaced(driver)
    with pytest.raises(FencedInstanceIdError):
        driver.heartbeat(ids[1], instance="i1")
    with pytest.raises(FencedInstanceIdError):
        driver.answer(driver.sync(ids[1], instance="i1"))
    with pytest.raises(FencedInstanceIdError):
        driver.answer(driver.join(ids[1], instance="i1"))
    with pytest.raises(FencedInstanceIdError):
        driver.commit(generation=1, member_id=ids[1], instance="i1")
    with pytest.raises(FencedInstanceIdError):
        driver.commit(generation=1, member_id=ids[1], instance="i1", producer=7)
    answer = driver.leave(LeavingMember(ids[1], "i1"))
    assert isinstance(answer[0][2], FencedInstanceIdError)
    with pytest.raises(UnknownMemberIdError):
        driver.heartbeat(ids[1])
    event = driver.event("member-fenced")
    assert (event["member"], event["group_instance_id"]) == (ids[1], "i1")


def test_static_replacement_survives_a_reload():
    driver, ids = stable(1, static=["i1"])
    result = replaced(driver)
    driver.reload()
    assert set(driver.group().members) == {ids[0], result.member_id}
    driver.heartbeat(result.member_id, instance="i1")


def test_static_replacement_takes_over_the_pending_sync():
    driver, ids = completing(1, static=["i1"])
    driver.answer(driver.sync(ids[0], assignments=((ids[1], b"x"),)))
    assert driver.state() == "Stable"
    result = replaced(driver)
    assert driver.group().pending_sync == {result.member_id}
    assert driver.answer(driver.sync(result.member_id)).assignment == b"x"
    assert not driver.group().pending_sync


def test_static_replacement_in_completing_rebalance_rebalances():
    driver, ids = completing(1, static=["i1"])
    waiting = driver.sync(ids[1], instance="i1")
    token = driver.join(instance="i1")
    with pytest.raises(FencedInstanceIdError):
        driver.answer(waiting)
    assert driver.state() == "PreparingRebalance"
    first = driver.join(ids[0])
    assert driver.answer(token).generation_id == driver.answer(first).generation_id == 2


def test_static_replacement_in_preparing_rebalance_fences_the_waiting_join():
    driver, ids = stable(1, static=["i1"])
    parked = driver.join(ids[1], instance="i1", protocols=OTHER)
    token = driver.join(instance="i1")
    with pytest.raises(FencedInstanceIdError):
        driver.answer(parked)
    assert driver.parked(token)
    driver.join(ids[0])
    assert driver.answer(token).generation_id == 2


def test_replacement_of_the_last_missing_member_completes_the_join_phase():
    driver, ids = stable(1, static=["i1"])
    first = driver.join(ids[0])
    token = driver.join(instance="i1")
    assert driver.answer(token).generation_id == driver.answer(first).generation_id == 2


def test_static_replacement_in_the_initial_phase_waits_for_the_delay():
    driver = Driver()
    first = driver.join(instance="i1")
    second = driver.join(instance="i1")
    with pytest.raises(FencedInstanceIdError):
        driver.answer(first)
    driver.finish_initial_delay()
    result = driver.answer(second)
    assert (result.leader, len(result.members)) == (result.member_id, 1)


def test_static_member_expires_by_its_session_alone():
    driver, ids = stable(0, static=["i1", "i2"])
    driver.advance(SESSION - 1)
    driver.heartbeat(ids[0])
    driver.advance(1)
    assert list(driver.group().members) == [ids[0]]
    assert driver.event("member-expired")["group_instance_id"] == "i2"


def test_expired_static_member_may_rejoin_as_a_new_member():
    driver, ids = stable(0, static=["i1", "i2"])
    driver.advance(SESSION - 1)
    driver.heartbeat(ids[0])
    driver.advance(1)
    assert driver.parked(driver.join(instance="i2"))


def test_static_member_that_does_not_sync_in_time_is_removed():
    driver, ids = stable(1, static=["i1"])
    token = driver.join(ids[0])
    for _ in range(2):
        for _ in range(REBALANCE // 5_000):
            with pytest.raises(RebalanceInProgressError):
                driver.heartbeat(ids[1])
            driver.advance(5_000)
        break
    driver.answer(token)
    driver.answer(driver.sync(ids[0]))
    for _ in range(REBALANCE // 5_000):
        for member_id in ids:
            driver.heartbeat(member_id)
        driver.advance(5_000)
    assert list(driver.group().members) == [ids[0]]
    assert driver.event("member-expired")["reason"] == "did not send SyncGroup in time"


@pytest.mark.parametrize(
    ("leaving", "error"),
    [
        (LeavingMember("", "i1"), None),
        (LeavingMember("", "i9"), UnknownMemberIdError),
        (LeavingMember("", None), UnknownMemberIdError),
        (LeavingMember("i1-2", "i1"), None),
        (LeavingMember("i1-2", "i9"), UnknownMemberIdError),
        (LeavingMember("other", "i1"), FencedInstanceIdError),
        (LeavingMember("i1-2", None), None),
    ],
)
def test_leave_by_member_or_instance_id_is_refused_if_they_do_not_match(leaving, error):
    driver, _ = stable(0, static=["i0", "i1"])
    ((member_id, instance, answer),) = driver.leave(leaving)
    assert (member_id, instance) == (leaving.member_id, leaving.group_instance_id)
    assert answer is None if error is None else isinstance(answer, error)
    assert driver.state() == ("PreparingRebalance" if error is None else "Stable")
