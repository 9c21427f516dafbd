"""Fencepost and Apache Kafka lead partitions in one cluster with Kafka's controller.

Apache Kafka also follows. The test simulates a third broker, which sends both leaders the same
requests.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any, Self

import pytest

from fencepost.cluster.lifecycle import LifecycleIntervals, RegisterBroker
from fencepost.cluster.records import BrokerEndpoint
from fencepost.coordinator.config.listeners import parse_address
from fencepost.coordinator.daemon.broker import Broker
from fencepost.coordinator.daemon.in_thread import BrokerThread
from fencepost.coordinator.metadata.kraft_metadata_cache import MEMBER_FEATURES
from fencepost.coordinator.replication.membership import BrokerMembership
from fencepost.coordinator.replication.quorum import QuorumConfig
from fencepost.tools.ports import hold_port
from tests.support.batches import batch
from tests.support.cluster import EARLIEST, LATEST, Cluster
from tests.support.kafka import Kafka
from tests.support.raw import Answer
from tests.support.targets import SETTINGS
from tests.support.waits import until

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.usefixtures("java_tools"),
    pytest.mark.timeout(300),
]

KAFKA, OURS, PLAYED = 1, 101, 102
CLUSTER_ID = "AAAAAAAAQACAAAAAAAAAAQ"
LAG_MS = 3_000


class Played:
    """A simulated broker: registered and live, but the test sends its requests."""

    def __init__(self, kafka: Kafka) -> None:
        self._kafka = kafka
        self._done, self._is_up = Event(), Event()
        self._held = hold_port()
        self.epoch = -1
        self._thread = Thread(target=lambda: asyncio.run(self._live()))

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._is_up.wait(60)
        return self

    def __exit__(self, *_error: object) -> None:
        self._done.set()
        self._thread.join()
        self._held.close()

    async def _live(self) -> None:
        endpoint = BrokerEndpoint("PLAINTEXT", "127.0.0.1", self._held.getsockname()[1], 0)
        registration = RegisterBroker(
            PLAYED, CLUSTER_ID, uuid.uuid4(), (endpoint,), MEMBER_FEATURES, (uuid.uuid4(),)
        )
        address = parse_address(self._kafka.controller)
        quorum = QuorumConfig((address,), {KAFKA: address}, "CONTROLLER")
        membership = BrokerMembership(
            quorum,
            registration,
            LifecycleIntervals(heartbeat_ms=500, session_ms=9_000),
            lambda _: None,
        )
        image = await membership.join()
        membership.follow(lambda _image: None, image)
        await membership.unfence()
        self.epoch = membership.broker_epoch
        self._is_up.set()
        await asyncio.to_thread(self._done.wait)
        await membership.stop()


class Mixed:
    """A cluster of Apache Kafka, Fencepost, and the simulated broker."""

    def __init__(self, kafka: Kafka, bootstrap: str, played: Played) -> None:
        self.played = played
        self.clients = {
            KAFKA: Cluster(kafka.bootstrap, deadline_s=60),
            OURS: Cluster(bootstrap, deadline_s=60),
        }

    @property
    def kafka(self) -> Cluster:
        return self.clients[KAFKA]

    def create(self, name: str, replicas: list[int], **configs: str) -> uuid.UUID:
        """Create a topic with one partition, and wait until its leader serves."""
        answer = self.kafka.call(
            "create_topics",
            5,
            timeout=10_000,
            topics=[
                {
                    "name": name,
                    "num_partitions": -1,
                    "replication_factor": -1,
                    "assignments": [{"partition_index": 0, "broker_ids": replicas}],
                    "configs": [
                        {"name": key.replace("_", "."), "value": value}
                        for key, value in configs.items()
                    ],
                }
            ],
        )
        assert answer["topics"][0]["error_code"] == "none", answer
        leader = self.clients[replicas[0]]
        until(lambda: leader.leaders(name) == 1, f"{name} is led")
        return leader.topic_id(name)

    def partition(self, name: str) -> Answer:
        """Return the partition in Kafka's Metadata."""
        answer = self.kafka.call("metadata", 12, topics=[{"name": name}])
        part: Answer = answer["topics"][0]["partitions"][0]
        return part


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> Iterator[Mixed]:
    root: Path = tmp_path_factory.mktemp("mixed")
    lag = {"replica.lag.time.max.ms": str(LAG_MS)}
    kafka = Kafka(root, {**SETTINGS, **lag}).start()
    settings = {
        "node.id": str(OURS),
        "process.roles": "broker",
        "controller.quorum.bootstrap.servers": kafka.controller,
        "controller.listener.names": "CONTROLLER",
        **lag,
    }
    try:
        with (
            BrokerThread(lambda: Broker(root / "ours", "127.0.0.1:0", settings)) as ours,
            Played(kafka) as played,
        ):
            mixed = Mixed(kafka, ours.bootstrap, played)
            yield mixed
            for client in mixed.clients.values():
                client.close()
    finally:
        kafka.stop()


def test_leadership_moves_to_kafka_and_back_without_loss(mixed):
    topic = "led-in-turn"
    mixed.create(topic, [OURS, KAFKA], min_insync_replicas="2")
    ours, kafka = mixed.clients[OURS], mixed.kafka
    for at in range(5):
        answer = ours.produce(topic, [b"%d" % at], acks=-1)
        assert (answer["error_code"], answer["base_offset"]) == ("none", at)
    assert kafka.produce(topic, [b"x"])["error_code"] == "not_leader_or_follower"
    # A client that sends its rack may read from Kafka's replica.
    until(lambda: kafka.fetch(topic, version=11)["high_watermark"] >= 4, "Kafka's own mark")

    def prefer(*replicas: int) -> None:
        wanted = {"partition_index": 0, "replicas": list(replicas)}
        topics = [{"name": topic, "partitions": [wanted]}]
        answer = kafka.call("alter_partition_reassignments", 0, timeout=10_000, topics=topics)
        assert answer["responses"][0]["partitions"][0]["error_code"] == "none", answer
        chosen = [{"topic": topic, "partitions": [0]}]
        kafka.call("elect_leaders", 2, election_type=0, timeout=10_000, topic_partitions=chosen)
        until(lambda: mixed.partition(topic)["leader_id"] == replicas[0], "the election")
        until(lambda: mixed.clients[replicas[0]].leaders(topic) == 1, "it leads")

    prefer(KAFKA, OURS)
    refused = ours.call("produce", 10, **producing(topic, batch([b"late"])))
    part = refused["responses"][0]["partition_responses"][0]
    assert part["error_code"] == "not_leader_or_follower"
    assert part["current_leader"]["leader_id"] == KAFKA
    assert [endpoint["node_id"] for endpoint in refused["node_endpoints"]] == [KAFKA]
    assert kafka.produce(topic, [b"5"])["base_offset"] == 5
    prefer(OURS, KAFKA)
    assert ours.produce(topic, [b"6"])["base_offset"] == 6
    until(lambda: ours.offset(topic, 0, LATEST) == 7, "all of it is committed")
    values = [value for fetched in ours.read(topic) for value in fetched.values]
    assert values == [b"%d" % at for at in range(7)]
    assert sorted(mixed.partition(topic)["isr_nodes"]) == [KAFKA, OURS]
    epochs = {fetched.leader_epoch for fetched in ours.read(topic)}
    assert len(epochs) == 3


def producing(topic: str, records: bytes, **how: Any) -> dict[str, Any]:
    topics = [{"name": topic, "partition_data": [{"index": 0, "records": records}]}]
    return {"acks": -1, "timeout": 300, "topic_data": topics} | how


class Asked:
    """The responses of one leader to clients and to the simulated follower, in order."""

    def __init__(self, mixed: Mixed, leader: int) -> None:
        self.mixed, self.leader = mixed, leader
        self.topic = f"led-by-{leader}"
        self.topic_id = mixed.create(self.topic, [leader, PLAYED], min_insync_replicas="2")
        self.client = mixed.clients[leader]
        self.said: list[tuple[str, Any]] = []

    def note(self, what: str, part: Answer) -> Answer:
        """Keep the fields of a response that can be compared: no messages and no timestamps."""
        kept = {
            key: value
            for key, value in part.items()
            if key not in {"error_message", "records", "log_append_time"}
        }
        kept["records"] = len(part.get("records") or b"")
        if kept.get("current_leader", {}).get("leader_id") == self.leader:
            kept["current_leader"] = dict(kept["current_leader"], leader_id="leader")
        self.said.append((what, kept))
        return part

    def fetch(self, what: str, offset: int, version: int = 17, **how: Any) -> Answer:
        replica = how.pop("replica", PLAYED)
        asked = {
            "partition": 0,
            "fetch_offset": offset,
            "current_leader_epoch": how.pop("leader_epoch", 0),
            "last_fetched_epoch": how.pop("last_epoch", -1),
            "log_start_offset": how.pop("log_start", 0),
            "partition_max_bytes": 1 << 20,
        }
        body: dict[str, Any] = {
            "max_wait": how.pop("max_wait", 0),
            "min_bytes": 1,
            "max_bytes": 1 << 20,
            "session_epoch": -1,
        }
        if version >= 15:
            epoch = how.pop("broker_epoch", self.mixed.played.epoch if replica >= 0 else -1)
            body["replica_state"] = {"replica_id": replica, "replica_epoch": epoch}
        else:
            body["replica_id"] = replica
        named = {"topic_id": how.pop("topic_id", self.topic_id)}
        if version < 13:
            named = {"topic": self.topic}
        answer = self.client.call(
            "fetch", version, topics=[{**named, "partitions": [asked]}], **body
        )
        return self.note(f"fetch {what}", answer["responses"][0]["partitions"][0])

    def produce(self, what: str, records: bytes, **how: Any) -> Answer:
        answer = self.client.call("produce", 10, **producing(self.topic, records, **how))
        return self.note(f"produce {what}", answer["responses"][0]["partition_responses"][0])

    def offset(self, what: str, timestamp: int, *, replica: int = -1, epoch: int = -1) -> Answer:
        asked = {"partition_index": 0, "timestamp": timestamp, "current_leader_epoch": epoch}
        topics = [{"name": self.topic, "partitions": [asked]}]
        answer = self.client.call("list_offsets", 7, replica_id=replica, topics=topics)
        return self.note(f"offset {what}", answer["topics"][0]["partitions"][0])

    def epoch_end(self, epoch: int, current: int) -> Answer:
        asked = {"partition": 0, "current_leader_epoch": current, "leader_epoch": epoch}
        topics = [{"topic": self.topic, "partitions": [asked]}]
        answer = self.client.call("offset_for_leader_epoch", 4, replica_id=PLAYED, topics=topics)
        return self.note(f"end of {epoch} in {current}", answer["topics"][0]["partitions"][0])

    def delete(self, what: str, offset: int) -> Answer:
        parts = [{"partition_index": 0, "offset": offset}]
        topics = [{"name": self.topic, "partitions": parts}]
        answer = self.client.call("delete_records", 2, timeout=300, topics=topics)
        return self.note(f"delete {what}", answer["topics"][0]["partitions"][0])

    def tell(self) -> list[tuple[str, Any]]:
        """Run all steps; return the responses, which must be the same from both leaders."""
        idempotent = batch([b"i"], producer_id=7, producer_epoch=0, sequence=0)
        self.produce("acks of one", batch([b"0", b"1"]), acks=1)
        self.fetch("of a client, uncommitted", 0, replica=-1)
        self.offset("latest, uncommitted", LATEST)
        self.offset("latest of a replica", LATEST, replica=PLAYED)
        self.fetch("from the start", 0)
        self.fetch("behind half", 1)
        self.fetch("at the end", 2)
        self.fetch("at the end again", 2, last_epoch=0)
        self.fetch("of a client", 0, replica=-1, last_epoch=-1)
        self.fetch("of a debugging client", 0, replica=-2)
        self.offset("latest", LATEST)
        self.offset("earliest", EARLIEST)
        self.offset("in a later epoch", LATEST, epoch=9)
        self.fetch("in a later epoch", 2, leader_epoch=9)
        self.fetch("of an older incarnation", 2, broker_epoch=self.mixed.played.epoch - 1)
        self.fetch("of no replica", 2, replica=777)
        self.fetch("of no replica, without an epoch", 2, replica=777, leader_epoch=-1)
        self.fetch("of an old no replica", 2, 12, replica=777, leader_epoch=-1)
        self.fetch("of an unknown topic", 2, topic_id=uuid.UUID(int=99))
        self.fetch("that diverges", 1000, last_epoch=0)
        self.fetch("beyond the end", 1000)
        self.fetch("in an epoch that nobody knows", 2, last_epoch=9)
        self.fetch("below the start", -1)
        for epoch, current in ((0, 0), (9, 0), (0, 9), (-1, 0)):
            self.epoch_end(epoch, current)
        self.produce("in time nobody followed", batch([b"2"]))
        self.fetch("of who lags", 2)
        self.produce("of a producer", idempotent)
        self.produce("of a producer, again", idempotent)
        self.fetch("of who has all", 4)
        self.produce("of a producer, committed", idempotent)
        self.fetch("of a client, all", 0, replica=-1)
        self.produce("of a leap", batch([b"j"], producer_id=7, producer_epoch=0, sequence=5))
        self.delete("beyond the end", 1000)
        self.delete("while a replica is behind", 1)
        self.fetch("of who has deleted", 4, log_start=1)
        self.delete("what all have deleted", 1)
        self.offset("earliest after that", EARLIEST)
        self.fetch("below the new start", 0)
        self.produce("without an ISR that has it", batch([b"3"]), acks=1)
        until(self._is_alone, "the played broker is out of the ISR")
        self.produce("below the minimum", batch([b"4"]))
        self.offset("latest below the minimum", LATEST)
        self.fetch("of who comes back", 5)
        until(lambda: len(self.mixed.partition(self.topic)["isr_nodes"]) == 2, "it is back")
        self.offset("latest, back", LATEST)
        self.fetch("of who is back", 5)
        return self.said

    def _is_alone(self) -> bool:
        return bool(self.mixed.partition(self.topic)["isr_nodes"] == [self.leader])


def test_both_leaders_give_the_same_responses(mixed):
    said = {node_id: Asked(mixed, node_id).tell() for node_id in (KAFKA, OURS)}
    pairs = zip(said[OURS], said[KAFKA], strict=True)
    differences = [f"{ours} instead of {theirs}" for ours, theirs in pairs if ours != theirs]
    assert not differences, "\n".join(differences)
