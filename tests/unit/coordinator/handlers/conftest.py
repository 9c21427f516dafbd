"""A broker for handlers of topics and records, and a client with Kafka's message schemas."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fencepost.coordinator.daemon.broker import Broker
from tests.support.cluster import GROUP, TRANSACTION, Cluster, unique
from tests.support.guarded import Guarded
from tests.support.telemetry import ENABLED

CONFIG = {
    "node.id": "3",
    **ENABLED,
    "broker.rack": "r1",
    "offsets.topic.num.partitions": "2",
    "transaction.state.log.num.partitions": "2",
    "num.partitions": "2",
    "message.max.bytes": "100000",
    "fetch.max.bytes": "50000",
}


@pytest.fixture(scope="module")
def bootstrap(tmp_path_factory) -> Iterator[str]:
    with Broker.in_thread(tmp_path_factory.mktemp("data"), config=CONFIG) as broker:
        yield broker.bootstrap


@pytest.fixture
def client(bootstrap) -> Iterator[Cluster]:
    with Cluster(bootstrap) as connected:
        yield connected


@pytest.fixture
def topic(client) -> str:
    return client.create_topic(unique("t"))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory) -> Iterator[Guarded]:
    """Yield a broker with an authorizer."""
    config = {
        **CONFIG,
        "group.initial.rebalance.delay.ms": "0",
        "group.consumer.assignment.interval.ms": "0",
        "transaction.two.phase.commit.enable": "true",
        "unstable.api.versions.enable": "true",
    }
    with Guarded(tmp_path_factory.mktemp("guarded"), config) as broker:
        yield broker


@pytest.fixture(scope="module")
def admin(guarded) -> Iterator[Cluster]:
    """Yield a client of ``guarded`` with every right."""
    with guarded.admin() as client:
        client.coordinator("any", GROUP)
        client.coordinator("any", TRANSACTION)
        client.create_topic("other")
        yield client
