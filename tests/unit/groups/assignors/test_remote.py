"""A group with a remote assignor keeps its assignment until the assignor's response arrives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fencepost.groups import shard
from fencepost.groups.assignors.model import AssignorRegistry, run
from fencepost.groups.assignors.range import RangeAssignor
from fencepost.groups.assignors.remote import (
    RETRY_MS,
    ComputeTarget,
    RemoteAssignor,
    TargetComputed,
)
from fencepost.groups.assignors.uniform import UniformAssignor
from tests.unit.groups.consumer_driver import ConsumerDriver, T, settings, settle
from tests.unit.groups.group_driver import G


def driver() -> ConsumerDriver:
    registry = AssignorRegistry([RemoteAssignor("mine"), UniformAssignor()])
    return ConsumerDriver(consumer=settings(assignors=registry))


def asked(group: ConsumerDriver) -> ComputeTarget:
    (effect,) = group.effects
    assert isinstance(effect, ComputeTarget)
    group.effects.clear()
    return effect


def answer(group: ConsumerDriver, effect: ComputeTarget, result=None, problem="") -> None:
    group.send(TargetComputed(effect.group_id, effect.assignor, effect.group, result, problem))


def right(effect: ComputeTarget):
    return run(RangeAssignor(), effect.group)


def test_response_of_remote_assignor_becomes_the_target_of_a_new_epoch():
    group = driver()
    first = group.client("a")
    assert (first.epoch, first.told) == (2, frozenset())
    effect = asked(group)
    assert (effect.group_id, effect.assignor) == (G, "mine")
    answer(group, effect, right(effect))
    settle(first)
    assert (first.epoch, len(first.owned)) == (3, 4)
    assert group.effects == []
    assert group.event("group-epoch-bumped")["reason"] == "assignor 'mine' answered"


def test_members_keep_their_assignment_while_the_remote_assignor_computes():
    group = driver()
    first = group.client("a")
    answer(group, effect := asked(group), right(effect))
    settle(first)
    second = group.client("b")
    settle(first, second)
    assert (len(first.owned), len(second.owned)) == (4, 0)
    answer(group, effect := asked(group), right(effect))
    settle(first, second)
    assert (len(first.owned), len(second.owned)) == (2, 2)
    second.leave()
    settle(first)
    assert len(first.owned) == 2
    answer(group, effect := asked(group), right(effect))
    settle(first)
    assert len(first.owned) == 4


def test_failed_remote_assignor_keeps_the_target_and_is_retried_after_an_interval():
    group = driver()
    first = group.client("a")
    answer(group, effect := asked(group), right(effect))
    settle(first)
    second = group.client("b")
    answer(group, asked(group), None, "RuntimeError: no idea")
    assert group.event("assignor-failed") == {
        "assignor": "mine",
        "cause": "RuntimeError: no idea",
        "epoch": group.consumer_group().epoch,
    }
    settle(first, second)
    assert (len(first.owned), group.effects) == (4, [])
    group.advance(RETRY_MS - 1)
    settle(first, second, rounds=1)
    assert group.effects == []
    group.advance(1)
    settle(first, second, rounds=1)
    answer(group, effect := asked(group), right(effect))
    settle(first, second)
    assert (len(first.owned), len(second.owned)) == (2, 2)


def test_timer_retries_a_failed_remote_assignor_without_heartbeats():
    group = driver()
    first = group.client("a")
    answer(group, asked(group), None, "RuntimeError: no idea")
    group.advance(RETRY_MS - 1)
    assert group.effects == []
    group.advance(1)
    answer(group, effect := asked(group), right(effect))
    assert ("assignor", G) not in group.timers
    settle(first)
    assert len(first.owned) == 4


@pytest.mark.parametrize("way", ["leave", "expire", "change"])
def test_retry_timer_does_nothing_once_group_is_empty_or_has_another_assignor(way):
    group = driver()
    first = group.client("a")
    answer(group, asked(group), None, "RuntimeError: no idea")
    if way == "leave":
        first.leave()
    elif way == "expire":
        group.advance(RETRY_MS - 1)
        group.timers["session", G, "a"] = group.now
        group.advance(0)
    else:
        group.client("b", server_assignor="uniform")
        first.leave()
    group.advance(RETRY_MS)
    assert group.effects == []


def test_group_config_override_does_not_repeat_the_assignor_request():
    group = driver()
    group.own[G] = replace(group.consumer, session_timeout_ms=50_000)
    first = group.client("a")
    answer(group, effect := asked(group), right(effect))
    settle(first)
    for _ in range(3):
        group.advance(RETRY_MS)
        first.beat()
    assert group.effects == []


def test_invalid_response_of_remote_assignor_is_a_failure_and_keeps_the_target():
    group = driver()
    group.client("a")
    effect = asked(group)
    for wrong in (
        {"a": {(T, 0)}, "stranger": {(T, 1)}},
        {"a": {(T, 4)}},
        {"a": [(T, 0), (T, 0)]},
        {"a": {(b"x" * 16, 0)}},
    ):
        answer(group, effect, wrong)
        assert group.event("assignor-failed")["assignor"] == "mine"
        assert group.consumer_group().targets == {"a": frozenset()}


def test_response_computed_for_an_older_group_epoch_is_ignored():
    group = driver()
    first = group.client("a")
    early = asked(group)
    group.client("b")
    answer(group, early, right(early))
    assert group.consumer_group().targets == {"a": frozenset(), "b": frozenset()}
    first.leave()
    answer(group, early, right(early))
    answer(group, ComputeTarget("gone", "mine", early.group), {})
    assert not group.consumer_group().targets.get("b")


def test_pending_assignor_request_is_repeated_after_reload():
    group = driver()
    first = group.client("a")
    asked(group)
    group.reload()
    settle(first, rounds=1)
    answer(group, effect := asked(group), right(effect))
    settle(first)
    assert len(first.owned) == 4


def test_member_that_selects_another_assignor_is_assigned_by_it():
    group = driver()
    client = group.client("a", server_assignor="uniform")
    assert (len(client.owned), group.effects) == (4, [])


def test_remembered_assignor_requests_are_bounded(monkeypatch):
    monkeypatch.setattr(shard, "MAX_REMEMBERED_ASSIGNORS", 2)
    state = driver().machine._shard
    for group_id in ("g1", "g2", "g3"):
        state.note_assignor_request(group_id, "mine", 0)
    assert [state.may_request_assignor(name, "mine", 1) for name in ("g1", "g2", "g3")] == [
        True,
        False,
        False,
    ]
