"""Comparison of a cluster's replicas."""

from __future__ import annotations

from collections.abc import Iterator

from fencepost.coordinator.daemon.broker import Broker
from fencepost.testing import Cluster

Batch = tuple[int, int, int, int]
"""Base and last offset, leader epoch and CRC of a batch."""


Replica = tuple[int, int, list[Batch]]
"""Log start offset, high watermark and batches."""


def replica_of(cluster: Cluster, broker_id: int, topic: str, index: int) -> Replica:
    """Return a broker's replica of a partition."""

    async def look(broker: Broker) -> Replica:
        partition = broker.storage.logs.partition(topic, index)
        found = [
            (header.base_offset, header.last_offset, header.leader_epoch, header.crc)
            for header, _ in partition.reader.read_all()
        ]
        return partition.log_start_offset, partition.high_watermark, found

    return cluster.brokers[broker_id].call(look)


def assert_replicas_are_equal(cluster: Cluster) -> None:
    """Check that all replicas have equal batches between log start offset and high watermark."""
    for topic, index, replicas in _partitions(cluster):
        cluster.wait_for(
            lambda which=(topic, index), brokers=replicas: _are_level(cluster, *which, brokers),
            f"replicas of {topic}-{index} that have all",
        )
        logs = {replica: replica_of(cluster, replica, topic, index) for replica in replicas}
        start = max(log[0] for log in logs.values())
        end = min(log[1] for log in logs.values())
        seen = {
            broker_id: [batch for batch in log[2] if start <= batch[1] and batch[0] < end]
            for broker_id, log in logs.items()
        }
        first = seen[replicas[0]]
        assert all(found == first for found in seen.values()), f"{topic}-{index}: {seen}"


def _are_level(cluster: Cluster, topic: str, index: int, brokers: tuple[int, ...]) -> bool:
    async def look(broker: Broker) -> tuple[int, int]:
        partition = broker.storage.logs.partition(topic, index)
        return partition.log_end_offset, partition.high_watermark

    return len({cluster.brokers[broker].call(look) for broker in brokers}) == 1


def _partitions(cluster: Cluster) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    for name, topic in cluster.image.topics.items():
        for index, partition in enumerate(topic.partitions):
            running = tuple(b for b in partition.replicas if cluster.brokers[b].is_running)
            yield name, index, running
