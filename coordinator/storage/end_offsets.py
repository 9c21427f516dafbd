"""The end offset of a partition that this broker leads, as its consumers see it."""

from __future__ import annotations

from fencepost.coordinator.errors import OffsetNotAvailableError
from fencepost.coordinator.storage.replica_manager import ReplicaManager
from fencepost.logcore.partition import Partition
from fencepost.logcore.reading import Isolation


def is_settled(replicas: ReplicaManager, partition: Partition) -> bool:
    """Return whether the leader's high watermark is valid: a new leader must first advance it."""
    machine = replicas.led(partition.topic, partition.index)
    return machine is None or partition.high_watermark >= machine.epoch_start_offset


def not_settled(partition: Partition) -> OffsetNotAvailableError:
    """Return the error for a leader whose high watermark is not valid yet."""
    return OffsetNotAvailableError(f"{partition.name} does not know yet what is committed")


def end_offset(replicas: ReplicaManager, topic: str, index: int) -> int:
    """Return the high watermark of a partition.

    Raises like :meth:`ReplicaManager.leader`, and OffsetNotAvailableError.
    """
    partition = replicas.leader(topic, index)
    if not is_settled(replicas, partition):
        raise not_settled(partition)
    return partition.reader.end_of(Isolation.READ_UNCOMMITTED)
