"""Simulated histories of whole daemons; ``make sim WORLD=daemons SEED=7 N=1`` repeats one."""

from __future__ import annotations

import pytest

from tests.sim.daemons import draw_options, play
from tests.sim.directed import DIRECTED
from tests.sim.planted import planted, play_directed, seeds_until_found
from tests.sim.repeated import stories
from tests.sim.run import DAEMONS

SEEDS = 4
SLOW_SEEDS = 60
MOST_SEEDS = 20
"""Seeds within which a planted bug must be found."""

SPREAD = frozenset(
    {
        "the start of the epoch is not looked at when a replica joins",
        "an old broker epoch is trusted",
        "acks=all is answered before the high watermark",
        "who waits over a loss of leadership is answered",
        "a change that may have been made is taken back",
        "a pending change outlives metadata",
        "a leader that missed others in between believes what its followers told before",
        "the high watermark is the end of the most advanced follower",
        "a follower whose offset is not known does not hold the high watermark",
        "an empty answer loses the last fetched epoch for good",
        "an unknown epoch cuts to where the leader's ends (KIP-279)",
        "an older epoch is no divergence",
        "a cut leaves the epochs that began behind it",
        "the session names a partition again only when its offset moved",
        "the controller takes a replica of another incarnation",
        "an election does not raise the leader epoch",
        "an unclean shutdown keeps its place among the eligible",
        "the eligible stay eligible when the ISR is large enough",
        "anybody who lives is elected",
        "who has a new incarnation has the epoch of the old one",
        "a fenced broker stays in the ISR",
        "a block of producer ids is given twice",
        "a replica that is taken away stays on its broker",
        "a snapshot lacks the settings of topics",
        "an observer keeps what a snapshot no longer has",
        "markers do not wait for the high watermark",
        "a marker of a former transaction ends the next one",
        "a transaction is stable before its marker is replicated",
        "a coordinator answers before the high watermark",
        "a coordinator forgets the last batch when it loads",
        "the sessions of members do not begin when a group is loaded",
        "who was refused below min ISR may be overtaken",
        "the leader's high watermark is taken whole",
        "a process that was killed says that it stopped in order",
        "a coordinator that has resigned goes on",
        "offsets of a topic that is gone are those of the next one of its name",
        "a process leads before the controller knows of it",
        "a marker is answered before the high watermark",
        "a first batch of a transaction is not verified",
        "what waits over an election is answered",
        "offsets of a transaction are not verified",
    }
)
"""Bugs of clusters that `make slow` searches for; each shows in the first one or two histories."""


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
        if options["brokers"] == 1 or name in SPREAD
    ],
)
def test_histories_of_daemons_find_bug(name: str) -> None:
    bug, _ = DIRECTED[name]
    found = seeds_until_found(bug, 1, MOST_SEEDS, DAEMONS)
    assert found is not None
    play_directed(name, found[0])  # without the bug, the same history must hold


@pytest.mark.parametrize("brokers", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_seed_of_daemons_is_one_history(brokers: int) -> None:
    """The history must not depend on the order of sets of strings (``PYTHONHASHSEED``)."""
    drawn = map(draw_options, range(1, 100))
    seed = next(one.seed for one in drawn if one.brokers == brokers and one.chaos_ms == 2_000)
    assert len(stories(DAEMONS, seed)) == 1
