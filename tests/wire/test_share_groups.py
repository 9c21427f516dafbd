"""Share groups (KIP-932): members, records and offsets, on either broker."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import AcknowledgeType, Producer, ShareConsumer

from tests.support import requests
from tests.support.batches import batch
from tests.support.cluster import GROUP, Cluster, unique
from tests.support.kafka import run_tool
from tests.support.raw import Answer
from tests.support.share import ACCEPT, Member, acquired, configure, parts_of, values
from tests.support.waits import until

RECORDS = 20


@pytest.fixture
def cluster(bootstrap: str) -> Iterator[Cluster]:
    with Cluster(bootstrap) as client:
        client.coordinator(unique("g"), GROUP)
        yield client


def starts_at_the_beginning(cluster: Cluster, group: str) -> None:
    """Let the group begin with the first record of each partition."""
    configure(cluster, group, share_auto_offset_reset="earliest")


def beat(cluster: Cluster, group: str, member: str, epoch: int, *topics: str) -> Answer:
    fields: dict[str, Any] = {"subscribed_topic_names": list(topics)} if topics else {}
    body = requests.share_group_heartbeat(group, member, epoch, **fields)
    return cluster.call("share_group_heartbeat", 1, **body)


def assigned(cluster: Cluster, group: str, member: str, topic: str) -> tuple[int, list[Answer]]:
    """Join, and send heartbeats until partitions are assigned; return epoch and assignment."""
    epoch = beat(cluster, group, member, 0, topic)["member_epoch"]

    def beaten() -> tuple[int, list[Answer]] | None:
        nonlocal epoch
        answer = beat(cluster, group, member, epoch, topic)
        assert answer["error_code"] == "none", answer
        epoch = answer["member_epoch"]
        rows = answer["assignment"]["topic_partitions"]
        return (epoch, rows) if rows else None

    return until(beaten, "partitions are assigned")


def described(cluster: Cluster, group: str, *topics: Any) -> list[Answer]:
    body = requests.describe_share_group_offsets(group, *topics)
    (found,) = cluster.call("describe_share_group_offsets", 1, **body)["groups"]
    assert found["error_code"] == "none", found
    return found["topics"]


def produce(cluster: Cluster, topic: str, *records: bytes) -> None:
    parts = [{"index": 0, "records": batch(list(records))}]
    topics = [{"name": topic, "partition_data": parts}]
    answer = cluster.call("produce", 9, acks=-1, timeout=10_000, topic_data=topics)
    assert answer["responses"][0]["partition_responses"][0]["error_code"] == "none", answer


def test_librdkafka_gets_each_record_once_and_a_released_one_again(
    bootstrap: str, cluster: Cluster
) -> None:
    group, topic = unique("g"), cluster.create_topic(unique("t"), 2)
    starts_at_the_beginning(cluster, group)
    producer = Producer({"bootstrap.servers": bootstrap})
    for number in range(RECORDS):
        producer.produce(topic, b"%d" % number)
    producer.flush()
    consumer = ShareConsumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "share.acknowledgement.mode": "explicit",
        }
    )
    accepted: dict[bytes, int] = {}
    deliveries: list[bytes] = []

    def consumed() -> bool:
        for message in consumer.poll(0.2):
            assert message.error() is None
            deliveries.append(message.value())
            if message.value() == b"3" and deliveries.count(b"3") == 1:
                consumer.acknowledge(message, AcknowledgeType.RELEASE)
            else:
                accepted[message.value()] = message.delivery_count()
                consumer.acknowledge(message, AcknowledgeType.ACCEPT)
        return len(accepted) == RECORDS

    try:
        consumer.subscribe([topic])
        until(consumed, "all records are consumed")
        consumer.commit_sync(10)
    finally:
        consumer.close()
    assert sorted(deliveries, key=int) == sorted(
        [*(b"%d" % number for number in range(RECORDS)), b"3"], key=int
    )
    assert {value for value, count in accepted.items() if count != 1} == {b"3"}
    # A partition without a record has no start offset, and hence no lag.
    (row,) = described(cluster, group, None)
    assert {part["lag"] for part in row["partitions"]} - {-1} == {0}
    until(lambda: state(cluster, group) == "Empty", "the member has left")


def state(cluster: Cluster, group: str) -> str:
    body = requests.share_group_describe(group)
    (found,) = cluster.call("share_group_describe", 1, **body)["groups"]
    return str(found["group_state"] or found["error_code"])


def test_members_get_records_from_the_altered_start_offset(cluster: Cluster) -> None:
    group, topic = unique("g"), cluster.create_topic(unique("t"))
    topic_id = cluster.topic_id(topic)
    produce(cluster, topic, b"0", b"1")
    produce(cluster, topic, b"2", b"3")
    altered = cluster.call(
        "alter_share_group_offsets", 0, **requests.alter_share_group_offsets(group, topic, {0: 2})
    )
    assert altered["error_code"] == "none", altered
    member = str(uuid.uuid4())
    epoch, rows = assigned(cluster, group, member, topic)
    assert rows == [{"topic_id": str(topic_id), "partitions": [0]}]
    session = Member(cluster, group, member)

    def fetched() -> Answer | None:
        part = parts_of(session.fetch({topic_id: {0: []}} if session.epoch == 0 else {})).get(0)
        return part if part is not None and part["acquired_records"] else None

    part = until(fetched, "records are acquired")
    assert (acquired(part), values(part)) == ([(2, 3, 1)], [b"2", b"3"])
    session.acknowledge({topic_id: {0: [(2, 3, ACCEPT)]}})
    ((row,),) = (result["partitions"] for result in described(cluster, group, (topic, [0])))
    assert (row["lag"], row["error_code"]) == (0, "none")
    assert beat(cluster, group, member, -1)["member_epoch"] == -1
    assert epoch > 0


def test_deleted_share_group_loses_its_start_offsets(cluster: Cluster) -> None:
    group, topic = unique("g"), cluster.create_topic(unique("t"))
    produce(cluster, topic, b"0", b"1")
    alter = requests.alter_share_group_offsets(group, topic, {0: 1})
    assert cluster.call("alter_share_group_offsets", 0, **alter)["error_code"] == "none"

    def start_offset() -> int:
        ((row,),) = (result["partitions"] for result in described(cluster, group, (topic, [0])))
        return int(row["start_offset"])

    until(lambda: start_offset() == 1, "the offset is altered")
    (deleted,) = cluster.call("delete_groups", 2, **requests.delete_groups(group))["results"]
    assert deleted["error_code"] == "none"
    assert start_offset() == -1
    assert state(cluster, group) == "group_id_not_found"


def test_heartbeat_of_another_group_type_is_refused(cluster: Cluster) -> None:
    group, topic = unique("g"), cluster.create_topic(unique("t"))
    member = str(uuid.uuid4())
    assert beat(cluster, group, member, 0, topic)["error_code"] == "none"
    joining = requests.join_consumer_group(group, member, topic)
    refused = cluster.call("consumer_group_heartbeat", 1, **joining)
    assert (refused["error_code"], refused["error_message"]) == (
        "group_id_not_found",
        f"Group {group} is not a consumer group.",
    )
    other = unique("g")
    joining = requests.join_consumer_group(other, member, topic)
    assert cluster.call("consumer_group_heartbeat", 1, **joining)["error_code"] == "none"
    refused = beat(cluster, other, member, 0, topic)
    assert (refused["error_code"], refused["error_message"]) == (
        "group_id_not_found",
        f"Group {other} is not a share group.",
    )
    listed = cluster.call("list_groups", 5, types_filter=["share"])["groups"]
    assert group in {row["group_id"] for row in listed}
    assert other not in {row["group_id"] for row in listed}


# --- Apache Kafka's tools ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("java_tools")
def test_kafkas_share_groups_tool_describes_resets_and_deletes(
    bootstrap: str, cluster: Cluster
) -> None:
    group, topic = unique("g"), cluster.create_topic(unique("t"))
    produce(cluster, topic, b"0", b"1", b"2")
    alter = requests.alter_share_group_offsets(group, topic, {0: 1})
    assert cluster.call("alter_share_group_offsets", 0, **alter)["error_code"] == "none"

    def tool(*arguments: str) -> list[list[str]]:
        """Return the rows that the tool prints, each as its words."""
        said = run_tool(
            "org.apache.kafka.tools.consumer.group.ShareGroupCommand",
            *("--bootstrap-server", bootstrap, *arguments),
        )
        return [line.split() for line in said.splitlines() if line.strip()]

    assert [group, "Empty"] in tool("--list", "--state")
    assert [group, topic, "0", "1", "2"] in tool("--describe", "--group", group)
    member = str(uuid.uuid4())
    assigned(cluster, group, member, topic)
    rows = [row for row in tool("--describe", "--members", "--group", group) if member in row]
    assert rows == [[group, member, "/127.0.0.1", cluster.client_id, "1", f"{topic}:0"]]
    assert beat(cluster, group, member, -1)["member_epoch"] == -1
    reset = ("--reset-offsets", "--group", group, "--topic", topic, "--to-latest", "--execute")
    assert [group, topic, "0", "3"] in tool(*reset)
    assert [group, topic, "0", "3", "0"] in tool("--describe", "--group", group)
    assert [topic, "Successful"] in tool("--delete-offsets", "--group", group, "--topic", topic)
    said = " ".join(word for row in tool("--delete", "--group", group) for word in row)
    assert said == f"Deletion of requested share groups ('{group}') was successful."


@pytest.mark.slow
@pytest.mark.usefixtures("java_tools")
def test_javas_share_consumer_gets_every_record(bootstrap: str, cluster: Cluster) -> None:
    group, topic = unique("g"), cluster.create_topic(unique("t"))
    starts_at_the_beginning(cluster, group)
    produce(cluster, topic, *(b"%d" % number for number in range(RECORDS)))
    said = run_tool(
        "org.apache.kafka.tools.consumer.ConsoleShareConsumer",
        *("--bootstrap-server", bootstrap, "--topic", topic, "--group", group),
        *("--max-messages", str(RECORDS), "--timeout-ms", "30000"),
    )
    values = [line for line in said.splitlines() if line.isdigit()]
    assert sorted(values, key=int) == [str(number) for number in range(RECORDS)]
    ((row,),) = (result["partitions"] for result in described(cluster, group, None))
    assert row["lag"] == 0
