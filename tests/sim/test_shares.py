"""Simulated runs with share groups; ``make sim WORLD=shares SEED=7 N=1`` repeats one."""

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
    "the persisted start offset is one too high": 1,
    "the start offset passes available records": 1,
    "another delivery does not increase the delivery count": 1,
    "an acknowledgement succeeds before its state is written": 1,
    "acquisition locks never expire": 1,
    "an accepted record is written as available": 1,
    "a share partition ignores the gaps of a loaded state": 1,
    "the delivery complete count does not change": 1,
    "a loaded state lacks the delivery counts": 1,
    "a share partition ignores the log start offset": 1,
    "a read_committed group reads open transactions": 1,
    "a read_committed group gets records of aborted transactions": 1,
    "a ShareSnapshot record lacks the state batches": 1,
    "a loading share coordinator skips ShareUpdate records": 1,
    "the state topic is pruned up to the newest snapshot": 1,
    "a ShareUpdate record drops the earlier state batches": 1,
    "each state read resets the start offset": 1,
    "the share coordinator responds before the high watermark": 1,
    "the start offset passes the gaps of a loaded state": 2,
    "the share coordinator does not record the leader epoch of a read": 4,
    "a record at the delivery limit becomes available again": 3,
    "an acknowledgement succeeds although its state write failed": 4,
    "the share coordinator accepts writes of a former leader": 2,
    "a record is archived when its acquisition lock expires": 5,
    "a lost state write counts as written": 1,
    "a member may acknowledge records of another member": 7,
    "a member may acknowledge records that are not acquired": 7,
    "acknowledgement errors are missing from responses": 7,
    "ShareAcknowledge does not wait for its state writes": 6,
    "a new share partition reads its state before the last write of the former one ends": 31,
    "an initialization that is repeated too late resets the state": 7,
    "the state topic is pruned up to a snapshot that is not committed": 27,
    "a repeated initialization of the same epoch resets the state": 11,
}
"""The seeds that find planted bugs; `make test` searches for the first :data:`QUICK` bugs."""
QUICK = 2


def test_histories_of_share_groups_violate_no_guarantee() -> None:
    played = [play(seed) for seed in SEEDS]
    assert {draw_share_options(seed).is_cluster for seed in SEEDS} == {False, True}
    assert sum(history.acknowledged for history in played) > 20 * len(SEEDS), (
        "hardly anything was written"
    )
    assert sum(history.transactions for history in played) > 0, "nothing was committed"


@pytest.mark.slow
@pytest.mark.timeout(1_200)
def test_more_histories_of_share_groups_violate_no_guarantee() -> None:
    for seed in SLOW_SEEDS:
        play(seed)


def test_planted_bugs_apply_to_the_current_code() -> None:
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
    play_shares(name, FOUND[name])  # without the bug, the same run must succeed


@pytest.mark.slow
def test_seed_of_share_groups_determines_the_history() -> None:
    """The simulated run must not depend on the order of sets of strings (``PYTHONHASHSEED``)."""
    seeds = [seed for seed in SEEDS if draw_share_options(seed).is_cluster]
    assert len(stories(SHARES, seeds[0])) == 1
