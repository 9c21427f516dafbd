"""What the data and administration side refuses. No class here knows a wire number.

The name in parentheses is Kafka's error; ``errors.py`` holds the map.
"""

from __future__ import annotations

from fencepost.cluster.controller import errors as controller
from fencepost.logcore.machine import DomainError

# What the state of the cluster forbids, a controller says.
InvalidPartitionsError = controller.InvalidPartitionsError
InvalidReplicaAssignmentError = controller.InvalidReplicaAssignmentError
InvalidReplicationFactorError = controller.InvalidReplicationFactorError
InvalidRequestError = controller.InvalidRequestError
InvalidTopicError = controller.InvalidTopicError
InvalidUpdateVersionError = controller.InvalidUpdateVersionError
NotAReplicaError = controller.NotAReplicaError
PolicyViolationError = controller.PolicyViolationError
TopicAlreadyExistsError = controller.TopicAlreadyExistsError
UnknownTopicIdError = controller.UnknownTopicIdError
UnknownTopicOrPartitionError = controller.UnknownTopicOrPartitionError


class DataError(DomainError):
    """Base of everything that topics, partitions and their administration refuse."""


class InconsistentTopicIdError(DataError):
    """A topic has another id here than the request says (INCONSISTENT_TOPIC_ID)."""


class OffsetNotAvailableError(DataError):
    """A new leader does not know yet how far its log is committed (OFFSET_NOT_AVAILABLE)."""


class NotEnoughReplicasError(DataError):
    """The ISR is too small for an append with acks=all (NOT_ENOUGH_REPLICAS)."""


class NotEnoughReplicasAfterAppendError(DataError):
    """What was appended is committed by too small an ISR (NOT_ENOUGH_REPLICAS_AFTER_APPEND)."""


class RequestTimedOutError(DataError):
    """Other replicas or the controller did not do their part in time (REQUEST_TIMED_OUT)."""


class TopicDeletionDisabledError(DataError):
    """``delete.topic.enable`` is off (TOPIC_DELETION_DISABLED)."""


class InvalidRequiredAcksError(DataError):
    """A Produce request asks for a number of acknowledgements (INVALID_REQUIRED_ACKS)."""


class TransactionalIdMissingError(DataError):
    """A transactional batch comes without its id (TRANSACTIONAL_ID_AUTHORIZATION_FAILED)."""


class TopicAuthorizationError(DataError):
    """The client may not do that with the topic (TOPIC_AUTHORIZATION_FAILED)."""


class GroupAuthorizationError(DataError):
    """The client may not do that with the group (GROUP_AUTHORIZATION_FAILED)."""


class ClusterAuthorizationError(DataError):
    """The client may not do that with the cluster (CLUSTER_AUTHORIZATION_FAILED)."""


class TransactionalIdAuthorizationError(DataError):
    """The client may not use the transactional id (TRANSACTIONAL_ID_AUTHORIZATION_FAILED)."""


class ThrottlingQuotaExceededError(DataError):
    """A client changes topics faster than it may (THROTTLING_QUOTA_EXCEEDED)."""


class MetadataUnavailableError(DataError):
    """The metadata log could not be written; nothing was changed (KAFKA_STORAGE_ERROR)."""


class FetchSessionIdNotFoundError(DataError):
    """No such fetch session, or no longer (FETCH_SESSION_ID_NOT_FOUND)."""


class InvalidFetchSessionEpochError(DataError):
    """A request of a fetch session is not the next one (INVALID_FETCH_SESSION_EPOCH)."""


class FetchSessionTopicIdError(DataError):
    """A fetch session was begun with ids and goes on with names (FETCH_SESSION_TOPIC_ID_ERROR)."""
