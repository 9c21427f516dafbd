"""Simulated runs of whole daemons; ``make sim WORLD=daemons SEED=7 N=1`` repeats one."""

from __future__ import annotations

import pytest

from tests.sim.daemons import draw_options, play
from tests.sim.directed import DIRECTED
from tests.sim.planted import planted, play_directed, seeds_until_found
from tests.sim.repeated import stories
from tests.sim.run import DAEMONS

SEEDS = 4
"""Number of seeds in ``make test``; CI simulates 250 seeds by ``make sim``."""
MOST_SEEDS = 20
"""Number of seeds within which a planted bug must be found."""

QUICK = frozenset(
    name
    for name, (_, options) in DIRECTED.items()
    if options["brokers"] == 1
    and name != "a start does not flush records that a killed process left unflushed"
)
"""The bugs that ``make test`` searches for. The bug that is left out only shows in the 14th run."""

SPREAD = frozenset(
    {
        "a replica joins the ISR before it reaches the start of the leader epoch",
        "the leader accepts fetches with an old broker epoch",
        "the leader acknowledges before the high watermark",
        "a parked Produce is acknowledged after a loss of leadership",
        "the leader reverts an ISR change that may have been applied",
        "a pending ISR change outlives newer metadata",
        "a leader that missed leader epochs keeps the states of its followers",
        "the high watermark does not wait for followers",
        "a follower with an unknown offset does not hold back the high watermark",
        "a follower loses its last fetched epoch in an empty response",
        "a follower truncates to the leader's end of an epoch that it lacks (KIP-279)",
        "the leader ignores a last fetched epoch that it lacks",
        "a truncation keeps leader epochs that start after it",
        "a fetch session only resends a partition when its fetch offset changes",
        "the controller adds a former incarnation of a broker to the ISR",
        "an election does not raise the leader epoch",
        "a broker stays in the ELR after an unclean shutdown",
        "the ELR is kept when the ISR reaches min ISR",
        "any live replica is elected leader",
        "a new incarnation of a broker gets the broker epoch of the former one",
        "a fenced broker stays in the ISR",
        "the controller allocates a block of producer ids twice",
        "a broker keeps a replica after its removal by a reassignment",
        "a metadata snapshot lacks the topic settings",
        "an observer keeps metadata that a later snapshot lacks",
        "a coordinator sends markers before the high watermark",
        "a marker of a former transaction ends the next transaction",
        "the last stable offset passes a marker before it is replicated",
        "a coordinator responds before the high watermark",
        "a loading coordinator skips the last batch",
        "a loaded group does not start its members' session timers",
        "a batch overtakes one that was refused under min ISR",
        "a follower takes a high watermark above its log end offset",
        "a killed broker reports a clean shutdown",
        "a coordinator that has resigned stays active",
        "a recreated topic has the committed offsets of the deleted topic",
        "a broker leads before it is registered",
        "the leader acknowledges a marker before the high watermark",
        "the leader does not verify the first batch of a transaction",
        "a coordinator responds to parked requests after it has resigned",
        "a coordinator does not verify transactional offset commits",
        "retention deletes records above the high watermark",
    }
)
"""Bugs of clusters that `make slow` searches for; each shows in the first or second run."""


def test_histories_of_daemons_violate_no_guarantee() -> None:
    played = [play(seed) for seed in range(1, SEEDS + 1)]
    assert {draw_options(seed).is_cluster for seed in range(1, SEEDS + 1)} == {False, True}
    assert sum(history.acknowledged for history in played) > 20 * SEEDS, (
        "hardly anything was written"
    )
    assert sum(history.transactions for history in played) > SEEDS, "hardly anything was committed"


def test_planted_bugs_apply_to_the_current_code() -> None:
    for bug, _ in DIRECTED.values():
        with planted(bug):
            pass


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name, (_, options) in DIRECTED.items()
        if options["brokers"] == 1 or name in SPREAD
    ],
)
def test_histories_of_daemons_find_bug(name: str) -> None:
    bug, _ = DIRECTED[name]
    found = seeds_until_found(bug, 1, MOST_SEEDS, DAEMONS)
    assert found is not None
    play_directed(name, found[0])  # without the bug, the same run must succeed


@pytest.mark.slow
@pytest.mark.parametrize("brokers", [1, 3])
def test_seed_of_daemons_determines_the_history(brokers: int) -> None:
    """The simulated run must not depend on the order of sets of strings (``PYTHONHASHSEED``)."""
    drawn = map(draw_options, range(1, 100))
    seed = next(
        options.seed
        for options in drawn
        if options.brokers == brokers and options.chaos_ms == 2_000
    )
    assert len(stories(DAEMONS, seed)) == 1
