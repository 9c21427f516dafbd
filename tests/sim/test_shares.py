"""Simulated histories with share groups; ``make sim WORLD=shares SEED=7 N=1`` repeats one."""

from __future__ import annotations

import pytest

from tests.sim.bugs_shares import SHARES as BUGS
from tests.sim.planted import planted, play_shares, seeds_until_found
from tests.sim.repeated import stories
from tests.sim.run import SHARES
from tests.sim.shares import draw_share_options, play

SEEDS = (1, 2, 4)
"""Two standalone brokers and a cluster."""
SLOW_SEEDS = range(5, 45)
FOUND = {
    "the written start offset is one too high": 1,
    "the start offset passes records that are available": 1,
    "the delivery count does not rise": 1,
    "an acknowledgement is answered before it is written": 1,
    "locks do not end": 1,
    "an accepted record is written as available": 1,
    "the gaps of a state are not read": 1,
    "completed offsets are not counted": 1,
    "a loaded state forgets the delivery counts": 1,
    "the log's start is not looked at": 1,
    "committed groups read open transactions": 1,
    "records of aborted transactions are delivered": 1,
    "a snapshot of the state lacks its batches": 1,
    "a load leaves out the updates of a state": 1,
    "the log of the state is pruned at the newest snapshot": 1,
    "an update forgets the batches before it": 1,
    "an initialized state is begun again by each read": 1,
    "a coordinator of shares answers before the high watermark": 1,
    "the start offset passes the gaps of a state": 2,
    "a read does not record the leader's epoch": 2,
    "a record is released at the delivery limit": 3,
    "a failed write is answered with NONE": 4,
    "the share coordinator takes the writes of a former leader": 4,
    "a record whose lock ends is given up": 5,
    "a lost write counts as written": 5,
    "a member may acknowledge the records of another one": 7,
    "records that nobody holds may be acknowledged": 7,
    "the errors of acknowledgements are not told": 7,
    "ShareAcknowledge does not wait for its writes": 6,
}
"""The seeds whose histories find planted bugs; `make test` plays the first :data:`QUICK`."""
QUICK = 3


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


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if number < QUICK else pytest.mark.slow)
        for number, name in enumerate(FOUND)
    ],
)
def test_histories_of_share_groups_find_bug(name: str) -> None:
    bug = next(bug for bug, _ in BUGS if bug.name == name)
    assert seeds_until_found(bug, FOUND[name], 1, SHARES) is not None
    play_shares(name, FOUND[name])  # without the bug, the same history must hold


@pytest.mark.slow
def test_seed_of_share_groups_is_one_history() -> None:
    """The history must not depend on the order of sets of strings (``PYTHONHASHSEED``)."""
    seeds = [seed for seed in SEEDS if draw_share_options(seed).is_cluster]
    assert len(stories(SHARES, seeds[0])) == 1
