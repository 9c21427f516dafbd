"""The names of internal topics."""

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
"""The topic of the history. Only brokers write to it; in a cluster each broker writes its own
partition."""

SHARE_SCOPE = "group"
"""The scope that events of share partitions have in the history; events of groups have it, too."""

CONTROLLER_SUBJECT = "controller"
"""The subject of history entries about elections of a controller on ZooKeeper, and their causes."""

INTERNAL_TOPICS = frozenset({CONSUMER_OFFSETS, TRANSACTION_STATE, SHARE_GROUP_STATE, HISTORY_TOPIC})
"""Topics that Metadata marks as internal and that clients may not write to."""

OUTSIDE_TRANSACTIONS = INTERNAL_TOPICS - {CONSUMER_OFFSETS}
"""Internal topics that the broker never writes to in a transaction. They cannot be added to a
transaction, and get no marker: a shard treats a record that it has not written as corruption."""


PROGRESS_SUFFIX, PROGRESS_BEGIN = "-progress", '{"b":'
"""How to recognize a commit of progress by Spark's sink: the end of its group id, and the beginning
of its metadata."""


def is_progress(group_id: str, metadata: str) -> bool:
    """Return whether a committed offset is the progress of a Spark query, not a consumer's."""
    return group_id.endswith(PROGRESS_SUFFIX) and metadata.startswith(PROGRESS_BEGIN)


def check_name(name: str) -> None:
    """Raise InvalidTopicError unless a client may create a topic called ``name``."""
    topic_names.check_name(name)
    if name == HISTORY_TOPIC:
        raise InvalidTopicError(f"{name} is the broker's own")


def is_internal(topic: str) -> bool:
    """Return whether a topic is internal: a coordinator's, or the history."""
    return topic in INTERNAL_TOPICS
