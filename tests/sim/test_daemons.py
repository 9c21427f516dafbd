"""Histories whose nodes are the whole daemon; ``make sim WORLD=daemons SEED=7 N=1`` repeats one."""

from __future__ import annotations

import pytest

from tests.sim.daemons import draw_options, play
from tests.sim.directed import DIRECTED, NOT_FOUND
from tests.sim.planted import planted, play_directed, seeds_until_found
from tests.sim.repeated import stories
from tests.sim.run import DAEMONS

SEEDS = 4
SLOW_SEEDS = 60
MOST_SEEDS = 20
"""In which a bug has to be found."""


def test_histories_of_daemons_hold() -> None:
    played = [play(seed) for seed in range(1, SEEDS + 1)]
    assert {draw_options(seed).is_cluster for seed in range(1, SEEDS + 1)} == {False, True}
    assert sum(one.acknowledged for one in played) > 20 * SEEDS, "hardly anything was written"
    assert sum(one.transactions for one in played) > SEEDS, "hardly anything was committed"


@pytest.mark.slow
@pytest.mark.timeout(1_200)
def test_more_histories_of_daemons_hold() -> None:
    for seed in range(SEEDS + 1, SEEDS + SLOW_SEEDS + 1):
        play(seed)


def test_bugs_on_purpose_are_changes_of_the_daemon_of_today() -> None:
    for bug, _ in DIRECTED.values():
        with planted(bug):
            pass


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if options["brokers"] > 1 else ())
        for name, (_, options) in DIRECTED.items()
        if name not in NOT_FOUND
    ],
)
def test_histories_of_daemons_find_bug(name: str) -> None:
    bug, _ = DIRECTED[name]
    found = seeds_until_found(bug, 1, MOST_SEEDS, DAEMONS)
    assert found is not None
    play_directed(name, found[0])  # it holds without the bug


@pytest.mark.parametrize("brokers", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_seed_of_daemons_is_one_history(brokers: int) -> None:
    """Also where sets and dictionaries of strings have another order."""
    drawn = map(draw_options, range(1, 100))
    seed = next(one.seed for one in drawn if one.brokers == brokers and one.chaos_ms == 2_000)
    assert len(stories(DAEMONS, seed)) == 1
