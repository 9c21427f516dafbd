"""The errors that the controller raises. None of them contains a protocol error code.

The name in parentheses is Kafka's error; ``coordinator/error_codes.py`` maps the classes to codes.
"""

from __future__ import annotations

from fencepost.logcore.machine import DomainError


class ClusterError(DomainError):
    """Base of the controller's errors."""


# --- topics and partitions ---


class UnknownTopicOrPartitionError(ClusterError):
    """The topic or the partition does not exist (UNKNOWN_TOPIC_OR_PARTITION)."""


class UnknownTopicIdError(ClusterError):
    """No topic has this id (UNKNOWN_TOPIC_ID)."""


class TopicAlreadyExistsError(ClusterError):
    """A topic of this name exists (TOPIC_ALREADY_EXISTS)."""


class InvalidTopicError(ClusterError):
    """The name is not allowed, or clients may not write to it (INVALID_TOPIC_EXCEPTION)."""


class InvalidPartitionsError(ClusterError):
    """The number of partitions is invalid (INVALID_PARTITIONS)."""


class InvalidReplicationFactorError(ClusterError):
    """The number of replicas is invalid (INVALID_REPLICATION_FACTOR)."""


class InvalidReplicaAssignmentError(ClusterError):
    """Replicas cannot be placed as requested (INVALID_REPLICA_ASSIGNMENT)."""


class InvalidRequestError(ClusterError):
    """The request contradicts itself or the node's role (INVALID_REQUEST)."""


class PolicyViolationError(ClusterError):
    """A limit or the topic's configuration forbids the request (POLICY_VIOLATION)."""


class UnacceptableCredentialError(ClusterError):
    """A SCRAM credential cannot be used for a login (UNACCEPTABLE_CREDENTIAL)."""


class UnsupportedSaslMechanismError(ClusterError):
    """The mechanism does not exist (UNSUPPORTED_SASL_MECHANISM)."""


class DuplicateResourceError(ClusterError):
    """A request names the same resource twice (DUPLICATE_RESOURCE)."""


class ResourceNotFoundError(ClusterError):
    """The resource does not exist (RESOURCE_NOT_FOUND)."""


class InvalidConfigError(ClusterError):
    """A setting cannot have this value (INVALID_CONFIG)."""


class InvalidUpdateVersionError(ClusterError):
    """The partition epoch or feature level does not allow the update (INVALID_UPDATE_VERSION)."""


# --- brokers ---


class InconsistentClusterIdError(ClusterError):
    """The sender belongs to another cluster (INCONSISTENT_CLUSTER_ID)."""


class DuplicateBrokerRegistrationError(ClusterError):
    """Another live process has this broker id (DUPLICATE_BROKER_REGISTRATION)."""


class InvalidRegistrationError(ClusterError):
    """A broker's registration is not valid (INVALID_REGISTRATION)."""


class UnsupportedFeatureLevelError(ClusterError):
    """A finalized level is not supported, or too low for the request (UNSUPPORTED_VERSION)."""


class StaleBrokerEpochError(ClusterError):
    """The broker is not registered with this epoch (STALE_BROKER_EPOCH)."""


class BrokerIdNotRegisteredError(ClusterError):
    """No broker has this id (BROKER_ID_NOT_REGISTERED)."""


class ControllerIdNotRegisteredError(ClusterError):
    """No controller has this id (CONTROLLER_ID_NOT_REGISTERED)."""


class NotControllerError(ClusterError):
    """This controller is not the active one, or is behind (NOT_CONTROLLER)."""


# --- ISR, elections, reassignments ---


class IneligibleReplicaError(ClusterError):
    """A broker that is inactive or has restarted may not join the ISR (INELIGIBLE_REPLICA)."""


class NewLeaderElectedError(ClusterError):
    """The change was made, and it elected another leader (NEW_LEADER_ELECTED)."""


class NotAReplicaError(ClusterError):
    """The broker has no replica of the partition that it names (NOT_LEADER_OR_FOLLOWER)."""


class ElectionNotNeededError(ClusterError):
    """The partition already has the requested leader (ELECTION_NOT_NEEDED)."""


class PreferredLeaderNotAvailableError(ClusterError):
    """The first replica cannot lead (PREFERRED_LEADER_NOT_AVAILABLE)."""


class EligibleLeadersNotAvailableError(ClusterError):
    """No replica can lead (ELIGIBLE_LEADERS_NOT_AVAILABLE)."""


class NoReassignmentInProgressError(ClusterError):
    """No reassignment is in progress that could be cancelled (NO_REASSIGNMENT_IN_PROGRESS)."""


class ProducerIdsExhaustedError(ClusterError):
    """All producer ids have been allocated (UNKNOWN_SERVER_ERROR)."""
