"""Real clients while brokers go and come back: no error that they do not get from Apache Kafka.

librdkafka, Java's clients, aiokafka and franz-go at the same time (``failover/``), on three brokers
of Apache Kafka and then on three of Fencepost, through the same faults. Each writes, reads in a
group, and copies in transactions; all that its application gets to see of errors is told.
"""

from __future__ import annotations

import functools
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from confluent_kafka import Message

from tests.oracle.go_build import built
from tests.oracle.test_joining import created
from tests.support.cluster import Cluster
from tests.support.daemon import Daemon
from tests.support.kafka import Kafka, KafkaCluster, java_command
from tests.support.member import MemberCluster
from tests.support.pipeline import Clients
from tests.support.processes import Child
from tests.support.raw import Answer
from tests.support.waits import until

pytestmark = [pytest.mark.oracle, pytest.mark.usefixtures("java_tools"), pytest.mark.timeout(600)]

PROGRAMS = Path(__file__).with_name("failover")
NAMES: Final = "librdkafka", "java", "aiokafka", "franz-go"
PARTITIONS: Final = 3
COORDINATORS: Final = "__consumer_offsets", "__transaction_state"
TOPICS: Final = [f"{way}-{name}" for name in NAMES for way in ("in", "out")]
ALL: Final = [*COORDINATORS, *TOPICS]

SETTINGS: Final = {
    "broker.heartbeat.interval.ms": "500",
    "broker.session.timeout.ms": "3000",
    "replica.lag.time.max.ms": "4000",
    "min.insync.replicas": "2",
    "transaction.state.log.min.isr": "2",
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.num.partitions": "1",
    "group.initial.rebalance.delay.ms": "0",
    "auto.leader.rebalance.enable": "false",
    "log.retention.ms": "-1",
}

TOLD: Final = re.compile(r"(?:\d\d:\d\d:\d\d\.\d+ )?ERROR (.*)")
"""By the program, or by the log of Java's clients."""

NO_CONNECTION: Final = re.compile(
    r"^([\w ]+):.*(Connect to .* failed|ConnectionRefused|KafkaConnectionError|NodeNotReadyError|"
    r"connection refused|connection reset|broken pipe|EOF).*"
)
"""All that says no more than that a process is gone: in whose words depends on the moment."""

GONE: Final = "no connection"
QUIET: Final = "quiet"
MOVE: Final = "preferred leaders are elected"
LOOK_S: Final = 0.1
ATTEMPTS: Final = 2

NOT_IN_EACH_RUN: Final[Mapping[str, set[str]]] = {}
"""What Apache Kafka causes as well, but not in each run: it depends on what is under way."""

Errors = dict[str, Counter[str]]
"""How often each was told, by step."""


class Client:
    """One of the programs."""

    def __init__(self, name: str, command: list[str], bootstrap: str, stop: Path) -> None:
        self.name = name
        self.child = Child([*command, bootstrap, name, str(stop)])
        self._looked_at = 0

    @property
    def at(self) -> tuple[int, ...]:
        """What it has sent, been acknowledged, read and copied; nothing at first."""
        lines = self.child.lines
        last = next((one for one in reversed(lines[-1000:]) if one.startswith("AT ")), "")
        return tuple(int(one) for one in last.split()[1:])

    def new_errors(self) -> Counter[str]:
        """What it told since the last call."""
        begin, self._looked_at = self._looked_at, len(self.child.lines)
        told = (TOLD.match(one) for one in self.child.lines[begin : self._looked_at])
        return Counter(plain(one[1]) for one in told if one)


def plain(text: str) -> str:
    """Without what differs from one time to the other: addresses, numbers."""
    if gone := NO_CONNECTION.match(text):
        return f"{gone[1]}: {GONE}"
    return re.sub(r"\d+", "#", re.sub(r"(\w+://)?[\w.]+:\d+(/\w+)?", "…", text))


class Scene(NamedTuple):
    """A cluster under way, with all clients at it."""

    cluster: KafkaCluster | MemberCluster
    clients: list[Client]

    def node(self, number: int) -> Kafka | Daemon:
        return self.cluster.node(number)

    def partitions(self) -> list[Answer]:
        """What the first broker knows."""
        with Cluster(self.node(1).bootstrap) as client:
            answer = client.call("metadata", 8, topics=[{"name": name} for name in ALL])
        return [part for topic in answer["topics"] for part in topic["partitions"]]

    def have_isr(self, *expected: int) -> bool:
        parts = self.partitions()
        return len(parts) == len(TOPICS) * PARTITIONS + len(COORDINATORS) and all(
            sorted(part["isr_nodes"]) == list(expected) for part in parts
        )

    def go_on(self, what: str) -> None:
        """Wait until every client has written, read and copied more."""
        goals = {one.name: [then + 12 for then in one.at] for one in self.clients}
        behind: list[str] = []

        def probe() -> bool:
            behind[:] = [
                f"{one.name} at {one.at}, not at {goals[one.name]}"
                for one in self.clients
                if any(now < goal for now, goal in zip(one.at, goals[one.name], strict=True))
            ]
            return not behind

        try:
            until(probe, what)
        except TimeoutError as error:
            raise TimeoutError(f"{error}; {behind}") from None

    # --- what is done to it ---

    def down_and_up(self, number: int, how: Callable[[Kafka | Daemon], object]) -> None:
        how(self.node(number))
        rest = [one for one in (1, 2, 3) if one != number]
        until(lambda: self.have_isr(*rest), f"every ISR is without {number}", poll_s=LOOK_S)
        self.go_on(f"without {number}")
        self.node(number).start()

    def leader_is_killed(self) -> None:
        self.down_and_up(2, lambda node: node.kill())

    def broker_is_stopped(self) -> None:
        self.down_and_up(3, terminated)

    def preferred_leaders(self) -> None:
        with Cluster(self.node(1).bootstrap) as client:
            answer = client.call(
                "elect_leaders", 2, election_type=0, topic_partitions=None, timeout=20_000
            )
        assert answer["error_code"] == "none", answer
        until(
            lambda: all(p["leader_id"] == p["replica_nodes"][0] for p in self.partitions()),
            "every leader is the preferred one",
        )

    def coordinators_are_killed(self) -> None:
        self.down_and_up(3, lambda node: node.kill())


def terminated(node: Kafka | Daemon) -> None:
    assert node.child is not None
    node.child.terminate()


STEPS: Final = {
    QUIET: lambda scene: None,
    "a leader is killed": Scene.leader_is_killed,
    "a broker is stopped": Scene.broker_is_stopped,
    MOVE: Scene.preferred_leaders,
    "the coordinators are killed": Scene.coordinators_are_killed,
}


def story(
    cluster: KafkaCluster | MemberCluster, commands: Mapping[str, list[str]], stop: Path
) -> dict[str, Errors]:
    """Lead it; what each client told. All is checked to be there once, and in order."""
    cluster.start()
    first = cluster.node(1).bootstrap
    # Two and three are those that go: Apache Kafka's first is the controller as well.
    for name in COORDINATORS:
        created(first, name, [[3, 1, 2]])
    for name in TOPICS:
        created(first, name, [[2, 3, 1], [3, 1, 2], [1, 2, 3]])
    bootstrap = cluster.bootstrap
    scene = Scene(cluster, [Client(*one, bootstrap, stop) for one in commands.items()])
    errors: dict[str, Errors] = {one.name: {} for one in scene.clients}
    try:
        until(lambda: all(one.at[3:] > (0,) for one in scene.clients), "all clients are at work")
        for step, act in STEPS.items():
            begin = time.monotonic()
            act(scene)
            until(lambda: scene.have_isr(1, 2, 3), "every ISR is full", poll_s=LOOK_S)
            scene.go_on(f"{cluster.name}, after: {step}")
            print(f"{cluster.name}: {step}: {time.monotonic() - begin:.1f} s")
            for one in scene.clients:
                errors[one.name][step] = one.new_errors()
        stop.touch()
        for one in scene.clients:
            check(one, Clients(bootstrap))
            errors[one.name]["the end"] = one.new_errors()
    finally:
        for one in scene.clients:
            one.child.kill()
            said = "\n".join(one.child.lines)
            stop.with_name(f"{stop.name}-{one.name}.txt").write_text(said, encoding="utf-8")
    return errors


def check(client: Client, readers: Clients) -> None:
    """It wrote, read and copied every number once and in order."""
    sent = int(client.child.wait_for_line(r"^SENT (\d+)$", deadline_s=60)[1])
    until(lambda: client.at[2] == sent, f"{client.name} has read all")
    for topic in (f"in-{client.name}", f"out-{client.name}"):
        found = until(functools.partial(all_of, readers, topic, sent), f"{topic} has all")
        for index in range(PARTITIONS):
            values = [int(one.value()) for one in found if one.partition() == index]
            assert values == list(range(index, sent, PARTITIONS)), f"{topic}-{index}"


def all_of(readers: Clients, topic: str, count: int) -> list[Message] | None:
    """What is committed in a topic, once it is so much."""
    found = readers.messages(topic, PARTITIONS)
    return found if len(found) >= count else None


def test_no_error_that_apache_kafka_does_not_cause(tmp_path: Path) -> None:
    commands = {
        "librdkafka": [sys.executable, str(PROGRAMS / "librdkafka.py")],
        "java": java_command(str(PROGRAMS / "Failover.java")),
        "aiokafka": [sys.executable, str(PROGRAMS / "by_aiokafka.py")],
        "franz-go": [str(built("./failover", "franz-go-failover"))],
    }

    def told_by(make: type[KafkaCluster | MemberCluster], attempt: int) -> dict[str, Errors]:
        cluster = make(tmp_path / f"{make.name}-{attempt}", settings=SETTINGS)
        try:
            return story(cluster, commands, tmp_path / f"stop-{make.name}-{attempt}")
        finally:
            cluster.stop()

    theirs: dict[str, set[str]] = {name: set(NOT_IN_EACH_RUN.get(name, ())) for name in NAMES}
    # What depends on the moment may come of Apache Kafka the next time.
    for attempt in range(ATTEMPTS):
        kafka, ours = told_by(KafkaCluster, attempt), told_by(MemberCluster, attempt)
        for name in NAMES:
            show(name, ours[name], kafka[name])
            theirs[name] |= set().union(*kafka[name].values())
        extra = {
            (name, step, what)
            for name in NAMES
            for step, found in ours[name].items()
            for what in found
            if what not in theirs[name]
            or (is_out_of_place(step, what) and what not in kafka[name][step])
        }
        if not extra:
            return
        print("only of ours:", extra)
    raise AssertionError(extra)


def is_out_of_place(step: str, what: str) -> bool:
    """Whether it is told at a step that does not explain it: all of the first, and lost brokers."""
    return step == QUIET or (step == MOVE and what.endswith(GONE))


def show(name: str, ours: Errors, theirs: Errors) -> None:
    """Print how often each was told: by ours, and by Apache Kafka."""
    for step, found in ours.items():
        for what in sorted(found | theirs[step]):
            print(f"{found[what]:4} {theirs[step][what]:4}  {name}: {step}: {what}")
