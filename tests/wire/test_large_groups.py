"""Large groups stay below every limit of a broker with its default settings."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import confluent_kafka
import pytest

from fencepost.groups.assignors.client.model import Subscription
from fencepost.groups.assignors.client.protocol import encode_subscription
from tests.support.cluster import Cluster, unique
from tests.support.daemon import Daemon
from tests.support.waits import until

TOPICS = [f"region-eu-central-1.team-{n % 40:02}.service-{n:05}.order-events" for n in range(3_000)]
NAMES = [name.ljust(60, "x") for name in TOPICS]
"""3,000 names of 60 characters."""
MEMBERS = 1_000


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    started = Daemon(tmp_path_factory.mktemp("large"), {}).start()
    with Cluster(started.bootstrap) as cluster:
        for at in range(0, len(NAMES), 500):
            topics = [
                {"name": name, "num_partitions": 1, "replication_factor": 1}
                for name in NAMES[at : at + 500]
            ]
            cluster.call("create_topics", 5, timeout=30_000, topics=topics)
    yield started
    started.stop()


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_librdkafka_reads_three_thousand_topics_by_pattern(daemon: Daemon, protocol: str) -> None:
    conf = {
        "bootstrap.servers": daemon.bootstrap,
        "group.id": unique("g"),
        "group.protocol": protocol,
    }
    consumer = confluent_kafka.Consumer(conf)

    def has_all() -> bool:
        consumer.poll(0.1)
        return len(consumer.assignment()) == len(NAMES)

    with contextlib.closing(consumer):
        consumer.subscribe([r"^region-.*\.order-events.*"])
        until(has_all, "all topics", deadline_s=60, poll_s=0)


def join(cluster: Cluster, group: str, metadata: Sequence[bytes], member_id: str = "") -> Any:
    protocols = [{"name": f"assignor-{at}", "metadata": one} for at, one in enumerate(metadata)]
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


def test_member_rejoins_with_all_that_it_owns_and_large_user_data(daemon: Daemon) -> None:
    """Two assignors; what Kafka Streams and Connect say of tasks is some 100 KB."""
    group, owned = unique("g"), tuple((name, 0) for name in NAMES)
    first = Subscription(tuple(NAMES), b"")
    again = Subscription(tuple(NAMES), b"u" * 100_000, owned)
    with Cluster(daemon.bootstrap) as cluster:
        cluster.coordinator(group, 0)
        joined = join(cluster, group, [encode_subscription(first)] * 2)
        assert joined["error_code"] == "none"
        member_id = joined["member_id"]
        for _ in range(3):
            joined = join(cluster, group, [encode_subscription(again)] * 2, member_id)
            assert joined["error_code"] == "none"
            assert joined["member_id"] == member_id


def test_a_thousand_members_of_the_consumer_protocol(daemon: Daemon) -> None:
    group = unique("g")
    with Cluster(daemon.bootstrap, deadline_s=60) as cluster:
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
