"""A standalone broker serves its partitions by the rules of a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from fencepost.cluster.image import MetadataImage, PartitionRegistration, TopicImage
from fencepost.coordinator.daemon.broker import Broker
from fencepost.coordinator.daemon.in_thread import BrokerThread
from fencepost.coordinator.errors import UnknownTopicOrPartitionError
from fencepost.coordinator.storage.replica_counts import SoleReplicaCounter
from tests.support.cluster import Cluster
from tests.support.metadata_changes import create_partitions, create_topic, delete_topic
from tests.support.stalls import watched_loop
from tests.unit.coordinator.services.coordinators import storage

TOPIC_ID = UUID(int=7)
OURS = 1
"""The leader epoch after the broker has started twice."""
COUNT = 600
"""So many partitions that the broker becomes their leader or follower only in several turns."""


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerThread]:
    """Yield a broker that has restarted once, with the topic ``t``."""
    with Broker.in_thread(tmp_path) as thread, Cluster(thread.bootstrap) as client:
        client.create_topic("t")
    with Broker.in_thread(tmp_path) as thread:
        yield thread


def fetch(client: Cluster, leader_epoch: int, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    part = {
        "partition": 0,
        "fetch_offset": 0,
        "current_leader_epoch": leader_epoch,
        "last_fetched_epoch": -1,
        "log_start_offset": 0,
        "partition_max_bytes": 1 << 20,
    }
    answer = client.call(
        "fetch",
        17,
        max_wait=0,
        min_bytes=1,
        max_bytes=1 << 20,
        session_epoch=-1,
        topics=[{"topic_id": client.topic_id("t"), "partitions": [part]}],
        **more,
    )
    return answer, answer["responses"][0]["partitions"][0]


def test_fenced_fetch_names_this_broker_as_the_leader(broker: BrokerThread) -> None:
    """KIP-951: the response has the bound port, which the earlier registration did not have."""
    host, _, port = broker.bootstrap.rpartition(":")
    with Cluster(broker.bootstrap) as client:
        answer, part = fetch(client, OURS - 1)
        assert part["error_code"] == "fenced_leader_epoch"
        assert part["current_leader"] == {"leader_id": 1, "leader_epoch": OURS}
        (node,) = answer["node_endpoints"]
        assert (node["node_id"], node["host"], node["port"]) == (1, host, int(port))


def test_fenced_follower_fetch_names_the_leader_without_endpoints(broker: BrokerThread) -> None:
    with Cluster(broker.bootstrap) as client:
        state = {"replica_id": 2, "replica_epoch": -1}
        answer, part = fetch(client, OURS - 1, replica_state=state)
        assert part["current_leader"] == {"leader_id": 1, "leader_epoch": OURS}
        assert answer["node_endpoints"] == []


@pytest.mark.parametrize(
    ("epoch", "error"), [(-1, "none"), (OURS, "none"), (OURS + 1, "unknown_leader_epoch")]
)
def test_fetch_checks_the_leader_epoch_of_the_image(
    broker: BrokerThread, epoch: int, error: str
) -> None:
    with Cluster(broker.bootstrap) as client:
        answer, part = fetch(client, epoch)
        assert part["error_code"] == error
        assert answer["node_endpoints"] == []


def test_replica_manager_has_the_metadata_image_before_any_change(tmp_path: Path) -> None:
    store = storage(tmp_path)
    assert store.replicas.image is store.metadata.image
    create_topic(store.metadata, "t", 2)
    assert store.replicas.image is store.metadata.image
    assert store.replicas.leader_of("t", 1) == (1, 0)
    for find in (store.replicas.leader, store.replicas.readable):
        with pytest.raises(UnknownTopicOrPartitionError, match="no partition 2 of this topic"):
            find("t", 2)
    assert list(store.replicas) == [], "no machine for a partition with one replica"
    assert (store.replicas.counts(0).partitions, store.replicas.counts(0).leaders) == (2, 2)
    store.logs.close()


def directories(path: Path) -> set[str]:
    return {child.name for child in path.iterdir()}


async def test_deletion_of_100_000_partitions_does_not_block_the_loop(tmp_path: Path) -> None:
    async with Broker(tmp_path) as broker:
        services = broker.services
        metadata = services.metadata
        create_topic(metadata, "t", 10_000)
        for count in range(20_000, 100_001, 10_000):
            create_partitions(metadata, "t", count)
        used = [0, 1, 99_999]
        logs = [services.replicas.leader("t", index) for index in used]
        with watched_loop() as watch:

            def delete() -> None:
                with metadata.unforced():
                    delete_topic(metadata, "t")

            watch.time(delete, "the deletion")
            await services.topics_forgotten()
        assert [services.logs.find_open(("t", index)) for index in used] == [None] * len(used)
        assert [log.marks.stopped is not None for log in logs] == [True] * len(used)
        assert not {f"t-{index}" for index in used} & directories(tmp_path)
    watch.check()


async def test_pending_leader_change_of_a_deleted_topic_is_discarded(
    tmp_path: Path,
) -> None:
    """Three images arrive at once: with two replicas, with one replica, and without the topic."""
    store = storage(tmp_path)
    topic_id = create_topic(store.metadata, "t", COUNT).topic_id
    both, alone = (
        PartitionRegistration(replicas, replicas, 1, epoch, epoch)
        for epoch, replicas in enumerate(((1, 2), (1,)), 1)
    )
    images = [MetadataImage()]
    for leader in (both, alone):
        topic = TopicImage("t", topic_id, (leader,) * COUNT)
        images.append(MetadataImage(topics={"t": topic}, topics_by_id={topic_id: topic}))
    replicas = store.replicas
    replicas.start()
    for old, image in pairwise([*images, MetadataImage()]):
        replicas.publish(old, image)
    assert list(replicas) == []
    assert not replicas._due.partitions
    assert not store.commits.has_replicated
    assert [log for log in store.logs if log.topic == "t"] == []
    await replicas.stop()
    await store.flusher.close()
    store.logs.close()


def test_sole_replica_count_follows_topic_changes() -> None:
    alone = PartitionRegistration((1,), (1,), 1, 0, 0)
    other = PartitionRegistration((1, 2), (1, 2), 1, 0, 0)
    counter = SoleReplicaCounter(1)
    for rows, count in (((alone, alone), 2), ((alone, other, alone), 2), ((other,), 0)):
        image = MetadataImage(topics={"t": TopicImage("t", TOPIC_ID, rows)})
        assert counter.count(image) == count
