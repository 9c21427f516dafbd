"""Builds the record that changes a partition, including elections and the ELR.

Source: ``PartitionChangeBuilder``; KIP-966, KIP-455.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field, replace
from enum import Enum
from uuid import UUID

from fencepost.cluster.controller.reassignment_steps import completed
from fencepost.cluster.image import (
    NEVER_LED,
    NO_LEADER,
    NO_LEADER_CHANGE,
    PartitionRegistration,
)
from fencepost.cluster.records import PartitionChangeRecord
from fencepost.logcore.values import dataclass

RECOVERED, RECOVERING = 0, 1
"""The leader recovery states: RECOVERING after an unclean election, until the leader reports that
it has recovered."""


class Election(Enum):
    """The rule by which a leader is elected."""

    PREFERRED = "preferred"
    """The first replica if it may lead; otherwise as ONLINE."""
    ONLINE = "online"
    """The current leader stays if it may lead; otherwise the first replica that may lead."""
    UNCLEAN = "unclean"
    """As ONLINE; if no replica may lead, any live replica, which may lose records."""


@dataclass(slots=True)
class PartitionChangeBuilder:
    """The wanted state of a partition; None leaves a value unchanged."""

    partition: PartitionRegistration
    topic_id: UUID
    index: int
    is_acceptable: Callable[[int], bool]
    """Whether a broker is active and its log directory online, so that it may lead if its log is
    complete."""
    min_isr: int
    """``min.insync.replicas``, which may exceed the number of replicas."""
    default_directory: Callable[[int], UUID]
    elr_enabled: bool = False
    election: Election = Election.ONLINE
    isr: tuple[int, ...] | None = None
    replicas: tuple[int, ...] | None = None
    adding: tuple[int, ...] | None = None
    removing: tuple[int, ...] | None = None
    leader_recovery_state: int | None = None
    unclean_shutdown: frozenset[int] = frozenset()
    """Brokers whose logs may have lost records."""
    directories: dict[int, UUID] = field(default_factory=dict)
    """New log directories, by the replica's broker id."""
    raises_leader_epoch: bool = False
    """Whether every change raises the leader epoch. On ZooKeeper every change must, because a
    broker ignores a LeaderAndIsr request with a leader epoch that it knows (kafka:
    ``LeaderAndIsr.newLeaderAndIsr``; similar in KRaft:
    ``triggerLeaderEpochBumpForIsrShrinkIfNeeded``)."""
    is_alter_partition: bool = False
    """Whether the leader requested the change (ZooKeeper). The response contains the ISR but not
    the replicas, so a change of the replicas must raise the leader epoch."""
    always_writes: bool = False
    """Whether to write a record even if nothing changes, so that the replicas are informed
    again."""

    def build(self) -> PartitionChangeRecord | None:
        """Return the record, None if nothing changes."""
        state = self.partition
        isr = _changed_or(self.isr, state.isr)
        replicas = _changed_or(self.replicas, state.replicas)
        adding = _changed_or(self.adding, state.adding_replicas)
        removing = _changed_or(self.removing, state.removing_replicas)
        done = completed(replicas, adding, removing, isr)
        if done is not None:
            (replicas, isr), adding, removing = done, (), ()

        is_first = state.partition_epoch == NEVER_LED
        if is_first:  # kafka: PartitionStateMachine.initializeLeaderAndIsrForPartitions
            isr = tuple(filter(self.is_acceptable, replicas))

        elr = self._elr(isr, replicas)
        leader, is_unclean = self._elect(replicas, isr, elr)
        recovery = self.leader_recovery_state
        if recovery is None:
            recovery = state.leader_recovery_state
        if leader != state.leader and leader in elr:
            isr, elr = (leader,), tuple(broker_id for broker_id in elr if broker_id != leader)
        if is_unclean:
            isr, elr, recovery = (leader,), (), RECOVERING
        if not isr and not self.elr_enabled and not is_first:
            # Without an ELR, only the last ISR shows which replicas have the records.
            isr = (
                tuple(broker_id for broker_id in state.isr if broker_id in replicas) or replicas[:1]
            )

        # Removed replicas must see a new leader epoch even if the leader stays (KAFKA-13972).
        names_leader = (
            leader != state.leader
            or is_unclean
            or (replicas is not state.replicas and not set(state.replicas) <= set(replicas))
        )
        record = PartitionChangeRecord(
            topic_id=self.topic_id,
            partition_id=self.index,
            isr=None if isr == state.isr else isr,
            leader=leader if names_leader else NO_LEADER_CHANGE,
            replicas=None if replicas == state.replicas else replicas,
            removing_replicas=None if removing == state.removing_replicas else removing,
            adding_replicas=None if adding == state.adding_replicas else adding,
            leader_recovery_state=-1 if recovery == state.leader_recovery_state else recovery,
            directories=self._directories(replicas),
            eligible_leader_replicas=None if elr == state.elr else elr,
            last_known_elr=self._last_known_elr(isr, leader),
        )
        if record == PartitionChangeRecord(self.topic_id, self.index) and not self.always_writes:
            return None
        must_elect = self.raises_leader_epoch or (self.is_alter_partition and self._moves(record))
        if must_elect and record.leader == NO_LEADER_CHANGE:
            return replace(record, leader=leader)
        return record

    def _moves(self, record: PartitionChangeRecord) -> bool:
        """Whether the record changes the replicas, which the answer to the leader omits."""
        return (record.replicas, record.adding_replicas, record.removing_replicas) != (None,) * 3

    def _elr(self, isr: tuple[int, ...], replicas: tuple[int, ...]) -> tuple[int, ...]:
        """Return the replicas outside the ISR that have every committed record.

        The ELR is empty unless the ISR is smaller than ``min.insync.replicas``. The high watermark
        does not advance with such an ISR, so a replica that leaves it misses no committed record.
        """
        if not self.elr_enabled or len(isr) >= min(self.min_isr, len(replicas)):
            return ()
        no_more = {*isr, *self.unclean_shutdown}
        return tuple(
            broker_id
            for broker_id in dict.fromkeys((*self.partition.elr, *self.partition.isr))
            if broker_id in replicas and broker_id not in no_more
        )

    def _elect(
        self, replicas: tuple[int, ...], isr: tuple[int, ...], elr: tuple[int, ...]
    ) -> tuple[int, bool]:
        """Return the elected leader, and whether it may lack records."""
        eligible = isr or elr

        def may_lead(replica: int) -> bool:
            return replica in eligible and self.is_acceptable(replica)

        leader = self.partition.leader
        first = (
            (replicas[0], leader, *replicas[1:])
            if self.election is Election.PREFERRED
            else (leader, *replicas)
        )
        for replica in first:
            if may_lead(replica):
                return replica, False
        at_last: list[int] = []
        last_known = self.partition.last_known_elr
        if self.elr_enabled and not eligible and len(last_known) == 1:
            at_last += [broker_id for broker_id in last_known if broker_id in replicas]
        if self.election is Election.UNCLEAN:
            at_last += replicas
        # Kafka elects the last known leader even if it is not alive, which helps no client.
        elected = next(
            (broker_id for broker_id in at_last if self.is_acceptable(broker_id)), NO_LEADER
        )
        return elected, elected != NO_LEADER

    def _last_known_elr(self, isr: tuple[int, ...], leader: int) -> tuple[int, ...] | None:
        """Return the new last known ELR, None if it does not change.

        When the ISR becomes empty, the former leader becomes the last known ELR. The last known ELR
        is cleared when the partition has a leader again.
        """
        state = self.partition
        if not self.elr_enabled:
            return None
        if not isr and state.isr and state.leader not in (NO_LEADER, *state.last_known_elr):
            return (state.leader,)
        return () if leader != NO_LEADER and state.last_known_elr else None

    def _directories(self, replicas: tuple[int, ...]) -> tuple[UUID, ...] | None:
        state = self.partition
        if replicas is state.replicas and not self.directories:
            return None
        assigned = dict(zip(state.replicas, state.directories, strict=False)) | self.directories
        directories = tuple(
            assigned[replica] if replica in assigned else self.default_directory(replica)
            for replica in replicas
        )
        return None if directories == state.directories else directories


def _changed_or(new: tuple[int, ...] | None, old: tuple[int, ...]) -> tuple[int, ...]:
    return old if new is None else new
