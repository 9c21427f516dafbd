"""Leader epochs, ListOffsets, DeleteRecords, through a socket and Kafka's own message schemas."""

from __future__ import annotations

import shutil

import pytest

from fencepost.coordinator.daemon.broker import Broker
from tests.support.batches import NOW_MS, batch
from tests.support.cluster import EARLIEST, Cluster, unique
from tests.unit.coordinator.handlers.asking import fetch_parts, txn_batch

# --- leader epochs --------------------------------------------------------------------------------


def test_leader_epochs_over_a_restart(tmp_path):
    with Broker.in_thread(tmp_path) as broker, Cluster(broker.bootstrap) as client:
        client.create_topic("a")
        client.produce("a", [b"0", b"1"])
    with Broker.in_thread(tmp_path) as broker, Cluster(broker.bootstrap) as client:
        (topic,) = client.call("metadata", 9, topics=[{"name": "a"}])["topics"]
        assert topic["partitions"][0]["leader_epoch"] == 1

        def end_of(epoch: int, current: int = -1):
            parts = [{"partition": 0, "leader_epoch": epoch, "current_leader_epoch": current}]
            answer = client.call(
                "offset_for_leader_epoch", 4, topics=[{"topic": "a", "partitions": parts}]
            )
            part = answer["topics"][0]["partitions"][0]
            return part["error_code"], part["leader_epoch"], part["end_offset"]

        # The new epoch has no records yet, and still begins at the log end.
        assert end_of(0) == ("none", 0, 2)
        assert end_of(1) == ("none", 1, 2)
        client.produce("a", [b"2"])
        assert end_of(0) == ("none", 0, 2)
        assert end_of(1, 1) == ("none", 1, 3)
        assert end_of(2) == ("none", -1, -1)
        assert end_of(0, 0)[0] == "fenced_leader_epoch"
        assert end_of(0, 2)[0] == "unknown_leader_epoch"

        def fetch(offset: int, **epochs: int):
            answer = fetch_parts(client, [{"fetch_offset": offset, **epochs}], topic="a")
            return answer["responses"][0]["partitions"][0]

        assert fetch(0, current_leader_epoch=0)["error_code"] == "fenced_leader_epoch"
        assert fetch(0, current_leader_epoch=2)["error_code"] == "unknown_leader_epoch"
        assert fetch(3, last_fetched_epoch=1)["diverging_epoch"] == {"epoch": -1, "end_offset": -1}
        diverging = fetch(3, last_fetched_epoch=0)
        assert (diverging["diverging_epoch"], diverging["records"]) == (
            {"epoch": 0, "end_offset": 2}, b"",
        )  # fmt: skip
        assert fetch(2, last_fetched_epoch=5)["error_code"] == "offset_out_of_range"

        answer = client.call(
            "list_offsets", 4, replica_id=-1, topics=[{"name": "a", "partitions": [
                {"partition_index": 0, "timestamp": EARLIEST, "current_leader_epoch": 1}]}],
        )  # fmt: skip
        part = answer["topics"][0]["partitions"][0]
        assert (part["offset"], part["leader_epoch"]) == (0, 0)


# --- ListOffsets, DeleteRecords -------------------------------------------------------------------


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
def test_listing_offsets_in_every_version(client, topic, version):
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


def test_listing_an_empty_partition_twice_and_one_that_is_not_there(client, topic):
    assert _list(client, topic, -3) == ("none", -1, -1)
    assert _list(client, unique("none"), -1)[0] == "unknown_topic_or_partition"
    part = {"partition_index": 0, "timestamp": -1}
    answer = client.call(
        "list_offsets", 5, replica_id=-1, topics=[{"name": topic, "partitions": [part, part]}]
    )
    codes = [one["error_code"] for one in answer["topics"][0]["partitions"]]
    assert codes == ["invalid_request"]


def test_a_topic_that_is_named_twice_has_one_row(client):
    name = client.create_topic(unique("t"), 2)
    zero, one = ({"partition_index": index, "timestamp": -1} for index in (0, 1))
    topics = [{"name": name, "partitions": parts} for parts in ([zero], [one, zero])]
    (row,) = client.call("list_offsets", 5, replica_id=-1, topics=topics)["topics"]
    codes = {part["partition_index"]: part["error_code"] for part in row["partitions"]}
    assert codes == {0: "invalid_request", 1: "none"}


@pytest.mark.parametrize("version", [4, 6, 7, 12, 13, 18])
def test_an_isolation_level_that_there_is_not(client, topic, version):
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


@pytest.mark.parametrize(
    ("epoch", "code"), [(-1, "not_leader_or_follower"), (0, "unknown_leader_epoch")]
)
def test_nobody_follows(client, topic, epoch, code):
    client.produce(topic, [b"x"])
    part = {
        "partition": 0,
        "current_leader_epoch": epoch,
        "last_fetched_epoch": -1,
        "partition_max_bytes": 1_000,
    }
    for replica in (0, 3):
        body = {"session_epoch": -1, "topics": [{"topic": topic, "partitions": [part]}]}
        answer = client.call("fetch", 12, replica_id=replica, max_bytes=1_000, **body)
        (told,) = answer["responses"][0]["partitions"]
        assert (told["error_code"], told["records"]) == (code, b"")


def test_the_latest_committed_offset_is_the_lso(client, topic):
    tid = unique("tx")
    pid, epoch = client.init_producer(tid)
    client.produce(topic, [b"a"])
    client.produce(topic, txn_batch(pid, epoch), version=12, transactional_id=tid)
    assert _list(client, topic, -1)[1] == 2
    assert _list(client, topic, -1, isolation=1)[1] == 1


@pytest.mark.parametrize("version", range(3))
def test_deleting_records(client, topic, version):
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


def test_deleted_records_do_not_come_back_after_a_kill(tmp_path):
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
