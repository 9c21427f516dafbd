"""Descriptions of clusters and topics, through a socket and Kafka's own message schemas."""

from __future__ import annotations

import uuid

import pytest

from tests.support.cluster import TRANSACTION, unique
from tests.unit.coordinator.handlers.asking import create

ALL_TOPIC_OPERATIONS, ALL_CLUSTER_OPERATIONS, NOT_ASKED = 3576, 8096, -(2**31)
TOPIC, BROKER, LOGGER, METRICS, GROUP = 2, 4, 8, 16, 32


# --- Metadata -------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", range(14))
def test_metadata_in_every_version_describes_the_topic_and_the_broker(client, bootstrap, version):
    name = client.create_topic(unique("m"), 2)
    answer = client.call("metadata", version, topics=[{"name": name}])
    (broker,) = answer["brokers"]
    assert broker["node_id"] == 3
    assert f"{broker['host']}:{broker['port']}" == bootstrap
    if version >= 1:
        assert broker["rack"] == "r1"
        assert answer["controller_id"] == 3
    if version >= 2:
        assert len(answer["cluster_id"]) == 22
    (found,) = answer["topics"]
    assert (found["error_code"], found["name"]) == ("none", name)
    for index, part in enumerate(found["partitions"]):
        assert (part["partition_index"], part["leader_id"], part["error_code"]) == (
            index,
            3,
            "none",
        )
        assert part["replica_nodes"] == part["isr_nodes"] == [3]
    if version >= 10:
        assert uuid.UUID(found["topic_id"]).int
    if version >= 8:
        assert found["topic_authorized_operations"] == NOT_ASKED


def test_metadata_of_null_topics_returns_all_and_of_empty_topics_none(client, topic):
    for version, body in ((0, {"topics": []}), (1, {"topics": None}), (12, {"topics": None})):
        names = [row["name"] for row in client.call("metadata", version, **body)["topics"]]
        assert topic in names
    for version in (1, 5, 13):
        assert client.call("metadata", version, topics=[])["topics"] == []


@pytest.mark.parametrize("name", [None, "", "another"])
def test_metadata_by_topic_id_ignores_the_name(client, topic, name):
    """Java's clients send an empty name with an id."""
    known, unknown = client.topic_id(topic), uuid.uuid4()
    answer = client.call(
        "metadata",
        12,
        topics=[{"name": name, "topic_id": known}, {"name": name, "topic_id": unknown}],
    )
    first, second = answer["topics"]
    assert (first["name"], first["error_code"]) == (topic, "none")
    assert (second["name"], second["error_code"]) == (None, "unknown_topic_id")
    assert second["topic_id"] == str(unknown)


def test_metadata_returns_authorized_operations_on_request(client, topic):
    answer = client.call(
        "metadata",
        9,
        topics=[{"name": topic}],
        include_topic_authorized_operations=True,
        include_cluster_authorized_operations=True,
    )
    assert answer["cluster_authorized_operations"] == ALL_CLUSTER_OPERATIONS
    assert answer["topics"][0]["topic_authorized_operations"] == ALL_TOPIC_OPERATIONS


def test_metadata_auto_creates_a_topic_and_returns_it_the_next_time(client):
    name = unique("auto")
    ask = {"topics": [{"name": name}], "allow_auto_topic_creation": False}
    for _ in range(2):
        (found,) = client.call("metadata", 9, **ask)["topics"]
        assert found["error_code"] == "unknown_topic_or_partition"
    ask["allow_auto_topic_creation"] = True
    (found,) = client.call("metadata", 9, **ask)["topics"]
    assert (found["error_code"], found["partitions"]) == ("unknown_topic_or_partition", [])
    (found,) = client.call("metadata", 9, **ask)["topics"]
    assert (found["error_code"], len(found["partitions"])) == ("none", 2)


@pytest.mark.parametrize("name", ["", ".", "..", "a b", "ä", "x" * 250])
def test_invalid_topic_name_is_refused(client, name):
    (found,) = client.call("metadata", 9, topics=[{"name": name}])["topics"]
    assert found["error_code"] == "invalid_topic_exception"
    assert create(client, name)[0] == "invalid_topic_exception"


def test_topic_with_the_name_of_the_metadata_log_is_not_created(client):
    for _ in range(2):
        (found,) = client.call("metadata", 9, topics=[{"name": "__cluster_metadata"}])["topics"]
        assert found["error_code"] == "unknown_topic_or_partition"
    assert create(client, "__cluster_metadata")[0] == "invalid_request"


def test_internal_topic_is_marked_as_internal(client):
    client.coordinator("tx", TRANSACTION)
    (found,) = client.call("metadata", 9, topics=[{"name": "__transaction_state"}])["topics"]
    assert (found["is_internal"], len(found["partitions"])) == (True, 2)


# --- DescribeCluster, DescribeTopicPartitions -----------------------------------------------------


@pytest.mark.parametrize("version", range(3))
def test_describe_cluster_in_every_version_returns_the_broker(client, version):
    answer = client.call("describe_cluster", version, include_cluster_authorized_operations=True)
    assert (answer["error_code"], answer["controller_id"]) == ("none", 3)
    (broker,) = answer["brokers"]
    assert (broker["broker_id"], broker["rack"]) == (3, "r1")
    assert answer["cluster_authorized_operations"] == ALL_CLUSTER_OPERATIONS
    assert answer["cluster_id"] == client.call("metadata", 9, topics=[])["cluster_id"]
    if version >= 1:
        answer = client.call("describe_cluster", version, endpoint_type=2)
        assert answer["error_code"] == "mismatched_endpoint_type"
        answer = client.call("describe_cluster", version, endpoint_type=9)
        assert answer["error_code"] == "unsupported_endpoint_type"


def test_describe_topic_partitions_returns_pages_with_a_cursor(client):
    stem = unique("page")
    names = [client.create_topic(f"{stem}-{letter}", 3) for letter in "abc"]
    asked = [{"name": name} for name in (*names, f"{stem}-aa", "bad name")]
    pages, cursor = [], None
    for _ in range(10):
        answer = client.call(
            "describe_topic_partitions", 0, topics=asked, response_partition_limit=4, cursor=cursor
        )
        pages.append(answer["topics"])
        cursor = answer["next_cursor"]
        if cursor is None:
            break
    assert len(pages) == 3
    seen = [
        (topic["name"], part["partition_index"])
        for page in pages
        for topic in page
        for part in topic["partitions"]
    ]
    assert seen == [(name, index) for name in names for index in range(3)]
    errors = {topic["name"]: topic["error_code"] for page in pages for topic in page}
    assert errors[f"{stem}-aa"] == "unknown_topic_or_partition"
    assert errors["bad name"] == "invalid_topic_exception"
    for at, index in (("nowhere", 0), (names[0], -1)):
        cursor = {"topic_name": at, "partition_index": index}
        answer = client.call("describe_topic_partitions", 0, topics=asked, cursor=cursor)
        assert {topic["error_code"] for topic in answer["topics"]} == {"invalid_request"}
    every = client.call("describe_topic_partitions", 0, topics=[])["topics"]
    assert {topic["name"] for topic in every} >= set(names)
    assert every == sorted(every, key=lambda topic: topic["name"])


# --- describing -----------------------------------------------------------------------------------


def test_resources_named_twice_are_described_once(client, topic):
    resource = {"resource_type": TOPIC, "resource_name": topic, "configuration_keys": None}
    answer = client.call("describe_configs", 4, resources=[resource, resource])
    assert [result["resource_name"] for result in answer["results"]] == [topic]
    asked = {"name": topic, "partition_indexes": [0, 0, 1]}
    answer = client.call("describe_producers", 0, topics=[asked, asked])
    parts = [[part["partition_index"] for part in row["partitions"]] for row in answer["topics"]]
    assert parts == [[0, 1], []]
    answer = client.call("describe_transactions", 0, transactional_ids=["t", "u", "t"])
    assert [transaction["transactional_id"] for transaction in answer["transaction_states"]] == [
        "t",
        "u",
    ]
    answer = client.call("describe_groups", 6, groups=["g", "h", "g"])
    assert [group["group_id"] for group in answer["groups"]] == ["g", "h"]
    answer = client.call("consumer_group_describe", 1, group_ids=["g", "h", "g"])
    assert [group["group_id"] for group in answer["groups"]] == ["g", "h"]
    client.coordinator("g", 0)
    everything, nothing = {"group_id": "g", "topics": None}, {"group_id": "g", "topics": []}
    answer = client.call("offset_fetch", 8, groups=[everything, nothing, everything, nothing])
    assert len(answer["groups"]) == 3
    asked = {"name": topic, "partition_indexes": [0, 0, 1]}
    answer = client.call("offset_fetch", 7, group_id="g", topics=[asked, asked])
    parts = [[part["partition_index"] for part in row["partitions"]] for row in answer["topics"]]
    assert parts == [[0, 1], []]
    again = {"group_id": "g", "topics": [asked]}
    answer = client.call("offset_fetch", 8, groups=[again, again, {**again, "group_id": "h"}])
    parts = [
        [part["partition_index"] for part in group["topics"][0]["partitions"]]
        for group in answer["groups"]
    ]
    assert parts == [[0, 1], [], [0, 1]]
