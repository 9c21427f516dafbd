"""What the data and administration side refuses. No class here knows a wire number.

The name in parentheses is Kafka's error; ``errors.py`` holds the map.
"""

from __future__ import annotations

from fencepost.logcore.machine import DomainError


class DataError(DomainError):
    """Base of everything that topics, partitions and their administration refuse."""


class UnknownTopicOrPartitionError(DataError):
    """There is no such topic, or it has no such partition (UNKNOWN_TOPIC_OR_PARTITION)."""


class UnknownTopicIdError(DataError):
    """No topic has this id (UNKNOWN_TOPIC_ID)."""


class TopicAlreadyExistsError(DataError):
    """The name is taken (TOPIC_ALREADY_EXISTS)."""


class InvalidTopicError(DataError):
    """The name is not allowed, or clients may not write to it (INVALID_TOPIC_EXCEPTION)."""


class InvalidPartitionsError(DataError):
    """The number of partitions is not possible (INVALID_PARTITIONS)."""


class InvalidReplicationFactorError(DataError):
    """The number of replicas is not possible (INVALID_REPLICATION_FACTOR)."""


class InvalidReplicaAssignmentError(DataError):
    """Replicas can not be placed as asked for (INVALID_REPLICA_ASSIGNMENT)."""


class InvalidRequestError(DataError):
    """The request contradicts itself (INVALID_REQUEST)."""


class NotAReplicaError(DataError):
    """A follower fetches a partition whose replica it is not (NOT_LEADER_OR_FOLLOWER)."""


class TopicDeletionDisabledError(DataError):
    """``delete.topic.enable`` is off (TOPIC_DELETION_DISABLED)."""


class TopicLimitExceededError(DataError):
    """A bound of ``metadata.MetadataLimits`` was met; the message names it (POLICY_VIOLATION)."""


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


class PolicyViolationError(DataError):
    """The topic's configuration forbids it (POLICY_VIOLATION)."""


class ThrottlingQuotaExceededError(DataError):
    """A client changes topics faster than it may (THROTTLING_QUOTA_EXCEEDED)."""


class InvalidUpdateVersionError(DataError):
    """A feature can not have this level, or not in this way (INVALID_UPDATE_VERSION)."""


class MetadataUnavailableError(DataError):
    """The metadata log could not be written; nothing was changed (KAFKA_STORAGE_ERROR)."""


class FetchSessionIdNotFoundError(DataError):
    """No such fetch session, or no longer (FETCH_SESSION_ID_NOT_FOUND)."""


class InvalidFetchSessionEpochError(DataError):
    """A request of a fetch session is not the next one (INVALID_FETCH_SESSION_EPOCH)."""


class FetchSessionTopicIdError(DataError):
    """A fetch session was begun with ids and goes on with names (FETCH_SESSION_TOPIC_ID_ERROR)."""
