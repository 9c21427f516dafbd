"""Histories whose nodes are the whole daemon; ``make sim WORLD=daemons SEED=7 N=1`` repeats one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fencepost.coordinator.runtime.flusher import Flusher
from tests.sim.bug import Bug
from tests.sim.bugs import BUGS as BUGS_OF_MODELS
from tests.sim.daemons import draw_options, live, play
from tests.sim.planted import planted
from tests.sim.repeated import stories
from tests.sim.run import DAEMONS

SEEDS = 4
SLOW_SEEDS = 60
MOST_SEEDS = 12
"""In which a bug has to be found."""

ALONE = {"brokers": 1, "factor": 1, "min_isr": 1, "faults": ("break_off", "kill")}
ALONE_WITHOUT_POWER = {**ALONE, "faults": ("power_loss",), "disk_ms": (1, 30)}
CLUSTER = {"brokers": 3, "factor": 3, "min_isr": 1, "faults": ("kill", "break_off")}

OF_MODELS = {bug.name: bug for bug in BUGS_OF_MODELS}

BUGS = [
    (
        Bug(
            "acknowledged before it is on disk",
            ((Flusher.after, "if not held:", "if held or not held:"),),
        ),
        ALONE_WITHOUT_POWER,
    ),
    (OF_MODELS["the five last batches of a producer are not looked at"], ALONE),
    *(
        (OF_MODELS[name], CLUSTER)
        for name in (
            "an election does not raise the leader epoch",
            "the high watermark is the end of the most advanced follower",
            "a follower begins by cutting its log to the high watermark",
            "a follower whose offset is not known does not hold the high watermark",
            "anybody who lives is elected",
        )
    ),
]
"""Changed lines of the daemon, and histories in which they show."""


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


@pytest.mark.parametrize(
    ("bug", "options"),
    [
        pytest.param(*one, id=one[0].name, marks=pytest.mark.slow if one[1]["brokers"] > 1 else ())
        for one in BUGS
    ],
)
def test_histories_of_daemons_find_bug(bug: Bug, options: dict[str, Any]) -> None:
    def story(seed: int) -> str | None:
        try:
            live(replace(draw_options(seed), **options))
        except Exception as error:  # noqa: BLE001 - any failure is a find
            return str(error)
        return None

    with planted(bug):
        found = next((seed for seed in range(1, MOST_SEEDS + 1) if story(seed)), None)
    assert found is not None
    assert story(found) is None, "it fails without the bug as well"


@pytest.mark.parametrize("brokers", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_seed_of_daemons_is_one_history(brokers: int) -> None:
    """Also where sets and dictionaries of strings have another order."""
    drawn = map(draw_options, range(1, 100))
    seed = next(one.seed for one in drawn if one.brokers == brokers and one.chaos_ms == 2_000)
    assert len(stories(DAEMONS, seed)) == 1
