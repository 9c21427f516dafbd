"""The elections that an image of the metadata tells to a coordinator.

Source: ``BrokerMetadataPublisher.updateCoordinator``.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from fencepost.cluster.image import LocalPartition, MetadataImage, local_changes
from fencepost.coordinator.runtime.background import survived


class Elected(Protocol):
    """Serves the partitions of an internal topic that this broker leads."""

    def elected(self, index: int, leader_epoch: int) -> None:
        """Serve a partition: this broker has come to lead it."""

    def resigned(self, index: int, leader_epoch: int | None) -> None:
        """Serve a partition no longer; None where the replica or the topic is gone."""


def publish_elections(
    coordinator: Elected, topic: str, broker_id: int, old: MetadataImage, image: MetadataImage
) -> None:
    """Tell ``coordinator`` of the partitions of its topic that a broker has won and lost."""
    before, after = old.topics.get(topic), image.topics.get(topic)
    if before is after:
        return
    topic_ids = {one.topic_id for one in (before, after) if one is not None}
    changes = local_changes(old, image, broker_id, topics=topic_ids)
    for one in changes.deletes:
        with _survived(one):
            coordinator.resigned(one.index, None)
    for one in changes.elected:
        with _survived(one):
            coordinator.elected(one.index, one.registration.leader_epoch)
    for one in changes.followers:
        with _survived(one):
            coordinator.resigned(one.index, one.registration.leader_epoch)


def _survived(one: LocalPartition) -> AbstractContextManager[None]:
    """A failure of one partition keeps the shards of no other from coming and going."""
    return survived("update coordinator", partition=f"{one.topic}-{one.index}")
