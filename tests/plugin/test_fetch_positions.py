"""``wait_for_fetch``: each consumer of a group has a position in each of its partitions."""

from __future__ import annotations

import asyncio
import threading

import pytest
from aiokafka import AIOKafkaConsumer
from kafka import KafkaConsumer

from fencepost.testing import Cluster, Kafka
from fencepost.testing.plugin import kafka_cluster
from tests.plugin.test_methods import member

__all__ = ["kafka_cluster"]

LATEST = {"auto.offset.reset": "latest"}
"""Without ``wait_for_fetch``, most consumers would miss the first records."""


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
@pytest.mark.kafka(topics={"orders": 4})
def test_latest_consumer_reads_every_record_after_the_wait(protocol: str, kafka: Kafka) -> None:
    settings = {} if protocol == "classic" else {"group.protocol": protocol}
    for group in ("one", "two"):
        with member(kafka, **settings, **LATEST, **{"group.id": group, "client.id": group}):
            found = kafka.wait_for_fetch(group, members=1)
            assert len(found.members[0].assigned) == 4
            kafka.produce("orders", *"abcd")
            kafka.wait_for_group(group, lag=0)


@pytest.mark.kafka(topics={"orders": 4})
def test_members_with_one_client_id_divide_the_partitions(kafka: Kafka) -> None:
    with member(kafka, **LATEST):
        kafka.wait_for_fetch("shop", members=1)
        with member(kafka, **LATEST):
            both = kafka.wait_for_fetch("shop", members=2)
            assert sorted(len(consumer.assigned) for consumer in both.members) == [2, 2]
            kafka.produce("orders", *"abcd")
            kafka.wait_for_group("shop", lag=0)
        kafka.wait_for_fetch("shop", members=1)


@pytest.mark.kafka(topics={"orders": 2})
def test_records_that_wait_in_the_client_do_not_hide_its_position(kafka: Kafka) -> None:
    kafka.produce("orders", *"abcd")

    async def main() -> None:
        consumer = AIOKafkaConsumer(
            "orders",
            bootstrap_servers=kafka.bootstrap,
            group_id="shop",
            auto_offset_reset="earliest",
        )
        async with consumer:
            await kafka.aio.wait_for_group("shop", members=1, lag=4)
            # aiokafka fetches from a partition again only after the fetched records were read.
            for _ in range(2):
                await kafka.aio.wait_for_fetch("shop", members=1)
            assert len(await consumer.getmany(timeout_ms=10_000)) > 0

    asyncio.run(main())


@pytest.mark.kafka(topics={"orders": 2})
def test_partitions_of_a_fetch_session_count(kafka: Kafka) -> None:
    consumer = KafkaConsumer(
        "orders", bootstrap_servers=kafka.bootstrap, group_id="shop", auto_offset_reset="latest"
    )
    ended = threading.Event()
    read: list[bytes] = []

    def poll() -> None:
        while not ended.is_set():
            # kafka-python 3.0.12 never fetches if a poll times out just when its join completes.
            timeout_ms = 50 if consumer.assignment() else 2_000
            for records in consumer.poll(timeout_ms).values():
                read.extend(record.value for record in records)
        consumer.close()

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        kafka.wait_for_fetch("shop", members=1)
        kafka.committed("shop")
        kafka.wait_for_fetch("shop", members=1)
        kafka.produce("orders", *"ab")
        seen = kafka.faults.observe(api="OffsetCommit")
        seen.wait(30)
        kafka.assert_committed("shop", {"orders": {0: 1, 1: 1}}, timeout=30)
    finally:
        ended.set()
        thread.join()
    assert sorted(read) == [b"a", b"b"]


@pytest.mark.kafka(topics={"orders": 2})
def test_wait_for_fetch_names_partitions_that_are_not_fetched(kafka: Kafka) -> None:
    kafka.faults.add(api="OffsetFetch", error="COORDINATOR_LOAD_IN_PROGRESS", times=None)
    with member(kafka):
        kafka.wait_for_group("shop", members=1)
        text = r"group shop Stable with 1 members and fetching \(not yet orders:0, orders:1\)"
        with pytest.raises(TimeoutError, match=text):
            kafka.wait_for_fetch("shop", members=1, timeout=0.1)
        kafka.faults.clear()
        kafka.wait_for_fetch("shop", members=1)


def test_wait_for_fetch_names_a_missing_group(kafka: Kafka) -> None:
    with pytest.raises(TimeoutError, match="there is no group 'shop'"):
        kafka.wait_for_fetch("shop", timeout=0.05)


@pytest.mark.kafka(topics={"orders": 3})
def test_wait_for_fetch_combines_positions_of_all_leaders(kafka_cluster: Cluster) -> None:
    with member(kafka_cluster, **LATEST):
        kafka_cluster.wait_for_fetch("shop", members=1)
        kafka_cluster.produce("orders", *"abc")
        kafka_cluster.wait_for_group("shop", lag=0)
