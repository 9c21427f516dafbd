"""Quotas of authenticated users: all clients of a user share a quota; other users do not."""

from __future__ import annotations

import pytest
from confluent_kafka import Producer

from tests.support.cluster import Cluster, unique
from tests.support.secured import USERS, Secured
from tests.support.waits import DEADLINE_S, until

RATE, MOST = 20_000, 195_000
"""The quota in bytes per second, and the bytes that it allows after ten idle seconds."""


def limit(admin: Cluster, rate: float | None, **entity: str) -> None:
    """Set or remove the quota of an entity, and wait until the broker has applied it."""
    kinds = {"user": "user", "client_id": "client-id"}
    named = [{"entity_type": kinds[kind], "entity_name": name} for kind, name in entity.items()]
    op = {"key": "producer_byte_rate", "value": rate or 0.0, "remove": rate is None}
    admin.call("alter_client_quotas", 1, entries=[{"entity": named, "ops": [op]}])
    asked = [
        {"entity_type": kinds[kind], "match_type": 0, "match": name}
        for kind, name in entity.items()
    ]

    def heard() -> bool:
        answer = admin.call("describe_client_quotas", 1, components=asked, strict=True)
        return [v["value"] for entry in answer["entries"] for v in entry["values"]] == (
            [] if rate is None else [rate]
        )

    until(heard, "the quota")


def waits(secured: Secured, user: str, client_id: str, topic: str, size: int) -> bool:
    """Return whether a client is throttled after producing ``size`` bytes."""
    told: list[float] = []
    producer = Producer(
        {
            "bootstrap.servers": secured.listeners["LOGIN"],
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.username": user,
            "sasl.password": USERS[user],
            "client.id": client_id,
            "throttle_cb": lambda event: told.append(event.throttle_time),
        }
    )
    producer.produce(topic, b"x" * size, partition=0)
    assert producer.flush(DEADLINE_S) == 0
    producer.poll(0.1)
    return bool(told)


@pytest.mark.slow
def test_quota_is_shared_by_all_clients_of_a_user_alone(secured: Secured) -> None:
    with Cluster(secured.bootstrap) as admin:
        topic = admin.create_topic(unique("limited"))
        limit(admin, RATE, user="alice")
        limit(admin, RATE, user="alice", client_id="own")
        assert not waits(secured, "alice", "first", topic, MOST)
        assert waits(secured, "alice", "second", topic, MOST // 2)
        assert not waits(secured, "alice", "own", topic, MOST)
        assert not waits(secured, "bob", "first", topic, 2 * MOST)
        limit(admin, None, user="alice", client_id="own")
        limit(admin, None, user="alice")
        assert not waits(secured, "alice", "first", topic, 2 * MOST)
