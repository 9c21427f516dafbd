"""Consumers of both protocols through thousands of rebalances: one owner each, no offset lost."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from fleet import Fleet
from group_driver import MADE

from fencepost.groups import member_update
from fencepost.groups.reconcile import reconcile

REBALANCES_PER_FLEET = 50
"""Then a new one starts: a log and its reloads grow with a fleet's life."""

MAX_STEPS = 20_000


@pytest.mark.timeout(3_600)
def test_a_fleet_of_both_protocols(request: pytest.FixtureRequest) -> None:
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


def test_the_ledger_sees_a_second_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that hands out what others still hold is found out."""

    def careless(member: Any, target: Any, _is_held: Any, *rest: Any) -> Any:
        return reconcile(member, target, lambda _partition: False, *rest)

    monkeypatch.setattr(member_update, "reconcile", careless)
    fleet = Fleet(0)
    fleet.driver.watch_every = 1 << 30
    with pytest.raises(AssertionError):
        live(fleet)
    MADE.clear()  # what this coordinator wrote is nothing that anyone should load
