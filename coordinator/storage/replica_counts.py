"""The numbers of partitions with a replica on this broker, by state.

Source: the gauges of ``ReplicaManager``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fencepost.cluster.image import MetadataImage, TopicImage
from fencepost.coordinator.storage.replica import Replica
from fencepost.logcore.values import dataclass


@dataclass(slots=True)
class ReplicaCounts:
    """Numbers of partitions with a replica on this broker."""

    partitions: int = 0
    leaders: int = 0
    under_replicated: int = 0
    """Led partitions whose ISR is smaller than their replica set."""
    under_min_isr: int = 0
    """Led partitions that refuse writes with acks=all."""
    at_min_isr: int = 0
    """Led partitions that would refuse such writes after the loss of one more replica."""
    offline: int = 0
    reassigning: int = 0
    """Led partitions with a reassignment in progress."""


class SoleReplicaCounter:
    """Counts the partitions that a broker leads as their only replica.

    There may be 200,000 such partitions, so they are recounted only when the topics have changed.
    """

    def __init__(self, node_id: int) -> None:
        self._node_id = node_id
        self._topics: Mapping[str, TopicImage] = {}
        self._count = 0

    def count(self, image: MetadataImage) -> int:
        """Return the number of such partitions in ``image``."""
        if self._topics is not image.topics:
            self._topics, self._count = image.topics, 0
            last, is_alone = None, False
            for topic in image.topics.values():
                for registration in topic.partitions:
                    if registration is not last:  # most partitions share their registration
                        last, is_alone = (
                            registration,
                            registration.is_sole_replica_on(self._node_id),
                        )
                    self._count += is_alone
        return self._count


def count(replicas: Collection[Replica], alone: int, offline: int) -> ReplicaCounts:
    """Count ``replicas``, plus ``alone`` partitions with this broker as leader and only replica.

    ``offline`` is the number of open logs that are offline.
    """
    counts = ReplicaCounts(alone + len(replicas), alone, offline=offline)
    for replica in replicas:
        machine = replica.machine
        counts.offline += replica.partition is None
        counts.leaders += machine.is_leader
        counts.under_replicated += machine.is_under_replicated
        counts.under_min_isr += machine.is_under_min_isr
        counts.at_min_isr += machine.is_at_min_isr
        counts.reassigning += machine.is_leader and machine.is_reassigning
    return counts
