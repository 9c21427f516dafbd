"""Thousands of rebalances with both protocols: one owner per partition, no offset lost."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from fencepost.groups import consumer, member_update
from fencepost.groups.machine import GroupMachine
from fencepost.groups.reconcile import reconcile
from fencepost.logcore.machine import Decision
from tests.support.quick import only
from tests.unit.groups.fleet import Fleet
from tests.unit.groups.group_driver import MADE

REBALANCES_PER_FLEET = 50
"""The rebalances of one fleet. Further rebalances would lengthen the log and slow reloads down."""

MAX_STEPS = 20_000


@pytest.mark.timeout(3_600)
def test_fleet_of_both_protocols_keeps_one_owner_and_every_offset(
    request: pytest.FixtureRequest,
) -> None:
    wanted = request.config.getoption("--rebalances")
    counts: Counter[str] = Counter()
    rebalances, seed = 0, 0
    while rebalances < wanted:
        fleet = Fleet(seed)
        for step in range(MAX_STEPS):
            try:
                fleet.step()
            except Exception as error:
                error.add_note(f"seed {seed}, step {step}")
                raise
            if step % 50 == 0:
                fleet.count_events()
                if fleet.rebalances >= REBALANCES_PER_FLEET:
                    break
        fleet.finish()
        rebalances += fleet.rebalances
        counts += fleet.counts
        seed += 1
    print(f"{rebalances} rebalances of {seed} fleets: {dict(counts)}")
    for kind in ("group-upgraded", "group-downgraded", "member-expired", "member-fenced"):
        assert counts[kind], f"no {kind} in {rebalances} rebalances"
    assert counts["commits"] > rebalances


def live(fleet: Fleet) -> None:
    for _ in range(MAX_STEPS):
        fleet.step()


@pytest.mark.parametrize("fleets", only((1, 8), 1))
def test_shortcut_for_unchanged_heartbeats_equals_the_full_decision(
    monkeypatch: pytest.MonkeyPatch, fleets: int
) -> None:
    """The shortcut for most heartbeats gives the same response as the full decision."""
    short, shown = consumer.is_unchanged, 0
    taken: list[bool] = []

    def noted(*what: Any) -> bool:
        taken.append(short(*what))
        return taken[-1]

    monkeypatch.setattr(consumer, "is_unchanged", noted)
    for seed in range(fleets):
        driver = (fleet := Fleet(seed)).driver

        def both(token: Any, command: Any, now_ms: int, driver: Any = driver) -> Decision:
            nonlocal shown
            taken.clear()
            decide = GroupMachine.decide
            decision = decide(driver.machine, token, command, now_ms)
            if any(taken):
                shown += 1
                with monkeypatch.context() as patch:
                    patch.setattr(consumer, "is_unchanged", lambda *_: False)
                    other = decide(driver.machine, token, command, now_ms)
                for timer in set(other.timers) - set(decision.timers):
                    assert timer.deadline_ms is None
                    assert timer.key not in driver.timers, "a timer that runs is to be stopped"
                assert replace(other, timers=decision.timers) == decision
            return decision

        monkeypatch.setattr(driver.machine, "decide", both)
        for _ in range(1_500):
            fleet.step()
            # A reload replaces the machine.
            monkeypatch.setattr(driver.machine, "decide", both)
    assert shown > 50


def test_ledger_detects_a_second_owner(monkeypatch: pytest.MonkeyPatch) -> None:

    def careless(member: Any, target: Any, _is_held: Any, *rest: Any) -> Any:
        return reconcile(member, target, lambda _partition: False, *rest)

    monkeypatch.setattr(member_update, "reconcile", careless)
    fleet = Fleet(0)
    fleet.driver.watch_every = 1 << 30
    with pytest.raises(AssertionError):
        live(fleet)
    MADE.clear()  # this coordinator writes invalid logs
