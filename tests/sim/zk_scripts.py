"""Scripts of a controller's work, with a fault at every single step.

A script is an election, a reassignment, a deletion or the like. Its first run counts the steps:
requests that reach ZooKeeper, and requests of a controller that reach a broker. Then there is a run
with each fault at each step. At the end of a run all invariants must hold, as in any other
simulation, and the script must have finished.

``python -m tests.sim.zk_scripts`` runs all scripts.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple
from uuid import UUID

from fencepost.cluster.image import BROKER_RESOURCE, PartitionRegistration
from fencepost.coordinator.zookeeper import znodes
from tests.sim.daemon import Daemon
from tests.sim.daemon_faults import TOPIC
from tests.sim.daemons import played
from tests.sim.network import Weather
from tests.sim.zk_access import written
from tests.sim.zk_history import ZooKeeperHistory
from tests.sim.zk_options import draw_options
from tests.sim.zk_server import ENSEMBLE, Connection, Op, Request
from tests.sim.zk_writers import Writers

DURATION_MS: Final = 2_500
AGAIN_MS: Final = 300
READING_MS: Final = 180
"""Long enough for a reassignment to begin, and shorter than the ping interval."""
RETURN_MS: Final = 170
"""Long enough for a broker to open another session and register; below the ping interval."""
POLL_MS: Final = 20
BACK_MS: Final = (50, 1_500)
"""How long a killed process is down: shorter or longer than its session timeout."""
OTHER: Final = "others"
"""The topic that scripts create, change or delete; no client uses it."""

EXPIRE, KILL, EXPIRE_ANOTHER = "expire", "kill", "expire another"
LOSE_REQUEST, LOSE_ANSWER = "lose the request", "lose the answer"
ANOTHER_WRITES, RESIGN = "another writes", "resign"
FAULTS: Final = (EXPIRE, KILL, EXPIRE_ANOTHER, LOSE_REQUEST, LOSE_ANSWER, ANOTHER_WRITES, RESIGN)
"""Faults of the controller, of another broker, or of the request at this step."""

OPTIONS: Final = replace(
    draw_options(1),
    brokers=3,
    factor=2,
    min_isr=1,
    partitions=2,
    weather=Weather(latency_ms=(1, 3)),
    disk_ms=(0, 0),
    creep_ns=0,
    faults=(),
    fault_pause_ms=100,
    chaos_ms=DURATION_MS,
    producers=1,
    transactions=0,
    readers=1,
    members=(),
    lag_ms=1_000,
    session_ms=600,
    acks=-1,
    servers=1,
    member_lag_ms=0,
)


class Step(NamedTuple):
    """The number of a step, and the fault at that step."""

    number: int
    fault: str


class Script:
    """An action on the cluster, and a check of its result."""

    def __init__(self, faults: ScriptedFaults) -> None:
        self.faults, self.history = faults, faults.history

    def begin(self) -> None:
        """Begin the action."""

    def arrives(self, request: Request) -> None:
        """Called with each request before ZooKeeper handles it."""

    def unfinished(self) -> list[str]:
        """Return a message for each result that is missing at the end."""
        return []

    def later(self, action: Callable[..., None], *given: Any, wait_ms: int = AGAIN_MS) -> None:
        """Schedule an action."""
        self.history.scheduler.after(wait_ms, action, *given)

    def part(self, topic: str, index: int) -> PartitionRegistration:
        """Return a partition's state in ZooKeeper."""
        return self.history.image.topics[topic].partitions[index]

    @property
    def ids(self) -> list[int]:
        """The ids of all brokers."""
        return [broker.node_id for broker in self.history.brokers]


class Election(Script):
    """An operator removes ``/controller``."""

    def begin(self) -> None:
        self.faults.remove_controller()


class Creation(Script):
    """A topic is created."""

    def begin(self) -> None:
        self.faults.ask(self.history.admin.create(OTHER, 2, 2))

    def unfinished(self) -> list[str]:
        return [] if OTHER in self.history.image.topics else ["the topic was not made"]


class Adoption(Script):
    """A tool of a release without topic ids creates a topic."""

    described: Mapping[str, object] = {"version": 1}

    def begin(self) -> None:
        parts = {str(index): self.ids[index : index + 2] for index in (0, 1)}
        self.faults.write_topic(OTHER, {**self.described, "partitions": parts})

    def unfinished(self) -> list[str]:
        found = self.history.image.topics.get(OTHER)
        if found is None:
            return ["the topic was not taken"]
        return [
            f"nobody leads: {partition}" for partition in found.partitions if partition.leader < 0
        ]


class AutomaticCreation(Adoption):
    """A broker of Apache Kafka 3.9 creates a topic automatically, because a client uses it."""

    described: Mapping[str, object] = {
        "version": 3,
        "topic_id": znodes.id_to_text(UUID(int=9 << 64)),
        "adding_replicas": {},
        "removing_replicas": {},
    }


class Deletion(Script):
    """A topic is deleted."""

    def begin(self) -> None:
        if OTHER in self.history.image.topics:
            self.faults.ask(self.history.admin.delete(OTHER))
            self.later(self.begin)

    def unfinished(self) -> list[str]:
        gone = OTHER not in self.history.image.topics
        return [] if gone else ["the topic was not deleted"]


class Marking(Deletion):
    """A tool marks a topic for deletion."""

    def begin(self) -> None:
        self.faults.mark(OTHER)


class Absence(Deletion):
    """A broker without a replica is away while a topic is deleted and a controller is elected."""

    def begin(self) -> None:
        self.away = self.faults.another()
        self.history.network.cut |= self._ways
        self.later(self._delete, wait_ms=OPTIONS.session_ms + AGAIN_MS)

    @property
    def _ways(self) -> set[tuple[str, str]]:
        name = self.away.node.name
        return {(name, ENSEMBLE), (ENSEMBLE, name)}

    def _come_back(self) -> None:
        self.history.network.cut -= self._ways

    def _delete(self) -> None:
        if f"/brokers/topics/{OTHER}" in self.history.ensemble.tree.nodes:
            if OTHER in self.history.image.topics:
                self.faults.ask(self.history.admin.delete(OTHER))
            self.later(self._delete)
        else:
            self._gone()

    def _gone(self) -> None:
        self.faults.remove_controller()
        self.later(self._come_back)


class Return(Absence):
    """As :class:`Absence`, but the broker returns just before the deletion ends.

    The controller notices the broker only after the deletion.
    """

    is_stalled = False

    def arrives(self, request: Request) -> None:
        # The controller sends both requests just before the request that deletes the topic.
        kind, path = request.ops[0][:2]
        if (kind, path) == ("children", znodes.partitions_path(OTHER)):
            self._come_back()
        elif (kind, path) == ("get", f"/config/topics/{OTHER}") and not self.is_stalled:
            self.is_stalled = True
            self.faults.stall(self.faults.elected(), RETURN_MS)

    def _gone(self) -> None:
        self._come_back()


class Loss(Script):
    """The controller is down for longer than its session timeout."""

    AWAY_MS: Final = 1_700
    found: Sequence[str] = ("it has not come back",)

    def begin(self) -> None:
        gone = self.faults.elected()
        gone.kill()
        self.later(self._come_back, gone, wait_ms=self.AWAY_MS)

    def _come_back(self, gone: Daemon) -> None:
        self.found = [
            f"{TOPIC}-{index} still counted on {gone.node.name}: {partition}"
            for index, partition in enumerate(self.history.image.topics[TOPIC].partitions)
            if partition.leader == gone.node_id
            or (gone.node_id in partition.isr and len(partition.isr) > 1)
        ]
        gone.start()

    def unfinished(self) -> list[str]:
        return [*self.found]


class Reassignment(Script):
    """One replica of a partition moves to the broker that has no replica."""

    original: tuple[int, ...] = ()
    target: tuple[int, ...] = ()

    def begin(self) -> None:
        known = self.part(TOPIC, 0)
        if not self.target:
            new = next(broker_id for broker_id in self.ids if broker_id not in known.replicas)
            self.original, self.target = known.replicas, (new, known.replicas[1])
        if known.replicas == self.original:
            self.faults.ask(self.history.admin.reassign((TOPIC, 0), self.target))
        self.later(self.begin)

    def unfinished(self) -> list[str]:
        known = self.part(TOPIC, 0)
        return [] if known.replicas == self.target else [f"it was not reassigned: {known}"]


class Addition(Script):
    """A tool adds a partition to a finished reassignment just before the controller deletes it."""

    targets: dict[tuple[str, int], tuple[int, ...]]
    is_added = False

    def begin(self) -> None:
        self.targets = {}
        for index in (0, 1):
            known = self.part(TOPIC, index).replicas
            new = next(broker_id for broker_id in self.ids if broker_id not in known)
            self.targets[TOPIC, index] = new, known[1]
        first = {(TOPIC, 0): self.targets[TOPIC, 0]}
        self.faults.put(znodes.REASSIGN_PARTITIONS, znodes.reassignments_data(first))

    def arrives(self, request: Request) -> None:
        is_removal = ("delete", znodes.REASSIGN_PARTITIONS) in {op[:2] for op in request.ops}
        if is_removal and not self.is_added:
            self.is_added = True
            data = znodes.reassignments_data(self.targets)
            self.faults.put(znodes.REASSIGN_PARTITIONS, data)

    def unfinished(self) -> list[str]:
        return [
            f"{place} was not reassigned to {target}"
            for place, target in self.targets.items()
            if self.part(*place).replicas != target
        ]


class UserChange(Script):
    """A tool changes a user just before a broker does."""

    PATH: Final = "/config/users/alice"
    is_changed = False

    def begin(self) -> None:
        self.faults.put(self.PATH, written(self.PATH, {"producer_byte_rate": "1024"}))
        self.later(self.faults.change_by_broker, self.PATH, "producer_byte_rate", "2048")

    def arrives(self, request: Request) -> None:
        if not self.is_changed and ("set", self.PATH) in {op[:2] for op in request.ops}:
            self.is_changed = True
            both = {"producer_byte_rate": "1024", "consumer_byte_rate": "50000"}
            self.faults.put(self.PATH, written(self.PATH, both))
            note = {"version": 2, "entity_path": "users/alice"}
            self.later(self.faults.tell, note)


class Reading(Script):
    """A starting broker becomes a replica between its reads of a topic and of the states."""

    is_stalled = False

    def begin(self) -> None:
        known = self.part(TOPIC, 0).replicas
        new = next(broker_id for broker_id in self.ids if broker_id not in known)
        self.target, self.reader = (known[0], new), self.history.broker(new)
        self.reader.kill()
        self.later(self.reader.start, wait_ms=1)  # its former session must still be alive

    def arrives(self, request: Request) -> None:
        is_read = request.ops[0][:2] == ("get", znodes.topic_path(TOPIC))
        if is_read and self.reader.is_starting and not self.is_stalled:
            self.is_stalled = True
            self.faults.stall(self.reader, READING_MS)
            self.faults.ask(self.history.admin.reassign((TOPIC, 0), self.target))

    def unfinished(self) -> list[str]:
        known = self.part(TOPIC, 0)
        return [] if known.replicas == self.target else [f"it was not reassigned: {known}"]


class EarlyState(Script):
    """A leader writes an ISR that a starting broker reads before the controller does."""

    is_written = False

    def begin(self) -> None:
        replicas = self.part(TOPIC, 0).replicas
        self.reader = self.history.broker(
            next(broker_id for broker_id in self.ids if broker_id not in replicas)
        )
        self.reader.kill()
        self.later(self.reader.start, wait_ms=OPTIONS.session_ms + AGAIN_MS)

    def arrives(self, request: Request) -> None:
        is_read = request.ops[0][:2] == ("get", znodes.state_path(TOPIC, 0))
        if is_read and self.reader.is_starting and not self.is_written:
            self.is_written = True
            self.faults.shrink(0)


class Shutdown(Script):
    """The leader of a partition is shut down, and comes back."""

    def begin(self) -> None:
        self.history.broker(self.part(TOPIC, 0).leader).stop()


class IsrNote(Script):
    """A leader writes its ISR by itself, and then a notification of the change."""

    def begin(self) -> None:
        self.faults.isr_note()


class Settings(Script):
    """A broker and a topic get settings whose znodes a tool has created without notifications."""

    VALUE: Final = "7000"
    elections: int = 0

    def begin(self) -> None:
        self.elections = self.history.truth.elections
        self.faults.tell_nobody(f"brokers/{self.ids[0]}", {"log.segment.bytes": "9999999"})
        self.faults.tell_nobody(f"topics/{OTHER}", {"retention.ms": "5"})
        self._change()

    def _change(self) -> None:
        admin = self.history.admin
        if not self._is_known():
            settings = {"log.retention.ms": self.VALUE}
            self.faults.ask(admin.configure(str(self.ids[0]), BROKER_RESOURCE, **settings))
            self.later(self._change)
        elif OTHER not in self.history.image.topics:
            self.faults.ask(admin.create(OTHER, 2, 2))

    def _is_known(self) -> bool:
        resource = BROKER_RESOURCE, str(self.ids[0])
        values = self.history.image.configs.get(resource, {})
        return values.get("log.retention.ms") == self.VALUE

    def unfinished(self) -> list[str]:
        missing = [] if self._is_known() else ["the broker has no such setting"]
        if OTHER not in self.history.image.topics:
            missing.append("the topic was not made")
        if self.faults.step is None and self.history.truth.elections > self.elections:
            missing.append("a controller resigned, and nothing had gone wrong")
        return missing


class Permission(Script):
    """All in-sync replicas are down, and a tool enables unclean leader election."""

    index = leader = other = 0
    is_led = False

    def begin(self) -> None:
        elected = self.faults.elected().node_id
        parts = [partition.replicas for partition in self.history.image.topics[OTHER].partitions]
        self.index = next((at for at, part in enumerate(parts) if elected not in part), 0)
        self.leader, self.other = self._now().isr
        self.history.broker(self.other).kill()
        self._once(lambda: self._now().isr == (self.leader,), self._be_gone)

    def _now(self) -> PartitionRegistration:
        return self.part(OTHER, self.index)

    def _once(self, holds: Callable[[], bool], then: Callable[[], None]) -> None:
        if holds():
            then()
        else:
            self.later(self._once, holds, then, wait_ms=POLL_MS)

    def _be_gone(self) -> None:
        self.history.broker(self.leader).kill()
        self.history.broker(self.other).start()
        self._once(
            lambda: self._now().leader < 0 and self.other in self.history.image.brokers,
            self._allow,
        )

    def _allow(self) -> None:
        self.faults.set_config(OTHER, {"unclean.leader.election.enable": "true"})
        self._once(lambda: self._now().leader == self.other, self._come_back)

    def _come_back(self) -> None:
        self.is_led = True
        self.history.broker(self.leader).start()

    def unfinished(self) -> list[str]:
        # With a fault, all replicas may be back before the unclean election.
        is_done = self.is_led or self.faults.step is not None
        return [] if is_done else ["who was allowed to lead did not"]


SCRIPTS: Final[Mapping[str, type[Script]]] = {
    "election": Election,
    "creation": Creation,
    "adoption": Adoption,
    "automatic creation": AutomaticCreation,
    "reassignment": Reassignment,
    "reading": Reading,
    "early state": EarlyState,
    "addition": Addition,
    "user": UserChange,
    "deletion": Deletion,
    "marking": Marking,
    "shutdown": Shutdown,
    "ISR note": IsrNote,
    "absence": Absence,
    "return": Return,
    "loss": Loss,
    "settings": Settings,
    "permission": Permission,
}


WITH_ANOTHER: Final = ("deletion", "marking", "absence", "return", "permission")
"""Scripts that need a topic to which no client writes."""


class ScriptedFaults(Writers):
    """Runs one script, with one fault at one step."""

    history: ScriptedHistory

    def __init__(self, history: ScriptedHistory) -> None:
        super().__init__(history)
        self.step = history.step
        self.script = SCRIPTS[history.script](self)
        self.steps = self.in_time = 0
        self._loses_answer = False

    def begin(self) -> None:
        ensemble, history = self.ensemble, self.history
        ensemble.before_step, ensemble.after_step = self._before_write, self._after_write
        history.before_told, history.after_told = self._before_told, self._after_told
        self.script.begin()

    def ask(self, work: Coroutine[Any, Any, None]) -> None:
        """Have the admin send a request."""
        self._do(work)

    def mark(self, topic: str) -> None:
        """Mark a topic for deletion, as a tool does."""
        self._write(Op("create", f"/admin/delete_topics/{topic}"))

    def stall(self, broker: Daemon, for_ms: int) -> None:
        """Delay a broker's requests to ZooKeeper."""
        client = self._client(broker)
        if client is not None:
            client.stall(for_ms)

    def shrink(self, index: int) -> None:
        """Remove a follower from an ISR, and create the ISR notification much later."""
        self._shrink(index, 1_000)

    def put(self, path: str, data: bytes) -> None:
        """Write a znode, as a tool does."""
        self._put(path, data)

    def tell(self, note: Mapping[str, object]) -> None:
        """Write a notification of changed settings."""
        data = json.dumps(note).encode()
        self._write(Op("create", znodes.CONFIG_CHANGE_PREFIX, data, sequence=True))

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

    def elected(self) -> Daemon:
        """Return the broker that was elected last."""
        return self.history.broker(int(self.truth.elected[1:]))

    def _is_now(self, what: str) -> bool:
        self.steps += 1
        if self.step is None or self.step.number != self.steps:
            return False
        fault = self.step.fault
        self.scheduler.say("--", f"{fault} at {what}")
        if fault == EXPIRE:
            self._expire(self.elected())
        elif fault == EXPIRE_ANOTHER:
            self._expire(self.another())
        elif fault == ANOTHER_WRITES:
            self.isr_note()
        elif fault == RESIGN:
            self.give_up(self.elected())
        elif fault == KILL and self.elected().node.is_up:
            elected = self.elected()
            # The process must not end within a turn of its own loop.
            self.scheduler.after(0, elected.kill)
            self.scheduler.after(BACK_MS[self.step.number % len(BACK_MS)], elected.start)
        self._loses_answer = fault == LOSE_ANSWER
        return fault == LOSE_REQUEST

    def give_up(self, broker: Daemon) -> None:
        """Have a controller resign, as after a failed write of its decisions."""
        node = self.history.node(broker)
        if node is not None and node.elected is not None and broker.loop is not None:
            with broker.loop.running():
                node._fail()

    def another(self) -> Daemon:
        """Return a broker other than the controller, preferably without a replica of ``OTHER``."""
        others = [broker for broker in self.history.brokers if broker is not self.elected()]
        topic = self.truth.image.topics.get(OTHER)
        replicas = () if topic is None else topic.partitions[0].replicas
        return next((other for other in others if other.node_id not in replicas), others[0])

    def _before_write(self, connection: Connection, request: Request) -> bool:
        self.script.arrives(request)
        if self._is_now(f"{connection.client.name}: {request}"):
            connection.close()
        return not connection.is_open

    def _after_write(self, connection: Connection, _request: Request) -> bool:
        lost, self._loses_answer = self._loses_answer, False
        if lost:
            connection.close()
        return lost

    def _before_told(self, broker: Daemon, request: Any) -> bool:
        if self._is_now(f"{broker.node.name}: {type(request).__name__}"):
            return True
        # A broker whose session expires is cut off from the network, so it also misses the
        # controller's request.
        is_its = self.step == (self.steps, EXPIRE_ANOTHER)
        return is_its and broker is self.another()

    def _after_told(self, _broker: Daemon, _request: Any) -> bool:
        lost, self._loses_answer = self._loses_answer, False
        return lost


class ScriptedHistory(ZooKeeperHistory):
    """A cluster that runs one script."""

    faults: ScriptedFaults

    def __init__(
        self, script: str, step: Step | None, told: Callable[[str], None] | None = None
    ) -> None:
        self.script, self.step = script, step
        super().__init__(OPTIONS, told)

    def _faults(self) -> ScriptedFaults:
        return ScriptedFaults(self)

    async def _make_topic(self) -> None:
        await super()._make_topic()
        if self.script in WITH_ANOTHER:
            # Two replicas on three brokers: one broker has none.
            await self.admin.create(OTHER, 1, 2)

    def _unsettled(self) -> list[str]:
        return super()._unsettled() + self.faults.script.unfinished()


def play(script: str, step: Step | None, tell: Callable[[str], None] | None = None) -> int:
    """Run a script; return how many steps it had before the recovery. Raises on a failure."""
    history = ScriptedHistory(script, step, tell)
    given = "" if step is None else f" --step {step.number} --fault '{step.fault}'"
    played(history, f"python -m tests.sim.zk_scripts --script '{script}'{given}")
    return history.faults.in_time


def steps(script: str, every: int = 1) -> Iterator[Step]:
    """Yield one in ``every`` steps of a script for each fault, with different first steps."""
    count = play(script, None)
    for at, fault in enumerate(FAULTS):
        for number in range(1 + at * every // len(FAULTS), count + 1, every):
            yield Step(number, fault)


def main() -> int:
    """Run the scripts; return 1 if one failed."""
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
            except Exception as error:  # noqa: BLE001 - any failure is reported
                failed += 1
                print(f"{script}, {step}: {type(error).__name__}: {str(error)[:300]}")
        print(f"{script}: {count} histories, {time.perf_counter() - begun:.1f} s", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
