"""A group whose topic gets more partitions, which makes the group rebalance."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, NewPartitions

from tests.support.cluster import unique
from tests.support.waits import until


def rebalances_as_it_grows(bootstrap: str, topic: str, *, protocol: str) -> None:
    """Let two members share ``topic`` with two partitions, add a third, and wait for its owner.

    In the classic protocol the leader notices the new partition in its metadata and rejoins; in the
    consumer protocol the coordinator notices it and raises the group epoch.
    """
    group = unique("growing")
    members = [_member(bootstrap, group, topic, protocol) for _ in range(2)]
    try:
        until(lambda: _owned(members) == [[0], [1]] or None, "each has one", deadline_s=120)
        admin = AdminClient({"bootstrap.servers": bootstrap})
        admin.create_partitions([NewPartitions(topic, 3)])[topic].result(60)
        until(
            lambda: sorted(itertools.chain(*_owned(members))) == [0, 1, 2],
            "they share all three",
            deadline_s=120,
        )
        producer = Producer({"bootstrap.servers": bootstrap})
        producer.produce(topic, b"new", partition=2)
        assert producer.flush(60) == 0
        until(_reads(members, b"new"), "the new partition is read", deadline_s=120)
    finally:
        for member in members:
            member.close()


def _member(bootstrap: str, group: str, topic: str, protocol: str) -> Consumer:
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "group.protocol": protocol,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "topic.metadata.refresh.interval.ms": 200,
        }
    )
    consumer.subscribe([topic])
    return consumer


def _owned(members: list[Consumer]) -> list[list[int]]:
    """Poll each member, and return the partitions of each."""
    for member in members:
        member.poll(0.02)
    return sorted(sorted(part.partition for part in member.assignment()) for member in members)


def _reads(members: list[Consumer], value: bytes) -> Callable[[], bool]:
    def seen() -> bool:
        return any(
            message.value() == value for member in members for message in member.consume(10, 0.05)
        )

    return seen
