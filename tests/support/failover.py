"""Three brokers of which one is killed, stopped or frozen, ours or Apache Kafka's, under clients.

An idempotent producer, a transactional pipeline and a consumer group go on meanwhile. A *turn*
takes the broker that leads a topic's first partition away and brings it back, and tells how long
nothing could be produced, and how long it took until every ISR was full again.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from confluent_kafka import Consumer, KafkaException, Message, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from tests.support.cluster import Cluster
from tests.support.kafka import KafkaCluster
from tests.support.member import Member, MemberCluster
from tests.support.pipeline import Clients, Pipeline
from tests.support.raw import Answer
from tests.support.waits import until

SOURCE, TARGET, PARTITIONS = "in", "out", 3
OFFSETS, TRANSACTIONS = "__consumer_offsets", "__transaction_state"
"""Of one partition each: its leader coordinates all."""

WAYS = "kill", "stop", "freeze"
TURNS = [
    (way, (SOURCE, OFFSETS, TRANSACTIONS)[(shift + number) % 3])
    for shift in range(3)
    for number, way in enumerate(WAYS)
]
"""What is done to the leader of which topic's first partition. The first three have every way and
every topic."""

PATIENCE = {"socket.timeout.ms": 3000, "metadata.recovery.strategy": "none", "log_level": 0}
"""A client notices a frozen broker by nothing else; librdkafka would wait for a minute."""

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
    "log.cleaner.enable": "false",  # each replica cleans when it likes
}
"""Of the cluster, whose controller has to be a process of its own."""


class Nodes:
    """The processes of a cluster of three. Each start is waited for."""

    def __init__(self, cluster: MemberCluster | KafkaCluster) -> None:
        self.cluster = cluster
        self.bootstrap = cluster.bootstrap

    def stop(self) -> None:
        """Kill all that run."""
        self.cluster.stop()
        if isinstance(self.cluster, MemberCluster):
            for one in (*self.cluster.nodes, self.cluster.controller):
                if one.child is not None:
                    self._keep(one)

    @staticmethod
    def _keep(one: Member) -> None:
        """Leave what a process that is gone has said beside its data, for who looks into it."""
        assert one.child is not None
        with (one.data_dir.parent / "output.txt").open("a", encoding="utf-8") as file:
            file.write("\n".join([*one.child.lines, "--- gone", ""]))

    def partitions(self, *topics: str, witness: int = 1) -> list[Answer]:
        """What a broker knows of these topics' partitions."""
        with Cluster(self.cluster.node(witness).bootstrap) as client:
            answer = client.call("metadata", 8, topics=[{"name": name} for name in topics])
        return [part for topic in answer["topics"] for part in topic["partitions"]]

    def has_isr(self, witness: int = 1, *, without: int = 0) -> bool:
        """Whether every ISR has all brokers, or all but one, as far as ``witness`` knows."""
        expected = {1, 2, 3} - {without}
        parts = self.partitions(SOURCE, TARGET, OFFSETS, TRANSACTIONS, witness=witness)
        full = [set(part["isr_nodes"]) == expected for part in parts]
        return len(full) == 2 * PARTITIONS + 2 and all(full)

    def leader(self, topic: str) -> int:
        """Who leads the first partition."""
        return int(self.partitions(topic)[0]["leader_id"])

    def down(self, node_id: int, way: str) -> None:
        """Take a broker away."""
        child = self.cluster.node(node_id).child
        assert child is not None
        if way == "kill":
            child.kill()
        elif way == "stop":
            child.terminate()
        else:
            os.kill(child.pid, signal.SIGSTOP)

    def back(self, node_id: int, way: str) -> None:
        """Bring it back."""
        broker = self.cluster.node(node_id)
        assert broker.child is not None
        if way == "freeze":
            os.kill(broker.child.pid, signal.SIGCONT)
            return
        if isinstance(broker, Member):
            self._keep(broker)
        broker.start()


class Writer(threading.Thread):
    """Writes numbers, shared out over the partitions, and knows which were acknowledged when."""

    def __init__(self, bootstrap: str) -> None:
        super().__init__(name="writer", daemon=True)
        self._producer = Producer(
            {"bootstrap.servers": bootstrap, "enable.idempotence": True, "linger.ms": 5, **PATIENCE}
        )
        self.stopping = threading.Event()
        self.sent = 0
        self.acknowledged: list[list[int]] = [[] for _ in range(PARTITIONS)]
        self.refused: list[str] = []
        self.longest_s = 0.0
        """Between two acknowledgements of one partition, since it was last set to zero."""
        self._last = [time.monotonic()] * PARTITIONS

    def run(self) -> None:
        """Until ``stopping``; all that was sent is acknowledged then."""
        while not self.stopping.wait(0.02):
            for _ in range(2 * PARTITIONS):
                index = self.sent % PARTITIONS
                self._producer.produce(
                    SOURCE, b"%d" % self.sent, partition=index, on_delivery=self._delivered
                )
                self.sent += 1
            self._producer.poll(0)
        assert self._producer.flush(60) == 0

    def _delivered(self, error: object, message: Message) -> None:
        if error is not None:
            self.refused.append(str(error))
            return
        index, now = message.partition(), time.monotonic()
        self.longest_s = max(self.longest_s, now - self._last[index])
        self._last[index] = now
        self.acknowledged[index].append(int(message.value()))

    def goes_on(self, what: str) -> None:
        """Wait until something newly written was acknowledged in every partition."""
        begin = self.sent
        until(lambda: all(one and one[-1] >= begin for one in self.acknowledged), what)


class GroupMember(threading.Thread):
    """A member of a group that commits what it has seen, and notes what was committed."""

    def __init__(self, clients: Clients, seen: set[int], committed: dict[int, int]) -> None:
        super().__init__(name="member", daemon=True)
        self._clients, self._seen, self._committed = clients, seen, committed
        self.stopping = threading.Event()
        self.refused: Counter[str] = Counter()

    def run(self) -> None:
        """Until ``stopping``."""
        consumer = self._clients.consumer("group")
        consumer.subscribe([SOURCE])
        while not self.stopping.is_set():
            found = [one for one in consumer.consume(1_000, 0.2) if not one.error()]
            if found:
                self._seen.update(int(one.value()) for one in found)
                self._commit(consumer)
        consumer.close()

    def _commit(self, consumer: Consumer) -> None:
        try:
            for one in consumer.commit(asynchronous=False):
                if one.error is None and one.offset >= 0:
                    before = self._committed.get(one.partition, 0)
                    self._committed[one.partition] = max(before, one.offset)
        except KafkaException as error:
            self.refused[error.args[0].name()] += 1


class AtWork:
    """The clients, and what they have seen."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.clients = Clients(nodes.bootstrap, PATIENCE)
        self.seen: set[int] = set()
        self.committed: dict[int, int] = {}
        """Offsets of the group, by partition."""
        self.writer = Writer(nodes.bootstrap)
        self.pipeline = Pipeline(self.clients, "pipeline", SOURCE, TARGET)
        self.members = [GroupMember(self.clients, self.seen, self.committed) for _ in range(2)]

    def finish(self) -> None:
        """Write no more, and wait until all has been read and copied."""
        self.writer.stopping.set()
        self.writer.join(90)
        until(lambda: self.seen == set(range(self.writer.sent)), "the group has read all")
        until(
            lambda: len(self.clients.messages(TARGET, PARTITIONS)) >= self.writer.sent,
            "all is copied",
            poll_s=0.5,
        )


@contextmanager
def at_work(nodes: Nodes) -> Iterator[AtWork]:
    """Make the topics, and have the clients at work."""
    topics = [NewTopic(name, PARTITIONS, 3) for name in (SOURCE, TARGET)]
    admin = AdminClient({"bootstrap.servers": nodes.bootstrap})
    for made in admin.create_topics(topics).values():
        made.result(30)
    work = AtWork(nodes)
    threads = (work.writer, work.pipeline, *work.members)
    for one in threads:
        one.start()
    try:
        until(lambda: len(work.committed) == PARTITIONS, "the group is at work")
        until(lambda: nodes.partitions(TRANSACTIONS), "transactions are under way")
        yield work
    finally:
        for one in threads:
            one.stopping.set()
        for one in threads:
            one.join(90)


class Figures(NamedTuple):
    """Of one turn, in seconds: the longest pause of producing, and until every ISR was full."""

    way: str
    pause_s: float
    full_s: float


def turn(nodes: Nodes, writer: Writer, way: str, topic: str) -> Figures:
    """One broker goes and comes back."""
    until(nodes.has_isr, "all in sync")
    victim = nodes.leader(topic)
    witness = victim % 3 + 1
    what = f"{way} of {victim}, leader of {topic}"
    writer.longest_s = 0.0
    nodes.down(victim, way)
    until(lambda: nodes.has_isr(witness, without=victim), f"every ISR is without it: {what}")
    writer.goes_on(f"producing goes on: {what}")
    pause_s = writer.longest_s
    begin = time.monotonic()
    nodes.back(victim, way)
    until(lambda: nodes.has_isr(witness), f"every ISR is full: {what}")
    figures = Figures(way, pause_s, time.monotonic() - begin)
    print(f"{what}: {figures.pause_s:.2f} s, {figures.full_s:.2f} s")
    return figures
