"""Three brokers are killed at each step of a transaction: the coordinator, leaders, followers.

Afterwards every replica shows a read_committed reader each committed value once and no other value,
no transaction is open, the group's offset is the last one, and replicas are equal byte by byte.
CLUSTER_POINTS is the number of points to try, or ``all``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from fencepost.tools.sweep.points import KillMoment, KillPoint, spread
from tests.crash.cluster_sweep import COMEBACKS, COMMIT, SCENARIOS, Bench, Place, sweep
from tests.crash.crashing_cluster import BROKERS, FORCED
from tests.crash.sweeps import swept

pytestmark = [pytest.mark.crash, pytest.mark.timeout(14_400)]

POINTS = os.environ.get("CLUSTER_POINTS", "300")
JOBS = 4
"""How many clusters run at once. Mostly they wait until the controller fences a broker."""

MOST_TRIES = 5
"""The maximum number of attempts to find a planted bug."""


def chosen(places: Sequence[Place], count: int) -> Sequence[Place]:
    """Return ``count`` places: first all of the commit scenario, then evenly chosen others."""
    first = [place for place in places if place.scenario is COMMIT]
    if len(first) < min(count, len(places)):
        rest = [place for place in places if place.scenario is not COMMIT]
        return [*first, *spread(rest, count - len(first))]
    return spread(places, count)


def tried(home: Path, look: Callable[[Bench], Sequence[Place]], share: float) -> list[Place]:
    """Try a part of the points, ``share`` times CLUSTER_POINTS, and return all points."""

    def choose(places: Sequence[Place]) -> Sequence[Place]:
        return places if POINTS == "all" else chosen(places, max(1, round(int(POINTS) * share)))

    return swept(sweep(home, JOBS), look, choose, lambda place: place.scenario.name)


def test_transaction_survives_a_kill_of_any_broker_at_any_step(tmp_path: Path) -> None:
    places = tried(
        tmp_path,
        lambda bench: [place for scenario in SCENARIOS for place in bench.places(scenario)],
        share=0.8,
    )
    for scenario in SCENARIOS:
        seen = {(place.node_id, place.point.kind) for place in places if place.scenario is scenario}
        decided, data, offsets = (f"{name}-{index}" for name, index in scenario.layout.partitions)
        wanted = [f"write {decided} ONGOING", f"write {data} records", f"write {offsets} offsets"]
        wanted += [f"mark {name}" for name in (decided, data, offsets)]
        if scenario.layout.data == FORCED:
            wanted.append(f"sync {data}/segment.log")
        # As a leader or as a follower, each broker must have every kind of point.
        for node_id in BROKERS:
            assert {(node_id, event) for event in wanted} <= seen, (scenario.name, node_id)


def test_transaction_survives_a_kill_during_the_restart_of_a_broker(tmp_path: Path) -> None:
    places = tried(
        tmp_path,
        lambda bench: [point for place in COMEBACKS for point in bench.comeback(place)],
        share=0.2,
    )
    kinds = {(place.node_id, place.then.kind) for place in places if place.then is not None}
    cut = {node_id for node_id, kind in kinds if re.match(r"truncate .*\.log$", kind)}
    assert cut == set(BROKERS)


@pytest.mark.parametrize(
    ("bug", "node_id", "where", "problem"),
    [
        ("decisions are not waited for", 1, "answer EndTxn", "no transaction is open"),
        ("markers are not waited for", 2, "answer WriteTxnMarkers to 1", "no transaction is open"),
        ("offsets are not waited for", 3, "answer TxnOffsetCommit", "the group is at"),
    ],
)
def test_planted_bug_is_found_by_the_cluster_sweep(
    tmp_path: Path, bug: str, node_id: int, where: str, problem: str
) -> None:
    place = Place(COMMIT, node_id, KillPoint(KillMoment.AFTER, 1, where))
    tries = sweep(tmp_path, 1, bug=bug, patience_s=10)
    # A single attempt may not show the bug: the record may be replicated before the response.
    tries.run(lambda _: [place] * MOST_TRIES, to_the_first=True)
    print(len(tries.results), tries.problems)
    assert any(problem in text for text in tries.problems)
