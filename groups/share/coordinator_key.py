"""The coordinator keys of share partitions, as FindCoordinator and the share coordinator hash them.

Source: ``SharePartitionKey.asCoordinatorKey`` and ``validate``.
"""

from __future__ import annotations

import base64
import re
from typing import Final

from fencepost.groups.share.commands import SharePartitionKey
from fencepost.groups.share.errors import InvalidShareRequestError

_ID_BYTES: Final = 16
_PARTS: Final = 3
_INDEX: Final = re.compile(r"[+-]?\d{1,10}", re.ASCII)


def coordinator_key(key: SharePartitionKey) -> str:
    """Return ``group:topicId:partition``, with the topic id as Kafka writes it."""
    topic_id = base64.urlsafe_b64encode(key.topic_id).rstrip(b"=").decode()
    return f"{key.group_id}:{topic_id}:{key.partition}"


def parse_coordinator_key(text: str) -> SharePartitionKey:
    """Parse a coordinator key from the right: a group id may contain colons (KAFKA-20183).

    Raises InvalidShareRequestError.
    """
    parts = text.rsplit(":", _PARTS - 1)
    if len(parts) != _PARTS or not parts[0]:
        raise InvalidShareRequestError(f"not group:topicId:partition: {text}")
    group_id, topic_id, partition = parts
    try:
        raw = base64.b64decode(topic_id.encode() + b"==", altchars=b"-_", validate=True)
    except ValueError as error:
        raise InvalidShareRequestError(f"not a topic id: {topic_id}") from error
    if len(raw) != _ID_BYTES or _INDEX.fullmatch(partition) is None:
        raise InvalidShareRequestError(f"not group:topicId:partition: {text}")
    return SharePartitionKey(group_id, raw, int(partition))
