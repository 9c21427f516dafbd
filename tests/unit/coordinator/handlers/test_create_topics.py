"""CreateTopics, through a socket and Kafka's own message schemas."""

from __future__ import annotations

import uuid

import pytest

from fencepost.coordinator.daemon.broker import Broker
from tests.support.cluster import Cluster, unique
from tests.unit.coordinator.handlers.asking import create


@pytest.mark.parametrize("version", range(2, 8))
def test_create_topics_in_every_version_creates_the_topic(client, version):
    name = unique("c")
    configs = [{"name": "retention.ms", "value": "77"}]
    code, topic = create(client, name, version, num_partitions=3, configs=configs)
    assert code == "none"
    if version >= 5:
        assert (topic["num_partitions"], topic["replication_factor"]) == (3, 1)
        found = {entry["name"]: entry for entry in topic["configs"]}
        assert (found["retention.ms"]["value"], found["retention.ms"]["config_source"]) == ("77", 1)
        assert found["max.message.bytes"]["value"] == "100000"
        assert found["max.message.bytes"]["config_source"] == 4
        assert found["segment.ms"]["config_source"] == 5
    if version >= 7:
        assert uuid.UUID(topic["topic_id"]) == client.topic_id(name)
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
def test_invalid_topic_is_refused(client, fields, code):
    name = unique("c")
    got, topic = create(client, name, **fields)
    assert got == code
    assert topic["error_message"]
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
def test_manual_assignment_with_gaps_or_invalid_replicas_is_refused(client, assignment, code):
    entries = [
        {"partition_index": index, "broker_ids": brokers} for index, brokers in assignment.items()
    ]
    got, _ = create(
        client, unique("c"), num_partitions=-1, replication_factor=-1, assignments=entries
    )
    assert got == code


def test_create_topics_applies_defaults_and_refuses_duplicates_and_collisions(client):
    name = unique("c.d")
    code, topic = create(client, name, num_partitions=-1, replication_factor=-1)
    assert (code, topic["num_partitions"]) == ("none", 2)
    code, topic = create(client, name.replace(".", "_"))
    assert code == "invalid_topic_exception"
    assert name in topic["error_message"]
    twice = unique("c")
    entry = {"name": twice, "num_partitions": 1, "replication_factor": 1}
    answer = client.call("create_topics", 7, topics=[entry, entry])
    assert [row["error_code"] for row in answer["topics"]] == ["invalid_request"]
    answer = client.call("create_topics", 7, topics=[entry], validate_only=True)
    assert answer["topics"][0]["error_code"] == "none"
    assert answer["topics"][0]["topic_id"] is not None
    assert (
        client.call("metadata", 9, topics=[{"name": twice}], allow_auto_topic_creation=False)[
            "topics"
        ][0]["error_code"]
        == "unknown_topic_or_partition"
    )


def test_coordinator_serves_once_its_internal_topic_is_created(tmp_path):
    """Kafka's brokers serve a coordinator's topic even without a FindCoordinator request."""
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
