"""Consumer groups of KIP-848 with librdkafka: the coordinator assigns, the members reconcile."""

from __future__ import annotations

import contextlib
from collections import Counter

import pytest
from confluent_kafka import ConsumerGroupState, ConsumerGroupType, KafkaException
from confluent_kafka.admin import AdminClient

from tests.support.cluster import Cluster, unique
from tests.support.growing_group import rebalances_as_it_grows
from tests.support.waits import until
from tests.wire.clients import confluent_producer, dotted


@contextlib.contextmanager
def member(bootstrap: str, group: str, topic: str, **conf):
    import confluent_kafka

    # librdkafka refuses a session timeout and a heartbeat interval, because the broker sets them.
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "group.protocol": "consumer",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "fetch.wait.max.ms": 100,
            **dotted(conf),
        }
    )
    consumer.subscribe([topic])
    try:
        yield consumer
    finally:
        consumer.close()


@pytest.fixture
def topic(cluster: Cluster, bootstrap: str) -> str:
    name = cluster.create_topic(unique("kip848"), 6)
    with confluent_producer(bootstrap) as producer:
        for number in range(120):
            producer.produce(name, str(number), partition=number % 6)
    return name


def owned(*members) -> list[int]:
    """Poll every member once; return the sorted partition numbers that the members own."""
    for consumer in members:
        consumer.poll(0.02)
    return sorted(len(consumer.assignment()) for consumer in members)


def test_partitions_are_shared_out_and_every_record_is_read_once(bootstrap, topic):
    group, seen = unique("group"), Counter()
    with member(bootstrap, group, topic) as first:
        until(lambda: owned(first) == [6], "the only member owns everything")
        with member(bootstrap, group, topic) as second, member(bootstrap, group, topic) as third:
            until(lambda: owned(first, second, third) == [2, 2, 2], "three members share")
            partitions = [
                part.partition
                for consumer in (first, second, third)
                for part in consumer.assignment()
            ]
            assert sorted(partitions) == list(range(6))
        until(lambda: owned(first) == [6], "what the others left comes back")
    with member(bootstrap, group, topic) as reader:

        def read() -> bool:
            for message in reader.consume(200, 0.1):
                seen[message.value()] += 1
            return len(seen) == 120

        until(read, "everything is read")
    assert set(seen.values()) == {1}


def test_next_member_resumes_at_the_committed_offsets(bootstrap, topic):
    group = unique("group")
    with member(bootstrap, group, topic) as first:
        until(lambda: first.consume(200, 0.2), "records come")
        committed = {part.partition: part.offset for part in first.commit(asynchronous=False)}
    with member(bootstrap, group, topic) as second:
        until(lambda: owned(second) == [6], "the successor owns everything")
        found = {part.partition: part.offset for part in second.committed(second.assignment())}
    assert {index: found[index] for index in committed} == committed


def test_static_member_gets_its_former_partitions_after_a_restart(bootstrap, topic):
    group = unique("group")
    with member(bootstrap, group, topic, group_instance_id="a") as first:
        with member(bootstrap, group, topic, group_instance_id="b") as second:
            until(lambda: owned(first, second) == [3, 3], "two static members share")
            had = {part.partition for part in second.assignment()}
        with member(bootstrap, group, topic, group_instance_id="b") as again:
            until(lambda: owned(again) == [3], "the static member is back")
            assert {part.partition for part in again.assignment()} == had
            assert len(first.assignment()) == 3


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_group_rebalances_when_its_topic_grows(cluster, bootstrap, protocol):
    name = cluster.create_topic(unique("grows"), 2)
    rebalances_as_it_grows(bootstrap, name, protocol=protocol)


def test_consumer_group_is_listed_described_and_deleted_by_admin_client(bootstrap, topic):
    group = unique("group")
    admin = AdminClient({"bootstrap.servers": bootstrap})
    with member(bootstrap, group, topic, client_id="me") as consumer:
        until(lambda: owned(consumer) == [6], "the member owns everything")
        listed = {found.group_id: found for found in admin.list_consumer_groups().result().valid}
        assert listed[group].type is ConsumerGroupType.CONSUMER
        described = admin.describe_consumer_groups([group])[group].result()
        assert described.state is ConsumerGroupState.STABLE
        (seen,) = described.members
        assert seen.client_id == "me"
        assert len(seen.assignment.topic_partitions) == 6
        with pytest.raises(KafkaException, match="NON_EMPTY_GROUP"):
            admin.delete_consumer_groups([group])[group].result()
    until(
        lambda: (
            admin.describe_consumer_groups([group])[group].result().state
            is ConsumerGroupState.EMPTY
        ),
        "the group is empty",
    )
    admin.delete_consumer_groups([group])[group].result()


def test_new_partition_is_assigned_without_a_restart(cluster, bootstrap, topic):
    from confluent_kafka.admin import NewPartitions

    admin = AdminClient({"bootstrap.servers": bootstrap})
    with member(
        bootstrap, unique("group"), topic, topic_metadata_refresh_interval_ms=200
    ) as consumer:
        until(lambda: owned(consumer) == [6], "the member owns everything")
        admin.create_partitions([NewPartitions(topic, 8)])[topic].result()
        until(lambda: owned(consumer) == [8], "and the new partitions")
