"""The table of transitions: every listed transition happens, every other transition raises."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from fencepost.groups import classic_group
from fencepost.groups.classic_state import TRANSITIONS, ClassicState, require_transition
from fencepost.groups.commands import DeleteGroup, ExpireOffsets
from fencepost.groups.diagram import classic_diagram, consumer_member_diagram
from fencepost.logcore.machine import InvariantViolation
from tests.unit.groups.group_driver import (
    SESSION,
    Driver,
    G,
    completing,
    empty,
    initial,
    preparing,
    stable,
)

E = ClassicState.EMPTY
P = ClassicState.PREPARING_REBALANCE
C = ClassicState.COMPLETING_REBALANCE
S = ClassicState.STABLE
D = ClassicState.DEAD


def leave_all(driver: Driver) -> None:
    driver.leave(*driver.group().members)


def unload(driver: Driver) -> None:
    driver.machine.on_unloaded()


SCENARIOS = {
    "a first member joins": (E, P, Driver, lambda d: d.join(version=3)),
    "a group that was used is joined again": (E, P, empty, lambda d: d.join(instance="i")),
    "the initial delay ends": (P, C, initial, lambda d: d.finish_initial_delay()),
    "all rejoined": (P, C, preparing, lambda d: d.rejoin_all()),
    "the missing one expires": (P, C, preparing, lambda d: d.advance(SESSION)),
    "the missing one leaves": (P, C, preparing, lambda d: d.leave("c-3")),
    "all leave": (P, E, stable, leave_all),
    "all expire": (P, E, stable, lambda d: d.advance(2 * SESSION)),
    "the leader assigns": (C, S, completing, lambda d: d.sync_all()),
    "a newcomer before the assignment": (C, P, completing, lambda d: d.join(version=3)),
    "a leave before the assignment": (C, P, completing, lambda d: d.leave("c-3")),
    "an expiry before the assignment": (C, P, completing, lambda d: d.advance(SESSION)),
    "a newcomer": (S, P, stable, lambda d: d.join(version=3)),
    "the leader rejoins": (S, P, stable, lambda d: d.join("c-1")),
    "new metadata": (S, P, stable, lambda d: d.join("c-3", protocols=(("range", b"n"),))),
    "a leave": (S, P, stable, lambda d: d.leave("c-3")),
    "an expiry": (S, P, stable, lambda d: d.advance(SESSION)),
    "deleted": (E, D, empty, lambda d: d.ask(DeleteGroup(G))),
    "expired": (E, D, empty, lambda d: d.ask(ExpireOffsets())),
    "unloaded when empty": (E, D, empty, unload),
    "unloaded in the join phase": (P, D, preparing, unload),
    "unloaded before the assignment": (C, D, completing, unload),
    "unloaded when stable": (S, D, stable, unload),
}


@pytest.fixture
def seen(monkeypatch):
    """Return a list that records the transitions of the test."""
    pairs: list[tuple[ClassicState, ClassicState]] = []

    def record(source, target, group_id):
        pairs.append((source, target))
        require_transition(source, target, group_id)

    monkeypatch.setattr(classic_group, "require_transition", record)
    return pairs


@pytest.mark.parametrize("name", SCENARIOS)
def test_listed_transition_happens(name, seen):
    source, target, build, act = SCENARIOS[name]
    built = build()
    driver = built if isinstance(built, Driver) else built[0]
    seen.clear()
    act(driver)
    assert (source, target) in seen


def test_every_listed_transition_has_a_scenario():
    assert {(source, target) for source, target, *_ in SCENARIOS.values()} == set(TRANSITIONS)


@pytest.mark.parametrize(("source", "target"), list(itertools.product(ClassicState, repeat=2)))
def test_transition_that_is_not_listed_raises(source, target):
    if (source, target) in TRANSITIONS:
        require_transition(source, target, G)
    else:
        with pytest.raises(InvariantViolation, match="may not go"):
            require_transition(source, target, G)


def test_transition_table_equals_kafkas():
    # ClassicGroupState: the valid previous states, without Dead's self-loop.
    previous = {
        target: {source for source, other in TRANSITIONS if other is target}
        for target in ClassicState
    }
    assert previous == {E: {P}, P: {S, C, E}, C: {P}, S: {C}, D: {E, P, C, S}}


def test_readme_contains_the_state_diagrams():
    readme = Path(classic_group.__file__).with_name("README.md").read_text()
    assert f"```mermaid\n{classic_diagram()}\n```" in readme
    assert f"```mermaid\n{consumer_member_diagram()}\n```" in readme
