"""Brokers with logins that markers configure."""

from __future__ import annotations

import confluent_kafka
import pytest

pytestmark = pytest.mark.kafka(users={"carol": "of the module"})


def told(config, topic):
    errors = []
    producer = confluent_kafka.Producer(config)
    producer.produce(topic, b"v", on_delivery=lambda error, _: errors.append(str(error or "")))
    producer.flush(20)
    return errors


@pytest.mark.kafka(topics=["orders"], users={"alice": "a"}, acls=["alice WRITE topic:orders"])
def test_marker_sets_the_rights_of_users(kafka):
    assert told(kafka.client_config("alice"), "orders") == [""]
    assert "authorization failed" in told(kafka.client_config("carol"), "orders")[0]


def test_broker_of_the_module_has_users(kafka_module):
    topic = kafka_module.topic("orders")
    assert told(kafka_module.client_config(), topic) == [""]


@pytest.mark.kafka(users={"alice": "a"})
def test_fails_users_of_a_shared_one(kafka_module):
    pass


@pytest.mark.kafka(users=["alice"])
def test_fails_users_without_passwords(kafka):
    pass


@pytest.mark.kafka(acls="alice READ topic:orders")
def test_fails_rules_that_are_none(kafka):
    pass


@pytest.mark.kafka(acls=["alice READ table:orders"])
def test_fails_a_rule_that_is_none(kafka):
    pass
