"""The APIs of the share coordinator, through a socket and Kafka's own message schemas."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from fencepost.cluster.acl import Operation
from fencepost.coordinator.daemon.broker import Broker
from tests.support.cluster import Cluster, unique
from tests.support.guarded import cluster
from tests.support.requests import SHARE_STATE_FIELDS
from tests.support.share import SHARE, initialize, kafka_id
from tests.unit.coordinator.handlers.conftest import CONFIG

SHARE_CONFIG = {**CONFIG, "share.coordinator.state.topic.num.partitions": "3"}
LATEST = {"write_share_group_state": 1, "read_share_group_state_summary": 1}
APIS = {api: (LATEST.get(api, 0), fields) for api, fields in SHARE_STATE_FIELDS.items()}


@pytest.fixture(scope="module")
def bootstrap(tmp_path_factory) -> Iterator[str]:
    with Broker.in_thread(tmp_path_factory.mktemp("share"), config=SHARE_CONFIG) as broker:
        yield broker.bootstrap


@pytest.fixture
def topic_id(client, topic) -> uuid.UUID:
    return client.topic_id(topic)


def ask(client: Cluster, api: str, group: str, topic_id: uuid.UUID | None, **fields: Any):
    """Send a request about partition 0 and return the partition's result."""
    version, body = APIS[api]
    part = {"partition": 0, **body, **fields}
    topics = [{"topic_id": topic_id, "partitions": [part]}]
    answer = client.call(api, version, group_id=group, topics=topics)
    (result,) = answer["results"]
    (partition,) = result["partitions"]
    return partition


def find(client: Cluster, key: str, version: int = 6):
    body = {"key_type": SHARE}
    body |= {"key": key} if version < 4 else {"coordinator_keys": [key]}
    answer = client.call("find_coordinator", version, **body)
    return answer if version < 4 else answer["coordinators"][0]


def test_share_group_state_is_initialized_written_read_and_deleted(client, topic_id):
    group = unique("g")
    initialize(client, group, topic_id, start_offset=-1)
    part = ask(client, "read_share_group_state", group, topic_id, leader_epoch=3)
    assert (part["state_epoch"], part["start_offset"], part["state_batches"]) == (1, -1, [])
    batches = [
        {"first_offset": 5, "last_offset": 9, "delivery_state": 2, "delivery_count": 1},
        {"first_offset": 10, "last_offset": 10, "delivery_state": 0, "delivery_count": 2},
    ]
    state = {"leader_epoch": 3, "start_offset": 4, "delivery_complete_count": 5}
    part = ask(client, "write_share_group_state", group, topic_id, **state, state_batches=batches)
    assert part["error_code"] == "none"
    part = ask(client, "read_share_group_state", group, topic_id, leader_epoch=3)
    assert (part["start_offset"], part["state_batches"]) == (4, batches)
    part = ask(client, "read_share_group_state_summary", group, topic_id)
    assert (part["start_offset"], part["delivery_complete_count"]) == (4, 5)
    assert (part["leader_epoch"], part["state_epoch"]) == (3, 1)
    fenced = ask(client, "write_share_group_state", group, topic_id, leader_epoch=2)
    assert fenced["error_code"] == "fenced_leader_epoch"
    assert ask(client, "delete_share_group_state", group, topic_id)["error_code"] == "none"
    part = ask(client, "read_share_group_state_summary", group, topic_id)
    assert (part["error_code"], part["start_offset"]) == ("none", -1)


def test_invalid_share_state_partition_returns_an_error(client, topic_id):
    group = unique("g")
    find(client, f"{group}:{kafka_id(topic_id)}:0")
    for api in APIS:
        part = ask(client, api, group, None)
        assert (part["error_code"], part["partition"]) == ("invalid_request", 0), api
        part = ask(client, api, group, topic_id, partition=-1)
        assert (part["error_code"], part["partition"]) == ("invalid_request", -1), api
    for api in ("read_share_group_state", "write_share_group_state"):
        assert ask(client, api, group, topic_id)["error_code"] == "invalid_request"
    for api in ("initialize_share_group_state", "delete_share_group_state"):
        assert ask(client, api, group, uuid.uuid4())["error_code"] == "unknown_topic_or_partition"


@pytest.mark.parametrize("api", APIS)
def test_request_without_group_or_partitions_gets_an_empty_response(client, topic_id, api):
    version, body = APIS[api]
    part = {"partition": 0, **body}
    for group, topics in (
        ("", [{"topic_id": topic_id, "partitions": [part]}]),
        ("g", []),
        ("g", [{"topic_id": topic_id, "partitions": []}]),
    ):
        answer = client.call(api, version, group_id=group, topics=topics)
        assert answer["results"] == []


def test_coordinator_is_found_by_a_key_with_colons(client, topic_id):
    for group in ("g", "a:b", ":", "a:b:0"):
        found = find(client, f"{group}:{kafka_id(topic_id)}:0")
        assert (found["error_code"], found["node_id"]) == ("none", 3)
    assert find(client, f"g:{kafka_id(topic_id)}:-1")["error_code"] == "none"


@pytest.mark.parametrize("key", ["", "g", "g:0", "g:AAAA:0", ":{id}:0", "g:{id}:", "g:{id}:x"])
def test_malformed_coordinator_key_is_an_invalid_request(client, topic_id, key):
    key = key.replace("{id}", kafka_id(topic_id))
    assert find(client, key)["error_code"] == "invalid_request"


def test_find_coordinator_below_version_6_refuses_share_keys(client, topic_id):
    for version in (3, 5):
        found = find(client, f"g:{kafka_id(topic_id)}:0", version)
        assert found["error_code"] == "invalid_request"


def test_share_state_requests_need_cluster_action(guarded, admin, topic_id):
    key = f"g:{kafka_id(topic_id)}:0"
    with Cluster(guarded.bootstrap) as client:
        assert find(client, key)["error_code"] == "cluster_authorization_failed"
        for api in APIS:
            part = ask(client, api, "g", topic_id)
            assert part["error_code"] == "cluster_authorization_failed"
        guarded.allow(cluster(Operation.CLUSTER_ACTION))
        assert find(client, key)["error_code"] == "none"
        part = ask(client, "read_share_group_state_summary", "g", topic_id)
        assert part["error_code"] == "unknown_topic_or_partition"
