"""Transactions in a cluster of three brokers whose coordinator is killed at each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition

from fencepost.coordinator.runtime.key_partition import partition_for
from fencepost.testing import Cluster

PARTITIONS = 3
LIMIT_S = 60
STEPS = ["claimed", "begun", "written"]
ID = "an id"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(3) as found:
        yield found


def coordinator(cluster: Cluster, topic: str, key: str) -> int:
    """Return the broker that coordinates a group or a transactional id."""
    count = len(cluster.image.topics[topic].partitions)
    return cluster.leader(topic, partition_for(key, count))


def read(cluster: Cluster, topic: str) -> list[str]:
    """Return the committed values of a topic, sorted."""
    settings = {"group.id": "reader", "enable.partition.eof": True, "log_level": 0}
    consumer = Consumer({**settings, "bootstrap.servers": cluster.bootstrap})
    consumer.assign([TopicPartition(topic, index, 0) for index in range(PARTITIONS)])
    values, ended = [], set()
    while len(ended) < PARTITIONS:
        message = consumer.poll(LIMIT_S)
        assert message is not None, f"{topic} does not end"
        if message.error() is None:
            values.append(message.value().decode())
        elif message.error().code() == KafkaError._PARTITION_EOF:
            ended.add(message.partition())
    consumer.close()
    return sorted(values)


def goes_through(cluster: Cluster, topic: str, step: str, go: Callable[[], None]) -> None:
    """Run transactions on three leaders; call ``go`` when the first reaches ``step``."""
    cluster.topic(topic, PARTITIONS)
    settings = {"transactional.id": ID, "transaction.timeout.ms": 60_000, "log_level": 0}
    producer = Producer({**settings, "bootstrap.servers": cluster.bootstrap})

    def is_at(here: str) -> None:
        if here == step:
            go()

    producer.init_transactions(LIMIT_S)
    is_at("claimed")
    expected = []
    for outcome in ("commit", "abort", "commit again"):
        producer.begin_transaction()
        is_at("begun")
        values = [f"{outcome} {index}" for index in range(PARTITIONS)]
        for index, value in enumerate(values):
            producer.produce(topic, value, partition=index)
        assert producer.flush(LIMIT_S) == 0
        is_at("written")
        step = "" if outcome == "commit" else step
        if outcome == "abort":
            producer.abort_transaction(LIMIT_S)
        else:
            producer.commit_transaction(LIMIT_S)
            expected += values
    assert read(cluster, topic) == sorted(expected)


@pytest.mark.parametrize("step", STEPS)
def test_transactions_complete_after_the_coordinator_is_killed(cluster: Cluster, step: str) -> None:
    gone: list[int] = []

    def kill() -> None:
        if not gone:
            gone.append(coordinator(cluster, "__transaction_state", ID))
            cluster.kill(gone[0])

    goes_through(cluster, f"killed-{step}", step, kill)
    cluster.restart(gone[0])
