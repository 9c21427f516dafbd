"""Brokers whose clients log in, use TLS, and are subject to ACLs."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from typing import Any

import aiokafka
import aiokafka.errors
import confluent_kafka
import kafka as kafka_python
import pytest
from kafka import errors as kafka_python_errors

from fencepost.client.client import ApiError
from fencepost.cluster.acl import PatternType, Permission
from fencepost.testing import Kafka
from fencepost.testing.access import STYLES, certificates, parse_rule

USERS = {"alice": 'pa"ss, w\\;o]rd=', "bob": "b"}
RULES = [
    "alice READ,WRITE,CREATE topic:orders-*",
    "alice READ group:*",
    "bob ALL topic:*",
    "deny bob READ topic:orders-secret",
]


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "tls"])
def guarded(request: pytest.FixtureRequest) -> Iterator[Kafka]:
    with Kafka(users=USERS, acls=RULES, tls=request.param) as broker:
        yield broker


def confluent(config: dict[str, Any], topic: str) -> None:
    producer = confluent_kafka.Producer(config)
    told: list[str] = []
    producer.produce(topic, b"v", on_delivery=lambda error, _: told.append(str(error or "")))
    producer.flush(20)
    if told != [""]:
        raise PermissionError(told)


async def aio(config: dict[str, Any], topic: str) -> None:
    async with aiokafka.AIOKafkaProducer(**config) as producer:
        await producer.send_and_wait(topic, b"v")


def python(config: dict[str, Any], topic: str) -> None:
    producer = kafka_python.KafkaProducer(**config)
    try:
        producer.send(topic, b"v").get(20)
    finally:
        producer.close()


async def write(style: str, config: dict[str, Any], topic: str) -> None:
    if style == "aiokafka":
        await aio(config, topic)
    else:
        {"confluent": confluent, "kafka-python": python}[style](config, topic)


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
@pytest.mark.parametrize("style", ["confluent", "aiokafka", "kafka-python"])
async def test_client_config_logs_in_clients_of_each_style(
    guarded: Kafka, style: str, mechanism: str
) -> None:
    topic = guarded.topic(f"orders-{uuid.uuid4()}")
    told = guarded.client_config(user="alice", style=style, mechanism=mechanism)
    await write(style, told, topic)
    assert [record.value for record in guarded.records(topic, at_least=1)] == [b"v"]


@pytest.mark.parametrize("style", ["confluent", "aiokafka", "kafka-python"])
async def test_client_without_the_right_is_refused(guarded: Kafka, style: str) -> None:
    topic = guarded.topic(f"bills-{uuid.uuid4()}")
    told = guarded.client_config(user="alice", style=style)
    with pytest.raises(
        (
            PermissionError,
            aiokafka.errors.TopicAuthorizationFailedError,
            kafka_python_errors.TopicAuthorizationFailedError,
        )
    ):
        await write(style, told, topic)
    guarded.acl(f"alice WRITE topic:{topic}")
    await write(style, guarded.client_config(user="alice", style=style), topic)
    assert len(guarded.records(topic, at_least=1)) == 1


def test_java_style_config_has_java_property_names(guarded: Kafka) -> None:
    told = guarded.client_config(user="alice", style="java")
    assert told["bootstrap.servers"] == guarded.bootstrap
    assert told["sasl.jaas.config"] == (
        "org.apache.kafka.common.security.scram.ScramLoginModule required"
        ' username="alice" password="pa\\"ss, w\\\\;o]rd=";'
    )
    plain = guarded.client_config(user="bob", style="java", mechanism="PLAIN")
    assert plain["sasl.jaas.config"].startswith(
        "org.apache.kafka.common.security.plain.PlainLoginModule required"
    )


def test_users_and_rules_survive_a_crash(guarded: Kafka) -> None:
    topic = guarded.topic(f"orders-{uuid.uuid4()}")
    guarded.crash()
    guarded.restart()
    confluent(guarded.client_config(user="alice"), topic)


@pytest.mark.parametrize(
    ("ask", "reason"),
    [
        ({}, "user=None is not one of the broker's: alice, bob"),
        ({"user": "carol"}, "user='carol' is not one"),
        ({"user": "bob", "style": "rdkafka"}, "style is one of confluent, aiokafka"),
        ({"user": "bob", "mechanism": "GSSAPI"}, "mechanism is one of PLAIN"),
    ],
)
def test_client_config_of_unknown_user_or_mechanism_is_refused(
    guarded: Kafka, ask: dict[str, str], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        guarded.client_config(**ask)


def test_client_config_without_users_is_plaintext(kafka: Kafka) -> None:
    for style in STYLES:
        told = kafka.client_config(style=style)
        assert set(told.values()) == {kafka.bootstrap, "PLAINTEXT"}
    with pytest.raises(ValueError, match="the broker has no users"):
        kafka.client_config(user="alice")
    with pytest.raises(RuntimeError, match="tls=True gives it one"):
        kafka.ca_file  # noqa: B018 - reading the attribute raises the error
    with pytest.raises(ApiError, match="SECURITY_DISABLED"):
        kafka.acl("alice READ topic:orders")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"users": {"alice": 1}}, "passwords by name"),
        ({"users": {"": "x"}}, "passwords by name"),
        ({"acls": []}, "acls= needs users="),
        ({"users": {"a": "b"}, "acls": "a READ topic:t"}, "a list of rules"),
        ({"users": {"a": "b"}, "acls": ["a READ"]}, "is not an ACL like"),
        ({"users": {"a": "b"}, "acls": ["a LOOK topic:t"]}, "unknown operation 'LOOK'"),
        ({"users": {"a": "b"}, "acls": ["a READ table:t"]}, "no resource type 'table'"),
        ({"users": {"a": "b"}, "acls": ["a READ topic"]}, "the topic needs a name"),
    ],
)
def test_invalid_security_arguments_are_refused(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises((TypeError, ValueError), match=reason):
        Kafka(**arguments)


def test_acl_rule_text_is_parsed() -> None:
    rule = parse_rule("Deny User:bob read,Write transactional-id:app-*")
    assert (rule.permission, rule.principal) == (Permission.DENY, "User:bob")
    assert [operation.name for operation in rule.operations] == ["READ", "WRITE"]
    assert (rule.pattern_type, rule.resource_name) == (PatternType.PREFIXED, "app-")
    anybody = parse_rule("* DESCRIBE cluster")
    assert (anybody.principal, anybody.resource_name) == ("User:*", "kafka-cluster")
    assert parse_rule("a READ topic:*")[4:] == (PatternType.LITERAL, "*")


def test_tls_without_trustme_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    certificates.cache_clear()
    monkeypatch.setitem(sys.modules, "trustme", None)
    with pytest.raises(ImportError, match=r"tls=True needs: pip install '.\[tls-testing\]'"):
        Kafka(tls=True)
