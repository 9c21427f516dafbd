"""Faults of some of the partitions in a request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from confluent_kafka import Consumer, Producer

from fencepost.testing import Kafka
from tests.support.batches import batch, batches
from tests.support.cluster import Cluster
from tests.support.raw import ConnectionLostError

LED_ELSEWHERE = "NOT_LEADER_OR_FOLLOWER"
TOPICS = ("orders", "payments")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    with Kafka(tmp_path_factory.mktemp("partial")) as kafka:
        for topic in TOPICS:
            kafka.topic(topic, partitions=3)
        yield kafka


@pytest.fixture
def broker(shared: Kafka) -> Iterator[Kafka]:
    yield shared
    shared.faults.clear()


@pytest.fixture
def client(broker: Kafka) -> Iterator[Cluster]:
    with Cluster(broker.bootstrap) as client:
        yield client


def codes(answer: dict[str, Any], topics: str, partitions: str, index: str) -> dict[Any, str]:
    """Return the error codes by topic and partition; check that each partition occurs once."""
    found = [
        (
            (topic.get("name") or topic.get("topic") or topic["topic_id"], row[index]),
            row["error_code"],
        )
        for topic in answer[topics]
        for row in topic[partitions]
    ]
    assert len(dict(found)) == len(found), found
    return dict(found)


def ids(client: Cluster) -> dict[str, UUID]:
    return {topic: client.topic_id(topic) for topic in TOPICS}


@pytest.mark.parametrize("version", [3, 9, 13])
def test_produce_to_a_partition_with_a_fault_is_not_written(
    version: int, broker: Kafka, client: Cluster
) -> None:
    known = ids(client)

    def end(topic: str, index: int) -> int:
        return len(broker.records(topic, partition=index))

    before = {(topic, index): end(topic, index) for topic in TOPICS for index in range(3)}
    fault = broker.faults.add(api="Produce", error=LED_ELSEWHERE, only={"orders": [1, 2]})
    keys: dict[str, Any] = dict(known) if version >= 13 else {topic: topic for topic in TOPICS}
    name = "topic_id" if version >= 13 else "name"
    data = [
        {
            name: keys[topic],
            "partition_data": [{"index": index, "records": batch([b"v"])} for index in range(3)],
        }
        for topic in TOPICS
    ]
    answer = client.call(
        "produce", version, transactional_id=None, acks=-1, timeout=9_000, topic_data=data
    )
    told = codes(answer, "responses", "partition_responses", "index")
    wrong = {(str(keys["orders"]), 1), (str(keys["orders"]), 2)}
    assert {place for place, code in told.items() if code != "none"} == wrong
    assert set(told.values()) == {"none", LED_ELSEWHERE.lower()}
    assert len(told) == 6
    written = {place for place in before if end(*place) > before[place]}
    assert written == before.keys() - {("orders", 1), ("orders", 2)}
    assert (fault.hits, fault.is_used_up) == (1, True)


@pytest.mark.parametrize("version", [4, 12, 16])
def test_fetch_with_a_partition_fault_returns_the_other_partitions(
    version: int, broker: Kafka, client: Cluster
) -> None:
    topic = broker.topic(f"fetched-{version}", partitions=3)
    broker.produce(topic, "a", "b", "c")
    topic_id = client.topic_id(topic)
    named = {"topic_id": topic_id} if version >= 13 else {"topic": topic}
    parts = [
        {"partition": index, "fetch_offset": 0, "partition_max_bytes": 1_000} for index in range(3)
    ]
    broker.faults.add(api="Fetch", error=LED_ELSEWHERE, only={topic: 1})
    answer = client.call("fetch", version, max_bytes=9_000, topics=[{**named, "partitions": parts}])
    found = {
        partition["partition_index"]: (
            partition["error_code"],
            [value for row in batches(partition["records"] or b"") for value in row.values],
        )
        for partition in answer["responses"][0]["partitions"]
    }
    assert found == {
        0: ("none", [b"a"]),
        1: (LED_ELSEWHERE.lower(), []),
        2: ("none", [b"c"]),
    }


def test_partition_with_a_fault_stays_in_the_fetch_session(broker: Kafka, client: Cluster) -> None:
    topic = broker.topic("in-session", partitions=2)
    parts = [{"partition": index, "fetch_offset": 0} for index in range(2)]
    asked = [{"topic": topic, "partitions": parts}]
    first = client.call("fetch", 12, session_id=0, session_epoch=0, topics=asked)
    session = first["session_id"]
    assert session
    fault = broker.faults.add(api="Fetch", error=LED_ELSEWHERE, only={topic: 1})
    second = client.call(
        "fetch", 12, session_id=session, session_epoch=1, topics=[], max_wait=60_000, min_bytes=1
    )
    assert codes(second, "responses", "partitions", "partition_index") == {
        (topic, 1): LED_ELSEWHERE.lower()
    }
    assert (second["error_code"], second["session_id"], fault.hits) == ("none", session, 1)
    broker.produce(topic, "a", "b")
    third = client.call(
        "fetch", 12, session_id=session, session_epoch=2, topics=[], max_wait=9_000, min_bytes=1
    )
    told = codes(third, "responses", "partitions", "partition_index")
    assert told == {(topic, 0): "none", (topic, 1): "none"}


def test_offset_commit_for_a_partition_with_a_fault_is_not_committed(
    broker: Kafka, client: Cluster
) -> None:
    client.coordinator("partial", 0)
    broker.faults.add(api="OffsetCommit", error="UNSTABLE_OFFSET_COMMIT", only={"orders": 0})
    rows = [{"partition_index": index, "committed_offset": 5} for index in range(2)]
    answer = client.call(
        "offset_commit",
        8,
        group_id="partial",
        generation_id_or_member_epoch=-1,
        topics=[{"name": topic, "partitions": rows} for topic in TOPICS],
    )
    told = codes(answer, "topics", "partitions", "partition_index")
    assert told.pop(("orders", 0)) == "unstable_offset_commit"
    assert set(told.values()) == {"none"}
    assert broker.committed("partial") == dict.fromkeys(told, 5)


def test_partition_fault_does_not_apply_to_other_partitions(broker: Kafka, client: Cluster) -> None:
    fault = broker.faults.add(api="ListOffsets", error=LED_ELSEWHERE, only={"orders": [0]})
    lost = broker.faults.add(api="ListOffsets", close="before", only={"payments": [2]})

    def ask(topic: str, index: int) -> str:
        row = [{"partition_index": index, "timestamp": -1}]
        answer = client.call("list_offsets", 7, topics=[{"name": topic, "partitions": row}])
        (code,) = codes(answer, "topics", "partitions", "partition_index").values()
        return code

    assert ask("orders", 1) == ask("payments", 0) == "none"
    assert (fault.hits, lost.hits) == (0, 0)
    assert ask("orders", 0) == LED_ELSEWHERE.lower()
    assert fault.seen[0].partitions == {("orders", 0)}
    with pytest.raises(ConnectionLostError):
        ask("payments", 2)


def test_clients_retry_the_partition_with_a_fault(tmp_path: Path) -> None:
    with Kafka(tmp_path) as kafka:
        kafka.topic("orders", partitions=2)
        refused = kafka.faults.add(api="Produce", error=LED_ELSEWHERE, only={"orders": 1}, times=2)
        producer = Producer({"bootstrap.servers": kafka.bootstrap, "retry.backoff.ms": 10})
        for index in range(2):
            producer.produce("orders", str(index), partition=index)
        assert producer.flush(30) == 0
        assert refused.hits == 2
        assert len(kafka.records("orders")) == 2
        unread = kafka.faults.add(api="Fetch", error=LED_ELSEWHERE, only={"orders": 0}, times=2)
        consumer = Consumer(
            {
                "bootstrap.servers": kafka.bootstrap,
                "group.id": "shop",
                "auto.offset.reset": "earliest",
                "topic.metadata.refresh.fast.interval.ms": 50,
            }
        )
        consumer.subscribe(["orders"])
        seen = {message.value() for message in consumer.consume(2, 30)}
        consumer.close()
        assert (seen, unread.hits) == ({b"0", b"1"}, 2)


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"api": "EndTxn", "error": LED_ELSEWHERE, "only": {"t": 0}}, "needs an api among Produce"),
        ({"error": LED_ELSEWHERE, "only": {"t": 0}}, "needs an api among Produce"),
        ({"drop": True, "only": {}}, "only has no partition"),
        ({"drop": True, "only": {"t": []}}, "only has no partition"),
        ({"drop": True, "only": {"t": "0"}}, "a partition or a list of them, not '0'"),
        ({"drop": True, "only": {"t": [-1]}}, "a partition of only is 0 or more, not -1"),
        ({"drop": True, "only": ["t"]}, "partitions by topic"),
    ],
)
def test_invalid_partitions_of_a_fault_are_refused(
    broker: Kafka, told: dict[str, Any], why: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=why):
        broker.faults.add(**told)
