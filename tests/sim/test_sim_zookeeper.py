"""Histories of a cluster on ZooKeeper from seeds; ``make sim WORLD=zookeeper SEED=7 N=1``."""

from __future__ import annotations

import pytest

from tests.sim import zk_steps
from tests.sim.bug import Bug
from tests.sim.bugs_zookeeper import ZOOKEEPER
from tests.sim.planted import planted, seeds_until_found, steps_until_found
from tests.sim.repeated import stories
from tests.sim.run import ZOOKEEPER as ON_ZOOKEEPER
from tests.sim.zk_cluster import play

SEEDS = 12
SLOW_SEEDS = 100
"""In CI; ``make sim N=10000`` plays more."""

EVERY, SLOWLY_EVERY = 15, 5
"""The tests play one in so many steps; ``python -m tests.sim.zk_steps`` plays all."""


def test_seeds() -> None:
    acknowledged = 0
    for seed in range(1, SEEDS + 1):
        acknowledged += play(seed).acknowledged
    assert acknowledged > 50 * SEEDS, "hardly anything was written"


@pytest.mark.slow
def test_more_seeds() -> None:
    for seed in range(SEEDS + 1, SEEDS + SLOW_SEEDS + 1):
        play(seed)


@pytest.mark.slow
@pytest.mark.parametrize("script", zk_steps.SCRIPTS)
def test_steps(script: str) -> None:
    for step in zk_steps.steps(script, EVERY):
        zk_steps.play(script, step)


@pytest.mark.slow
@pytest.mark.parametrize("script", zk_steps.SCRIPTS)
def test_more_steps(script: str) -> None:
    for step in zk_steps.steps(script, SLOWLY_EVERY):
        zk_steps.play(script, step)


DELETED_UNHEARD = (
    ("marking", zk_steps.Step(1, zk_steps.EXPIRE)),
    ("marking", zk_steps.Step(2, zk_steps.EXPIRE_ANOTHER)),
    *(("deletion", zk_steps.Step(number, zk_steps.EXPIRE_ANOTHER)) for number in range(5, 13)),
)
"""A broker that was not registered during a deletion kept the topic for good: the controller did
not tell returning brokers, and they did not look for deleted topics by themselves."""


@pytest.mark.parametrize(("script", "step"), DELETED_UNHEARD)
def test_deletions_that_were_not_heard_of(script: str, step: zk_steps.Step) -> None:
    zk_steps.play(script, step)


@pytest.mark.parametrize("number", range(38, 43))
def test_who_gives_up_while_it_reads_where_it_listens_is_not_named(number: int) -> None:
    """An elected broker that resigned named itself as the controller until its next read."""
    zk_steps.play("election", zk_steps.Step(number, zk_steps.RESIGN))


def test_settings_of_a_topic_that_goes() -> None:
    """A controller elected during the deletion kept them for the next topic of that name."""
    play(78)


@pytest.mark.parametrize("number", range(6, 11))
def test_a_topic_of_a_tool_whose_controller_gave_up_halfway(number: int) -> None:
    """The topic had an id but no znode for states, so that every later controller resigned."""
    zk_steps.play("adoption", zk_steps.Step(number, zk_steps.LOSE_ANSWER))


def test_a_broker_that_is_asked_for_a_change_and_its_end_at_once_may_write_neither() -> None:
    play(137)


def test_bugs_on_purpose_are_changes_of_the_code_of_today() -> None:
    for bug in ZOOKEEPER:
        with planted(bug):
            pass


BUGS = {bug.name: bug for bug in ZOOKEEPER}

SURELY_FOUND = [
    BUGS[name]
    for name in (
        "a registration outlives its session",
        "who has resigned keeps his node",
        "the controller's node is looked at once",
        "brokers are looked at once",
        "a new controller does not tell what there is",
        "who comes back keeps what was deleted",
    )
]


@pytest.mark.slow
@pytest.mark.parametrize("bug", SURELY_FOUND, ids=lambda bug: bug.name)
def test_bugs_on_purpose_are_found(bug: Bug) -> None:
    assert seeds_until_found(bug, 1, 40, ON_ZOOKEEPER) or steps_until_found(bug, 6)


def test_a_seed_is_one_history() -> None:
    """The order of sets of strings does not change the history."""
    (story,) = stories(ON_ZOOKEEPER, 2)
    assert b"is elected in epoch" in story
