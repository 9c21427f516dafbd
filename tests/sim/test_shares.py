"""Simulated histories with share groups; ``make sim WORLD=shares SEED=7 N=1`` repeats one."""

from __future__ import annotations

import pytest

from tests.sim.bugs_shares import SHARES as BUGS
from tests.sim.planted import planted
from tests.sim.repeated import stories
from tests.sim.run import SHARES
from tests.sim.shares import draw_share_options, play

SEEDS = (1, 2, 4)
"""Two standalone brokers and a cluster."""
SLOW_SEEDS = range(5, 45)
MOST_SEEDS = 12
"""Seeds within which a planted bug must be found."""


def test_histories_of_share_groups_hold() -> None:
    played = [play(seed) for seed in SEEDS]
    assert {draw_share_options(seed).is_cluster for seed in SEEDS} == {False, True}
    assert sum(one.acknowledged for one in played) > 20 * len(SEEDS), "hardly anything was written"
    assert sum(one.transactions for one in played) > 0, "nothing was committed"


@pytest.mark.slow
@pytest.mark.timeout(1_200)
def test_more_histories_of_share_groups_hold() -> None:
    for seed in SLOW_SEEDS:
        play(seed)


def test_planted_bugs_are_changes_of_the_product_of_today() -> None:
    for bug, _ in BUGS:
        with planted(bug):
            pass


@pytest.mark.slow
def test_seed_of_share_groups_is_one_history() -> None:
    """The history must not depend on the order of sets of strings (``PYTHONHASHSEED``)."""
    seeds = [seed for seed in SEEDS if draw_share_options(seed).is_cluster]
    assert len(stories(SHARES, seeds[0])) == 1
