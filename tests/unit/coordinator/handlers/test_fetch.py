"""Fetch, through a socket and Kafka's own message schemas."""

from __future__ import annotations

import threading
import time
import uuid

import pytest

from tests.support.batches import batches
from tests.support.cluster import READ_COMMITTED, Cluster, unique
from tests.unit.coordinator.handlers.asking import fetch_parts, txn_batch


@pytest.mark.parametrize("version", range(4, 19))
def test_fetch_in_every_version_returns_records_and_offsets(client, version):
    name = client.create_topic(unique("f"), 2)
    client.produce(name, [b"a", b"b"])
    known = name if version < 13 else client.topic_id(name)
    answer = fetch_parts(client, [{}, {"partition": 1}, {"partition": 2}], version, known)
    first, second, third = answer["responses"][0]["partitions"]
    assert [batch.values for batch in batches(first["records"])] == [(b"a", b"b")]
    assert (first["high_watermark"], first["last_stable_offset"]) == (2, 2)
    assert first["aborted_transactions"] is None
    assert (second["error_code"], second["records"], second["high_watermark"]) == ("none", b"", 0)
    assert third["error_code"] == "unknown_topic_or_partition"
    if version >= 5:
        assert first["log_start_offset"] == 0
    if version >= 7:
        assert answer["session_id"] == 0


@pytest.mark.parametrize(
    ("offset", "code"),
    [(0, "none"), (2, "none"), (3, "offset_out_of_range"), (-1, "offset_out_of_range")],
)
def test_fetch_offset_outside_the_log_is_out_of_range(client, topic, offset, code):
    client.produce(topic, [b"a", b"b"])
    part = client.fetch(topic, offset=offset)
    assert part["error_code"] == code


def test_fetch_by_an_unknown_topic_id_is_refused(client):
    answer = fetch_parts(client, [{}], 13, uuid.uuid4())
    assert answer["responses"][0]["partitions"][0]["error_code"] == "unknown_topic_id"


def test_read_committed_fetch_lists_aborted_transactions_and_ends_at_the_lso(client, topic):
    client.produce(topic, [b"a"])
    part = client.fetch(topic, isolation=READ_COMMITTED)
    assert part["aborted_transactions"] == []
    tid = unique("tx")
    pid, epoch = client.init_producer(tid)
    client.produce(topic, txn_batch(pid, epoch), version=12, transactional_id=tid)
    part = client.fetch(topic, isolation=READ_COMMITTED, offset=1)
    assert (part["records"], part["last_stable_offset"], part["high_watermark"]) == (b"", 1, 2)


def test_first_partition_with_data_may_exceed_the_limits_by_one_batch(client):
    name = client.create_topic(unique("f"), 3)
    for index in (1, 2):
        for _ in range(3):
            client.produce(name, [b"x" * 1000], partition=index)
    parts = [{"partition": index, "partition_max_bytes": 10} for index in range(3)]
    answer = fetch_parts(client, parts, topic=name, max_bytes=10)
    sizes = [len(part["records"]) for part in answer["responses"][0]["partitions"]]
    assert sizes[0] == sizes[2] == 0
    assert 1000 < sizes[1] < 2000
    answer = fetch_parts(
        client, [{"partition": index} for index in range(3)], topic=name, max_bytes=2500
    )
    sizes = [len(part["records"]) for part in answer["responses"][0]["partitions"]]
    assert sizes[0] == sizes[2] == 0
    assert 2000 < sizes[1] < 2500


def test_fetch_response_is_limited_by_fetch_max_bytes_of_the_broker(client, topic):
    for _ in range(8):
        client.produce(topic, [b"x" * 10_000])
    assert 40_000 < len(client.fetch(topic)["records"]) <= 50_000


LONG_MS = 60_000
"""Longer than the client's timeout of 20 s: the test fails if the broker waits this long."""


def test_fetch_waits_for_min_bytes_or_max_wait(client, bootstrap, topic):
    begin = time.perf_counter()
    assert fetch_parts(client, [{}], topic=topic, max_wait=150)["responses"]
    assert time.perf_counter() - begin > 0.14

    def write() -> None:
        with Cluster(bootstrap) as other:
            time.sleep(0.1)
            other.produce(topic, [b"x"])
            other.produce(topic, [b"y" * 500])

    writer = threading.Thread(target=write)
    writer.start()
    answer = fetch_parts(client, [{}], topic=topic, max_wait=LONG_MS, min_bytes=400)
    writer.join()
    (part,) = answer["responses"][0]["partitions"]
    assert len(batches(part["records"])) == 2


@pytest.mark.parametrize("fields", [{"min_bytes": 0}, {"max_wait": 0}, {"max_wait": -1}])
def test_fetch_without_min_bytes_or_max_wait_is_answered_at_once(client, topic, fields):
    fetch_parts(client, [{}], topic=topic, **{"max_wait": LONG_MS, **fields})


def test_fetch_limited_by_a_segment_or_partition_max_bytes_does_not_wait(client):
    name = client.create_topic(unique("f"), 1, {"segment.bytes": str(1 << 20)})
    for _ in range(60):
        client.produce(name, [b"x" * 20_000])
    # The remaining records of the first segment are below ``min_bytes``, but the log has more.
    sizes = set()
    for offset in range(48, 56):
        part = {"fetch_offset": offset}
        answer = fetch_parts(client, [part], topic=name, max_wait=LONG_MS, min_bytes=50_000)
        sizes.add(len(batches(answer["responses"][0]["partitions"][0]["records"])))
    assert sizes == {1, 2}
    # The log has min_bytes, but the complete batches within the partition's limit are smaller.
    part = {"fetch_offset": 56, "partition_max_bytes": 30_000}
    answer = fetch_parts(client, [part], topic=name, max_wait=LONG_MS, min_bytes=25_000)
    assert len(batches(answer["responses"][0]["partitions"][0]["records"])) == 1


def test_fetch_with_an_error_or_without_partitions_does_not_wait(client, topic):
    fetch_parts(client, [{}, {"partition": 9}], topic=topic, max_wait=LONG_MS)
    client.call("fetch", 12, max_wait=LONG_MS, min_bytes=1, max_bytes=1, topics=[])


def test_delayed_fetch_of_a_deleted_topic_returns_unknown_topic_or_partition(
    client, bootstrap, topic
):
    def delete() -> None:
        with Cluster(bootstrap) as other:
            time.sleep(0.1)
            other.call("delete_topics", 5, topic_names=[topic])

    deleter = threading.Thread(target=delete)
    deleter.start()
    answer = fetch_parts(client, [{}], topic=topic, max_wait=LONG_MS)
    deleter.join()
    (part,) = answer["responses"][0]["partitions"]
    assert part["error_code"] == "unknown_topic_or_partition"


@pytest.mark.parametrize(
    ("epoch", "code"), [(-1, "not_leader_or_follower"), (0, "unknown_leader_epoch")]
)
def test_follower_fetch_from_a_standalone_broker_is_refused(client, topic, epoch, code):
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
