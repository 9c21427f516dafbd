"""Real clients of both protocols in one group: a partition has one reader, offsets are kept."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import confluent_kafka
import kafka
import pytest

from fencepost.client.queries.group_view import describe_group
from fencepost.client.queries.session import ClusterSession
from tests.support.cluster import Cluster, unique
from tests.support.waits import until
from tests.wire.clients import HEARTBEAT_MS, SESSION_MS, confluent_producer
from tests.wire.test_consumer_protocol import member

PARTITIONS = 6


@pytest.fixture
def topic(cluster: Cluster) -> str:
    return cluster.create_topic(unique("mixed"), PARTITIONS)


class Old:
    """A kafka-python consumer: classic protocol, range assignor."""

    def __init__(self, bootstrap: str, group: str, topic: str) -> None:
        self.consumer = kafka.KafkaConsumer(
            topic,
            bootstrap_servers=bootstrap,
            group_id=group,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            session_timeout_ms=SESSION_MS,
            heartbeat_interval_ms=HEARTBEAT_MS,
            retry_backoff_ms=20,
            fetch_max_wait_ms=50,
        )
        # If a kafka-python leader does not know the topic yet, it assigns no partitions, and it
        # does not always rebalance again later.
        assert self.consumer.partitions_for_topic(topic)

    def read(self) -> list[str]:
        # If joining takes longer than a poll, kafka-python 3.0 may lose the assignment, although
        # the group is stable on the broker.
        polled = self.consumer.poll(300)
        found = [record.value.decode() for part in polled.values() for record in part]
        if found:
            with contextlib.suppress(kafka.errors.CommitFailedError):
                self.consumer.commit()
        return found

    def owned(self) -> set[int]:
        return {part.partition for part in self.consumer.assignment()}

    def close(self) -> None:
        self.consumer.close(autocommit=False)


class New:
    """A librdkafka consumer: consumer protocol."""

    def __init__(self, bootstrap: str, group: str, topic: str) -> None:
        self._stack = contextlib.ExitStack()
        self.consumer = self._stack.enter_context(member(bootstrap, group, topic))

    def read(self) -> list[str]:
        found = [
            message.value().decode()
            for message in self.consumer.consume(50, 0.02)
            if not message.error()
        ]
        if found:
            with contextlib.suppress(confluent_kafka.KafkaException):
                self.consumer.commit(asynchronous=False)
        return found

    def owned(self) -> set[int]:
        return {part.partition for part in self.consumer.assignment()}

    def close(self) -> None:
        self._stack.close()


class Group:
    """The members of a group, and the records that were written and read."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self.bootstrap, self.topic, self.group = bootstrap, topic, unique("group")
        self.members: list[Old | New] = []
        self.written = 0
        self.seen: list[str] = []

    def add(self, kind: type[Old | New]) -> Old | New:
        client = kind(self.bootstrap, self.group, self.topic)
        self.members.append(client)
        return client

    def remove(self, client: Old | New) -> None:
        self.members.remove(client)
        client.close()

    def write(self, count: int = 60) -> None:
        with confluent_producer(self.bootstrap) as producer:
            for _ in range(count):
                producer.produce(self.topic, str(self.written), partition=self.written % PARTITIONS)
                self.written += 1

    def is_shared(self) -> bool:
        """Return whether each partition has one owner and every member has partitions."""
        for client in self.members:
            self.seen += client.read()
        owned = [client.owned() for client in self.members]
        return all(owned) and sorted(p for mine in owned for p in mine) == list(range(PARTITIONS))

    def settle(self, what: str) -> None:
        try:
            until(self.is_shared, what, deadline_s=60)
        except TimeoutError as error:
            error.add_note(f"owned: {[sorted(client.owned()) for client in self.members]}")
            with ClusterSession(self.bootstrap, 10) as session:
                error.add_note(str(describe_group(session, self.group)))
            raise

    def read_all(self) -> None:
        def is_complete() -> bool:
            self.is_shared()
            return len(set(self.seen)) == self.written

        until(is_complete, f"all {self.written} records are read", deadline_s=60)


@pytest.fixture
def group(bootstrap: str, topic: str) -> Iterator[Group]:
    made = Group(bootstrap, topic)
    yield made
    for client in list(made.members):
        made.remove(client)


def kind_of(cluster: Cluster, name: str) -> Any:
    listed = cluster.call("list_groups", 5, states_filter=[], types_filter=[])
    return next(g["group_type"] for g in listed["groups"] if g["group_id"] == name)


@pytest.mark.slow
def test_group_changes_its_protocol_under_load_without_losing_records(
    group: Group, cluster: Cluster
) -> None:
    group.write()
    first, second = group.add(Old), group.add(Old)
    group.settle("two classic members share")
    group.read_all()
    assert kind_of(cluster, group.group) == "classic"

    newcomer = group.add(New)
    group.write()
    group.settle("a consumer of KIP-848 shares with them")
    group.read_all()
    assert kind_of(cluster, group.group) == "consumer"

    group.remove(first)
    group.write()
    group.settle("one of each kind is left")
    group.read_all()

    group.remove(newcomer)
    group.write()
    group.settle("the classic one has everything again")
    group.read_all()
    assert kind_of(cluster, group.group) == "classic"
    ends = [cluster.offset(group.topic, partition) for partition in range(PARTITIONS)]
    until(
        lambda: (
            group.is_shared()
            and ends == [cluster.committed(group.group, group.topic, p) for p in range(PARTITIONS)]
        ),
        "everything is committed",
    )
    assert second in group.members


def test_members_of_both_protocols_join_and_leave_without_losing_records(group: Group) -> None:
    rng = random.Random(7)
    group.add(Old)
    for _ in range(6):
        group.write(30)
        if len(group.members) > 2 or (len(group.members) > 1 and rng.random() < 0.5):
            group.remove(rng.choice(group.members))
        else:
            group.add(rng.choice((Old, New)))
        group.settle("the members share")
    group.read_all()
