"""Share partitions in a cluster, whose state is at share coordinators on other brokers."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from confluent_kafka import Producer

from fencepost.client.queries.replicas import NO_LEADER as NO_LEADER_ID
from fencepost.client.queries.session import ClusterSession
from fencepost.client.queries.share_partitions import NO_LEADER, in_flight
from fencepost.testing import Cluster
from tests.support.cluster import Cluster as Client
from tests.support.raw import Answer
from tests.support.share import (
    ACCEPT,
    RELEASE,
    SHARE,
    Member,
    acquired,
    kafka_id,
    parts_of,
)
from tests.support.waits import until

GROUP, PARTITIONS = "g", 12
CONFIG = {
    "share.coordinator.state.topic.num.partitions": "6",
    "share.coordinator.state.topic.min.isr": "1",
}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(3, config=CONFIG) as found:
        found.topic("queue", PARTITIONS)
        yield found


class Clients:
    """A connection to each broker."""

    def __init__(self, cluster: Cluster, stack: ExitStack) -> None:
        self.cluster = cluster
        self.of = {
            broker_id: stack.enter_context(Client(broker.bootstrap))
            for broker_id, broker in cluster.brokers.items()
        }

    @property
    def any(self) -> Client:
        return next(iter(self.of.values()))

    def coordinator(self, topic: uuid.UUID, partition: int) -> int:
        """Return the broker with the share coordinator of a share partition."""
        key = f"{GROUP}:{kafka_id(topic)}:{partition}"

        def probe() -> int | None:
            found = self.any.call("find_coordinator", 6, key_type=SHARE, coordinator_keys=[key])
            (coordinator,) = found["coordinators"]
            return coordinator["node_id"] if coordinator["error_code"] == "none" else None

        return until(probe, f"share coordinator of {key}")

    def initialize(self, topic: uuid.UUID, partition: int) -> None:
        """Initialize the state of a share partition, like the group coordinator."""

        def probe() -> bool:
            part = {"partition": partition, "state_epoch": 1, "start_offset": 0}
            answer = self.of[self.coordinator(topic, partition)].call(
                "initialize_share_group_state",
                0,
                group_id=GROUP,
                topics=[{"topic_id": topic, "partitions": [part]}],
            )
            return bool(answer["results"][0]["partitions"][0]["error_code"] == "none")

        until(probe, f"state of partition {partition}")


def test_leader_writes_share_state_to_coordinator_on_another_broker(cluster: Cluster) -> None:
    with ExitStack() as stack:
        clients = Clients(cluster, stack)
        topic = clients.any.topic_id("queue")
        for partition in range(PARTITIONS):
            clients.initialize(topic, partition)
        produce(cluster, range(PARTITIONS))
        remote = [
            partition
            for partition in range(PARTITIONS)
            if clients.coordinator(topic, partition) != cluster.leader("queue", partition)
        ]
        assert remote, "all share coordinators are on the leaders"
        members: list[Member] = []
        for partition in range(PARTITIONS):
            client = clients.of[cluster.leader("queue", partition)]
            member = Member(client, GROUP)
            part = fetched(member, topic, partition)
            assert acquired(part) == [(0, 0, 1)]
            members.append(member)
        assert owners(cluster) == [member.member for member in members]
        for partition, member in enumerate(members):
            answer = member.acknowledge({topic: {partition: [(0, 0, ACCEPT)]}})
            assert parts_of(answer)[partition]["error_code"] == "none"


def test_new_leader_continues_with_the_persisted_share_state(cluster: Cluster) -> None:
    with ExitStack() as stack:
        clients = Clients(cluster, stack)
        topic = clients.any.topic_id("queue")
        clients.initialize(topic, 0)
        for _ in range(3):
            produce(cluster, [0])
        former = cluster.leader("queue", 0)
        member = Member(clients.of[former], GROUP)
        assert acquired(fetched(member, topic, 0)) == [(0, 2, 1)]
        answer = member.acknowledge({topic: {0: [(0, 0, ACCEPT), (1, 1, RELEASE)]}})
        assert parts_of(answer)[0]["error_code"] == "none"
        cluster.kill(former)
        until(lambda: cluster.leader("queue", 0) != former, "another leader")
        successor = Member(clients.of[cluster.leader("queue", 0)], GROUP)
        ranges: list[tuple[int, int, int]] = []
        while not ranges or ranges[-1][1] < 2:  # the high watermark may advance later
            ranges += acquired(fetched(successor, topic, 0))
        # Offset 1 keeps its delivery count; the new leader does not know the acquisition of offset
        # 2.
        assert ranges == [(1, 1, 2), (2, 2, 1)]


def test_partition_without_leader_has_no_in_flight_counts_and_a_reason(cluster: Cluster) -> None:
    cluster.topic("single", 1, replicas=1)
    cluster.kill(cluster.leader("single", 0))
    with ClusterSession(cluster.bootstrap, 30) as session:
        until(
            lambda: session.client.metadata(refresh=True).leader("single", 0) == NO_LEADER_ID,
            "the fencing of the leader",
        )
        found = in_flight(session, GROUP, [("single", 0)])
    assert found["single", 0] == ({}, NO_LEADER)


def owners(cluster: Cluster) -> list[str]:
    """Return each leader's report of the owner of the first in-flight record, by partition."""
    places = [("queue", partition) for partition in range(PARTITIONS)]
    with ClusterSession(cluster.bootstrap, 30) as session:
        found = in_flight(session, GROUP, places)
    return [found[place].view["first_open"]["member"] for place in places]


def fetched(member: Member, topic: uuid.UUID, partition: int) -> Answer:
    """Fetch until the partition has records, as leader and coordinator may have just moved."""

    def probe() -> Answer | None:
        answer = member.fetch({topic: {partition: []}}, max_wait=500)
        part = parts_of(answer).get(partition)
        return part if part is not None and part["acquired_records"] else None

    return until(probe, f"records of partition {partition}")


def produce(cluster: Cluster, partitions: object) -> None:
    producer = Producer({"bootstrap.servers": cluster.bootstrap, "acks": "all", "log_level": 0})
    for partition in partitions:  # type: ignore[attr-defined]
        producer.produce("queue", b"x", partition=partition)
    assert producer.flush(30) == 0
