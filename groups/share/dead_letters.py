"""Records of dead-letter queues (KIP-1191), and the reasons why a queue does not get them.

Source: ``ShareGroupDLQStateManager``, ``ShareGroupDLQManager``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from fencepost.groups.share.commands import SendToDeadLetterQueue
from fencepost.groups.share.states import Cause

TOPIC_NAME: Final = "errors.deadletterqueue.topic.name"
"""The group setting that names the topic of the group's queue."""

GROUP_ENABLE: Final = "errors.deadletterqueue.group.enable"
"""The topic setting that allows a topic to be a queue."""

NEW_QUEUE: Mapping[str, str] = MappingProxyType(
    {GROUP_ENABLE: "true", "message.timestamp.type": "CreateTime"}
)
"""The settings of a queue that a broker creates."""

REJECTED: Final = "Offset rejected by client."
LIMIT_REACHED: Final = "Offset delivery count exceeded the threshold."

_MESSAGES: Mapping[Cause, str] = MappingProxyType({Cause.REJECTED: REJECTED})
"""The texts by cause. For all other causes the text is :data:`LIMIT_REACHED`."""

Headers = tuple[tuple[str, bytes], ...]


class DeadLetterError(Exception):
    """Records did not reach the queue; if ``is_final``, another attempt would fail as well."""

    def __init__(self, reason: str, *, is_final: bool) -> None:
        super().__init__(reason)
        self.is_final = is_final


class NotProducedError(DeadLetterError):
    """The leader of the queue's partition did not append the records."""


class LeaderUnreachableError(NotProducedError):
    """The leader of the queue's partition gave no response."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, is_final=False)


def fixed_headers(topic: str, request: SendToDeadLetterQueue) -> tuple[Headers, Headers]:
    """Return the headers before and after the offset's header; they are equal for all records."""
    key = request.key
    before = (
        ("__dlq.errors.topic", topic.encode()),
        ("__dlq.errors.partition", b"%d" % key.partition),
    )
    after = (
        ("__dlq.errors.group", key.group_id.encode()),
        ("__dlq.errors.delivery.count", b"%d" % request.delivery_count),
        ("__dlq.errors.message", _MESSAGES.get(request.cause, LIMIT_REACHED).encode()),
    )
    return before, after


def offset_header(offset: int) -> tuple[str, bytes]:
    """Return the header with the offset of the source record."""
    return "__dlq.errors.offset", b"%d" % offset
