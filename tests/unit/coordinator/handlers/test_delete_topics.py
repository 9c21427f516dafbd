"""DeleteTopics, through a socket and Kafka's own message schemas."""

from __future__ import annotations

import uuid

import pytest

from fencepost.coordinator.daemon.broker import Broker
from tests.support.cluster import TRANSACTION, Cluster, unique


@pytest.mark.parametrize("version", range(1, 7))
def test_delete_topics_in_every_version_deletes_the_topic(client, version):
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


def test_topic_named_by_id_is_deleted(client):
    name = client.create_topic(unique("d"))
    topic_id = client.topic_id(name)
    both = [{"name": name, "topic_id": topic_id}]
    double = [{"name": name}, {"name": None, "topic_id": topic_id}]
    unknown = [{"name": None, "topic_id": uuid.uuid4()}]
    for topics, code in (
        (both, "invalid_request"), (double, "invalid_request"), (unknown, "unknown_topic_id"),
    ):  # fmt: skip
        answer = client.call("delete_topics", 6, topics=topics)
        assert {response["error_code"] for response in answer["responses"]} == {code}
    answer = client.call("delete_topics", 6, topics=[{"name": None, "topic_id": topic_id}])
    assert [(response["name"], response["error_code"]) for response in answer["responses"]] == [
        (name, "none")
    ]


def test_delete_topics_is_refused_if_topic_deletion_is_disabled(tmp_path):
    with (
        Broker.in_thread(tmp_path, config={"delete.topic.enable": "false"}) as broker,
        Cluster(broker.bootstrap) as client,
    ):
        client.create_topic("a")
        for version, code in ((1, "invalid_request"), (3, "topic_deletion_disabled")):
            answer = client.call("delete_topics", version, topic_names=["a"])
            assert answer["responses"][0]["error_code"] == code
