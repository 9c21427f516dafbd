"""Errors of topics, partitions and their administration, without numeric codes.

The name in parentheses is Kafka's error; ``error_codes.py`` maps the classes to it.
"""

from __future__ import annotations

from fencepost.cluster.controller import errors as controller
from fencepost.logcore.machine import DomainError

# Errors that depend on the cluster's state are defined by the controller.
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
    """Base of the errors of topics, partitions and their administration."""


class InconsistentTopicIdError(DataError):
    """The topic's id differs from the id in the request (INCONSISTENT_TOPIC_ID)."""


class OffsetNotAvailableError(DataError):
    """A new leader's high watermark is not yet valid (OFFSET_NOT_AVAILABLE)."""


class NotEnoughReplicasError(DataError):
    """The ISR is too small for an append with acks=all (NOT_ENOUGH_REPLICAS)."""


class NotEnoughReplicasAfterAppendError(DataError):
    """The ISR shrank too far after the append (NOT_ENOUGH_REPLICAS_AFTER_APPEND)."""


class RequestTimedOutError(DataError):
    """Other replicas or the controller did not respond in time (REQUEST_TIMED_OUT)."""


class TopicDeletionDisabledError(DataError):
    """``delete.topic.enable`` is off (TOPIC_DELETION_DISABLED)."""


class InvalidRequiredAcksError(DataError):
    """The acks of a Produce request are invalid (INVALID_REQUIRED_ACKS)."""


class TransactionalIdMissingError(DataError):
    """A transactional batch has no transactional id (TRANSACTIONAL_ID_AUTHORIZATION_FAILED)."""


class TopicAuthorizationError(DataError):
    """The client lacks permission on the topic (TOPIC_AUTHORIZATION_FAILED)."""


class GroupAuthorizationError(DataError):
    """The client lacks permission on the group (GROUP_AUTHORIZATION_FAILED)."""


class ClusterAuthorizationError(DataError):
    """The client lacks permission on the cluster (CLUSTER_AUTHORIZATION_FAILED)."""


class TransactionalIdAuthorizationError(DataError):
    """The client lacks permission on the id (TRANSACTIONAL_ID_AUTHORIZATION_FAILED)."""


class ThrottlingQuotaExceededError(DataError):
    """The client exceeds its controller mutation quota (THROTTLING_QUOTA_EXCEEDED)."""


class TooEarlyError(DataError):
    """The client's push interval has not passed yet (THROTTLING_QUOTA_EXCEEDED)."""


class UnknownSubscriptionIdError(DataError):
    """The client's telemetry subscription has changed (UNKNOWN_SUBSCRIPTION_ID)."""


class TelemetryTooLargeError(DataError):
    """A client's metrics exceed telemetry.max.bytes (TELEMETRY_TOO_LARGE)."""


class MetadataUnavailableError(DataError):
    """The metadata log could not be written; nothing was changed (KAFKA_STORAGE_ERROR)."""


class FetchSessionIdNotFoundError(DataError):
    """The fetch session does not exist or was evicted (FETCH_SESSION_ID_NOT_FOUND)."""


class InvalidFetchSessionEpochError(DataError):
    """The request does not have the session's next epoch (INVALID_FETCH_SESSION_EPOCH)."""


class FetchSessionTopicIdError(DataError):
    """A session's request switches between ids and names (FETCH_SESSION_TOPIC_ID_ERROR)."""
