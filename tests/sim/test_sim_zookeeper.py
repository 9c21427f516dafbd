"""Simulated runs of daemons on ZooKeeper.

``make sim WORLD=zookeeper SEED=7 N=1`` repeats one.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.sim import zk_scripts
from tests.sim.bug import Bug
from tests.sim.bugs_zookeeper import ZOOKEEPER
from tests.sim.network import Weather
from tests.sim.planted import planted, seeds_until_found
from tests.sim.repeated import stories
from tests.sim.run import ZOOKEEPER as ON_ZOOKEEPER
from tests.sim.zk_directed import DIRECTED, Staged, play_directed
from tests.sim.zk_history import live, play
from tests.sim.zk_options import draw_options

SEEDS = 2
"""Number of seeds in ``make test``; CI simulates 250 seeds by ``make sim``."""

EVERY = 600
"""The tests inject faults at one of this many steps of a script; ``python -m tests.sim.zk_scripts``
injects them at each step.
"""

MOST_SEEDS = 15
"""Number of seeds within which a planted bug must be found."""


def test_histories_on_zookeeper_violate_no_guarantee() -> None:
    acknowledged = sum(play(seed).acknowledged for seed in range(1, SEEDS + 1))
    assert acknowledged > 20 * SEEDS, "hardly anything was written"


@pytest.mark.slow
@pytest.mark.parametrize("script", zk_scripts.SCRIPTS)
def test_scripts_converge_with_a_fault_at_any_step(script: str) -> None:
    for step in zk_scripts.steps(script, EVERY):
        zk_scripts.play(script, step)


UNHEARD_DELETIONS = (
    ("marking", zk_scripts.Step(1, zk_scripts.EXPIRE)),
    ("marking", zk_scripts.Step(2, zk_scripts.EXPIRE_ANOTHER)),
)
"""Steps at which a fault once left a deleted topic on a broker that was not registered during the
deletion. The controller did not tell returning brokers about deleted topics, and brokers did not
look for deleted topics by themselves.
"""


@pytest.mark.parametrize(("script", "step"), UNHEARD_DELETIONS)
def test_topic_deleted_while_broker_is_not_registered_is_forgotten(
    script: str, step: zk_scripts.Step
) -> None:
    zk_scripts.play(script, step)


@pytest.mark.slow
def test_controller_that_resigned_during_its_election_does_not_name_itself() -> None:
    """The bug: an elected broker that resigned named itself as controller until its next read."""
    for number in (38, 41):
        zk_scripts.play("election", zk_scripts.Step(number, zk_scripts.RESIGN))


@pytest.mark.slow
def test_topic_written_by_a_tool_survives_a_controller_resignation() -> None:
    """The bug: the topic had an id but no znode for states, and every later controller resigned."""
    for number in (6, 9):
        zk_scripts.play("adoption", zk_scripts.Step(number, zk_scripts.LOSE_ANSWER))


@pytest.mark.slow
def test_results_of_a_backlog_of_elections_are_sent_in_time() -> None:
    options = replace(
        draw_options(5_182),
        brokers=3,
        factor=3,
        min_isr=1,
        partitions=1,
        weather=Weather(latency_ms=(5, 40)),
        faults=("flip",),
        fault_pause_ms=100,
        chaos_ms=6_000,
        lag_ms=2_000,
        session_ms=600,
        transactions=1,
        members=((False, False),) * 3,
        member_lag_ms=40,
    )
    live(options)


def test_planted_bugs_apply_to_the_current_code() -> None:
    assert {bug.name for bug in ZOOKEEPER} == DIRECTED.keys()
    for bug in ZOOKEEPER:
        with planted(bug):
            pass


@pytest.mark.slow
@pytest.mark.parametrize("bug", ZOOKEEPER, ids=lambda bug: bug.name)
def test_histories_on_zookeeper_find_bug(bug: Bug) -> None:
    found = seeds_until_found(bug, 1, MOST_SEEDS, ON_ZOOKEEPER)
    assert found is not None
    if not isinstance(DIRECTED[bug.name], Staged):
        play_directed(bug.name, found[0])  # without the bug, the same run must succeed


@pytest.mark.slow  # test_daemons.py has the same test of quicker simulated runs
def test_seed_on_zookeeper_determines_the_history() -> None:
    """The simulated run must not depend on the order of sets of strings (``PYTHONHASHSEED``)."""
    (story,) = stories(ON_ZOOKEEPER, 24)
    assert b"is elected in epoch" in story
