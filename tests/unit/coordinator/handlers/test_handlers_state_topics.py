"""The broker refuses requests after which a coordinator's topic would lose state."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.cluster import GROUP, TRANSACTION, Cluster

TOPIC = 2
SET, DELETE, APPEND, SUBTRACT = range(4)
STATE = ("__consumer_offsets", "__transaction_state")


@pytest.fixture(autouse=True)
def coordinated(client: Cluster) -> None:
    client.coordinator("g", GROUP)
    client.coordinator("t", TRANSACTION)


def configs(client: Cluster, name: str) -> dict[str, str]:
    """Return the settings of the topic itself, without defaults."""
    asked = [{"resource_type": TOPIC, "resource_name": name, "configuration_keys": None}]
    (found,) = client.call("describe_configs", 4, resources=asked)["results"]
    return {
        config["name"]: config["value"]
        for config in found["configs"]
        if config["config_source"] == 1
    }


def answered(
    client: Cluster, api: str, name: str, entries: list[dict[str, Any]], *, check: bool = False
) -> Any:
    resource = {"resource_type": TOPIC, "resource_name": name, "configs": entries}
    version = 2 if api == "alter_configs" else 1
    answer = client.call(api, version, resources=[resource], validate_only=check)
    return answer["responses"][0]


@pytest.mark.parametrize("topic", STATE)
@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize(
    ("key", "operation", "value"),
    [
        ("cleanup.policy", SET, "delete"),
        ("cleanup.policy", APPEND, "delete"),
        ("cleanup.policy", SUBTRACT, "compact"),
        ("cleanup.policy", DELETE, None),
        ("retention.ms", SET, "1"),
        ("retention.bytes", SET, "0"),
        ("delete.retention.ms", SET, "0"),
        ("min.compaction.lag.ms", SET, "9223372036854775807"),
        ("max.compaction.lag.ms", SET, "1"),
        ("max.message.bytes", SET, "0"),
        ("message.timestamp.before.max.ms", SET, "0"),
        ("message.timestamp.after.max.ms", SET, "0"),
    ],
)
def test_unsafe_config_of_an_internal_topic_is_refused(
    client: Cluster, topic: str, key: str, operation: int, value: str | None, *, check: bool
) -> None:
    before = configs(client, topic)
    change = {"name": key, "config_operation": operation, "value": value}
    answer = answered(client, "incremental_alter_configs", topic, [change], check=check)
    assert answer["error_code"] == "invalid_config"
    assert topic in answer["error_message"]
    assert configs(client, topic) == before
    if operation == SET:
        entries = [{"name": name, "value": text} for name, text in {**before, key: value}.items()]
        answer = answered(client, "alter_configs", topic, entries, check=check)
        assert answer["error_code"] == "invalid_config"
        assert configs(client, topic) == before


@pytest.mark.parametrize("topic", STATE)
def test_alter_configs_does_not_remove_cleanup_policy_of_an_internal_topic(
    client: Cluster, topic: str
) -> None:
    before = configs(client, topic)
    other = [{"name": "segment.bytes", "value": "2000000"}]
    for entries in ([], other):
        assert answered(client, "alter_configs", topic, entries)["error_code"] == "invalid_config"
    assert configs(client, topic) == before
    whole = [{"name": "cleanup.policy", "value": "compact"}, *other]
    assert answered(client, "alter_configs", topic, whole)["error_code"] == "none"
    assert configs(client, topic) == {"cleanup.policy": "compact", "segment.bytes": "2000000"}
    back = [{"name": name, "value": text} for name, text in before.items()]
    assert answered(client, "alter_configs", topic, back)["error_code"] == "none"


def create(client: Cluster, name: str, **own: str) -> Any:
    topic = {
        "name": name,
        "num_partitions": 1,
        "replication_factor": 1,
        "configs": [{"name": key.replace("_", "."), "value": own[key]} for key in own],
    }
    return client.call("create_topics", 5, topics=[topic], timeout=10_000)["topics"][0]


def test_internal_topic_is_not_created_with_unsafe_configs(client: Cluster) -> None:
    name = "__share_group_state"
    for own in ({"cleanup_policy": "compact"}, {"retention_ms": "1"}, {"max_message_bytes": "9"}):
        assert create(client, name, **own)["error_code"] == "invalid_config"
    made = create(client, name)
    assert made["error_code"] == "none"
    (policy,) = (config for config in made["configs"] if config["name"] == "cleanup.policy")
    assert policy["value"] == "delete"
    assert configs(client, name) == {
        "cleanup.policy": "delete",
        "compression.type": "producer",
        "min.insync.replicas": "2",
        "retention.ms": "-1",
        "segment.bytes": "104857600",
    }


@pytest.mark.parametrize("name", [*STATE, "__share_group_state", "__fencepost_history"])
def test_internal_topic_and_its_records_are_not_deleted(client: Cluster, name: str) -> None:
    answer = client.call("delete_topics", 5, topic_names=[name], timeout=10_000)
    assert answer["responses"][0]["error_code"] in {
        "invalid_topic_exception",
        "unknown_topic_or_partition",
    }
    partitions = [{"partition_index": 0, "offset": -1}]
    topics = [{"name": name, "partitions": partitions}]
    answer = client.call("delete_records", 2, topics=topics, timeout=10_000)
    assert answer["topics"][0]["partitions"][0]["error_code"] == "invalid_topic_exception"
