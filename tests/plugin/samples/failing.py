"""Tests that fail in different ways."""

import pytest


def transaction(kafka):
    from confluent_kafka import Producer

    producer = Producer(
        {
            "bootstrap.servers": kafka.bootstrap,
            "transactional.id": kafka.name("payments"),
            "client.id": "cashier",
        }
    )
    producer.init_transactions()
    producer.begin_transaction()
    producer.produce(kafka.name("orders"), b"one")
    producer.flush()


def test_earlier(kafka_session):
    transaction(kafka_session)


def test_fails(kafka):
    kafka.faults.add(api="EndTxn", close="after", times=2)
    transaction(kafka)
    raise AssertionError("on purpose")


def test_fails_with_the_shared_one(kafka_session):
    transaction(kafka_session)
    kafka_session.assert_committed("shop", {"orders": {0: 5}}, timeout=0)


def test_fails_without_a_broker(kafka):
    kafka.produce("orders", b"one")
    kafka.crash()
    kafka.records("orders")


@pytest.fixture
def broken(kafka):
    kafka.produce("orders", b"one")
    transaction(kafka)
    raise RuntimeError("broken on purpose")


def test_fails_to_begin(broken):
    pass


def test_passes(kafka):
    kafka.produce("orders", b"one")


@pytest.mark.kafka(topics={"orders": 0})
def test_no_partitions(kafka):
    pass


@pytest.mark.kafka(topics={"or/ders": 1})
def test_no_name(kafka):
    pass


@pytest.mark.kafka(topics={"orders": {"partition": 1}})
def test_no_such_key(kafka_session):
    pass


@pytest.mark.kafka({"orders": 1})
def test_by_position(kafka):
    pass


@pytest.mark.kafka(topic={"orders": 1})
def test_no_such_argument(kafka):
    pass


@pytest.mark.kafka(config={"num.partition": 1})
def test_no_such_setting(kafka):
    pass


@pytest.mark.kafka(config={"num.partitions": "many"})
def test_no_such_value(kafka):
    pass


@pytest.mark.kafka(config={"num.partitions": 3})
def test_config_of_a_shared_one(kafka_session):
    pass


@pytest.mark.kafka(config={"num.partitions": 3})
def test_config_of_a_module(kafka_module):
    pass


@pytest.mark.kafka(users={"alice": "a"}, acls=["alcie READ topic:orders"])
def test_rule_of_a_cluster(kafka_cluster):
    pass


@pytest.mark.kafka(config={"num.partition": 1})
def test_setting_of_a_cluster(kafka_cluster):
    pass


@pytest.mark.kafka(topics={"or/ders": 1}, brokers=1)
def test_topic_of_a_cluster(kafka_cluster):
    pass


@pytest.mark.kafka(brokers=2)
def test_brokers_of_one(kafka):
    pass


@pytest.mark.kafka(topics=["orders"])
def test_marker_that_no_fixture_reads():
    pass


@pytest.mark.kafka(topics=["orders"])
def test_marker_of_a_fixture_that_is_asked_for_late(request):
    assert request.getfixturevalue("kafka").records("orders") == []


@pytest.mark.kafka
def test_marker_as_a_label():
    pass


@pytest.mark.kafka(brokers=2)
def test_fails_with_a_cluster(kafka_cluster):
    kafka_cluster.kill(2)
    kafka_cluster.faults.add(api="EndTxn", close="after")
    raise AssertionError("on purpose")
