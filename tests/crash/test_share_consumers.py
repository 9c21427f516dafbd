"""confluent-kafka's share consumers while brokers are killed by ``kill -9``.

Every written record is delivered, no two acknowledgements of one record succeed, and in the end the
group has no lag. A record may be delivered again until an acknowledgement has succeeded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import requests
from tests.support.cluster import GROUP, Cluster, unique
from tests.support.daemon import Daemon
from tests.support.member import MemberCluster
from tests.support.share_work import at_work, starts_at_the_beginning
from tests.support.waits import until

pytestmark = [pytest.mark.crash, pytest.mark.slow, pytest.mark.timeout(600)]

SETTINGS = {
    "group.share.heartbeat.interval.ms": "300",
    "group.share.min.heartbeat.interval.ms": "300",
    "share.coordinator.state.topic.num.partitions": "3",
    "offsets.topic.num.partitions": "3",
}
OF_CLUSTER = {
    **SETTINGS,
    "share.coordinator.state.topic.min.isr": "2",
    "min.insync.replicas": "2",
    "broker.heartbeat.interval.ms": "300",
    "broker.session.timeout.ms": "2000",
}
KILLS = 4
RECORDS = 30
"""How many records are accepted between two kills."""


def lag_of(bootstraps: Callable[[], list[str]], group: str) -> Callable[[], int]:
    """Return a function that sums up the group's lag, or returns 1 while the lag is unknown."""

    def lag() -> int:
        for address in bootstraps():
            try:
                with Cluster(address) as client:
                    body = requests.describe_share_group_offsets(group, None)
                    answer = client.call("describe_share_group_offsets", 1, **body)
            except OSError:
                continue
            (found,) = answer["groups"]
            lags = [row["lag"] for topic in found["topics"] for row in topic["partitions"]]
            if found["error_code"] == "none" and lags and min(lags) >= 0:
                return sum(lags)
        return 1

    return lag


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path / "data", SETTINGS).start()
    yield daemon
    daemon.kill()


def test_share_consumers_survive_kills_of_their_broker(daemon: Daemon) -> None:
    group = unique("g")
    with Cluster(daemon.bootstrap) as client:
        client.coordinator(group, GROUP)
        topic = client.create_topic(unique("t"), 2)
    starts_at_the_beginning(daemon.bootstrap, group)
    lag = lag_of(lambda: [daemon.bootstrap], group)
    with at_work(daemon.bootstrap, group, topic, lag) as work:
        for _ in range(KILLS):
            work.progress(RECORDS)
            daemon.kill()
            daemon.start()
        work.progress(RECORDS)
    assert not work.missing
    assert not work.accepted_twice
    assert len(work.written) > KILLS * RECORDS


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[MemberCluster]:
    cluster = MemberCluster(tmp_path, 3, OF_CLUSTER)
    try:
        yield cluster.start()
    finally:
        cluster.stop()


def test_share_consumers_survive_kills_of_their_leader(cluster: MemberCluster) -> None:
    group, topic = unique("g"), unique("t")

    def leader() -> int:
        for node in cluster.nodes:
            if node.child is None or node.child.returncode is not None:
                continue
            with Cluster(node.bootstrap) as client:
                answer = client.call("metadata", 9, topics=[{"name": topic}])
                (row,) = answer["topics"][0]["partitions"]
                return int(row["leader_id"])
        return -1

    asked = {"name": topic, "num_partitions": 1, "replication_factor": 3}
    with Cluster(cluster.node(1).bootstrap) as client:
        answer = client.call("create_topics", 5, timeout=10_000, topics=[asked])
        assert answer["topics"][0]["error_code"] == "none", answer
    starts_at_the_beginning(cluster.bootstrap, group)
    lag = lag_of(lambda: [node.bootstrap for node in cluster.nodes], group)
    with at_work(cluster.bootstrap, group, topic, lag) as work:
        for _ in range(KILLS):
            work.progress(RECORDS)
            victim = leader()
            cluster.node(victim).kill()
            until(lambda: leader() not in (-1, victim), "another leader")  # noqa: B023
            work.progress(RECORDS)
            cluster.node(victim).start()
        work.progress(RECORDS)
    assert not work.missing
    assert not work.accepted_twice
    assert len(work.written) > KILLS * RECORDS
