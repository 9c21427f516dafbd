"""Tests as plain functions, with three clients."""

import asyncio
from pathlib import Path

import pytest


def test_broker_of_a_test_is_empty_at_first(kafka, tmp_path):
    assert kafka.history() == []
    kafka.produce(kafka.topic("orders"), b"one")
    assert list(tmp_path.iterdir()) == [], "the test's own directory is the test's"


def test_broker_has_no_topics_of_earlier_tests(kafka):
    kafka.topic("orders")  # fails if the topic of the previous test still exists
    assert kafka.records("orders") == []


@pytest.mark.kafka(
    topics={"orders": 3, "kept": {"partitions": 1, "config": {"retention.ms": -1}}},
    config={"num.partitions": 2, "auto.create.topics.enable": True},
)
def test_marker_sets_the_number_of_partitions(kafka):
    written = kafka.produce("orders", *"abc")
    assert [record.partition for record in written] == [0, 1, 2]
    assert {record.partition for record in kafka.produce("another", *"abcd")} == {0, 1}


@pytest.mark.kafka(topics=["orders"], config={"message.max.bytes": 10_000})
class TestClass:
    @pytest.mark.kafka(topics={"orders": 4, "payments": 2})
    def test_nearest_marker_overrides_outer_ones(self, kafka):
        assert kafka.produce("orders", b"", partition=3)[0].partition == 3
        assert kafka.produce("payments", b"", partition=1)[0].partition == 1
        assert kafka.config["message.max.bytes"] == "10000"


def test_confluent_clients_produce_consume_and_commit(kafka):
    from confluent_kafka import Consumer, Producer

    topic = kafka.topic("orders", partitions=2)
    producer = Producer({"bootstrap.servers": kafka.bootstrap})
    for at in range(4):
        producer.produce(topic, str(at).encode(), partition=at % 2)
    producer.flush()
    assert [record.value for record in kafka.records(topic, at_least=4)] == [b"0", b"2", b"1", b"3"]
    consumer = Consumer(
        {
            "bootstrap.servers": kafka.bootstrap,
            "group.id": "shop",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    consumer.subscribe([topic])
    seen = [consumer.consume(1, 20)[0].value() for _ in range(4)]
    consumer.commit(asynchronous=False)
    assert sorted(seen) == [b"0", b"1", b"2", b"3"]
    assert len(kafka.wait_for_group("shop", members=1, lag=0).members[0].assigned) == 2
    kafka.assert_committed("shop", {topic: {0: 2, 1: 2}})
    kafka.assert_committed("shop", {(topic, 0): 2})
    consumer.close()
    kafka.wait_for_group("shop", members=0)
    assert "member-left" in [entry.what for entry in kafka.history("shop")]


def test_kafka_python_clients_produce_consume_and_commit(kafka):
    from kafka import KafkaConsumer, KafkaProducer

    producer = KafkaProducer(bootstrap_servers=kafka.bootstrap)
    producer.send("orders", b"one").get(10)
    consumer = KafkaConsumer(
        "orders", bootstrap_servers=kafka.bootstrap, group_id="shop", auto_offset_reset="earliest"
    )
    assert next(consumer).value == b"one"
    consumer.commit()
    kafka.assert_committed("shop", {"orders": {0: 1}})
    consumer.close()
    producer.close()


def test_aiokafka_without_a_plugin_for_coroutines(kafka):
    from aiokafka import AIOKafkaProducer

    async def main():
        async with AIOKafkaProducer(bootstrap_servers=kafka.bootstrap) as producer:
            await producer.send_and_wait("orders", b"one")
            assert len(await kafka.aio.records("orders", at_least=1)) == 1

    asyncio.run(main())


def test_records_and_address_survive_a_restart(kafka):
    kafka.produce("orders", b"one")
    before = kafka.bootstrap
    kafka.restart()
    assert kafka.bootstrap == before
    assert [record.value for record in kafka.records("orders")] == [b"one"]
    assert Path(kafka.data_dir, "orders-0").is_dir()
