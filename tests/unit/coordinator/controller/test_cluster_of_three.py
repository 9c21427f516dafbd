"""A controller and three brokers in one process: topics, settings, leader changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from fencepost.coordinator.daemon.broker import Broker
from tests.support.cluster import Cluster, unique
from tests.support.waits import until
from tests.unit.coordinator.controller.conftest import CONFIG, Node

pytestmark = pytest.mark.slow

EVERYBODY = {1, 2, 3}


class Three:
    """A controller, brokers 1 to 3, and a client of broker 1."""

    def __init__(self, home: Path) -> None:
        self.stack = ExitStack()
        self.node = self.stack.enter_context(Node(home / "controller"))
        self.brokers = [self.start(home, node_id) for node_id in (1, 2, 3)]
        self.client = self.stack.enter_context(Cluster(self.brokers[0].bootstrap))

    def start(self, home: Path, node_id: int) -> Any:
        config = {
            "process.roles": "broker",
            "node.id": str(node_id),
            "listeners": "PLAINTEXT://127.0.0.1:0",
            "controller.quorum.bootstrap.servers": self.node.bootstrap,
            "controller.listener.names": CONFIG["controller.listener.names"],
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
        }
        return self.stack.enter_context(Broker.in_thread(home / f"{node_id}", config=config))

    def create(self, *assignment: Sequence[int]) -> str:
        name = unique("t")
        parts = [
            {"partition_index": index, "broker_ids": ids} for index, ids in enumerate(assignment)
        ]
        topic = {
            "name": name, "num_partitions": -1, "replication_factor": -1, "assignments": parts
        }  # fmt: skip
        answer = self.client.call("create_topics", 7, timeout=10_000, topics=[topic])["topics"][0]
        assert (answer["error_code"], answer["replication_factor"]) == ("none", len(assignment[0]))
        self.has(name, *((ids[0], set(ids)) for ids in assignment))
        return name

    def states(self, name: str) -> list[tuple[int, set[int]]]:
        """Return the leader and the ISR of each partition."""
        (topic,) = self.client.call("metadata", 8, topics=[{"name": name}])["topics"]
        parts = sorted(topic["partitions"], key=lambda partition: int(partition["partition_index"]))
        return [(part["leader_id"], set(part["isr_nodes"])) for part in parts]

    def has(self, name: str, *expected: tuple[int, set[int]]) -> None:
        until(lambda: self.states(name) == list(expected), f"{name} has {expected}")


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Three]:
    made = Three(tmp_path_factory.mktemp("three"))
    with made.stack:
        yield made


def test_topics_are_created_grown_and_deleted(three: Three) -> None:
    name = three.create([1, 2, 3], [2, 3, 1])
    grown = three.client.call(
        "create_partitions", 3, timeout=10_000, topics=[{"name": name, "count": 3}]
    )
    assert grown["results"][0]["error_code"] == "none"
    until(lambda: [isr for _, isr in three.states(name)] == [EVERYBODY] * 3, "it has grown")
    assert three.client.produce(name, [b"v"], acks=-1)["error_code"] == "none"
    gone = three.client.call("delete_topics", 5, timeout=10_000, topic_names=[name])
    assert gone["responses"][0]["error_code"] == "none"
    until(lambda: three.states(name) == [], "it is gone")


@pytest.mark.parametrize("kind", [2, 4])
def test_altered_config_reaches_the_broker(three: Three, kind: int) -> None:
    resource = three.create([1]) if kind == 2 else "1"
    key = "retention.ms" if kind == 2 else "log.retention.ms"
    changed = three.client.call(
        "incremental_alter_configs",
        1,
        resources=[
            {
                "resource_type": kind,
                "resource_name": resource,
                "configs": [{"name": key, "config_operation": 0, "value": "7777777"}],
            }
        ],
    )
    assert changed["responses"][0]["error_code"] == "none"

    def told() -> object:
        asked = {"resource_type": kind, "resource_name": resource, "configuration_keys": [key]}
        answer = three.client.call("describe_configs", 4, resources=[asked])
        return answer["results"][0]["configs"][0]["value"]

    until(lambda: told() == "7777777", "the setting is there")


def test_config_resources_include_all_live_brokers(three: Three) -> None:
    broker, logger = 4, 8
    answer = three.client.call("list_config_resources", 1, resource_types=[broker, logger])
    listed = {
        (resource["resource_type"], resource["resource_name"])
        for resource in answer["config_resources"]
    }
    assert listed == {(kind, str(node_id)) for kind in (broker, logger) for node_id in EVERYBODY}


def test_reassigned_partition_moves_to_the_new_replicas(three: Three) -> None:
    name = three.create([1])
    assert three.client.produce(name, [b"a", b"b"], acks=-1)["error_code"] == "none"
    moved = three.client.call(
        "alter_partition_reassignments",
        0,
        timeout=10_000,
        topics=[{"name": name, "partitions": [{"partition_index": 0, "replicas": [3, 2]}]}],
    )
    assert moved["responses"][0]["partitions"][0]["error_code"] == "none"
    three.has(name, (3, {2, 3}))
    with Cluster(three.brokers[2].bootstrap) as client:
        assert client.produce(name, [b"c"], acks=-1)["base_offset"] == 2


def test_controlled_shutdown_moves_leadership_to_other_replicas(three: Three) -> None:
    """This test must be the last in this file, because it stops a broker that other tests use."""
    name = three.create([3, 1, 2], [1, 2, 3])
    three.brokers[2].stop()
    three.has(name, (1, {1, 2}), (1, {1, 2}))
    assert three.client.produce(name, [b"v"], acks=-1)["error_code"] == "none"
