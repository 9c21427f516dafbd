"""The error codes that replication handles, and the errors that a leader raises.

The error codes in the answers of other brokers decide what replication does next, so this is the
only package of state machines that knows the numbers of Kafka's errors.
"""

from __future__ import annotations

from enum import IntEnum

from fencepost.logcore.machine import DomainError


class Errors(IntEnum):
    """The error codes that replication handles (kafka: ``Errors``)."""

    NONE = 0
    OFFSET_OUT_OF_RANGE = 1
    CORRUPT_MESSAGE = 2
    UNKNOWN_TOPIC_OR_PARTITION = 3
    NOT_LEADER_OR_FOLLOWER = 6
    NETWORK_EXCEPTION = 13
    INVALID_RECORD = 87
    NOT_CONTROLLER = 41
    INVALID_REQUEST = 42
    OPERATION_NOT_ATTEMPTED = 55
    KAFKA_STORAGE_ERROR = 56
    FETCH_SESSION_ID_NOT_FOUND = 70
    INVALID_FETCH_SESSION_EPOCH = 71
    FENCED_LEADER_EPOCH = 74
    UNKNOWN_LEADER_EPOCH = 75
    STALE_BROKER_EPOCH = 77
    INVALID_UPDATE_VERSION = 95
    UNKNOWN_TOPIC_ID = 100
    INCONSISTENT_TOPIC_ID = 103
    FETCH_SESSION_TOPIC_ID_ERROR = 106
    INELIGIBLE_REPLICA = 107
    NEW_LEADER_ELECTED = 108
    OFFSET_MOVED_TO_TIERED_STORAGE = 109


def error_name(code: int) -> str:
    """Return Kafka's name of a code in :class:`Errors`, or ``error`` and the number."""
    try:
        return Errors(code).name
    except ValueError:
        return f"error {code}"


class ReplicationError(DomainError):
    """Base of the errors that a leader returns to another broker."""


class NotLeaderOrFollowerError(ReplicationError):
    """This broker does not lead the partition, or the request has an outdated broker epoch.

    (NOT_LEADER_OR_FOLLOWER)
    """


class UnknownReplicaError(ReplicationError):
    """The fetching broker is not among the replicas that this broker knows (UNKNOWN_LEADER_EPOCH).

    A new assignment may have reached the fetching broker first. That broker retries the fetch
    (KAFKA-13837).
    """
