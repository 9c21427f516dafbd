"""Histories of a cluster from seeds; ``make sim SEED=7 N=1`` repeats one."""

from __future__ import annotations

import pytest

from tests.sim.bug import Bug
from tests.sim.bugs import BUGS
from tests.sim.cluster import play
from tests.sim.planted import planted, seeds_until_found
from tests.sim.repeated import stories
from tests.sim.run import KRAFT

SEEDS = 30
SLOW_SEEDS = 500
"""In CI; ``make sim N=100000`` plays more."""


MOST_SEEDS = 600
"""In which a bug has to be found."""


def test_seeds() -> None:
    acknowledged = 0
    for seed in range(1, SEEDS + 1):
        acknowledged += play(seed).acknowledged
    assert acknowledged > 100 * SEEDS, "hardly anything was written"


@pytest.mark.slow
def test_more_seeds() -> None:
    for seed in range(SEEDS + 1, SEEDS + SLOW_SEEDS + 1):
        play(seed)


def test_bugs_on_purpose_are_changes_of_the_code_of_today() -> None:
    for bug in BUGS:
        with planted(bug):
            pass


@pytest.mark.slow
@pytest.mark.parametrize("bug", [one for one in BUGS if not one.is_rare], ids=lambda bug: bug.name)
def test_bugs_on_purpose_are_found(bug: Bug) -> None:
    assert seeds_until_found(bug, 1, MOST_SEEDS) is not None


def test_a_seed_is_one_history() -> None:
    """Also where sets and dictionaries of strings have another order."""
    assert len(stories(KRAFT, 11)) == 1
