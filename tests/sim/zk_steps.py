"""Scripts of a controller's work, with a fault at every single step.

A script (an election, a reassignment, a deletion, …) is played once to count its steps: requests
that reach ZooKeeper, and requests of a controller that reach a broker. Then it is played again with
each fault at each step. In the end all invariants must hold, as in any other history, and the
script must have finished.

``python -m tests.sim.zk_steps`` plays all of them.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

from fencepost.cluster.image import BROKER_RESOURCE, PartitionRegistration
from fencepost.coordinator.zookeeper import znodes
from tests.sim.faults import TOPIC, Faults
from tests.sim.network import Weather
from tests.sim.process import BrokerOptions
from tests.sim.swarm import ProducerOptions
from tests.sim.zk_broker import ZooKeeperBroker
from tests.sim.zk_cluster import ZooKeeperCluster, told
from tests.sim.zk_faults import ZooKeeperFaults
from tests.sim.zk_server import ENSEMBLE, Connection, Op, Request
from tests.sim.zk_swarm import ZooKeeperOptions

DURATION_MS: Final = 2_500
AGAIN_MS: Final = 300
POLL_MS: Final = 20
BACK_MS: Final = (50, 1_500)
"""How long a killed process is away: its old session is alive then, or has expired."""
OTHER: Final = "others"
"""The topic that scripts create, change or delete; no client uses it."""

EXPIRE, KILL, EXPIRE_ANOTHER = "expire", "kill", "expire another"
LOSE_REQUEST, LOSE_ANSWER = "lose the request", "lose the answer"
ANOTHER_WRITES, RESIGN = "another writes", "resign"
FAULTS: Final = (EXPIRE, KILL, EXPIRE_ANOTHER, LOSE_REQUEST, LOSE_ANSWER, ANOTHER_WRITES, RESIGN)
"""Faults of the controller, of another broker, or of the request at this step."""

OPTIONS: Final = ZooKeeperOptions(
    seed=1,
    brokers=3,
    replication_factor=2,
    partitions=2,
    broker=BrokerOptions(min_isr=1, lag_ms=1_000, session_ms=600),
    weather=Weather(latency_ms=(1, 3)),
    faults=(),
    fault_pause_ms=100,
    chaos_ms=DURATION_MS,
    producers=(ProducerOptions(0, -1, True, 5, 60),),
    transactions=0,
    consumers=(False,),
)


class Step(NamedTuple):
    """The number of a step, and the fault at that step."""

    number: int
    fault: str


class Script:
    """An action on the cluster, and a check of its result."""

    def __init__(self, faults: ScriptedFaults) -> None:
        self.faults = faults
        self.cluster = faults.cluster

    def begin(self) -> None:
        """Begin the action."""

    def unfinished(self) -> list[str]:
        """Return a message for each result that is missing in the end."""
        return []


class Election(Script):
    """An operator removes ``/controller``."""

    def begin(self) -> None:
        self.faults.remove_controller()


class Creation(Script):
    """A topic is created."""

    def begin(self) -> None:
        self.faults.create_topic(2, 2, OTHER)

    def unfinished(self) -> list[str]:
        there = OTHER in self.cluster.truth.image.topics
        return [] if there else ["the topic was not made"]


class Adoption(Script):
    """A tool of a release without topic ids creates a topic."""

    def begin(self) -> None:
        parts = {str(index): self.cluster.ids[index : index + 2] for index in (0, 1)}
        self.faults.write_topic(OTHER, {"version": 1, "partitions": parts})

    def unfinished(self) -> list[str]:
        found = self.cluster.truth.image.topics.get(OTHER)
        if found is None:
            return ["the topic was not taken"]
        return [f"nobody leads: {one}" for one in found.partitions if one.leader < 0]


class Deletion(Script):
    """A topic is deleted."""

    topics = (OTHER,)

    def begin(self) -> None:
        if OTHER in self.cluster.truth.image.topics:
            self.cluster.controller.delete_topic(OTHER)
            self.cluster.scheduler.after(AGAIN_MS, self.begin)

    def unfinished(self) -> list[str]:
        gone = OTHER not in self.cluster.truth.image.topics
        return [] if gone else ["the topic was not deleted"]


class Marking(Deletion):
    """A tool marks a topic for deletion."""

    def begin(self) -> None:
        self.faults.mark(OTHER)


class Absence(Deletion):
    """A broker without a replica is away while a topic is deleted and a controller is elected."""

    def begin(self) -> None:
        elected = int(self.cluster.truth.elected[1:])
        name = f"b{self.faults.another(elected)}"
        ways = {(name, ENSEMBLE), (ENSEMBLE, name)}
        self.cluster.network.cut |= ways
        self._later(self._delete, ways, wait_ms=OPTIONS.broker.session_ms + AGAIN_MS)

    def _later(self, action: Callable[..., None], *given: Any, wait_ms: int = AGAIN_MS) -> None:
        self.cluster.scheduler.after(wait_ms, action, *given)

    def _delete(self, ways: set[tuple[str, str]]) -> None:
        if f"/brokers/topics/{OTHER}" in self.cluster.ensemble.tree.nodes:
            if OTHER in self.cluster.truth.image.topics:
                self.cluster.controller.delete_topic(OTHER)
            self._later(self._delete, ways)
        else:
            self.faults.remove_controller()
            self._later(self.cluster.network.cut.difference_update, ways)


class Loss(Script):
    """The controller is down for longer than its session timeout."""

    AWAY_MS: Final = 1_700
    gone: int = 0
    found: Sequence[str] = ("it has not come back",)

    def begin(self) -> None:
        self.gone = int(self.cluster.truth.elected[1:])
        self.cluster.crash_broker(self.gone)
        self.cluster.scheduler.after(self.AWAY_MS, self._come_back)

    def _come_back(self) -> None:
        self.found = [
            f"{TOPIC}-{index} still counted on b{self.gone}: {one}"
            for index, one in enumerate(self.cluster.truth.image.topics[TOPIC].partitions)
            if one.leader == self.gone or (self.gone in one.isr and len(one.isr) > 1)
        ]
        self.cluster.start_broker(self.gone)

    def unfinished(self) -> list[str]:
        return [*self.found]


class Reassignment(Script):
    """One replica of a partition moves to the broker that has none."""

    original: tuple[int, ...] = ()
    target: tuple[int, ...] = ()

    def begin(self) -> None:
        known = self.cluster.truth.image.topics[TOPIC].partitions[0]
        if not self.target:
            new = next(one for one in self.cluster.ids if one not in known.replicas)
            self.original, self.target = known.replicas, (new, known.replicas[1])
        if known.replicas == self.original:
            self.cluster.controller.reassign(TOPIC, 0, self.target)
        self.cluster.scheduler.after(AGAIN_MS, self.begin)

    def unfinished(self) -> list[str]:
        known = self.cluster.truth.image.topics[TOPIC].partitions[0]
        return [] if known.replicas == self.target else [f"it was not reassigned: {known}"]


class Shutdown(Script):
    """The leader of a partition is shut down, and comes back."""

    def begin(self) -> None:
        leader = self.cluster.truth.image.topics[TOPIC].partitions[0].leader
        self.cluster.processes[leader].stop()


class IsrNote(Script):
    """A leader writes its ISR by itself, and a notification of the change."""

    def begin(self) -> None:
        self.faults.isr_note()


class Settings(Script):
    """A broker and a topic get settings whose znodes a tool has created without notifications."""

    VALUE: Final = "7000"
    elections: int = 0

    def begin(self) -> None:
        self.elections = self.cluster.truth.elections
        self.faults.tell_nobody(f"brokers/{self.cluster.ids[0]}", {"log.segment.bytes": "9999999"})
        self.faults.tell_nobody(f"topics/{OTHER}", {"retention.ms": "5"})
        self._change()

    def _change(self) -> None:
        if not self._is_known():
            self.cluster.controller.alter_broker(self.cluster.ids[0], self.VALUE)
            self.cluster.scheduler.after(AGAIN_MS, self._change)
        elif OTHER not in self.cluster.truth.image.topics:
            self.faults.create_topic(2, 2, OTHER)

    def _is_known(self) -> bool:
        resource = BROKER_RESOURCE, str(self.cluster.ids[0])
        values = self.cluster.truth.image.configs.get(resource, {})
        return values.get("log.retention.ms") == self.VALUE

    def unfinished(self) -> list[str]:
        missing = [] if self._is_known() else ["the broker has no such setting"]
        if OTHER not in self.cluster.truth.image.topics:
            missing.append("the topic was not made")
        if self.cluster.step is None and self.cluster.truth.elections > self.elections:
            missing.append("a controller resigned, and nothing had gone wrong")
        return missing


class Permission(Script):
    """All in-sync replicas are down, and a tool enables unclean leader election."""

    index = leader = other = 0
    is_led = False

    def begin(self) -> None:
        elected = int(self.cluster.truth.elected[1:])
        parts = [one.replicas for one in self.cluster.truth.image.topics[OTHER].partitions]
        self.index = next((at for at, one in enumerate(parts) if elected not in one), 0)
        self.leader, self.other = self._now().isr
        self.cluster.crash_broker(self.other)
        self._once(lambda: self._now().isr == (self.leader,), self._be_gone)

    def _now(self) -> PartitionRegistration:
        return self.cluster.truth.image.topics[OTHER].partitions[self.index]

    def _once(self, holds: Callable[[], bool], then: Callable[[], None]) -> None:
        if holds():
            then()
        else:
            self.cluster.scheduler.after(POLL_MS, self._once, holds, then)

    def _be_gone(self) -> None:
        self.cluster.crash_broker(self.leader)
        self.cluster.start_broker(self.other)
        self._once(
            lambda: self._now().leader < 0 and self.other in self.cluster.truth.image.brokers,
            self._allow,
        )

    def _allow(self) -> None:
        self.faults.set_config(OTHER, {"unclean.leader.election.enable": "true"})
        self._once(lambda: self._now().leader == self.other, self._come_back)

    def _come_back(self) -> None:
        self.is_led = True
        self.cluster.start_broker(self.leader)

    def unfinished(self) -> list[str]:
        # With a fault, all replicas may be back before the unclean election.
        is_done = self.is_led or self.cluster.step is not None
        return [] if is_done else ["who was allowed to lead did not"]


SCRIPTS: Final[Mapping[str, type[Script]]] = {
    "election": Election,
    "creation": Creation,
    "adoption": Adoption,
    "reassignment": Reassignment,
    "deletion": Deletion,
    "marking": Marking,
    "shutdown": Shutdown,
    "ISR note": IsrNote,
    "absence": Absence,
    "loss": Loss,
    "settings": Settings,
    "permission": Permission,
}


WITH_ANOTHER: Final = ("deletion", "marking", "absence", "permission")
"""Scripts that need a topic to which no client writes."""


class ScriptedFaults(ZooKeeperFaults):
    """Plays one script, with one fault at one step."""

    cluster: ScriptedCluster

    def __init__(self, cluster: ScriptedCluster) -> None:
        super().__init__(cluster)
        self.script = SCRIPTS[cluster.script](self)
        self.steps = self.in_time = 0
        self._loses_answer = False

    def begin(self) -> None:
        ensemble, cluster = self.cluster.ensemble, self.cluster
        ensemble.before_step, ensemble.after_step = self._before_write, self._after_write
        cluster.before_told, cluster.after_told = self._before_told, self._after_told
        self.script.begin()

    def mark(self, topic: str) -> None:
        """Mark a topic for deletion, as a tool does."""
        self._write(Op("create", f"/admin/delete_topics/{topic}"))

    def tell_nobody(self, entity: str, values: Mapping[str, str]) -> None:
        """Create the znode of settings, without a notification."""
        self._write(Op("create", f"{znodes.CONFIGS}/{entity}", znodes.config_data(values)))

    def set_config(self, topic: str, values: Mapping[str, str]) -> None:
        """Change the settings of a topic, as a tool does."""
        note = json.dumps({"version": 2, "entity_path": f"topics/{topic}"}).encode()
        self._write(
            Op("set", f"/config/topics/{topic}", znodes.config_data(values)),
            Op("create", znodes.CONFIG_CHANGE_PREFIX, note, sequence=True),
        )

    def write_topic(self, topic: str, node: Mapping[str, object]) -> None:
        """Create a topic, as a tool does."""
        self._write(Op("create", f"/brokers/topics/{topic}", json.dumps(node).encode()))

    def heal(self) -> None:
        self.in_time = self.steps
        super().heal()

    # --- the steps ---

    def _is_now(self, what: str) -> bool:
        self.steps += 1
        wanted = self.cluster.step
        if wanted is None or wanted.number != self.steps:
            return False
        self.scheduler.say("--", f"{wanted.fault} at {what}")
        elected = int(self.cluster.truth.elected[1:])
        if wanted.fault == EXPIRE:
            self._expire(elected)
        elif wanted.fault == EXPIRE_ANOTHER:
            self._expire(self.another(elected))
        elif wanted.fault == ANOTHER_WRITES:
            self.isr_note()
        elif wanted.fault == RESIGN:
            cast("ZooKeeperBroker", self.cluster.processes[elected]).give_up()
        elif wanted.fault == KILL and self._is_up(elected):
            self.cluster.crash_broker(elected)
            back_ms = BACK_MS[wanted.number % len(BACK_MS)]
            self.scheduler.after(back_ms, self.cluster.start_broker, elected)
        self._loses_answer = wanted.fault == LOSE_ANSWER
        return wanted.fault == LOSE_REQUEST

    def another(self, elected: int) -> int:
        """Return another broker than the controller, if possible without a replica of ``OTHER``."""
        others = [one for one in self.cluster.ids if one != elected]
        topic = self.cluster.truth.image.topics.get(OTHER)
        replicas = () if topic is None else topic.partitions[0].replicas
        return next((one for one in others if one not in replicas), others[0])

    def _before_write(self, connection: Connection, request: Request) -> bool:
        if self._is_now(f"{connection.client.name}: {request}"):
            connection.close()
        return not connection.is_open

    def _after_write(self, connection: Connection, _request: Request) -> bool:
        lost, self._loses_answer = self._loses_answer, False
        if lost:
            connection.close()
        return lost

    def _before_told(self, broker: ZooKeeperBroker, request: Any) -> bool:
        if self._is_now(f"{broker.node.name}: {type(request).__name__}"):
            return True
        # A broker whose session expires, because it was cut off, also misses this request.
        step = self.cluster.step
        is_its = step is not None and step == (self.steps, EXPIRE_ANOTHER)
        return is_its and broker.broker_id == self.another(int(self.cluster.truth.elected[1:]))

    def _after_told(self, _broker: ZooKeeperBroker, _request: Any) -> bool:
        lost, self._loses_answer = self._loses_answer, False
        return lost


class ScriptedCluster(ZooKeeperCluster):
    """A cluster that plays one script."""

    faults: ScriptedFaults

    def __init__(
        self, script: str, step: Step | None, tell: Callable[[str], None] | None = None
    ) -> None:
        self.script, self.step = script, step
        super().__init__(OPTIONS, tell)

    def _faults(self) -> Faults:
        return ScriptedFaults(self)

    @property
    def first_topics(self) -> list[str]:
        return [OTHER] if self.script in WITH_ANOTHER else []

    def _stale_images(self) -> list[str]:
        return super()._stale_images() + self.faults.script.unfinished()


def play(script: str, step: Step | None, tell: Callable[[str], None] | None = None) -> int:
    """Play a script; return how many steps it had before the recovery. Raises on a failure."""
    cluster = ScriptedCluster(script, step, tell)
    given = "" if step is None else f" --step {step.number} --fault '{step.fault}'"
    with told(cluster, f"python -m tests.sim.zk_steps --script '{script}'{given}"):
        cluster.run()
    return cluster.faults.in_time


def steps(script: str, every: int = 1) -> Iterator[Step]:
    """Yield one in ``every`` steps of a script for each fault, at other steps for each."""
    count = play(script, None)
    for at, fault in enumerate(FAULTS):
        for number in range(1 + at * every // len(FAULTS), count + 1, every):
            yield Step(number, fault)


def main() -> int:
    """Play the scripts; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--script", choices=SCRIPTS, help="this one alone")
    parser.add_argument("--step", type=int, help="tell the story of this step alone")
    parser.add_argument("--fault", choices=FAULTS)
    given = parser.parse_args()
    gc.set_threshold(200_000, 50, 50)
    if given.script and (given.step is None) != (given.fault is None):
        parser.error("--step and --fault belong together")
    if given.step is not None:
        play(given.script, Step(given.step, given.fault), lambda line: print(line, end=""))
        return 0
    failed = 0
    for script in [given.script] if given.script else SCRIPTS:
        begun, count = time.perf_counter(), 0
        for step in steps(script):
            count += 1
            try:
                play(script, step)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is told
                failed += 1
                print(f"{script}, {step}: {type(error).__name__}: {str(error)[:300]}")
        print(f"{script}: {count} histories, {time.perf_counter() - begun:.1f} s", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
