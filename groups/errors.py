"""The errors of group requests. None of them contains a protocol error code.

The name in parentheses is Kafka's error; ``coordinator/error_codes.py`` maps the classes to codes.
"""

from __future__ import annotations

from fencepost.logcore.machine import DomainError


class GroupError(DomainError):
    """Base of all errors of the group coordinator."""


class InvalidGroupIdError(GroupError):
    """The group id is empty where a real group is needed (INVALID_GROUP_ID)."""


class InvalidSessionTimeoutError(GroupError):
    """The session timeout lies outside the broker's bounds (INVALID_SESSION_TIMEOUT)."""


class InconsistentGroupProtocolError(GroupError):
    """The protocol type or the offered protocols do not match (INCONSISTENT_GROUP_PROTOCOL)."""


class UnknownMemberIdError(GroupError):
    """The group has no such member; it must join as a new one (UNKNOWN_MEMBER_ID)."""


class MemberIdRequiredError(GroupError):
    """A new dynamic member must join again under ``member_id`` (MEMBER_ID_REQUIRED, KIP-394)."""

    def __init__(self, member_id: str) -> None:
        super().__init__("the member must rejoin with the member id given to it")
        self.member_id = member_id


class FencedInstanceIdError(GroupError):
    """The instance id belongs to another member id now (FENCED_INSTANCE_ID, KIP-345)."""


class IllegalGenerationError(GroupError):
    """The generation is not the group's current one (ILLEGAL_GENERATION)."""


class RebalanceInProgressError(GroupError):
    """The group rebalances; the member must rejoin (REBALANCE_IN_PROGRESS)."""


class GroupMaxSizeReachedError(GroupError):
    """The group is full (GROUP_MAX_SIZE_REACHED, KIP-389)."""


class GroupLimitExceededError(GroupError):
    """A limit of ``GroupLimits`` is exceeded; the message names it (POLICY_VIOLATION)."""


class GroupDeadError(GroupError):
    """The group is being removed at this moment (COORDINATOR_NOT_AVAILABLE)."""


class NotGroupCoordinatorError(GroupError):
    """The shard stops serving; the client must find the coordinator again (NOT_COORDINATOR)."""


class GroupIdNotFoundError(GroupError):
    """The group does not exist, or is of another kind than requested (GROUP_ID_NOT_FOUND)."""


class NonEmptyGroupError(GroupError):
    """The group still has members (NON_EMPTY_GROUP)."""


class GroupSubscribedToTopicError(GroupError):
    """The offset stays, because the group consumes its topic (GROUP_SUBSCRIBED_TO_TOPIC)."""


class OffsetMetadataTooLargeError(GroupError):
    """An offset's metadata string is too long (OFFSET_METADATA_TOO_LARGE)."""


class UnstableOffsetCommitError(GroupError):
    """A transaction that commits this offset is still open (UNSTABLE_OFFSET_COMMIT, KIP-447)."""


# --- the consumer protocol (KIP-848) -------------------------------------------------------------


class InvalidGroupRequestError(GroupError):
    """A field of a ConsumerGroupHeartbeat is missing or out of place (INVALID_REQUEST)."""


class UnsupportedAssignorError(GroupError):
    """The server has no assignor with that name (UNSUPPORTED_ASSIGNOR)."""


class FencedMemberEpochError(GroupError):
    """The member must drop its partitions and rejoin with epoch 0 (FENCED_MEMBER_EPOCH)."""


class StaleMemberEpochError(GroupError):
    """The epoch of a commit or fetch is not the member's current one (STALE_MEMBER_EPOCH)."""


class UnreleasedInstanceIdError(GroupError):
    """Another member still uses the instance id (UNRELEASED_INSTANCE_ID)."""


class UnsupportedGroupRequestError(GroupError):
    """The group does not support the request or its version (UNSUPPORTED_VERSION)."""
