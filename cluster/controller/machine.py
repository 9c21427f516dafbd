"""The active controller: decisions on requests, and periodic tasks.

The caller appends a result's records, passes them to :meth:`Controller.replay`, and answers once
the records are committed. A decision does not change the image, so nothing needs to be undone if
its records cannot be written. A decision may change soft state: sessions, queued elections and the
times of periodic tasks.

Source: ``QuorumController``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from uuid import UUID

from fencepost.cluster.acl import Acl, AclFilter
from fencepost.cluster.controller import (
    acls,
    adoption,
    brokers,
    configs,
    elections,
    features,
    isr,
    producer_ids,
    quotas,
    reassignments,
    scram,
    topics,
)
from fencepost.cluster.controller.heartbeats import BrokerHeartbeatManager, BrokerHeartbeatRequest
from fencepost.cluster.controller.outcome import ControllerResult
from fencepost.cluster.controller.partition_change import Election
from fencepost.cluster.controller.placement import RandomSource
from fencepost.cluster.controller.view import (
    UNCLEAN_LEADER_ELECTION,
    ControllerSettings,
    ControllerView,
)
from fencepost.cluster.delta import replayed
from fencepost.cluster.image import MetadataImage, PartitionRegistration
from fencepost.cluster.records import (
    BrokerRegistrationChangeRecord,
    ConfigRecord,
    MetadataRecord,
    NoOpRecord,
    RegisterBrokerRecord,
    UnregisterBrokerRecord,
)
from fencepost.cluster.topic_names import ChargeQuota, unlimited
from fencepost.cluster.topic_records import without_partition_records
from fencepost.logcore.machine import DomainError
from fencepost.logcore.steps import Steps


class Controller:
    """The controller of the whole cluster; ``now_ms`` is a monotonic time."""

    def __init__(self, settings: ControllerSettings, image: MetadataImage, now_ms: int) -> None:
        self.settings = settings
        self.image = image
        self.heartbeats = BrokerHeartbeatManager(image, settings.session_timeout_ms, now_ms)
        self.has_listeners = False
        """Whether observers fetch the metadata log; without them, no NoOpRecord is written."""
        self._balance_ms = now_ms + settings.leader_imbalance_check_interval_ms
        self._unclean_ms = now_ms + settings.unclean_check_interval_ms
        self._idle_ms = now_ms + settings.max_idle_interval_ms

    @property
    def view(self) -> ControllerView:
        """The image and the settings for a decision."""
        return ControllerView(self.image, self.settings)

    def replay(
        self, records: Sequence[MetadataRecord], base_offset: int, epoch: int, now_ms: int
    ) -> MetadataImage:
        """Apply records that were written from ``base_offset`` on; return the next image."""
        image = replayed(self.image, records, base_offset + len(records) - 1, epoch)
        self.install(image, records, base_offset, now_ms)
        return image

    def install(
        self,
        image: MetadataImage,
        records: Sequence[MetadataRecord],
        base_offset: int,
        now_ms: int,
    ) -> None:
        """Apply records as :meth:`replay` does, with an image that the caller built from them."""
        self.image = image
        self._idle_ms = now_ms + self.settings.max_idle_interval_ms
        last = base_offset + len(records) - 1
        for offset, record in enumerate(without_partition_records(records), base_offset):
            match record:
                case RegisterBrokerRecord():
                    self.heartbeats.register(record.broker_id, record.broker_epoch, offset)
                case UnregisterBrokerRecord():
                    self.heartbeats.unregister(record.broker_id)
                case BrokerRegistrationChangeRecord():
                    if record.fenced > 0:
                        self.heartbeats.fence(record.broker_id)
                    if record.in_controlled_shutdown:
                        self.heartbeats.note_shutdown_offset(record.broker_id, last)
                case ConfigRecord(name=name) if name == UNCLEAN_LEADER_ELECTION:
                    self._unclean_ms = now_ms

    # --- brokers ---

    def register_broker(
        self, request: brokers.BrokerRegistrationRequest, next_offset: int, now_ms: int
    ) -> ControllerResult[int | None]:
        """See :func:`brokers.register`."""
        return brokers.register(self.view, self.heartbeats, request, next_offset, now_ms)

    def register_controller(
        self, request: brokers.ControllerRegistrationRequest
    ) -> ControllerResult[None]:
        """See :func:`brokers.register_controller`."""
        return brokers.register_controller(request)

    def unregister_controller(self, controller_id: int) -> ControllerResult[None]:
        """See :func:`brokers.unregister_controller`."""
        return brokers.unregister_controller(self.view, controller_id)

    def heartbeat(
        self, request: BrokerHeartbeatRequest, now_ms: int
    ) -> ControllerResult[brokers.BrokerHeartbeatReply]:
        """See :func:`brokers.heartbeat`."""
        return brokers.heartbeat(self.view, self.heartbeats, request, now_ms)

    def broker_discovered(
        self, record: RegisterBrokerRecord, location: str
    ) -> ControllerResult[bool]:
        """See :func:`brokers.register_discovered`."""
        return brokers.register_discovered(self.view, self.heartbeats, record, location)

    def broker_gone(self, broker_id: int, cause: str) -> ControllerResult[bool]:
        """Unregister a broker whose ZooKeeper node has vanished, and remove it from every ISR.

        The answer says whether the caller must call again.
        """
        broker = self.image.brokers.get(broker_id)
        if broker is None:
            return brokers.remove_unregistered(self.view, broker_id, cause)
        return brokers.fence(self.view, broker, cause, forgets=True)

    def begin_shutdown(self, broker_id: int, broker_epoch: int) -> ControllerResult[bool]:
        """See :func:`brokers.begin_shutdown`; raises StaleBrokerEpochError."""
        return brokers.begin_shutdown(self.view, self.view.registered(broker_id, broker_epoch))

    def led_by(self, broker_id: int) -> list[tuple[str, int]]:
        """See :func:`brokers.led_by`."""
        return brokers.led_by(self.view, broker_id)

    def begin(self, now_ms: int) -> None:
        """Become active: rebuild soft state, and queue leaderless partitions for election."""
        self.heartbeats.restart(self.image, now_ms)
        leaderless = (
            (topic, at) for topic, at, partition in self.view.partitions() if partition.leader < 0
        )
        self.heartbeats.elect_soon(leaderless, "the controller has become active")

    def unregister_broker(self, broker_id: int) -> ControllerResult[bool]:
        """See :func:`brokers.unregister`."""
        return brokers.unregister(self.view, broker_id)

    def allocate_producer_ids(
        self, broker_id: int, broker_epoch: int
    ) -> ControllerResult[producer_ids.ProducerIdsBlock]:
        """See :func:`producer_ids.allocate_producer_ids`."""
        return producer_ids.allocate_producer_ids(self.view, broker_id, broker_epoch)

    def reserve_producer_ids(self, below: int) -> ControllerResult[None]:
        """See :func:`producer_ids.reserve_producer_ids`."""
        return producer_ids.reserve_producer_ids(self.view, below)

    def reset_producer_ids(self, following: int) -> ControllerResult[None]:
        """See :func:`producer_ids.reset_producer_ids`."""
        return producer_ids.reset_producer_ids(self.view, following)

    # --- partitions ---

    def alter_partition(
        self, broker_id: int, broker_epoch: int, items: Sequence[isr.ProposedIsr]
    ) -> ControllerResult[list[PartitionRegistration | DomainError]]:
        """See :func:`isr.alter_partition`."""
        return isr.alter_partition(self.view, broker_id, broker_epoch, items)

    def assign_replicas_to_dirs(
        self, broker_id: int, broker_epoch: int, items: Sequence[isr.DirectoryAssignment]
    ) -> ControllerResult[list[DomainError | None]]:
        """See :func:`isr.assign_replicas_to_dirs`."""
        return isr.assign_replicas_to_dirs(self.view, broker_id, broker_epoch, items)

    def record_lost_replicas(
        self,
        broker_id: int,
        lost: Iterable[isr.TopicIdPartition],
        recovered: Iterable[isr.TopicIdPartition],
    ) -> ControllerResult[None]:
        """See :func:`isr.record_lost_replicas`."""
        return isr.record_lost_replicas(self.view, broker_id, lost, recovered)

    def elect_leaders(
        self, election: Election, partitions: Sequence[elections.Partition] | None
    ) -> ControllerResult[list[tuple[elections.Partition, DomainError | None]]]:
        """See :func:`elections.elect_leaders`."""
        return elections.elect_leaders(self.view, election, partitions)

    def elect_first_leaders(self, topic_id: UUID) -> ControllerResult[bool]:
        """See :func:`elections.elect_first_leaders`."""
        return elections.elect_first_leaders(self.view, topic_id)

    def elect_restarted_leaders(
        self, partitions: Sequence[elections.Partition]
    ) -> ControllerResult[bool]:
        """See :func:`elections.elect_restarted_leaders`."""
        return elections.elect_restarted_leaders(self.view, partitions)

    def alter_partition_reassignments(
        self,
        items: Sequence[reassignments.ReassignablePartition],
        *,
        allow_replication_factor_change: bool = True,
        may_wait: bool = False,
    ) -> ControllerResult[list[DomainError | None]]:
        """See :func:`reassignments.alter_partition_reassignments`."""
        return reassignments.alter_partition_reassignments(
            self.view,
            items,
            allow_replication_factor_change=allow_replication_factor_change,
            may_wait=may_wait,
        )

    def resume_reassignments(self, partitions: Sequence[tuple[str, int]]) -> ControllerResult[None]:
        """See :func:`reassignments.resume_reassignments`."""
        return reassignments.resume_reassignments(self.view, partitions)

    def list_partition_reassignments(
        self, partitions: Sequence[tuple[str, int]] | None
    ) -> list[tuple[str, int, PartitionRegistration]]:
        """See :func:`reassignments.list_partition_reassignments`."""
        return reassignments.list_partition_reassignments(self.view, partitions)

    # --- topics, settings, features ---

    def prepare_topic(
        self, topic: topics.NewTopic, *, topic_id: UUID, draw: RandomSource
    ) -> Steps[topics.PreparedPartitions | None]:
        """See :func:`topics.prepare_topic`."""
        return topics.prepare_topic(self.view, topic, topic_id=topic_id, draw=draw)

    def create_topic(
        self,
        topic: topics.NewTopic,
        *,
        topic_id: UUID,
        draw: RandomSource,
        check_configs: configs.CheckConfigs,
        charge: ChargeQuota = unlimited,
        validate_only: bool = False,
        prepared: topics.PreparedPartitions | None = None,
    ) -> ControllerResult[topics.CreatedTopic]:
        """See :func:`topics.create_topic`."""
        return topics.create_topic(
            self.view,
            topic,
            topic_id=topic_id,
            draw=draw,
            check_configs=check_configs,
            charge=charge,
            validate_only=validate_only,
            prepared=prepared,
        )

    def create_internal_topic(
        self, topic: topics.NewTopic, *, topic_id: UUID, draw: RandomSource
    ) -> ControllerResult[topics.CreatedTopic | None]:
        """See :func:`topics.create_internal_topic`."""
        return topics.create_internal_topic(self.view, topic, topic_id=topic_id, draw=draw)

    def prepare_partitions(
        self,
        name: str,
        count: int,
        *,
        assignments: Sequence[Sequence[int]] | None,
        draw: RandomSource,
    ) -> Steps[topics.PreparedPartitions | None]:
        """See :func:`topics.prepare_partitions`."""
        return topics.prepare_partitions(self.view, name, count, assignments=assignments, draw=draw)

    def create_partitions(
        self,
        name: str,
        count: int,
        *,
        assignments: Sequence[Sequence[int]] | None,
        draw: RandomSource,
        charge: ChargeQuota = unlimited,
        validate_only: bool = False,
        prepared: topics.PreparedPartitions | None = None,
    ) -> ControllerResult[int]:
        """See :func:`topics.create_partitions`."""
        return topics.create_partitions(
            self.view,
            name,
            count,
            assignments=assignments,
            draw=draw,
            charge=charge,
            validate_only=validate_only,
            prepared=prepared,
        )

    def adopt_topic(self, topic: adoption.AdoptedTopic) -> ControllerResult[None]:
        """See :func:`adoption.adopt_topic`."""
        return adoption.adopt_topic(self.view, topic)

    def delete_topic(
        self, topic_id: UUID, charge: ChargeQuota = unlimited, *, allows_internal: bool = False
    ) -> ControllerResult[None]:
        """See :func:`topics.delete_topic`."""
        return topics.delete_topic(self.view, topic_id, charge, allows_internal=allows_internal)

    def incremental_alter_configs(
        self,
        resource: configs.Resource,
        changes: Sequence[configs.AlterConfig],
        *,
        check_configs: configs.CheckConfigs,
        list_default: Callable[[int, str], str | None],
        validate_only: bool = False,
    ) -> ControllerResult[None]:
        """See :func:`configs.incremental_alter_configs`."""
        return configs.incremental_alter_configs(
            self.view,
            resource,
            changes,
            check_configs=check_configs,
            list_default=list_default,
            validate_only=validate_only,
        )

    def legacy_alter_configs(
        self,
        resource: configs.Resource,
        values: Mapping[str, str | None],
        *,
        check_configs: configs.CheckConfigs,
        validate_only: bool = False,
    ) -> ControllerResult[None]:
        """See :func:`configs.legacy_alter_configs`."""
        return configs.legacy_alter_configs(
            self.view, resource, values, check_configs=check_configs, validate_only=validate_only
        )

    def update_features(
        self, updates: Sequence[features.FeatureUpdate], *, validate_only: bool = False
    ) -> ControllerResult[Mapping[str, int]]:
        """See :func:`features.update_features`."""
        return features.update_features(self.view, updates, validate_only=validate_only)

    # --- ACLs ---

    def check_acl_creation(
        self, new: Iterable[Acl], existing: acls.AclIndex, reason_against: acls.ReasonAgainst
    ) -> Steps[acls.AclCreation]:
        """See :func:`acls.check_creation`."""
        return acls.check_creation(self.view, new, existing, reason_against)

    def create_acls(
        self, new: Iterable[Acl], existing: acls.AclIndex, draw_id: Callable[[], UUID]
    ) -> ControllerResult[None]:
        """See :func:`acls.create_acls`."""
        return acls.create_acls(self.view, new, existing, draw_id)

    def check_acl_deletion(
        self, filters: Iterable[AclFilter], existing: acls.AclIndex
    ) -> Steps[acls.AclDeletion]:
        """See :func:`acls.check_deletion`."""
        return acls.check_deletion(self.view, filters, existing)

    def delete_acls(
        self, deleted: Iterable[Acl], existing: acls.AclIndex
    ) -> ControllerResult[None]:
        """See :func:`acls.delete_acls`."""
        return acls.delete_acls(deleted, existing)

    # --- users, quotas ---

    def check_credentials(
        self,
        alterations: Iterable[scram.ScramCredentialAlteration],
        least_iterations: scram.LeastIterations,
        reason_against: acls.ReasonAgainst,
    ) -> Steps[tuple[dict[str, DomainError], list[scram.ScramCredentialAlteration]]]:
        """See :func:`scram.check_credentials`."""
        return scram.check_credentials(self.view, alterations, least_iterations, reason_against)

    def alter_credentials(
        self, alterations: Iterable[scram.ScramCredentialAlteration], derive_keys: scram.DeriveKeys
    ) -> ControllerResult[list[DomainError | None]]:
        """See :func:`scram.alter_credentials`."""
        return scram.alter_credentials(self.view, alterations, derive_keys)

    def add_credentials(
        self, added: Iterable[scram.ScramCredentialUpsertion], derive_keys: scram.DeriveKeys
    ) -> ControllerResult[list[str]]:
        """See :func:`scram.add_credentials`."""
        return scram.add_credentials(self.view, added, derive_keys)

    def check_quotas(
        self, alterations: Iterable[quotas.ClientQuotaAlteration]
    ) -> Steps[list[quotas.CheckedAlteration]]:
        """See :func:`quotas.check_quotas`."""
        return quotas.check_quotas(self.view, alterations)

    def alter_client_quotas(
        self,
        alterations: Iterable[quotas.ClientQuotaAlteration],
        quota_count: int,
        reason_against: acls.ReasonAgainst,
    ) -> ControllerResult[list[DomainError | None]]:
        """See :func:`quotas.alter_client_quotas`."""
        return quotas.alter_client_quotas(self.view, alterations, quota_count, reason_against)

    # --- periodic tasks ---

    def next_task_ms(self) -> int | None:
        """Return the time of the next periodic task; None if no task is scheduled."""
        times = [self.heartbeats.next_expiry_ms()]
        if self.heartbeats.has_elections:
            times.append(0)
        if len(self.image.brokers) > 1 and self.settings.leader_rebalance:
            times.append(self._balance_ms)
        # The last broker may need an unclean election after all other brokers have been
        # unregistered.
        if self.image.brokers:
            times.append(self._unclean_ms)
        if self.has_listeners and self.settings.max_idle_interval_ms:
            times.append(self._idle_ms)
        return min((time for time in times if time is not None), default=None)

    def run_task(self, now_ms: int) -> ControllerResult[bool]:
        """Run the task that is due; the answer says whether to call again after the replay.

        The order is: one expired session, queued elections, preferred leaders, unclean elections,
        a NoOpRecord.
        """
        outcome = brokers.expire(self.view, self.heartbeats, now_ms)
        if outcome.answer:
            return outcome
        if self.heartbeats.has_elections:
            return brokers.elect_leaderless(self.view, self.heartbeats)
        if now_ms >= self._balance_ms:
            balanced = ControllerResult(False)
            if self.settings.leader_rebalance:
                balanced = elections.balance_leaders(self.view)
            if not balanced.answer:
                self._balance_ms = now_ms + self.settings.leader_imbalance_check_interval_ms
            if balanced.records:
                return ControllerResult(True, balanced.records, events=balanced.events)
        if now_ms >= self._unclean_ms:
            elected = elections.elect_unclean_leaders(self.view)
            if not elected.answer:
                self._unclean_ms = now_ms + self.settings.unclean_check_interval_ms
            if elected.records:
                return ControllerResult(True, elected.records, events=elected.events)
        if self.has_listeners and self.settings.max_idle_interval_ms and now_ms >= self._idle_ms:
            return ControllerResult(False, (NoOpRecord(),))
        return ControllerResult(False)
