"""Trying each point of a transaction on a cluster: the deaths, and the verdict.

What each broker does for a transaction is counted twice; what happened both times is a point. Then,
for each point, the broker that comes to it dies there as by ``kill -9`` and is started again, while
the client repeats what is not answered. A comeback has points as well: who died with something that
nobody else has must give it up, and may die at that.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from fencepost.coordinator.tools.sweep.points import Event, Point, Where
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

Act = Callable[[CrashingCluster, Layout, bytes, int], bool]
"""A transaction with a value and an offset, from its claim to its end; whether it is committed."""


@dataclass(frozen=True)
class Scenario:
    """A transaction with its roles on some brokers."""

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
    """One begins, another claims the id in the middle, and only what that one does counts."""
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
    """A point of a scenario, on one of the brokers, and perhaps one of its comeback."""

    scenario: Scenario
    node_id: int
    point: Point
    then: Point | None = None

    def __str__(self) -> str:
        points = [one for one in (self.point, self.then) if one is not None]
        where = ", then ".join(f"{one.where} {one.kind} #{one.number}" for one in points)
        return f"{self.scenario.name}, broker {self.node_id}, {where}"


COMEBACKS = tuple(
    Place(COMMIT, node_id, Point(Where.AFTER, 1, f"write {what}"))
    for node_id, what in (
        (1, "__transaction_state-0 PREPARE_COMMIT"),
        (2, "out-0 records"),
        (3, "__consumer_offsets-0 offsets"),
    )
)
"""Deaths after which a leader has what nobody else has, and has to give it up."""


@dataclass
class Bench:
    """A cluster, and what its transactions have left."""

    cluster: CrashingCluster
    number: int = 0
    is_committed: bool = False
    seen: dict[Layout, Seen] = field(default_factory=lambda: {APART: Seen(), TOGETHER: Seen()})
    offsets: dict[Layout, int] = field(default_factory=dict)

    def live(self, scenario: Scenario) -> None:
        """One more transaction."""
        self.number += 1
        value = b"%d" % self.number
        self.is_committed = scenario.act(self.cluster, scenario.layout, value, self.number)
        self.cluster.wait_for_end(scenario.layout)

    def check(self, layout: Layout) -> None:
        """Look whether what became of it is right, everywhere. AssertionError, TimeoutError."""
        values = [b"%d" % self.number] if self.is_committed else []
        if self.is_committed:
            self.offsets[layout] = self.number
        self.cluster.check(layout, self.seen[layout], values, self.offsets.get(layout, -1))

    def places(self, scenario: Scenario) -> list[Place]:
        """Where brokers can die."""

        def counted() -> Mapping[int, list[Event]]:
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
        """Where a broker can die once more when it comes back."""

        def counted() -> list[Event]:
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


def points_of(events: Sequence[Event], others: Sequence[Event]) -> Iterator[Point]:
    """The points of what happened both times."""
    wanted = Counter(event.what for event in events) & Counter(event.what for event in others)
    numbers: Counter[str] = Counter()
    for event in events:
        numbers[event.what] += 1
        if numbers[event.what] > wanted[event.what]:
            continue
        sides = [Where.BEFORE, Where.AFTER]
        if event.tearable:
            sides.insert(1, Where.TORN)
        elif "Fetch" in event.what:
            sides = [Where.BEFORE]  # after it is before whatever comes next
        for side in sides:
            yield Point(side, numbers[event.what], event.what)


def is_of_transaction(what: str, node_id: int) -> bool:
    """Whether a fetch is of the partition by whose write it is named."""
    message, _, write = what.partition(" | write ")
    if not write:
        return True
    if message == "ask Fetch":  # of the controller
        return False
    topic, _, rest = write.rpartition("-")
    leader = REPLICAS[topic, int(rest.split()[0])][0]
    return leader == (node_id if message.startswith("answer") else int(message.split()[-1]))


@dataclass(frozen=True)
class Result:
    """What became of a point: what the broker was killed at, if it was, and what was wrong."""

    place: Place
    killed: list[str]
    problem: str


class Sweep:
    """Several clusters that share the points among them.

    One in which something was wrong is left as it is, and another takes its place.
    """

    def __init__(self, home: Path, jobs: int, *, bug: str = "", patience_s: float = 60) -> None:
        self.results: list[Result] = []
        self._home, self._jobs, self._bug, self._patience_s = home, jobs, bug, patience_s
        self._opened = 0
        self._lock = threading.Lock()

    @property
    def problems(self) -> list[str]:
        """Of each point at which anything was wrong."""
        return [one.problem for one in self.results if one.problem]

    def run(self, look: Callable[[Bench], Sequence[Place]], *, to_the_first: bool = False) -> None:
        """Try the points that ``look`` finds, all or up to the first that is wrong."""
        first = self._bench()
        try:
            places = iter(look(first))
        except BaseException:
            first.cluster.close()
            raise
        benches = (first, *[None] * (self._jobs - 1))
        with ThreadPoolExecutor(self._jobs) as threads:
            for one in [
                threads.submit(self._work, bench, places, to_the_first) for bench in benches
            ]:
                one.result()

    def _bench(self) -> Bench:
        with self._lock:
            self._opened += 1
            home = self._home / f"cluster-{self._opened}"
        cluster = CrashingCluster(home, bug=self._bug, patience_s=self._patience_s)
        return Bench(cluster.__enter__())

    def _work(self, bench: Bench | None, places: Iterator[Place], to_the_first: bool) -> None:
        while True:
            with self._lock:
                is_over = to_the_first and self.problems
                place = None if is_over else next(places, None)
            if place is None:
                break
            bench = bench or self._bench()
            result = _tried(bench, place)
            with self._lock:
                self.results.append(result)
            if result.problem:
                print(result.problem, flush=True)
                bench.cluster.close()
                bench = None
        if bench is not None:
            bench.cluster.close()


def _tried(bench: Bench, place: Place) -> Result:
    killed: list[str] = []
    try:
        with bench.cluster.killed_at(place.node_id, place.point, killed, then=place.then):
            bench.live(place.scenario)
            if place.then is not None:
                bench.cluster.settle()  # the comeback is over
        bench.check(place.scenario.layout)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is wrong
        where = bench.cluster.home.name
        return Result(place, killed, f"{place}: {type(error).__name__}: {error} ({where})")
    return Result(place, killed, "")
