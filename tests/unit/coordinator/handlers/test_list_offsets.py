"""ListOffsets, and the fields that it has in common with Fetch, through a socket."""

from __future__ import annotations

import pytest

from tests.support.batches import NOW_MS, batch
from tests.support.cluster import Cluster, unique
from tests.unit.coordinator.handlers.asking import txn_batch


def _list(client: Cluster, topic: str, timestamp: int, version: int = 11, isolation: int = 0):
    parts = [{"partition_index": 0, "timestamp": timestamp}]
    body = {} if version < 2 else {"isolation_level": isolation}
    answer = client.call(
        "list_offsets",
        version,
        replica_id=-1,
        topics=[{"name": topic, "partitions": parts}],
        **body,
    )
    part = answer["topics"][0]["partitions"][0]
    return part["error_code"], part["offset"], part["timestamp"]


@pytest.mark.parametrize("version", range(1, 12))
def test_list_offsets_in_every_version_resolves_supported_timestamps(client, topic, version):
    for number in range(3):
        client.produce(topic, batch([b"x"], timestamp_ms=NOW_MS + 10 * (number % 2)))
    assert _list(client, topic, -1, version) == ("none", 3, -1)
    assert _list(client, topic, -2, version) == ("none", 0, -1)
    assert _list(client, topic, NOW_MS + 1, version) == ("none", 1, NOW_MS + 10)
    assert _list(client, topic, NOW_MS + 11, version) == ("none", -1, -1)
    unsupported = ("unsupported_version", -1, -1)
    assert _list(client, topic, -3, version) == (
        ("none", 1, NOW_MS + 10) if version >= 7 else unsupported
    )
    assert _list(client, topic, -4, version) == (("none", 0, -1) if version >= 8 else unsupported)
    assert _list(client, topic, -5, version) == (("none", -1, -1) if version >= 9 else unsupported)
    assert _list(client, topic, -6, version) == (("none", -1, -1) if version >= 11 else unsupported)
    assert _list(client, topic, -7, version) == unsupported


def test_list_offsets_of_repeated_or_missing_partitions_returns_errors(client, topic):
    assert _list(client, topic, -3) == ("none", -1, -1)
    assert _list(client, unique("none"), -1)[0] == "unknown_topic_or_partition"
    part = {"partition_index": 0, "timestamp": -1}
    answer = client.call(
        "list_offsets", 5, replica_id=-1, topics=[{"name": topic, "partitions": [part, part]}]
    )
    codes = [partition["error_code"] for partition in answer["topics"][0]["partitions"]]
    assert codes == ["invalid_request"]


def test_list_offsets_of_a_topic_named_twice_returns_one_row(client):
    name = client.create_topic(unique("t"), 2)
    zero, one = ({"partition_index": index, "timestamp": -1} for index in (0, 1))
    topics = [{"name": name, "partitions": parts} for parts in ([zero], [one, zero])]
    (row,) = client.call("list_offsets", 5, replica_id=-1, topics=topics)["topics"]
    codes = {part["partition_index"]: part["error_code"] for part in row["partitions"]}
    assert codes == {0: "invalid_request", 1: "none"}


@pytest.mark.parametrize("version", [4, 6, 7, 12, 13, 18])
def test_unknown_isolation_level_is_refused(client, topic, version):
    part = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1_000}
    named = {"topic": topic} if version < 13 else {"topic_id": client.topic_id(topic)}
    body = {} if version > 14 else {"replica_id": -1}
    answer = client.call(
        "fetch", version, max_bytes=1_000, isolation_level=2,
        topics=[{**named, "partitions": [part]}], **body,
    )  # fmt: skip
    told = [part["error_code"] for row in answer["responses"] for part in row["partitions"]]
    assert told == (["invalid_request"] if version < 13 else [])
    if version > 6:
        assert (answer["error_code"], answer["session_id"]) == ("invalid_request", 0)
    assert _list(client, topic, -1, isolation=2) == ("invalid_request", -1, -1)
    assert _list(client, topic, -1, isolation=1) == ("none", 0, -1)


def test_latest_committed_offset_is_the_lso(client, topic):
    tid = unique("tx")
    pid, epoch = client.init_producer(tid)
    client.produce(topic, [b"a"])
    client.produce(topic, txn_batch(pid, epoch), version=12, transactional_id=tid)
    assert _list(client, topic, -1)[1] == 2
    assert _list(client, topic, -1, isolation=1)[1] == 1
