"""Shows that librdkafka keeps using a group coordinator that Metadata no longer names.

    python -m tests.ecosystem.frozen_coordinator PPP/P   # three brokers of Fencepost
    python -m tests.ecosystem.frozen_coordinator JJJ/J   # three of Apache Kafka

A transactional producer sends a group's offsets. Then the group's coordinator is frozen until the
controller has fenced it and another broker coordinates the group. The producer sends offsets once
more, with a timeout of 15 s, and the program prints how long this takes.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from pathlib import Path

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tests.support.failover import ASSIGNED, OFFSETS, SETTINGS, SOURCE, TRANSACTIONS, Nodes
from tests.support.mixed import MixedCluster
from tests.support.waits import until

TOPIC = SOURCE
TIMEOUT_S = 15.0
"""How long the client waits for a response."""
GIVE_UP_S = 60.0
"""How long the program waits for the client."""
CLIENT = {"socket.timeout.ms": 3000, "log_level": 0}


def send(producer: Producer, consumer: Consumer, offset: int) -> str:
    """Send a group's offsets in a transaction; return a text with the duration and the result."""
    begun = time.monotonic()
    producer.begin_transaction()
    offsets = [TopicPartition(TOPIC, 0, offset)]
    try:
        producer.send_offsets_to_transaction(offsets, consumer.consumer_group_metadata(), TIMEOUT_S)
        producer.commit_transaction(TIMEOUT_S)
        outcome = "committed"
    except KafkaException as error:
        outcome = error.args[0].str()
    return f"{outcome} after {time.monotonic() - begun:.1f} s"


def show(nodes: Nodes) -> None:
    """Freeze the coordinator between two transactions."""
    clients = {"bootstrap.servers": nodes.bootstrap, **CLIENT}
    admin = AdminClient(clients)
    topics = [
        NewTopic(name, len(ASSIGNED[name]), replica_assignment=ASSIGNED[name], config=configs)
        for name, configs in (
            (TOPIC, {}),
            (OFFSETS, {"cleanup.policy": "compact"}),
            (TRANSACTIONS, {"cleanup.policy": "compact"}),
        )
    ]
    for created in admin.create_topics(topics).values():
        created.result(60)
    consumer = Consumer({**clients, "group.id": "g", "enable.auto.commit": False})
    consumer.subscribe([TOPIC])
    until(lambda: consumer.poll(0.1) or consumer.assignment(), "an assignment")
    producer = Producer({**clients, "transactional.id": "t"})
    producer.init_transactions(60)
    print("before:", send(producer, consumer, 1), flush=True)
    # This transaction can begin only after all markers of the last transaction are written, so no
    # marker waits for the frozen broker.
    producer.begin_transaction()
    producer.produce(TOPIC, b"", partition=0)
    producer.commit_transaction(60)
    frozen = nodes.leader(OFFSETS)
    witness = frozen % 3 + 1
    nodes.inject_fault(frozen, "freeze")
    try:
        until(lambda: has_moved(nodes, frozen, witness), "another coordinator")
        until(lambda: frozen not in named(producer), "Metadata without the frozen broker")
        said: list[str] = []
        caller = threading.Thread(
            target=lambda: said.append(send(producer, consumer, 2)), daemon=True
        )
        caller.start()
        caller.join(GIVE_UP_S)
        print("frozen:", *said or [f"no return within {GIVE_UP_S:.0f} s"], flush=True)
    finally:
        nodes.recover(frozen, "freeze")
    caller.join(GIVE_UP_S)
    print("back:", *said or [f"no return within further {GIVE_UP_S:.0f} s"], flush=True)


def has_moved(nodes: Nodes, frozen: int, witness: int) -> bool:
    """Return whether another broker leads the group's partition, according to ``witness``."""
    return nodes.partitions(OFFSETS, witness=witness)[0]["leader_id"] not in {frozen, -1}


def named(producer: Producer) -> set[int]:
    """Return the brokers in the Metadata response."""
    return set(producer.list_topics(timeout=10).brokers)


def main() -> None:
    """Run the program on a cluster of the layout in ``sys.argv``."""
    brokers, controllers = sys.argv[1].split("/")
    with tempfile.TemporaryDirectory() as folder:
        cluster = MixedCluster(Path(folder), brokers, SETTINGS, controllers=controllers)
        try:
            cluster.start()
            show(Nodes(cluster))
        finally:
            cluster.stop()
    sys.stdout.flush()
    os._exit(0)  # the client may hang in its last call


if __name__ == "__main__":
    main()
