"""A controller on ZooKeeper is killed, suspended or loses its session at each of its steps.

Afterwards another controller has finished the work. No znode is left in ``/admin``; every replica
is in sync, and replicas are equal byte by byte; ZooKeeper and every broker agree. No epoch has
decreased or has had two leaders. Every record that was acknowledged meanwhile is in the log once.
CONTROLLER_POINTS is the number of points to try, or ``all``.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fencepost.tools.sweep.points import spread
from tests.crash.controller_sweep import SCENARIOS, sweep
from tests.crash.sweeps import swept
from tests.support.zookeeper import ZooKeeper

pytestmark = [pytest.mark.crash, pytest.mark.timeout(14_400)]

POINTS = os.environ.get("CONTROLLER_POINTS", "100")
JOBS = 2
"""How many clusters run at once."""

STEPS = {
    "election": {
        "create /controller, set /controller_epoch",
        "list /brokers/topics",
        "get /brokers/topics/data/partitions/0/state",
        "ask UPDATE_METADATA",
        "ask LEADER_AND_ISR",
    },
    "a broker's death": {"list /brokers/ids", "ask UPDATE_METADATA", "ask LEADER_AND_ISR"},
    "reassignment": {"ask LEADER_AND_ISR", "ask UPDATE_METADATA", "ask STOP_REPLICA"},
    "creation": {"ask LEADER_AND_ISR", "ask UPDATE_METADATA"},
    "deletion": {"create /admin/delete_topics/new-*", "ask STOP_REPLICA"},
}
"""Scenario → steps that must be among its points."""


def test_controller_lost_at_any_step_leaves_no_open_work(
    tmp_path: Path, zookeeper: ZooKeeper
) -> None:
    places = swept(
        sweep(tmp_path, zookeeper, JOBS),
        lambda bench: [place for scenario in SCENARIOS for place in bench.places(scenario)],
        lambda places: places if POINTS == "all" else spread(places, int(POINTS)),
        lambda place: (place.scenario.name, place.fault),
    )
    for name, steps in STEPS.items():
        seen = {place.point.kind for place in places if place.scenario.name == name}
        assert steps <= seen, (name, steps - seen)
