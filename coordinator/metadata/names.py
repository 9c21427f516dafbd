"""The topics that are the broker's own."""

from __future__ import annotations

import uuid

from fencepost.cluster import topic_names
from fencepost.cluster.controller.errors import InvalidTopicError

METADATA_TOPIC = "__cluster_metadata"
METADATA_TOPIC_ID = uuid.UUID(int=1)
"""Kafka's reserved id of the metadata topic."""

CONSUMER_OFFSETS = "__consumer_offsets"
TRANSACTION_STATE = "__transaction_state"
SHARE_GROUP_STATE = "__share_group_state"
HISTORY_TOPIC = "__fencepost_history"
"""One partition, written by the broker alone, read by anybody who may read topics."""

CONTROLLER_SUBJECT = "controller"
"""Where brokers elect one, the history's entries of this subject tell who it was, and why."""

INTERNAL_TOPICS = frozenset({CONSUMER_OFFSETS, TRANSACTION_STATE, SHARE_GROUP_STATE, HISTORY_TOPIC})
"""Topics that Metadata marks as internal and that clients may not write to."""

OUTSIDE_TRANSACTIONS = INTERNAL_TOPICS - {CONSUMER_OFFSETS}
"""Internal topics whose owners never write in a transaction: none takes them in, no marker goes
there. A shard takes a record that it did not write for corruption."""


PROGRESS_SUFFIX, PROGRESS_BEGIN = "-progress", '{"b":'
"""The name of a group in which Spark's sink keeps its progress, and the metadata of its commit."""


def is_progress(group_id: str, metadata: str) -> bool:
    """Whether a committed offset is the progress of a Spark query, which no consumer reads from."""
    return group_id.endswith(PROGRESS_SUFFIX) and metadata.startswith(PROGRESS_BEGIN)


def check_name(name: str) -> None:
    """Raise InvalidTopicError unless ``name`` may name a topic of a client."""
    topic_names.check_name(name)
    if name == HISTORY_TOPIC:
        raise InvalidTopicError(f"{name} is the broker's own")


def is_internal(topic: str) -> bool:
    """Whether a topic belongs to the coordinators, or to the broker."""
    return topic in INTERNAL_TOPICS
