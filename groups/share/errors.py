"""The errors of share requests. None of them contains a protocol error code.

The name in parentheses is Kafka's error; ``coordinator/error_codes.py`` maps the classes to codes.
Acknowledge responses carry the messages, so these are Kafka's texts.
"""

from __future__ import annotations

from fencepost.logcore.machine import DomainError


class ShareError(DomainError):
    """Base of all errors of share groups."""


class ShareSessionNotFoundError(ShareError):
    """The member has no share session on this broker (SHARE_SESSION_NOT_FOUND)."""


class InvalidShareSessionEpochError(ShareError):
    """The epoch is not the one that the session expects (INVALID_SHARE_SESSION_EPOCH)."""


class ShareSessionLimitReachedError(ShareError):
    """The broker has no room for another share session (SHARE_SESSION_LIMIT_REACHED)."""


class InvalidShareRequestError(ShareError):
    """A field of a share request has an impossible value (INVALID_REQUEST)."""


class InvalidRecordStateError(ShareError):
    """The member does not hold the acquisition lock of an offset (INVALID_RECORD_STATE)."""


class SharePartitionFencedError(ShareError):
    """The share partition was dropped; it must be read again (NOT_LEADER_OR_FOLLOWER)."""


class SharePartitionFailedError(ShareError):
    """The state of a share partition cannot be read or written (UNKNOWN_SERVER_ERROR)."""


class UnknownSharePartitionError(ShareError):
    """The topic or partition does not exist (UNKNOWN_TOPIC_OR_PARTITION)."""


class ShareGroupGoneError(ShareError):
    """The share coordinator knows no such group (GROUP_ID_NOT_FOUND)."""


class ShareCoordinatorUnloadedError(ShareError):
    """The shard stops serving; the coordinator must be found again (NOT_COORDINATOR)."""


class ShareCoordinatorUnavailableError(ShareError):
    """The share coordinator does not answer (COORDINATOR_NOT_AVAILABLE)."""


class FencedStateEpochError(ShareError):
    """The state was initialized again under a later state epoch (FENCED_STATE_EPOCH)."""


class FencedShareLeaderEpochError(ShareError):
    """A later leader of the partition has read the state (FENCED_LEADER_EPOCH)."""
