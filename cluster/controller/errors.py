"""What a controller refuses. No class here knows a wire number.

The name in parentheses is Kafka's error; ``coordinator/error_codes.py`` holds the map.
"""

from __future__ import annotations

from fencepost.logcore.machine import DomainError


class ClusterError(DomainError):
    """Base of everything that the state of the cluster forbids."""


# --- topics and partitions ---


class UnknownTopicOrPartitionError(ClusterError):
    """There is no such topic, or it has no such partition (UNKNOWN_TOPIC_OR_PARTITION)."""


class UnknownTopicIdError(ClusterError):
    """No topic has this id (UNKNOWN_TOPIC_ID)."""


class TopicAlreadyExistsError(ClusterError):
    """The name is taken (TOPIC_ALREADY_EXISTS)."""


class InvalidTopicError(ClusterError):
    """The name is not allowed, or clients may not write to it (INVALID_TOPIC_EXCEPTION)."""


class InvalidPartitionsError(ClusterError):
    """The number of partitions is not possible (INVALID_PARTITIONS)."""


class InvalidReplicationFactorError(ClusterError):
    """The number of replicas is not possible (INVALID_REPLICATION_FACTOR)."""


class InvalidReplicaAssignmentError(ClusterError):
    """Replicas can not be placed as asked for (INVALID_REPLICA_ASSIGNMENT)."""


class InvalidRequestError(ClusterError):
    """The request contradicts itself (INVALID_REQUEST)."""


class PolicyViolationError(ClusterError):
    """A bound or the topic's configuration forbids it (POLICY_VIOLATION)."""


class UnacceptableCredentialError(ClusterError):
    """A credential has another form than logins need (UNACCEPTABLE_CREDENTIAL)."""


class UnsupportedSaslMechanismError(ClusterError):
    """There is no such mechanism (UNSUPPORTED_SASL_MECHANISM)."""


class DuplicateResourceError(ClusterError):
    """A request names the same thing twice (DUPLICATE_RESOURCE)."""


class ResourceNotFoundError(ClusterError):
    """There is no such thing (RESOURCE_NOT_FOUND)."""


class InvalidConfigError(ClusterError):
    """A setting can not have this value (INVALID_CONFIG)."""


class InvalidUpdateVersionError(ClusterError):
    """A partition has another epoch, a feature not that level (INVALID_UPDATE_VERSION)."""


# --- brokers ---


class InconsistentClusterIdError(ClusterError):
    """The sender belongs to another cluster (INCONSISTENT_CLUSTER_ID)."""


class DuplicateBrokerRegistrationError(ClusterError):
    """Another living process has this broker id (DUPLICATE_BROKER_REGISTRATION)."""


class InvalidRegistrationError(ClusterError):
    """What a broker says of itself can not be (INVALID_REGISTRATION)."""


class UnsupportedFeatureLevelError(ClusterError):
    """A broker does not support a finalized level (UNSUPPORTED_VERSION)."""


class StaleBrokerEpochError(ClusterError):
    """The broker is not registered with this epoch (STALE_BROKER_EPOCH)."""


class BrokerIdNotRegisteredError(ClusterError):
    """No broker has this id (BROKER_ID_NOT_REGISTERED)."""


class NotControllerError(ClusterError):
    """This controller is not the active one, or is behind (NOT_CONTROLLER)."""


# --- ISR, elections, reassignments ---


class IneligibleReplicaError(ClusterError):
    """A replica may not join the ISR: it is fenced, gone, or another one (INELIGIBLE_REPLICA)."""


class NewLeaderElectedError(ClusterError):
    """The change was made, and with it came another leader (NEW_LEADER_ELECTED)."""


class NotAReplicaError(ClusterError):
    """A broker speaks of a partition whose replica it is not (NOT_LEADER_OR_FOLLOWER)."""


class ElectionNotNeededError(ClusterError):
    """The partition has the leader that was asked for (ELECTION_NOT_NEEDED)."""


class PreferredLeaderNotAvailableError(ClusterError):
    """The first replica can not lead (PREFERRED_LEADER_NOT_AVAILABLE)."""


class EligibleLeadersNotAvailableError(ClusterError):
    """No replica can lead (ELIGIBLE_LEADERS_NOT_AVAILABLE)."""


class NoReassignmentInProgressError(ClusterError):
    """There is nothing to be called off (NO_REASSIGNMENT_IN_PROGRESS)."""


class ProducerIdsExhaustedError(ClusterError):
    """All producer ids have been given out (UNKNOWN_SERVER_ERROR)."""
