"""The common part of the requests about start offsets of share groups.

The error messages are the default messages of Kafka's ``Errors``.
"""

from __future__ import annotations

from typing import Final

from kio.schema.errors import ErrorCode

from fencepost.coordinator.error_codes import error_code
from fencepost.logcore.machine import DomainError

Refusal = tuple[ErrorCode, str]
"""An error code and its message."""

UNSUPPORTED: Final = ErrorCode.unsupported_version, "The version of API is not supported."
GROUP_REFUSED: Final = ErrorCode.group_authorization_failed, "Group authorization failed."
GROUP_INVALID: Final = ErrorCode.invalid_group_id, "The group id is invalid."
TOPIC_REFUSED: Final = ErrorCode.topic_authorization_failed, "Topic authorization failed."
UNKNOWN: Final = (
    ErrorCode.unknown_topic_or_partition,
    "This server does not host this topic-partition.",
)


def refusal_of(error: DomainError) -> Refusal:
    """Return the code and the message of an error."""
    return error_code(error), str(error)
