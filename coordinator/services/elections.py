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
    """Notify ``coordinator`` of the partitions of its topic that a broker now leads or lost."""
    before, after = old.topics.get(topic), image.topics.get(topic)
    if before is after:
        return
    topic_ids = {one.topic_id for one in (before, after) if one is not None}
    changes = local_changes(old, image, broker_id, topics=topic_ids)
    for one in changes.deletes:
        with _swallow(one):
            coordinator.resigned(one.index, None)
    for one in changes.elected:
        with _swallow(one):
            coordinator.elected(one.index, one.registration.leader_epoch)
    for one in changes.followers:
        with _swallow(one):
            coordinator.resigned(one.index, one.registration.leader_epoch)


def _swallow(one: LocalPartition) -> AbstractContextManager[None]:
    """Log an error of one partition, so that the other partitions are still processed."""
    return swallow("update coordinator", partition=f"{one.topic}-{one.index}")
