"""Large groups fit within all default limits of a broker."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import confluent_kafka
import pytest
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor

from fencepost.groups.assignors.client.model import Subscription
from fencepost.groups.assignors.client.protocol import encode_subscription
from tests.support.cluster import Cluster, unique
from tests.support.own_broker import OwnBroker, own_broker
from tests.support.waits import until, until_true
from tests.wire.clients import aio_consumer, dotted

pytestmark = pytest.mark.slow

TOPICS = [f"region-eu-central-1.team-{n % 40:02}.service-{n:05}.order-events" for n in range(3_000)]
NAMES = [name.ljust(60, "x") for name in TOPICS]
"""3,000 names of 60 characters."""
MEMBERS = 1_000
COOPERATIVE = 2_800
"""Number of topics of two cooperative-sticky members of librdkafka. While the second member joins,
the group's record contains each topic name five times: in both subscriptions, twice among the
partitions that the first member owns (KIP-429's list and the assignor's user data), and in the
assignment. These are 369 bytes per topic. So with 2,841 topics a record reaches its limit of
1,048,588 bytes, which is also the limit in Apache Kafka.
"""

ROOM = 2 * 1_048_588
"""A value of ``max.message.bytes`` with which more topics fit."""
OFFSETS = "__consumer_offsets"


@pytest.fixture(scope="module")
def broker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OwnBroker]:
    """Yield a broker with 3,000 topics and a loaded group coordinator."""
    with own_broker(request, tmp_path_factory.mktemp("large")) as started:
        with Cluster(started.bootstrap) as cluster:
            for at in range(0, len(NAMES), 500):
                topics = [
                    {"name": name, "num_partitions": 1, "replication_factor": 1}
                    for name in NAMES[at : at + 500]
                ]
                cluster.call("create_topics", 5, timeout=30_000, topics=topics)
            cluster.coordinator("any", 0)
        yield started


def member(broker: OwnBroker, group: str, *topics: str, **conf: Any) -> confluent_kafka.Consumer:
    """Return a consumer of librdkafka that has subscribed to ``topics``."""
    settings = {"bootstrap.servers": broker.bootstrap, "group.id": group, **dotted(conf)}
    consumer = confluent_kafka.Consumer(settings)
    consumer.subscribe(list(topics))
    return consumer


def until_shared(members: Sequence[confluent_kafka.Consumer], topics: int) -> None:
    """Poll until each member has an equal share of the topics."""

    def parts() -> list[int]:
        for consumer in members:
            consumer.poll(0.05)
        return [len(consumer.assignment()) for consumer in members]

    equal = [topics // len(members)] * len(members)
    until(lambda: parts() == equal, "equal parts of the topics", deadline_s=60, poll_s=0)


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_librdkafka_reads_three_thousand_topics_by_pattern(
    broker: OwnBroker, protocol: str
) -> None:
    pattern = r"^region-.*\.order-events.*"
    with contextlib.closing(
        member(broker, unique("g"), pattern, group_protocol=protocol)
    ) as consumer:
        until_shared([consumer], len(NAMES))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "topics"), [("roundrobin,range", len(NAMES)), ("cooperative-sticky", COOPERATIVE)]
)
def test_second_librdkafka_member_takes_over_half_of_the_topics(
    broker: OwnBroker, strategy: str, topics: int
) -> None:
    conf = {"partition_assignment_strategy": strategy}
    group, names = unique("g"), NAMES[:topics]
    with contextlib.closing(member(broker, group, *names, **conf)) as first:
        until_shared([first], topics)
        with contextlib.closing(member(broker, group, *names, **conf)) as second:
            until_shared([first, second], topics)


@pytest.mark.slow
def test_refused_group_settles_once_the_offsets_topic_has_room(broker: OwnBroker) -> None:
    """No member is restarted. The first member keeps its partitions until the assignment fits."""
    conf: dict[str, Any] = {"partition_assignment_strategy": "cooperative-sticky"}
    group, log = unique("g"), RefusalLog()
    logged = {"debug": "cgrp", "logger": log, **conf}
    with contextlib.closing(member(broker, group, *NAMES, **logged)) as first:
        until_shared([first], len(NAMES))
        with contextlib.closing(member(broker, group, *NAMES, **conf)) as second:

            def is_refused() -> bool:
                first.poll(0.05)
                second.poll(0.05)
                return log.has_refusal

            until(is_refused, "a refused SyncGroup", deadline_s=60, poll_s=0)
            assert (len(first.assignment()), len(second.assignment())) == (len(NAMES), 0)
            with raised_room(broker):
                until_shared([first, second], len(NAMES))


class RefusalLog:
    """A logger for librdkafka that notices a refused SyncGroup."""

    has_refusal = False

    def log(self, level: int, text: str, *values: object) -> None:
        self.has_refusal |= "synchronization failed" in text % values


@contextlib.contextmanager
def raised_room(broker: OwnBroker) -> Iterator[None]:
    """Within the block, raise ``max.message.bytes`` of the offsets topic."""
    set_room(broker, str(ROOM))
    yield
    set_room(broker, None)


def set_room(broker: OwnBroker, size: str | None) -> None:
    config = {
        "name": "max.message.bytes",
        "config_operation": 1 if size is None else 0,
        "value": size,
    }
    resource = {"resource_type": 2, "resource_name": OFFSETS, "configs": [config]}
    with Cluster(broker.bootstrap) as cluster:
        answer = cluster.call("incremental_alter_configs", 1, resources=[resource])
    assert answer["responses"][0]["error_code"] == "none", answer


async def test_second_aiokafka_member_takes_over_half_of_the_topics(broker: OwnBroker) -> None:
    """The first member rejoins with the sticky assignor's user data, a list of its partitions."""
    conf = {
        "group_id": unique("g"),
        "partition_assignment_strategy": [StickyPartitionAssignor],
        # The assignor blocks the event loop, so there are no heartbeats for a second or more.
        "session_timeout_ms": 45_000,
    }
    async with aio_consumer(broker.bootstrap, *NAMES, **conf) as first:
        await until_true(lambda: len(first.assignment()) == len(NAMES), "all topics")
        async with aio_consumer(broker.bootstrap, *NAMES, **conf) as second:
            await until_true(
                lambda: (
                    [len(consumer.assignment()) for consumer in (first, second)]
                    == [len(NAMES) // 2] * 2
                ),
                "equal parts of the topics",
                deadline_s=60,
            )


def join(cluster: Cluster, group: str, metadata: Sequence[bytes], member_id: str = "") -> Any:
    protocols = [
        {"name": f"assignor-{at}", "metadata": subscription}
        for at, subscription in enumerate(metadata)
    ]
    return cluster.call(
        "join_group",
        3,
        group_id=group,
        session_timeout=30_000,
        rebalance_timeout=60_000,
        member_id=member_id,
        protocol_type="consumer",
        protocols=protocols,
    )


def test_member_rejoins_with_all_that_it_owns_and_large_user_data(broker: OwnBroker) -> None:
    """Each of two assignors adds 100 KB of user data, as Kafka Streams and Connect do."""
    group, owned = unique("g"), tuple((name, 0) for name in NAMES)
    first = Subscription(tuple(NAMES), b"")
    again = Subscription(tuple(NAMES), b"u" * 100_000, owned)
    with Cluster(broker.bootstrap) as cluster:
        cluster.coordinator(group, 0)
        joined = join(cluster, group, [encode_subscription(first)] * 2)
        assert joined["error_code"] == "none"
        member_id = joined["member_id"]
        for _ in range(3):
            joined = join(cluster, group, [encode_subscription(again)] * 2, member_id)
            assert joined["error_code"] == "none"
            assert joined["member_id"] == member_id


def test_consumer_group_accepts_a_thousand_members(broker: OwnBroker) -> None:
    group = unique("g")
    with Cluster(broker.bootstrap, deadline_s=60) as cluster:
        cluster.coordinator(group, 0)
        for number in range(MEMBERS):
            answer = cluster.call(
                "consumer_group_heartbeat",
                1,
                group_id=group,
                member_id=f"{number:036}",
                member_epoch=0,
                rebalance_timeout=60_000,
                subscribed_topic_names=NAMES[:100],
                topic_partitions=[],
            )
            assert answer["error_code"] == "none", answer
