"""Checks of the epochs and producer ids from which a starting node would continue."""

from __future__ import annotations

import structlog

from fencepost.cluster.image import MetadataImage
from fencepost.coordinator.metadata.errors import MetadataError
from fencepost.coordinator.metadata.names import METADATA_TOPIC
from fencepost.logcore.bounds import MAX_LEADER_EPOCH, MAX_PRODUCER_ID

MAX_EPOCH = (1 << 31) - 2
"""The highest metadata log epoch, partition epoch or leader epoch that can be incremented."""

RESET_IDS = (
    "stop the broker and run fencepost log reset-producer-ids --data-dir DIRECTORY, which looks for"
    " the ids in use"
)
"""The remedy for a next producer id that is too high. An earlier release may have taken it from an
imported record, whose producer id a client had made up."""

_log = structlog.get_logger(__name__)


def check_taken_over(image: MetadataImage) -> None:
    """Raise MetadataError if leader epochs or producer ids are too high for another node to use."""
    following = image.next_producer_id
    if not 0 <= following <= MAX_PRODUCER_ID + 1:
        raise MetadataError(
            f"the next producer id is {following}, and other nodes only accept ids up to"
            f" {MAX_PRODUCER_ID}: {RESET_IDS}"
        )
    for topic in image.topics.values():
        for index, partition in enumerate(topic.partitions):
            if partition.leader_epoch > MAX_LEADER_EPOCH:
                raise MetadataError(
                    f"{topic.name}-{index} is in leader epoch {partition.leader_epoch}, and"
                    f" other nodes only accept epochs up to {MAX_LEADER_EPOCH}: {_BACKUP}"
                )


def check_epochs(image: MetadataImage) -> None:
    """Raise MetadataError for epochs above MAX_EPOCH; log an error if producer ids run out."""
    if image.epoch > MAX_EPOCH:
        raise MetadataError(f"{METADATA_TOPIC} is in epoch {image.epoch}, the last one: {_BACKUP}")
    for topic in image.topics.values():
        for index, partition in enumerate(topic.partitions):
            epoch = max(partition.leader_epoch, partition.partition_epoch)
            if epoch > MAX_EPOCH:
                raise MetadataError(
                    f"{topic.name}-{index} is in epoch {epoch}, the last one: {_BACKUP}"
                )
    if not 0 <= image.next_producer_id <= MAX_PRODUCER_ID + 1:
        _log.error(
            "producer ids run out",
            next_producer_id=image.next_producer_id,
            highest_taken_over=MAX_PRODUCER_ID,
            remedy=RESET_IDS,
        )


_BACKUP = "restore the data directory from a backup"
