"""Kills brokers of a cluster at all points of a transaction, and checks the results.

Each broker's operations for a transaction are counted in two runs. An operation that occurs in both
runs is a *point*. Then the transaction is repeated for each point. The broker that reaches the
point is killed (``kill -9``) and restarted, while the client retries unanswered requests. A
restarting broker has points as well: it may have to truncate records that no other replica has, and
may be killed meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from fencepost.tools.sweep.points import CountedEvent, KillMoment, KillPoint
from tests.crash.crashing_cluster import (
    APART,
    BROKERS,
    REPLICAS,
    TOGETHER,
    CrashingCluster,
    Layout,
    Seen,
)
from tests.crash.stubborn_client import RefusedError, StubbornClient
from tests.crash.sweeps import Sweep, points_of

Act = Callable[[CrashingCluster, Layout, bytes, int], bool]
"""Runs a whole transaction that writes a value and an offset; returns whether it was committed."""


@dataclass(frozen=True)
class Scenario:
    """A transaction, and the layout of its coordinators and leaders on the brokers."""

    name: str
    layout: Layout
    act: Act


def whole(version: int, *, commit: bool) -> Act:
    def act(cluster: CrashingCluster, layout: Layout, value: bytes, offset: int) -> bool:
        client = StubbornClient(cluster.bootstrap, layout.named("txn"), version=version)
        group = layout.named("group")
        client.transaction(group, *layout.data, [value], offset=offset, commit=commit)
        client.close()
        return commit

    return act


def fenced(cluster: CrashingCluster, layout: Layout, value: bytes, offset: int) -> bool:
    """Fence a producer in an open transaction by another one, which commits a transaction."""
    zombie = StubbornClient(cluster.bootstrap, layout.named("txn"), version=2)
    zombie.claim()
    zombie.send(*layout.data, b"never " + value)
    zombie.send_offset(layout.named("group"), layout.data[0], offset + 1_000)
    whole(2, commit=True)(cluster, layout, value, offset)
    with pytest.raises(RefusedError, match=r"producer_fenced|invalid_producer_epoch"):
        zombie.end(commit=True)
    zombie.close()
    return True


COMMIT = Scenario("commit", APART, whole(2, commit=True))
SCENARIOS = (
    COMMIT,
    Scenario("abort", APART, whole(2, commit=False)),
    Scenario("commit as of old", APART, whole(1, commit=True)),
    Scenario("fence", APART, fenced),
    Scenario("commit on one", TOGETHER, whole(2, commit=True)),
)


@dataclass(frozen=True)
class Place:
    """A point of a scenario on one broker, and perhaps a point while the broker restarts."""

    scenario: Scenario
    node_id: int
    point: KillPoint
    then: KillPoint | None = None

    def __str__(self) -> str:
        points = [point for point in (self.point, self.then) if point is not None]
        where = ", then ".join(f"{point.where} {point.kind} #{point.number}" for point in points)
        return f"{self.scenario.name}, broker {self.node_id}, {where}"


COMEBACKS = tuple(
    Place(COMMIT, node_id, KillPoint(KillMoment.AFTER, 1, f"write {what}"))
    for node_id, what in (
        (1, "__transaction_state-0 PREPARE_COMMIT"),
        (2, "out-0 records"),
        (3, "__consumer_offsets-0 offsets"),
    )
)
"""Kills after which a leader has records that no other replica has, and must truncate them."""


@dataclass
class Bench:
    """A cluster, and the results of its transactions so far."""

    cluster: CrashingCluster
    number: int = 0
    is_committed: bool = False
    seen: dict[Layout, Seen] = field(default_factory=lambda: {APART: Seen(), TOGETHER: Seen()})
    offsets: dict[Layout, int] = field(default_factory=dict)

    def live(self, scenario: Scenario) -> None:
        """Run one more transaction."""
        self.number += 1
        value = b"%d" % self.number
        self.is_committed = scenario.act(self.cluster, scenario.layout, value, self.number)
        self.cluster.wait_for_end(scenario.layout)

    def check(self, layout: Layout) -> None:
        """Check the last transaction's result on all replicas: AssertionError or TimeoutError."""
        values = [b"%d" % self.number] if self.is_committed else []
        if self.is_committed:
            self.offsets[layout] = self.number
        self.cluster.check(layout, self.seen[layout], values, self.offsets.get(layout, -1))

    def places(self, scenario: Scenario) -> list[Place]:
        """Return the points of a scenario at which brokers can be killed."""

        def counted() -> Mapping[int, list[CountedEvent]]:
            events = self.cluster.counted(lambda: self.live(scenario))
            self.check(scenario.layout)
            return events

        one, other = counted(), counted()
        return [
            Place(scenario, node_id, point)
            for node_id in BROKERS
            for point in points_of(one[node_id], other[node_id])
            if is_of_transaction(point.kind, node_id)
        ]

    def comeback(self, place: Place) -> list[Place]:
        """Return the points at which a broker can be killed again while it restarts."""

        def counted() -> list[CountedEvent]:
            killed: list[str] = []
            with self.cluster.killed_at(place.node_id, place.point, killed) as events:
                self.live(place.scenario)
                self.check(place.scenario.layout)
            assert killed, f"not reached: {place}"
            return events

        return [
            replace(place, then=point)
            for point in points_of(counted(), counted())
            if is_of_transaction(point.kind, place.node_id)
        ]


def is_of_transaction(what: str, node_id: int) -> bool:
    """Return whether a point depends only on the transaction, and not on timing.

    The name of a fetch contains a write. The fetch counts only if it can confirm this write, that
    is, if a follower of the written partition sends the fetch to the leader.
    """
    message, _, write = what.partition(" | write ")
    if not write:
        return True
    if message == "ask Fetch":  # a fetch from the controller
        return False
    name = re.match(r"(\S+)-(\d+)(\s|$)", write)
    if name is None:  # a checkpoint, which is written periodically
        return False
    leader = REPLICAS[name[1], int(name[2])][0]
    return leader == (node_id if message.startswith("answer") else int(message.split()[-1]))


def sweep(home: Path, jobs: int, *, bug: str = "", patience_s: float = 60) -> Sweep[Bench, Place]:
    """Return a sweep that runs ``jobs`` clusters at a time, with their files below ``home``."""

    def opened(folder: Path) -> Bench:
        return Bench(CrashingCluster(folder, bug=bug, patience_s=patience_s).start())

    return Sweep(home, jobs, opened, _try)


def _try(bench: Bench, place: Place, killed: list[str]) -> None:
    with bench.cluster.killed_at(place.node_id, place.point, killed, then=place.then):
        bench.live(place.scenario)
        if place.then is not None:
            bench.cluster.settle()  # wait until the restart is complete
    bench.check(place.scenario.layout)
