"""Authorization does not block the event loop, not even for the largest request of each API."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from fencepost.cluster.acl import ANYTHING, Acl, Operation, ResourceType
from fencepost.coordinator.daemon.broker import Broker
from fencepost.coordinator.daemon.in_thread import BrokerThread
from fencepost.coordinator.security.authorizer import STANDARD
from fencepost.coordinator.security.principal import Principal
from fencepost.coordinator.security.rules import RuleTable
from fencepost.protocol.api import ApiKey
from tests.support.guarded import rule
from tests.wire.test_stalls import (
    CASES,
    HALF,
    TOPICS,
    UNKNOWN,
    Case,
    Client,
    Make,
    check_largest,
    coordinator,
    create,
    name,
)

pytestmark = pytest.mark.slow

RULES = 4_000
"""Number of ACLs of a client that may do everything; all are for prefixes of topic names."""


def produce(make: Make) -> dict[str, object]:
    part = (make.PartitionProduceData(index=0, records=b""),)
    return {
        "acks": -1,
        "timeout_ms": 1000,
        "topic_data": [
            make.TopicProduceData(name=topic, partition_data=part) for topic in UNKNOWN[:HALF]
        ],
    }


def deletion(make: Make) -> dict[str, object]:
    part = (make.OffsetDeleteRequestPartition(partition_index=0),)
    return {
        "group_id": "g",
        "topics": [
            make.OffsetDeleteRequestTopic(name=topic, partitions=part) for topic in UNKNOWN[:HALF]
        ],
    }


REFUSED = {
    "produce": Case(ApiKey.PRODUCE, 9, produce),
    "deletion of offsets": Case(ApiKey.OFFSET_DELETE, 0, deletion),
    **{
        title: CASES[title]
        for title in (
            "fetch of unknown topics",
            "latest offsets",
            "metadata by name",
            "offsets of unknown groups",
        )
    },
}
ALLOWED = (
    "fetch session",
    "metadata of everything",
    "topics in pages",
    "unknown groups of consumers",
    "partitions for a transaction",
)


def rules() -> Iterator[Acl]:
    """Yield the ACLs, which allow everything."""
    for kind in ResourceType:
        if kind > ResourceType.TOPIC:
            yield rule((Operation.ALL, kind, ANYTHING))
    for stem in ("topic-", "unknown-", "wide", "nowhere"):
        for index in range(RULES // 4):
            yield rule((Operation.ALL, ResourceType.TOPIC, f"{stem}{index}"), prefixed=True)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Broker, BrokerThread]]:
    broker = Broker(
        tmp_path_factory.mktemp("guarded"),
        config={"authorizer.class.name": STANDARD, "allow.everyone.if.no.acl.found": "true"},
    )
    with BrokerThread(lambda: broker) as thread:
        client = Client(thread)
        client.ask(create([(name(index), 1) for index in range(TOPICS)]))
        for kind in (0, 1):
            client.ask(coordinator(kind))
        yield broker, thread


def check(guarded: tuple[Broker, BrokerThread], case: Case, rules: Iterable[Acl]) -> None:
    broker, thread = guarded
    authorizer = broker.services.authorizer
    assert authorizer is not None

    async def replace() -> None:
        authorizer.rules = RuleTable.of(rules)

    thread.call(replace)
    check_largest(case, thread)


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_largest_request_without_any_right_does_not_block_the_loop(guarded, case: Case) -> None:
    nobody = Principal("User", "nobody")
    kinds = [kind for kind in ResourceType if kind >= ResourceType.TOPIC]
    check(guarded, case, [rule((Operation.READ, kind, ANYTHING), nobody) for kind in kinds])


@pytest.mark.parametrize("title", ALLOWED)
def test_largest_request_with_every_right_does_not_block_the_loop(guarded, title: str) -> None:
    check(guarded, CASES[title], rules())
