"""Topics created, grown and deleted, through a socket and Kafka's own message schemas."""

from __future__ import annotations

import uuid

import pytest

from fencepost.coordinator.daemon.broker import Broker
from tests.support.cluster import TRANSACTION, Cluster, unique
from tests.unit.coordinator.handlers.asking import create


@pytest.mark.parametrize("version", range(2, 8))
def test_creating_in_every_version(client, version):
    name = unique("c")
    configs = [{"name": "retention.ms", "value": "77"}]
    code, one = create(client, name, version, num_partitions=3, configs=configs)
    assert code == "none"
    if version >= 5:
        assert (one["num_partitions"], one["replication_factor"]) == (3, 1)
        found = {entry["name"]: entry for entry in one["configs"]}
        assert (found["retention.ms"]["value"], found["retention.ms"]["config_source"]) == ("77", 1)
        assert found["max.message.bytes"]["value"] == "100000"
        assert found["max.message.bytes"]["config_source"] == 4
        assert found["segment.ms"]["config_source"] == 5
    if version >= 7:
        assert uuid.UUID(one["topic_id"]) == client.topic_id(name)
    assert create(client, name, version)[0] == "topic_already_exists"
    assert client.leaders(name) == 3


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"num_partitions": 0}, "invalid_partitions"),
        ({"num_partitions": -2}, "invalid_partitions"),
        ({"num_partitions": 10_001}, "policy_violation"),
        ({"replication_factor": 0}, "invalid_replication_factor"),
        ({"replication_factor": 2}, "invalid_replication_factor"),
        ({"configs": [{"name": "no.such", "value": "1"}]}, "invalid_config"),
        ({"configs": [{"name": "retention.ms", "value": "x"}]}, "invalid_config"),
        ({"configs": [{"name": "retention.ms", "value": None}]}, "invalid_config"),
        ({"assignments": [{"partition_index": 0, "broker_ids": [3]}]}, "invalid_request"),
    ],
)
def test_what_can_not_be_created(client, fields, code):
    name = unique("c")
    got, one = create(client, name, **fields)
    assert got == code
    assert one["error_message"]
    assert client.leaders(name) == 0


@pytest.mark.parametrize(
    ("assignment", "code"),
    [
        ({0: [3], 1: [3]}, "none"),
        ({0: [3], 2: [3]}, "invalid_replica_assignment"),
        ({0: [4]}, "invalid_replica_assignment"),
        ({0: [3, 3]}, "invalid_replica_assignment"),
        ({0: []}, "invalid_replica_assignment"),
    ],
)
def test_manual_assignment(client, assignment, code):
    entries = [
        {"partition_index": index, "broker_ids": brokers} for index, brokers in assignment.items()
    ]
    got, _ = create(
        client, unique("c"), num_partitions=-1, replication_factor=-1, assignments=entries
    )
    assert got == code


def test_defaults_duplicates_collisions_and_validate_only(client):
    name = unique("c.d")
    code, one = create(client, name, num_partitions=-1, replication_factor=-1)
    assert (code, one["num_partitions"]) == ("none", 2)
    code, one = create(client, name.replace(".", "_"))
    assert code == "invalid_topic_exception"
    assert name in one["error_message"]
    twice = unique("c")
    entry = {"name": twice, "num_partitions": 1, "replication_factor": 1}
    answer = client.call("create_topics", 7, topics=[entry, entry])
    assert [one["error_code"] for one in answer["topics"]] == ["invalid_request"]
    answer = client.call("create_topics", 7, topics=[entry], validate_only=True)
    assert answer["topics"][0]["error_code"] == "none"
    assert answer["topics"][0]["topic_id"] is not None
    assert (
        client.call("metadata", 9, topics=[{"name": twice}], allow_auto_topic_creation=False)[
            "topics"
        ][0]["error_code"]
        == "unknown_topic_or_partition"
    )


@pytest.mark.parametrize("version", range(4))
def test_growing(client, version):
    name = client.create_topic(unique("g"), 2)

    def grow(**fields):
        entry = {"name": name, "assignments": None, **fields}
        answer = client.call("create_partitions", version, topics=[entry])
        return answer["results"][0]["error_code"]

    assert grow(count=2) == grow(count=1) == grow(count=-1) == "invalid_partitions"
    assert grow(count=3, assignments=[{"broker_ids": [4]}]) == "invalid_replica_assignment"
    assert grow(count=3, assignments=[]) == "invalid_replica_assignment"
    assert grow(count=20_000) == "policy_violation"
    assert grow(name="none", count=3) == "unknown_topic_or_partition"
    answer = client.call(
        "create_partitions",
        version,
        topics=[{"name": name, "count": 4, "assignments": None}],
        validate_only=True,
    )
    assert answer["results"][0]["error_code"] == "none"
    assert client.leaders(name) == 2
    assert grow(count=4, assignments=[{"broker_ids": [3]}, {"broker_ids": [3]}]) == "none"
    assert client.leaders(name) == 4
    assert client.produce(name, [b"x"], partition=3)["error_code"] == "none"


@pytest.mark.parametrize("version", range(1, 7))
def test_deleting_in_every_version(client, version):
    name = client.create_topic(unique("d"))
    client.produce(name, [b"x"])

    def delete(name: str) -> str:
        asked = {"topic_names": [name]} if version < 6 else {"topics": [{"name": name}]}
        answer = client.call("delete_topics", version, **asked)
        return answer["responses"][0]["error_code"]

    assert delete(name) == "none"
    assert delete(name) == "unknown_topic_or_partition"
    client.coordinator("tx", TRANSACTION)
    assert delete("__transaction_state") == "invalid_topic_exception"
    assert client.produce(name, [b"x"])["error_code"] == "unknown_topic_or_partition"


def test_deleting_by_id(client):
    name = client.create_topic(unique("d"))
    topic_id = client.topic_id(name)
    both = [{"name": name, "topic_id": topic_id}]
    double = [{"name": name}, {"name": None, "topic_id": topic_id}]
    unknown = [{"name": None, "topic_id": uuid.uuid4()}]
    for topics, code in (
        (both, "invalid_request"), (double, "invalid_request"), (unknown, "unknown_topic_id"),
    ):  # fmt: skip
        answer = client.call("delete_topics", 6, topics=topics)
        assert {one["error_code"] for one in answer["responses"]} == {code}
    answer = client.call("delete_topics", 6, topics=[{"name": None, "topic_id": topic_id}])
    assert [(one["name"], one["error_code"]) for one in answer["responses"]] == [(name, "none")]


def test_deletion_can_be_disabled(tmp_path):
    with (
        Broker.in_thread(tmp_path, config={"delete.topic.enable": "false"}) as broker,
        Cluster(broker.bootstrap) as client,
    ):
        client.create_topic("a")
        for version, code in ((1, "invalid_request"), (3, "topic_deletion_disabled")):
            answer = client.call("delete_topics", version, topic_names=["a"])
            assert answer["responses"][0]["error_code"] == code


def test_a_coordinator_serves_as_soon_as_its_topic_is_created(tmp_path):
    """Kafka's brokers serve a coordinator's topic without a prior FindCoordinator."""
    with Broker.in_thread(tmp_path) as broker, Cluster(broker.bootstrap) as client:
        group = {"group_id": "g", "generation_id": 1, "member_id": "m"}
        producer = {"transactional_id": "t", "producer_id": 1, "producer_epoch": 0}

        def errors():
            beat = client.call("heartbeat", 4, **group)
            end = client.call("end_txn", 3, **producer, committed=True)
            return beat["error_code"], end["error_code"]

        for name in ("__consumer_offsets", "__transaction_state"):
            assert (
                client.call(
                    "create_topics",
                    7,
                    topics=[{"name": name, "num_partitions": 2, "replication_factor": 1}],
                    timeout=1000,
                    validate_only=True,
                )["topics"][0]["error_code"]
                == "none"
            )
        assert errors() == ("not_coordinator", "not_coordinator")
        for name in ("__consumer_offsets", "__transaction_state"):
            assert create(client, name, num_partitions=2)[0] == "none"
            assert client.leaders(name) == 2
        assert errors() == ("unknown_member_id", "invalid_producer_id_mapping")
