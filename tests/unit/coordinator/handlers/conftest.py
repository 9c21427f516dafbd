"""A broker for the handlers of topics and records, and a client that speaks Kafka's own schemas."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fencepost.coordinator.daemon.broker import Broker
from tests.support.cluster import Cluster, unique

CONFIG = {
    "node.id": "3",
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
