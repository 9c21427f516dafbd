"""Tests that share a broker."""

import os
from pathlib import Path

import pytest

pytestmark = pytest.mark.kafka(config={"num.partitions": 2}, topics={"orders": 3})


@pytest.fixture(scope="session")
def address(kafka_session):
    return kafka_session.bootstrap


@pytest.fixture
def application(kafka_session):
    """Return the topic of an application that needs the topic before it starts."""
    assert kafka_session.records(kafka_session.name("orders")) == []
    return kafka_session.name("orders")


@pytest.mark.parametrize("value", [str(number) for number in range(6)])
def test_topic_names_are_unique_to_the_test(
    value, application, kafka_session, kafka_module, address
):
    assert kafka_session.bootstrap == address != kafka_module.bootstrap
    kafka_session.produce(application, value)
    assert [record.value for record in kafka_session.records(application)] == [value.encode()]
    assert kafka_module.records(kafka_module.name("orders"), partition=2) == []
    assert (
        len({record.partition for record in kafka_module.produce(kafka_module.name("x"), *"ab")})
        == 2
    )
    assert (
        len({record.partition for record in kafka_session.produce(kafka_session.name("x"), *"ab")})
        == 1
    )
    with Path(os.environ["ADDRESSES"]).open("a", encoding="utf-8") as file:
        print(address, file=file)
