"""Fixtures that create clients, as in users' tests."""

import asyncio

import pytest


@pytest.fixture
def group(kafka):
    return kafka.name("shop")


def test_confluent_fixtures_make_clients(kafka, confluent_producer, confluent_consumer, group):
    producer = confluent_producer({"transactional.id": "till"})
    producer.init_transactions()
    producer.begin_transaction()
    producer.produce("orders", b"tea")
    producer.commit_transaction()
    consumer = confluent_consumer("orders", group=group, settings={"enable.auto.commit": False})
    (message,) = consumer.consume(1, 30)
    assert message.value() == b"tea"
    (member,) = kafka.wait_for_group(group, members=1).members
    assert member.client_id == "shop-1"


def test_kafka_python_fixtures_make_clients(kafka, kafka_python_producer, kafka_python_consumer):
    kafka_python_producer().send("orders", b"tea").get(30)
    consumer = kafka_python_consumer("orders")
    assert next(consumer).value == b"tea"
    assert kafka.wait_for_group("consumers", members=1).members[0].client_id == "consumers-1"


def test_aiokafka_fixtures_make_clients(kafka, aiokafka_producer, aiokafka_consumer):
    async def main():
        async with aiokafka_producer() as producer:
            await producer.send_and_wait("orders", b"tea")
        async with aiokafka_consumer("orders", group="shop") as consumer:
            assert (await consumer.getone()).value == b"tea"

    asyncio.run(main())
    kafka.wait_for_group("shop", members=0)


CLOSED = []


@pytest.mark.parametrize("end", ["running", "down"])
def test_shared_broker_has_no_clients_of_earlier_tests(kafka_session, confluent_consumer, end):
    for earlier in CLOSED:
        assert kafka_session.wait_for_group(earlier, members=0).members == ()
    topic = kafka_session.topic("orders")
    kafka_session.produce(topic, b"tea")
    assert confluent_consumer(topic).consume(1, 30)
    CLOSED.append(kafka_session.name("consumers"))
    kafka_session.wait_for_group(CLOSED[-1], members=1)
    if end == "down":
        kafka_session.faults.add(api="LeaveGroup", drop="request", times=None)
        kafka_session.crash()


def test_clients_of_the_previous_test_have_left(kafka_session):
    assert len(CLOSED) == 2
    for group in CLOSED:
        kafka_session.wait_for_group(group, members=0)


@pytest.mark.kafka(users={"alice": "secret"}, acls=["alice ALL topic:*", "alice ALL group:*"])
def test_users_log_in(kafka, confluent_consumer, kafka_python_producer):
    kafka.topic("orders")
    kafka_python_producer(user="alice").send("orders", b"tea").get(30)
    assert confluent_consumer("orders", user="alice").consume(1, 30)[0].value() == b"tea"


def test_client_accepts_subclasses_and_outlives_a_crash(kafka):
    from confluent_kafka import Consumer
    from confluent_kafka.admin import AdminClient

    class Shop(Consumer):
        pass

    kafka.produce("orders", b"tea")
    assert "orders" in kafka.client(AdminClient).list_topics(timeout=30).topics
    shop = kafka.client(Shop, {"group.id": "shop", "auto.offset.reset": "earliest"})
    shop.subscribe(["orders"])
    assert shop.consume(1, 30)
    with pytest.raises(TypeError, match="a class of confluent-kafka, aiokafka or kafka-python"):
        kafka.client(dict)
    kafka.crash()
