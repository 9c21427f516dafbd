"""DeleteRecords, through a socket and Kafka's own message schemas."""

from __future__ import annotations

import shutil

import pytest

from fencepost.coordinator.daemon.broker import Broker
from tests.support.cluster import EARLIEST, Cluster, unique


@pytest.mark.parametrize("version", range(3))
def test_delete_records_in_every_version_advances_the_log_start_offset(client, topic, version):
    client.produce(topic, [b"a"])
    client.produce(topic, [b"b"])

    def delete(offset: int, name: str = topic):
        parts = [{"partition_index": 0, "offset": offset}]
        answer = client.call(
            "delete_records", version, topics=[{"name": name, "partitions": parts}], timeout=1000
        )
        part = answer["topics"][0]["partitions"][0]
        return part["error_code"], part["low_watermark"]

    assert delete(3) == delete(-2) == ("offset_out_of_range", -1)
    assert delete(1) == ("none", 1)
    assert delete(0) == ("none", 1)
    assert client.fetch(topic, offset=0)["error_code"] == "offset_out_of_range"
    assert client.values(topic) == [b"b"]
    assert delete(-1) == ("none", 2)
    assert delete(0, unique("none"))[0] == "unknown_topic_or_partition"
    assert delete(0, "__consumer_offsets")[0] == "invalid_topic_exception"
    compacted = client.create_topic(unique("k"), 1, {"cleanup.policy": "compact"})
    assert delete(0, compacted)[0] == "policy_violation"


def test_log_start_offset_set_by_delete_records_survives_a_kill(tmp_path):
    broker = Broker.in_thread(tmp_path / "data").start()
    with Cluster(broker.bootstrap) as client:
        client.create_topic("a")
        client.produce("a", [b"a", b"b"])
        client.call(
            "delete_records", 2,
            topics=[{"name": "a", "partitions": [{"partition_index": 0, "offset": 2}]}],
        )  # fmt: skip
        copy = tmp_path / "copy"
        shutil.copytree(tmp_path / "data", copy)
    broker.stop()
    with Broker.in_thread(copy) as killed, Cluster(killed.bootstrap) as client:
        assert client.offset("a", 0, EARLIEST) == 2
