"""Calls of :class:`ControllerRequestApplier` for each topic of a controller's request."""

from __future__ import annotations

from uuid import UUID

from fencepost.cluster.image import MetadataImage
from fencepost.cluster.records import MetadataRecord
from fencepost.coordinator.zookeeper.requests import ControllerRequestApplier
from fencepost.protocol.schema import Entity


def apply_leader_and_isr(
    applier: ControllerRequestApplier, image: MetadataImage, body: Entity
) -> tuple[list[MetadataRecord], dict[UUID, dict[int, int]]]:
    """Return the records of a LeaderAndIsr, and the error of each partition by topic id."""
    records: list[MetadataRecord] = []
    errors = {}
    for topic in body.topic_states:
        replayed, errors[topic.topic_id] = applier.leader_and_isr(
            image, topic, topic.partition_states
        )
        records += replayed
    return records, errors


def apply_update_metadata(
    applier: ControllerRequestApplier, image: MetadataImage, body: Entity, broker_epoch: int
) -> list[MetadataRecord]:
    """Return the records of an UpdateMetadata."""
    records = applier.live_brokers(image, body, broker_epoch)
    for topic in body.topic_states:
        records += applier.update_metadata(image, topic, topic.partition_states)
    return records
