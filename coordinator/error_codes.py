"""The single map from domain errors to Kafka's error codes.

It contains every subclass of ``DomainError`` that can be raised; a test checks that. An error whose
code depends on the API (PRODUCER_FENCED is INVALID_PRODUCER_EPOCH in a Produce response) is
translated by the handler beforehand.
"""

from __future__ import annotations

from collections.abc import Mapping

from kio.schema.errors import ErrorCode

from fencepost.cluster import errors as replication
from fencepost.cluster.controller import errors as controller
from fencepost.coordinator import errors as data_errors
from fencepost.coordinator.config.key import ConfigError
from fencepost.coordinator.controller import errors as observers
from fencepost.coordinator.runtime import errors as shard_errors
from fencepost.coordinator.zookeeper import errors as zookeeper
from fencepost.groups import errors as groups
from fencepost.groups.share import errors as shares
from fencepost.logcore import errors as logs
from fencepost.logcore.machine import DomainError, InvalidRegularExpressionError
from fencepost.protocol.added_errors import CONTROLLER_ID_NOT_REGISTERED
from fencepost.txn import errors as txns

CODES: Mapping[type[DomainError], ErrorCode] = {
    # logcore
    InvalidRegularExpressionError: ErrorCode.invalid_regular_expression,
    logs.CorruptRecordError: ErrorCode.corrupt_message,
    logs.InvalidRecordError: ErrorCode.invalid_record,
    logs.NotOneBatchError: ErrorCode.invalid_record,
    logs.InvalidTimestampError: ErrorCode.invalid_timestamp,
    logs.RecordTooLargeError: ErrorCode.message_too_large,
    logs.RecordListTooLargeError: ErrorCode.record_list_too_large,
    logs.UnsupportedCompressionError: ErrorCode.unsupported_compression_type,
    logs.OffsetOutOfRangeError: ErrorCode.offset_out_of_range,
    logs.OutOfOrderSequenceError: ErrorCode.out_of_order_sequence_number,
    logs.TooManyProducersError: ErrorCode.not_enough_replicas,
    logs.InvalidProducerEpochError: ErrorCode.invalid_producer_epoch,
    logs.TransactionCoordinatorFencedError: ErrorCode.transaction_coordinator_fenced,
    logs.InvalidTxnStateError: ErrorCode.invalid_txn_state,
    logs.FencedLeaderEpochError: ErrorCode.fenced_leader_epoch,
    logs.UnknownLeaderEpochError: ErrorCode.unknown_leader_epoch,
    logs.StorageError: ErrorCode.kafka_storage_error,
    logs.NoSpaceError: ErrorCode.kafka_storage_error,
    # A follower does not report this error to clients, as in Kafka.
    logs.UnexpectedAppendOffsetError: ErrorCode.unknown_server_error,
    observers.SnapshotNotFoundError: ErrorCode.snapshot_not_found,
    observers.PositionOutOfRangeError: ErrorCode.position_out_of_range,
    # cluster
    controller.UnknownTopicOrPartitionError: ErrorCode.unknown_topic_or_partition,
    controller.UnknownTopicIdError: ErrorCode.unknown_topic_id,
    controller.TopicAlreadyExistsError: ErrorCode.topic_already_exists,
    controller.InvalidTopicError: ErrorCode.invalid_topic_exception,
    controller.InvalidPartitionsError: ErrorCode.invalid_partitions,
    controller.InvalidReplicationFactorError: ErrorCode.invalid_replication_factor,
    controller.InvalidReplicaAssignmentError: ErrorCode.invalid_replica_assignment,
    controller.InvalidRequestError: ErrorCode.invalid_request,
    controller.PolicyViolationError: ErrorCode.policy_violation,
    controller.UnacceptableCredentialError: ErrorCode.unacceptable_credential,
    controller.UnsupportedSaslMechanismError: ErrorCode.unsupported_sasl_mechanism,
    controller.DuplicateResourceError: ErrorCode.duplicate_resource,
    controller.ResourceNotFoundError: ErrorCode.resource_not_found,
    controller.InvalidConfigError: ErrorCode.invalid_config,
    controller.InvalidUpdateVersionError: ErrorCode.invalid_update_version,
    controller.InconsistentClusterIdError: ErrorCode.inconsistent_cluster_id,
    controller.DuplicateBrokerRegistrationError: ErrorCode.duplicate_broker_registration,
    controller.InvalidRegistrationError: ErrorCode.invalid_registration,
    controller.UnsupportedFeatureLevelError: ErrorCode.unsupported_version,
    controller.StaleBrokerEpochError: ErrorCode.stale_broker_epoch,
    controller.BrokerIdNotRegisteredError: ErrorCode.broker_id_not_registered,
    controller.ControllerIdNotRegisteredError: CONTROLLER_ID_NOT_REGISTERED,
    controller.NotControllerError: ErrorCode.not_controller,
    controller.IneligibleReplicaError: ErrorCode.ineligible_replica,
    controller.NewLeaderElectedError: ErrorCode.new_leader_elected,
    controller.NotAReplicaError: ErrorCode.not_leader_or_follower,
    controller.ElectionNotNeededError: ErrorCode.election_not_needed,
    controller.PreferredLeaderNotAvailableError: ErrorCode.preferred_leader_not_available,
    controller.EligibleLeadersNotAvailableError: ErrorCode.eligible_leaders_not_available,
    controller.NoReassignmentInProgressError: ErrorCode.no_reassignment_in_progress,
    controller.ProducerIdsExhaustedError: ErrorCode.unknown_server_error,
    replication.NotLeaderOrFollowerError: ErrorCode.not_leader_or_follower,
    replication.UnknownReplicaError: ErrorCode.unknown_leader_epoch,
    # coordinator
    ConfigError: ErrorCode.invalid_config,
    data_errors.InconsistentTopicIdError: ErrorCode.inconsistent_topic_id,
    data_errors.OffsetNotAvailableError: ErrorCode.offset_not_available,
    data_errors.NotEnoughReplicasError: ErrorCode.not_enough_replicas,
    data_errors.NotEnoughReplicasAfterAppendError: ErrorCode.not_enough_replicas_after_append,
    data_errors.TopicDeletionDisabledError: ErrorCode.topic_deletion_disabled,
    data_errors.InvalidRequiredAcksError: ErrorCode.invalid_required_acks,
    data_errors.TransactionalIdMissingError: ErrorCode.transactional_id_authorization_failed,
    data_errors.TopicAuthorizationError: ErrorCode.topic_authorization_failed,
    data_errors.ClusterAuthorizationError: ErrorCode.cluster_authorization_failed,
    data_errors.GroupAuthorizationError: ErrorCode.group_authorization_failed,
    data_errors.TransactionalIdAuthorizationError: (
        ErrorCode.transactional_id_authorization_failed
    ),
    data_errors.ThrottlingQuotaExceededError: ErrorCode.throttling_quota_exceeded,
    data_errors.TooEarlyError: ErrorCode.throttling_quota_exceeded,
    data_errors.UnknownSubscriptionIdError: ErrorCode.unknown_subscription_id,
    data_errors.TelemetryTooLargeError: ErrorCode.telemetry_too_large,
    data_errors.RequestTimedOutError: ErrorCode.request_timed_out,
    data_errors.FetchSessionIdNotFoundError: ErrorCode.fetch_session_id_not_found,
    data_errors.InvalidFetchSessionEpochError: ErrorCode.invalid_fetch_session_epoch,
    data_errors.FetchSessionTopicIdError: ErrorCode.fetch_session_topic_id_error,
    zookeeper.NotInZooKeeperError: ErrorCode.unsupported_version,
    zookeeper.NotWrittenError: ErrorCode.unknown_server_error,
    data_errors.MetadataUnavailableError: ErrorCode.kafka_storage_error,
    shard_errors.CoordinatorLoadInProgressError: ErrorCode.coordinator_load_in_progress,
    shard_errors.NotCoordinatorError: ErrorCode.not_coordinator,
    shard_errors.CoordinatorNotAvailableError: ErrorCode.coordinator_not_available,
    shard_errors.VerificationLostError: ErrorCode.network_exception,
    shard_errors.TransactionCoordinatorBusyError: ErrorCode.not_enough_replicas,
    # groups
    groups.InvalidGroupIdError: ErrorCode.invalid_group_id,
    groups.InvalidSessionTimeoutError: ErrorCode.invalid_session_timeout,
    groups.InconsistentGroupProtocolError: ErrorCode.inconsistent_group_protocol,
    groups.UnknownMemberIdError: ErrorCode.unknown_member_id,
    groups.MemberIdRequiredError: ErrorCode.member_id_required,
    groups.FencedInstanceIdError: ErrorCode.fenced_instance_id,
    groups.IllegalGenerationError: ErrorCode.illegal_generation,
    groups.RebalanceInProgressError: ErrorCode.rebalance_in_progress,
    groups.GroupMaxSizeReachedError: ErrorCode.group_max_size_reached,
    groups.GroupLimitExceededError: ErrorCode.policy_violation,
    groups.GroupDeadError: ErrorCode.coordinator_not_available,
    groups.NotGroupCoordinatorError: ErrorCode.not_coordinator,
    groups.GroupIdNotFoundError: ErrorCode.group_id_not_found,
    groups.NonEmptyGroupError: ErrorCode.non_empty_group,
    groups.GroupSubscribedToTopicError: ErrorCode.group_subscribed_to_topic,
    groups.OffsetMetadataTooLargeError: ErrorCode.offset_metadata_too_large,
    groups.UnstableOffsetCommitError: ErrorCode.unstable_offset_commit,
    groups.InvalidGroupRequestError: ErrorCode.invalid_request,
    groups.UnsupportedAssignorError: ErrorCode.unsupported_assignor,
    groups.FencedMemberEpochError: ErrorCode.fenced_member_epoch,
    groups.StaleMemberEpochError: ErrorCode.stale_member_epoch,
    groups.UnreleasedInstanceIdError: ErrorCode.unreleased_instance_id,
    groups.UnsupportedGroupRequestError: ErrorCode.unsupported_version,
    # groups/share
    shares.ShareSessionNotFoundError: ErrorCode.share_session_not_found,
    shares.InvalidShareSessionEpochError: ErrorCode.invalid_share_session_epoch,
    shares.ShareSessionLimitReachedError: ErrorCode.share_session_limit_reached,
    shares.InvalidShareRequestError: ErrorCode.invalid_request,
    shares.InvalidRecordStateError: ErrorCode.invalid_record_state,
    shares.SharePartitionFencedError: ErrorCode.not_leader_or_follower,
    shares.SharePartitionFailedError: ErrorCode.unknown_server_error,
    shares.UnknownSharePartitionError: ErrorCode.unknown_topic_or_partition,
    shares.ShareGroupGoneError: ErrorCode.group_id_not_found,
    shares.ShareCoordinatorUnloadedError: ErrorCode.not_coordinator,
    shares.ShareCoordinatorUnavailableError: ErrorCode.coordinator_not_available,
    shares.FencedStateEpochError: ErrorCode.fenced_state_epoch,
    shares.FencedShareLeaderEpochError: ErrorCode.fenced_leader_epoch,
    # txn
    txns.InvalidTxnRequestError: ErrorCode.invalid_request,
    txns.InvalidTransactionTimeoutError: ErrorCode.invalid_transaction_timeout,
    txns.TwoPhaseCommitDisabledError: ErrorCode.transactional_id_authorization_failed,
    txns.KeepPreparedUnsupportedError: ErrorCode.unsupported_version,
    txns.ConcurrentTransactionsError: ErrorCode.concurrent_transactions,
    txns.ProducerFencedError: ErrorCode.producer_fenced,
    txns.InvalidProducerIdMappingError: ErrorCode.invalid_producer_id_mapping,
    txns.InvalidTransactionStateError: ErrorCode.invalid_txn_state,
    txns.TransactionAbortableError: ErrorCode.transaction_abortable,
    txns.TransactionalIdNotFoundError: ErrorCode.transactional_id_not_found,
    txns.ProducerIdsUnavailableError: ErrorCode.coordinator_load_in_progress,
    txns.TooManyTransactionalIdsError: ErrorCode.policy_violation,
    txns.TooManyPartitionsError: ErrorCode.policy_violation,
    txns.CoordinatorUnloadedError: ErrorCode.not_coordinator,
}


def error_code(error: DomainError) -> ErrorCode:
    """Return Kafka's code for ``error``; UNKNOWN_SERVER_ERROR for a class missing from the map."""
    return CODES.get(type(error), ErrorCode.unknown_server_error)
