"""Failovers of three brokers of Fencepost, of Apache Kafka, or of both kinds.

An idempotent producer, a transactional pipeline and groups of both protocols work all the time. A
*turn* kills, stops or freezes a broker or the active controller, and then restores it. The broker
is the leader of a topic's first partition. The turn measures the pause of produce requests, and the
time until every ISR is full again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from confluent_kafka import Consumer, KafkaException, Message, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from tests.support.cluster import Cluster
from tests.support.mixed import MixedCluster, Node
from tests.support.pipeline import Clients, Pipeline
from tests.support.raw import Answer, ConnectionLostError
from tests.support.waits import until

SOURCE, TARGET, PARTITIONS = "in", "out", 3
OFFSETS, TRANSACTIONS = "__consumer_offsets", "__transaction_state"
"""Internal topics of one partition each, whose leaders coordinate all groups and transactions."""

ASSIGNED = {
    SOURCE: [[2, 1, 3], [3, 2, 1], [1, 3, 2]],
    TARGET: [[1, 2, 3], [2, 3, 1], [3, 1, 2]],
    OFFSETS: [[3, 1, 2]],
    TRANSACTIONS: [[1, 2, 3]],
}
"""Replicas of each partition, of which the first one leads when a turn begins. The topics have
different leaders, so faults of the leaders of three topics affect every broker.
"""

CONTROLLER = "the controller"
WAYS = "kill", "stop", "freeze"
CONTROLLER_FIRST = "kill both"
"""Kill the active controller and then the leader, which has no successor until the controller is
back."""

TURNS = [
    (fault, (SOURCE, OFFSETS, TRANSACTIONS)[(shift + number) % 3])
    for shift in range(3)
    for number, fault in enumerate(WAYS)
]
"""Pairs of a fault and a topic; the fault affects the leader of the topic's first partition. The
first three turns cover every fault and every topic.
"""

CONTROLLER_TURNS = [("kill", CONTROLLER), (CONTROLLER_FIRST, OFFSETS), ("freeze", CONTROLLER)]
CONTROLLER_TURNS += [("stop", CONTROLLER), (CONTROLLER_FIRST, SOURCE)]
"""Turns with a fault of the active controller."""

PATIENCE = {"socket.timeout.ms": 3000, "metadata.recovery.strategy": "none", "log_level": 0}
"""Client settings: only a timeout reveals a frozen broker, and librdkafka's default is a minute."""

DEADLINE_S = 180.0
"""Deadline of every wait: a JVM may take a minute to start on a busy machine."""

LONGER_THAN_SESSIONS_S = 3.0

UNHEARD = OSError, ConnectionLostError
"""Errors of a request to a broker that is starting or stopping."""

T = TypeVar("T")

PROTOCOLS = "classic", "consumer"

SETTINGS = {
    "broker.heartbeat.interval.ms": "500",
    "broker.session.timeout.ms": "2000",
    "replica.lag.time.max.ms": "2000",
    "min.insync.replicas": "2",
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.min.isr": "2",
    "transaction.state.log.num.partitions": "1",
    "group.initial.rebalance.delay.ms": "0",
    "log.retention.ms": "-1",
    "log.cleaner.enable": "false",  # replicas compact at different times
}
"""Settings of a cluster whose controller is a process of its own."""


class Nodes:
    """The processes of a three-broker cluster. A node has started once it serves."""

    def __init__(self, cluster: MixedCluster) -> None:
        self.cluster = cluster
        self.bootstrap = cluster.bootstrap

    def stop(self) -> None:
        """Kill all running nodes."""
        self.cluster.stop()
        for node in self.cluster.all_nodes:
            if node.child is not None:
                self._keep(node)

    @staticmethod
    def _keep(node: Node) -> None:
        """Append the output of an ended process to a file beside its data, for analysis."""
        assert node.child is not None
        with (node.data_dir.parent / "output.txt").open("a", encoding="utf-8") as file:
            file.write("\n".join([*node.child.lines, "--- gone", ""]))

    def partitions(self, *topics: str, witness: int = 1) -> list[Answer]:
        """Return the partitions of these topics in a broker's Metadata."""
        with Cluster(self.cluster.node(witness).bootstrap) as client:
            answer = client.call("metadata", 8, topics=[{"name": name} for name in topics])
        return [part for topic in answer["topics"] for part in topic["partitions"]]

    def has_isr(self, witness: int = 1, *, without: int = 0) -> bool:
        """Return whether every ISR in the Metadata of ``witness`` is full.

        An ISR is full if it has all brokers, except for ``without``, which it must not have.
        """
        expected = {node.node_id for node in self.cluster.nodes} - {without}
        parts = self.partitions(*ASSIGNED, witness=witness)
        full = [set(part["isr_nodes"]) == expected for part in parts]
        return len(full) == 2 * PARTITIONS + 2 and all(full)

    def leader(self, topic: str) -> int:
        """Return the leader of the first partition."""
        return int(self.partitions(topic)[0]["leader_id"])

    def elect_preferred(self) -> None:
        """Elect the preferred leader of every partition; all replicas must be in sync."""
        with Cluster(self.cluster.node(1).bootstrap) as client:
            client.call("elect_leaders", 2, election_type=0, topic_partitions=None, timeout=5_000)

    def is_led_as_preferred(self, witness: int = 1) -> bool:
        """Return whether all partitions have their preferred leaders, according to ``witness``."""
        parts = self.partitions(*ASSIGNED, witness=witness)
        return all(part["leader_id"] == part["replica_nodes"][0] for part in parts)

    def active_controller(self, *, without: int = 0) -> int | None:
        """Return the id of the active controller, None while there is none.

        The controller ``without`` gets no request.
        """
        topics = [{"topic_name": "__cluster_metadata", "partitions": [{"partition_index": 0}]}]
        for controller in self.cluster.controllers:
            if controller.node_id == without:
                continue
            with contextlib.suppress(*UNHEARD), Cluster(self.cluster.address(controller)) as client:
                answer = client.call("describe_quorum", 1, topics=topics)
                for part in (part for topic in answer["topics"] for part in topic["partitions"]):
                    if part["error_code"] == "none":
                        return int(part["leader_id"])
        return None

    def inject_fault(self, node_id: int, fault: str) -> None:
        """Kill, stop or freeze a broker or a controller."""
        child = self.cluster.node(node_id).child
        assert child is not None
        if fault == "kill":
            child.kill()
        elif fault == "stop":
            child.terminate(deadline_s=DEADLINE_S)
        else:
            os.kill(child.pid, signal.SIGSTOP)

    def recover(self, node_id: int, fault: str) -> None:
        """Start or resume a broker or a controller."""
        node = self.cluster.node(node_id)
        assert node.child is not None
        if fault == "freeze":
            os.kill(node.child.pid, signal.SIGCONT)
            return
        self._keep(node)
        node.start()


class Writer(threading.Thread):
    """Writes numbers to the partitions in turn.

    It records acknowledged numbers and the pauses between acknowledgements.
    """

    def __init__(self, bootstrap: str) -> None:
        super().__init__(name="writer", daemon=True)
        self._producer = Producer(
            {"bootstrap.servers": bootstrap, "enable.idempotence": True, "linger.ms": 5, **PATIENCE}
        )
        self.stopping = threading.Event()
        self.sent = 0
        self.acknowledged: list[list[int]] = [[] for _ in range(PARTITIONS)]
        self.refused: list[str] = []
        self.longest_s = [0.0] * PARTITIONS
        """Longest pause between two acknowledgements of each partition, since its last reset."""
        self._last = [time.monotonic()] * PARTITIONS

    def run(self) -> None:
        """Write until ``stopping`` is set, and wait for all acknowledgements."""
        while not self.stopping.wait(0.02):
            for _ in range(2 * PARTITIONS):
                index = self.sent % PARTITIONS
                self._producer.produce(
                    SOURCE, b"%d" % self.sent, partition=index, on_delivery=self._delivered
                )
                self.sent += 1
            self._producer.poll(0)
        assert self._producer.flush(DEADLINE_S) == 0

    def _delivered(self, error: object, message: Message) -> None:
        if error is not None:
            self.refused.append(str(error))
            return
        index, now = message.partition(), time.monotonic()
        self.longest_s[index] = max(self.longest_s[index], now - self._last[index])
        self._last[index] = now
        self.acknowledged[index].append(int(message.value()))

    def goes_on(self, what: str) -> None:
        """Wait until every partition has acknowledged a new record."""
        begin = self.sent
        settled(
            lambda: all(numbers and numbers[-1] >= begin for numbers in self.acknowledged), what
        )


class Group:
    """Two members of one protocol, and the records that both have seen and committed together."""

    def __init__(self, clients: Clients, protocol: str) -> None:
        self.name = f"group-{protocol}"
        self.seen: set[int] = set()
        self.committed: dict[int, int] = {}
        """Partition → last committed offset that the coordinator confirmed to any member."""
        self.refused: Counter[str] = Counter()
        self.members = [GroupMember(clients, self, protocol) for _ in range(2)]


class GroupMember(threading.Thread):
    """A group member that commits the offsets of its records, and keeps the committed offsets."""

    def __init__(self, clients: Clients, group: Group, protocol: str) -> None:
        super().__init__(name="member", daemon=True)
        self._clients, self._group, self._protocol = clients, group, protocol
        self.stopping = threading.Event()

    def run(self) -> None:
        """Consume and commit until ``stopping`` is set."""
        consumer = self._clients.consumer(self._group.name, protocol=self._protocol)
        consumer.subscribe([SOURCE])
        while not self.stopping.is_set():
            messages = [message for message in consumer.consume(1_000, 0.2) if not message.error()]
            if messages:
                self._group.seen.update(int(message.value()) for message in messages)
                self._commit(consumer)
        consumer.close()

    def _commit(self, consumer: Consumer) -> None:
        committed = self._group.committed
        try:
            for position in consumer.commit(asynchronous=False):
                if position.error is None and position.offset >= 0:
                    committed[position.partition] = max(
                        committed.get(position.partition, 0), position.offset
                    )
        except KafkaException as error:
            self._group.refused[error.args[0].name()] += 1


class AtWork:
    """The clients, with the records that they have seen."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.clients = Clients(nodes.bootstrap, PATIENCE)
        self.writer = Writer(nodes.bootstrap)
        self.pipeline = Pipeline(self.clients, "pipeline", SOURCE, TARGET)
        self.groups = [Group(self.clients, protocol) for protocol in PROTOCOLS]

    @property
    def threads(self) -> list[Writer | Pipeline | GroupMember]:
        """The threads of all clients."""
        members = [member for group in self.groups for member in group.members]
        return [self.writer, self.pipeline, *members]

    def finish(self) -> None:
        """Stop writing, and wait until all records have been read and copied."""
        self.writer.stopping.set()
        self.writer.join(DEADLINE_S)
        expected = set(range(self.writer.sent))
        for group in self.groups:
            settled(lambda seen=group.seen: seen == expected, f"{group.name} has read all")
        settled(
            lambda: len(self.clients.messages(TARGET, PARTITIONS)) >= self.writer.sent,
            "all is copied",
        )


@contextmanager
def at_work(nodes: Nodes, assigned: Mapping[str, list[list[int]]] = ASSIGNED) -> Iterator[AtWork]:
    """Create the topics with these replicas, and run the clients within the block."""
    admin = AdminClient({"bootstrap.servers": nodes.bootstrap})
    # After its first metadata librdkafka closes its bootstrap connections, and requests are lost.
    admin.list_topics(timeout=DEADLINE_S)
    topics = [
        NewTopic(name, len(parts), replica_assignment=parts) for name, parts in assigned.items()
    ]
    for made in admin.create_topics(topics).values():
        made.result(30)
    work = AtWork(nodes)
    for thread in work.threads:
        thread.start()
    try:
        for group in work.groups:
            settled(lambda found=group.committed: len(found) == PARTITIONS, f"{group.name} commits")
        yield work
    finally:
        for thread in work.threads:
            thread.stopping.set()
        for thread in work.threads:
            thread.join(DEADLINE_S)


class Figures(NamedTuple):
    """Measurements of one turn, in seconds.

    The longest pause of any partition, the pause of the partition whose leader failed, and the time
    until every ISR was full.
    """

    fault: str
    pause_s: float
    led_pause_s: float
    full_s: float


def settled(probe: Callable[[], T | None], what: str) -> T:
    """Wait for a state of the cluster, with a deadline for a JVM on a busy machine."""

    def probe_once() -> T | None:
        with contextlib.suppress(*UNHEARD):
            return probe()
        return None

    return until(probe_once, what, deadline_s=DEADLINE_S, poll_s=0.05)


def turn(nodes: Nodes, writer: Writer, fault: str, topic: str, index: int = 0) -> Figures:
    """Inject a fault into a partition's leader or the active controller, and recover from it."""
    settled(nodes.has_isr, "all in sync")
    settled(lambda: nodes.is_led_as_preferred() or nodes.elect_preferred(), "preferred leaders")
    if topic == CONTROLLER:
        return controller_turn(nodes, writer, fault)
    controller = None
    victim = ASSIGNED[topic][index][0]
    witness = victim % 3 + 1
    what = f"{fault} of {victim}, leader of {topic}-{index}"
    led = next(number for number, replicas in enumerate(ASSIGNED[SOURCE]) if replicas[0] == victim)
    writer.longest_s = [0.0] * PARTITIONS
    if fault == CONTROLLER_FIRST:
        controller = settled(nodes.active_controller, "a controller")
        fault = "kill"
        nodes.inject_fault(controller, fault)
    nodes.inject_fault(victim, fault)
    if controller is not None:
        nodes.recover(controller, fault)
    settled(lambda: nodes.has_isr(witness, without=victim), f"every ISR is without it: {what}")
    writer.goes_on(f"producing goes on: {what}")
    pauses = list(writer.longest_s)
    begin = time.monotonic()
    nodes.recover(victim, fault)
    settled(lambda: nodes.has_isr(witness), f"every ISR is full: {what}")
    return print_figures(what, Figures(fault, max(pauses), pauses[led], time.monotonic() - begin))


def controller_turn(nodes: Nodes, writer: Writer, fault: str) -> Figures:
    """Inject a fault into the active controller, and recover from it; no leader may change."""
    victim = settled(nodes.active_controller, "a controller")
    what = f"{fault} of {victim}, the controller"
    writer.longest_s = [0.0] * PARTITIONS
    nodes.inject_fault(victim, fault)
    # Wait longer than a session timeout: no broker may be fenced because its heartbeats failed.
    end = time.monotonic() + LONGER_THAN_SESSIONS_S
    writer.goes_on(f"producing goes on: {what}")
    settled(lambda: time.monotonic() > end, what)
    if len(nodes.cluster.controllers) > 1:
        settled(lambda: nodes.active_controller(without=victim), f"another controller: {what}")
    writer.goes_on(f"producing still goes on: {what}")
    pause_s = max(writer.longest_s)
    begin = time.monotonic()
    nodes.recover(victim, fault)
    settled(nodes.active_controller, f"a controller: {what}")
    settled(nodes.has_isr, f"every ISR is full: {what}")
    return print_figures(what, Figures(fault, pause_s, pause_s, time.monotonic() - begin))


def print_figures(what: str, figures: Figures) -> Figures:
    """Print and return the figures; ``what`` is their title."""
    print(f"{what}: {figures.pause_s:.2f} s, {figures.full_s:.2f} s", flush=True)
    return figures
