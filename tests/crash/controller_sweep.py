"""Injects faults at all steps of a cluster's controller, and checks the results.

An *act* is a change of the cluster, such as the creation of a topic. The controller's operations
for an act are counted in two runs. An operation that occurs in both runs is a *point*. Then the act
is repeated for each point and each fault. The fault is injected into the controller that reaches
the point, and the client repeats its request until the act succeeds. The next controller must
finish the act.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fencepost.tools.sweep.points import CountedEvent, KillPoint
from tests.crash.elected_cluster import BROKERS, DATA, MOVED, ElectedCluster
from tests.crash.sweeps import Sweep, points_of
from tests.support.waits import until
from tests.support.zookeeper import ZooKeeper

FAULTS = "kill", "sleep", "expiry"


@dataclass(frozen=True)
class Scenario:
    """The ``act`` during which a controller is held, and the steps before and after it."""

    name: str
    act: Callable[[Bench], None]
    prepare: Callable[[Bench], None] = lambda _: None
    finish: Callable[[Bench], None] = lambda _: None
    is_election: bool = False
    """Whether the act is an election, so that the newly elected controller is held."""


@dataclass(frozen=True)
class Place:
    """A point of a scenario, and the fault at it."""

    scenario: Scenario
    point: KillPoint
    fault: str

    def __str__(self) -> str:
        where = f"{self.point.where} {self.point.kind} #{self.point.number}"
        return f"{self.scenario.name}, {self.fault} {where}"


class Bench:
    """A cluster, and the state of the present scenario."""

    def __init__(self, cluster: ElectedCluster) -> None:
        self.cluster = cluster
        self.number = 0
        self.victim = 0
        self._fault: Future[None] | None = None

    @property
    def name(self) -> str:
        """The name of the topic that the present scenario creates."""
        return f"new-{self.number}"

    def live(self, scenario: Scenario) -> None:
        """Run the act of a scenario once."""
        scenario.act(self)
        scenario.finish(self)

    def places(self, scenario: Scenario) -> list[Place]:
        """Return all combinations of a point of the scenario and a fault."""

        def counted() -> list[CountedEvent]:
            self.begin(scenario)
            self.cluster.arm(BROKERS, None)
            self.live(scenario)
            self.cluster.check()
            events = {node_id: self.cluster.brokers[node_id].disarm()[1] for node_id in BROKERS}
            return events[self.cluster.controller or 0]

        points = [*points_of(counted(), counted())]
        return [Place(scenario, point, fault) for point in points for fault in FAULTS]

    def begin(self, scenario: Scenario) -> None:
        """Prepare the next run of a scenario, and let the writer write."""
        self.number += 1
        scenario.prepare(self)
        self.cluster.writer.begin()

    @contextmanager
    def faulty(self, place: Place, faults: list[str]) -> Iterator[None]:
        """Within the block, inject the fault into the first broker that reaches the point."""
        controller = self.cluster.controller
        armed = BROKERS if place.scenario.is_election or controller is None else (controller,)
        self.cluster.arm(armed, place.point)
        waiting, leave = [*armed], threading.Event()
        self._fault = None

        def watch() -> bool:
            for node_id in [*waiting]:
                what = self.cluster.brokers[node_id].reached()
                if what is None:
                    continue
                waiting.remove(node_id)
                if faults or leave.is_set():
                    self.cluster.brokers[node_id].go_on()
                else:
                    faults.append(what)
                    self._fault = threads.submit(self.cluster.fault, node_id, place.fault)
            return leave.is_set() and (self._fault is None or self._fault.done())

        with ThreadPoolExecutor(2) as threads:
            watcher = threads.submit(until, watch, "the fault is over", deadline_s=3_600)
            try:
                yield
            finally:
                leave.set()
                watcher.result()
                if self._fault is not None:
                    self._fault.result()
        for node_id in armed:
            self.cluster.brokers[node_id].disarm()


# --- acts ---


def _lose_office(bench: Bench) -> None:
    """End the controller's session; its broker survives, and registers again."""
    cluster, controller = bench.cluster, bench.cluster.controller
    epoch = cluster.znodes.get("/controller_epoch")[0]
    if controller is not None:
        cluster.end_session(controller)
    cluster.until(lambda: cluster.znodes.get("/controller_epoch")[0] != epoch, "an election")


def _choose_victim(bench: Bench) -> None:
    """Choose a broker that leads partitions and is not the controller."""
    cluster = bench.cluster
    bench.victim = next(node_id for node_id in BROKERS if node_id != cluster.controller)

    def leads() -> bool:
        states = [
            cluster.node(f"/brokers/topics/{DATA}/partitions/{index}/state") for index in range(3)
        ]
        if bench.victim in {state["leader"] for state in states}:
            return True
        cluster.call("elect_leaders", 2, election_type=0, timeout=5_000)
        return False

    cluster.until(leads, "the victim leads")
    cluster.settle()


def _kill_victim(bench: Bench) -> None:
    cluster, victim = bench.cluster, bench.victim
    broker = cluster.brokers[victim]
    os.kill(broker.pid, signal.SIGKILL)
    broker.kill()
    cluster.end_session(victim)

    def is_led_by_others() -> bool:
        states = [
            cluster.node(f"/brokers/topics/{DATA}/partitions/{index}/state") for index in range(3)
        ]
        return all(state["leader"] not in {victim, -1} for state in states)

    cluster.until(is_led_by_others, "others lead")


def _raise_victim(bench: Bench) -> None:
    bench.cluster.brokers[bench.victim].start()


def _reassign(bench: Bench) -> None:
    """Reassign the partition to the next pair of brokers, so that its preferred leader changes."""
    pairs = [1, 2], [2, 3], [3, 1]
    cluster = bench.cluster
    now = cluster.node(f"/brokers/topics/{MOVED}")["partitions"]["0"]
    wanted = pairs[(pairs.index(now) + 1) % 3]
    cluster.until(lambda: cluster.reassign(MOVED, wanted), "reassigned")


def _create(bench: Bench) -> None:
    cluster = bench.cluster
    cluster.until(lambda: cluster.create(bench.name, [[1, 2, 3], [2, 3, 1]]), "created")


def _delete(bench: Bench) -> None:
    cluster = bench.cluster
    cluster.until(lambda: cluster.delete(bench.name), "deleted")


def _all_know(bench: Bench) -> None:
    """Wait until each broker knows the new topic."""

    def known() -> bool:
        cluster = bench.cluster
        return all(
            cluster.connection(node_id).leaders(bench.name) > 0
            or any((cluster.home / str(node_id) / "data").glob(f"{bench.name}-?"))
            for node_id in BROKERS
        )

    bench.cluster.until(known, "all know")


def _make_then_settle(bench: Bench) -> None:
    _create(bench)
    _all_know(bench)


SCENARIOS = (
    Scenario("election", _lose_office, is_election=True),
    Scenario("a broker's death", _kill_victim, _choose_victim, _raise_victim),
    Scenario("reassignment", _reassign),
    Scenario("creation", _create, finish=_delete),
    Scenario("deletion", _delete, _make_then_settle),
)


# --- the sweep ---


def sweep(home: Path, zookeeper: ZooKeeper, jobs: int) -> Sweep[Bench, Place]:
    """Return a sweep that runs ``jobs`` clusters at a time on one ZooKeeper."""
    return Sweep(home, jobs, lambda folder: Bench(ElectedCluster(folder, zookeeper).start()), _try)


def _try(bench: Bench, place: Place, reached: list[str]) -> None:
    bench.begin(place.scenario)
    with bench.faulty(place, reached):
        bench.live(place.scenario)
        bench.cluster.rest()
    bench.cluster.check()
