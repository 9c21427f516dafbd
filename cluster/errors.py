"""What replication is told and what it refuses, in Kafka's numbers and as exceptions.

Answers between brokers carry error codes that decide what a machine does next, so here, as nowhere
else in the pure packages, the numbers are known.
"""

from __future__ import annotations

from enum import IntEnum

from fencepost.logcore.machine import DomainError


class Errors(IntEnum):
    """The codes with a rule of their own in replication (kafka: ``Errors``)."""

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
    """Kafka's name of a code, for people; the number where replication has no rule for it."""
    try:
        return Errors(code).name
    except ValueError:
        return f"error {code}"


class ReplicationError(DomainError):
    """Base of what a leader refuses to another broker."""


class NotLeaderOrFollowerError(ReplicationError):
    """This broker does not lead the partition, or an older incarnation of a broker asks.

    (NOT_LEADER_OR_FOLLOWER)
    """


class UnknownReplicaError(ReplicationError):
    """A broker fetches that is in no assignment known here (UNKNOWN_LEADER_EPOCH).

    The metadata that assign it may have reached it earlier; it tries again (KAFKA-13837).
    """
