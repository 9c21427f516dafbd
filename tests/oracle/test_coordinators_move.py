"""Coordinators of Fencepost and Apache Kafka 4.3 in one cluster, in which a broker is killed.

Transactions span partitions whose leaders are of both kinds, so brokers send each other markers and
verifications in both directions. The logs of transactions and of groups have replicas of both
kinds. Nothing may be lost.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer

from tests.oracle.test_joining import created, leaders, until_unfenced
from tests.support import kafka43
from tests.support.kafka import Kafka
from tests.support.member import Member
from tests.support.pipeline import QUIET, Clients, Pipeline
from tests.support.waits import until

KAFKA = {
    "broker.session.timeout.ms": "4000",
    "min.insync.replicas": "2",
    "transaction.state.log.num.partitions": "4",
    "offsets.topic.num.partitions": "4",
}
JAVA, OURS, ALSO_OURS = 1, 101, 102
BROKERS = JAVA, OURS, ALSO_OURS
PARTITIONS = 3


def turned(count: int) -> list[list[int]]:
    """Return replica assignments in which each broker is the first replica in turn."""
    return [[BROKERS[(at + number) % 3] for number in range(3)] for at in range(count)]


class Mixed:
    """Apache Kafka, which is also the controller, and two brokers of Fencepost."""

    def __init__(self, directory: Path) -> None:
        home = directory / "kafka"
        home.mkdir()
        self.kafka = Kafka(home, KAFKA, libs=kafka43.jars)
        self.kafka.start()
        self.members = {
            node_id: Member(directory / str(node_id), self.kafka.controller, node_id=node_id)
            for node_id in BROKERS[1:]
        }
        for node_id in self.members:
            self.start(node_id)
        created(self.kafka.bootstrap, "__transaction_state", turned(4))
        created(self.kafka.bootstrap, "__consumer_offsets", turned(4))
        for topic in ("in", "out"):
            created(self.kafka.bootstrap, topic, turned(PARTITIONS))
        every = set(BROKERS)
        until(lambda: set(leaders(self.kafka.bootstrap, "out").values()) == every, "all lead")
        members = (member.bootstrap for member in self.members.values())
        self.bootstrap = ",".join((self.kafka.bootstrap, *members))
        self.clients = Clients(self.bootstrap)

    def start(self, node_id: int) -> None:
        self.members[node_id].start()
        until_unfenced(self.kafka, node_id)

    def read(self, topic: str) -> list[str]:
        """Return all committed values up to the last stable offsets."""
        return [message.value().decode() for message in self.clients.messages(topic, PARTITIONS)]

    def stop(self) -> None:
        for member in self.members.values():
            member.kill()
        self.kafka.stop()


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mixed]:
    cluster = Mixed(tmp_path_factory.mktemp("mixed"))
    yield cluster
    cluster.stop()


def test_transactions_across_brokers_of_both_kinds_are_atomic(mixed: Mixed) -> None:
    """With eight transactional ids, every broker coordinates some of them."""
    expected = set()
    for number in range(8):
        producer = mixed.clients.producer(f"id-{number}")
        for turn in range(3):
            producer.begin_transaction()
            values = [f"{number}-{turn}-{index}" for index in range(PARTITIONS)]
            for index, value in enumerate(values):
                producer.produce("in", value, partition=index)
            if turn == 1:
                producer.flush(30)
                producer.abort_transaction(30)
            else:
                producer.commit_transaction(30)
                expected.update(values)
    assert sorted(mixed.read("in")) == sorted(expected)


def test_pipelines_stay_exactly_once_while_brokers_are_killed_or_stopped(mixed: Mixed) -> None:
    pipelines = [Pipeline(mixed.clients, f"pipeline-{at}", "in", "out") for at in range(2)]
    for pipeline in pipelines:
        pipeline.start()
    producer = Producer({"bootstrap.servers": mixed.bootstrap, "enable.idempotence": True, **QUIET})
    sent = 0

    def send(seconds: float) -> None:
        nonlocal sent
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            for _ in range(20):
                producer.produce("in", f"record {sent}", partition=sent % PARTITIONS)
                sent += 1
            producer.flush(10)

    try:
        for node_id, how in ((OURS, "kill"), (ALSO_OURS, "stop")):
            send(2)
            getattr(mixed.members[node_id], how)()
            send(6)  # longer than the session timeout
            mixed.start(node_id)
            send(2)
        assert producer.flush(60) == 0
        expected = sorted(value for value in mixed.read("in"))
        until(lambda: len(mixed.read("out")) >= len(expected), "all is copied", deadline_s=120)
    finally:
        for pipeline in pipelines:
            pipeline.stopping.set()
        for pipeline in pipelines:
            pipeline.join(90)
    assert sent == sum(value.startswith("record") for value in expected)
    assert sorted(mixed.read("out")) == expected
