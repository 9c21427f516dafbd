"""Notification of a coordinator about the elections in a metadata image.

Source: ``BrokerMetadataPublisher.updateCoordinator``.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from fencepost.cluster.image import LocalPartition, MetadataImage, local_changes
from fencepost.coordinator.runtime.background import swallow


class ElectableCoordinator(Protocol):
    """Serves the partitions of an internal topic that this broker leads."""

    def elected(self, index: int, leader_epoch: int) -> None:
        """Serve a partition that this broker now leads."""

    def resigned(self, index: int, leader_epoch: int | None) -> None:
        """Stop serving a partition; the epoch is None if the replica or topic was deleted."""


def publish_elections(
    coordinator: ElectableCoordinator,
    topic: str,
    broker_id: int,
    old: MetadataImage,
    image: MetadataImage,
) -> None:
    """Notify ``coordinator`` of the partitions that a broker has begun or ceased to lead."""
    before, after = old.topics.get(topic), image.topics.get(topic)
    if before is after:
        return
    topic_ids = {topic.topic_id for topic in (before, after) if topic is not None}
    changes = local_changes(old, image, broker_id, topics=topic_ids)
    for delete in changes.deletes:
        with _swallow(delete):
            coordinator.resigned(delete.index, None)
    for partition in changes.elected:
        with _swallow(partition):
            coordinator.elected(partition.index, partition.registration.leader_epoch)
    for follower in changes.followers:
        with _swallow(follower):
            coordinator.resigned(follower.index, follower.registration.leader_epoch)


def _swallow(local: LocalPartition) -> AbstractContextManager[None]:
    """Log an error of one partition, so that the other partitions are still processed."""
    return swallow("update coordinator", partition=f"{local.topic}-{local.index}")
