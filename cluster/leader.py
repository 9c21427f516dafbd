"""One partition that this broker leads: its followers' offsets, its ISR and its high watermark.

The caller reports events (records appended, a follower's fetch, an image, an answer of the
controller, time) and carries out the returned :class:`LeaderStep`. One rule stands above the
others: while an ISR change is pending at the controller, either ISR may be the committed one, so
the high watermark waits for every replica that is in either (KIP-497, the *maximal* ISR).

Source: ``Partition``; KIP-497, KIP-841, KIP-903, KIP-966.
"""

from __future__ import annotations

from enum import Enum
from typing import Final
from uuid import UUID

from fencepost.cluster.errors import (
    NotLeaderOrFollowerError,
    UnknownReplicaError,
    error_name,
)
from fencepost.cluster.image import PartitionRegistration
from fencepost.cluster.isr import (
    ALTER_PARTITION_ERRORS,
    ANY_BROKER_EPOCH,
    ISR_TRANSITIONS,
    NEVER_MS,
    UNKNOWN_OFFSET,
    AlteredPartition,
    IsrChange,
    IsrState,
    IsrTrigger,
    ReplicaState,
    ReplicationView,
)
from fencepost.logcore.machine import Event, InvariantViolation
from fencepost.logcore.values import dataclass


class AcksVerdict(Enum):
    """Whether a write with acks=all may be answered."""

    WAITING = "the high watermark is below it"
    DONE = "enough replicas have it"
    NOT_ENOUGH_REPLICAS_AFTER_APPEND = "it is committed, by fewer than min.insync.replicas"
    NOT_LEADER_OR_FOLLOWER = "this broker no longer leads, or not without a break"


@dataclass(frozen=True, slots=True)
class LeaderStep:
    """The effects of an event, for the caller to act on."""

    high_watermark_moved: bool = False
    low_watermark_moved: bool = False
    isr_changed: bool = False
    """The committed ISR has changed; waiting writes may have to be refused."""
    send: IsrChange | None = None
    """A change to submit to :class:`~fencepost.cluster.alter_partition.AlterPartitions`."""
    epoch_entry: tuple[int, int] | None = None
    """The (leader epoch, start offset) to add to the epoch cache before any other action."""
    is_new_leader: bool = False
    """This broker did not lead the partition before."""
    events: tuple[Event, ...] = ()


NOTHING: Final = LeaderStep()
_HIGH_WATERMARK_MOVED: Final = LeaderStep(high_watermark_moved=True)


class PartitionLeader:
    """The state machine of one led partition; see the module docstring.

    An instance may outlive a leadership: :meth:`resign` keeps the epochs, so that a late, older
    registration is recognized.
    """

    def __init__(
        self,
        view: ReplicationView,
        topic: str,
        topic_id: UUID,
        index: int,
        *,
        min_insync_replicas: int = 1,
    ) -> None:
        self._view = view
        self.topic, self.topic_id, self.index = topic, topic_id, index
        self.min_insync_replicas = min_insync_replicas
        """The topic's setting; call :meth:`reconsider` after changing it."""
        self.is_leader = False
        self.leader_epoch = -1
        self.partition_epoch = -1
        self.leads_since_epoch = -1
        """The leader epoch since which this broker has led without interruption."""
        self.epoch_start_offset = UNKNOWN_OFFSET
        self.registration: PartitionRegistration | None = None
        """The registration applied last; its ISR may be older than :attr:`isr`."""
        self.isr: tuple[int, ...] = ()
        """The committed ISR."""
        self.pending: IsrChange | None = None
        self.state = IsrState.COMMITTED
        self.maximal_isr: frozenset[int] = frozenset()
        """The committed ISR, and the replicas that a pending change adds."""
        self.replicas: dict[int, ReplicaState] = {}
        """The replicas on other brokers."""
        self.log_end_offset = 0
        self.log_start_offset = 0
        self.high_watermark = 0
        self.low_watermark = 0
        """The lowest log start offset of this replica and of the replicas on unfenced brokers, −1
        while one of these offsets is unknown. DeleteRecords waits for the low watermark."""

    # --- leadership ---

    def become_leader(
        self,
        registration: PartitionRegistration,
        log_start_offset: int,
        log_end_offset: int,
        high_watermark: int,
        now_ms: int,
    ) -> LeaderStep:
        """Begin to lead the partition, or apply a new registration while this broker leads it.

        A registration with an older partition epoch is ignored. While this broker leads, a
        registration with the same partition epoch is ignored as well: this broker knows it from the
        controller's answer to AlterPartition, and a change that was proposed since then may be
        pending. ``high_watermark`` is used only if this broker did not lead before.
        """
        if registration.partition_epoch < self.partition_epoch or (
            self.is_leader and registration.partition_epoch == self.partition_epoch
        ):
            return NOTHING
        # Other brokers may have led the partition meanwhile, and followers may have truncated and
        # appended in those epochs, so the followers' states are dropped.
        if self.is_leader and registration.leader_epoch > self.leader_epoch + 1:
            self.is_leader = False
            self.replicas.clear()
        was, events, former = self.isr, [], self.registration
        is_new_leader, epoch_entry = not self.is_leader, None
        self.log_start_offset, self.log_end_offset = log_start_offset, log_end_offset
        if is_new_leader:
            self.high_watermark = high_watermark
        pending = self.pending
        self._commit(IsrTrigger.METADATA, registration.isr)
        self.registration = registration
        self._assign(registration)
        if registration.leader_epoch > self.leader_epoch or is_new_leader:
            self.epoch_start_offset = log_end_offset
            epoch_entry = registration.leader_epoch, log_end_offset
            for replica in self.replicas.values():
                in_isr = replica.broker_id in registration.isr
                replica.reset(now_ms, log_end_offset, in_isr=in_isr)
            self.leader_epoch = registration.leader_epoch
            if is_new_leader:
                self.leads_since_epoch = registration.leader_epoch
        self.partition_epoch = registration.partition_epoch
        self.is_leader = True
        if epoch_entry is not None and former is not None:
            events.append(self._leader_event(former))
        if is_new_leader:
            self.low_watermark = self._lowest_start()
        elif set(was) != set(self.isr):
            reason = self._reason_of_removal(was)
            if pending is not None and {broker_id for broker_id, _ in pending.new_isr} == set(
                self.isr
            ):
                reason = pending.reason
            events.append(self._isr_event(was, reason))
        return LeaderStep(
            high_watermark_moved=self._advance(now_ms),
            low_watermark_moved=self._advance_low(),
            isr_changed=not is_new_leader and set(was) != set(self.isr),
            epoch_entry=epoch_entry,
            is_new_leader=is_new_leader,
            events=tuple(events),
        )

    def resign(self, registration: PartitionRegistration | None = None) -> bool:
        """Stop leading, because of ``registration`` or because the partition was removed.

        Returns False, and changes nothing, if the registration is older than the known one.
        Otherwise the caller must check every operation that waits for the partition.
        """
        if registration is not None:
            if registration.partition_epoch < self.partition_epoch:
                return False
            self.partition_epoch = registration.partition_epoch
            self.leader_epoch = registration.leader_epoch
        self.registration = registration
        self.is_leader = False
        self.epoch_start_offset = UNKNOWN_OFFSET
        self.replicas.clear()
        self._commit(IsrTrigger.METADATA, ())
        return True

    def _assign(self, registration: PartitionRegistration) -> None:
        me, former = self._view.broker_id, self.replicas
        self.replicas = {
            replica: former.get(replica) or ReplicaState(replica)
            for replica in registration.replicas
            if replica != me
        }

    # --- log offsets ---

    def on_appended(self, log_end_offset: int, now_ms: int) -> LeaderStep:
        """Set this replica's log end offset."""
        self.log_end_offset = log_end_offset
        return _HIGH_WATERMARK_MOVED if self._advance(now_ms) else NOTHING

    def log_start_moved(self, log_start_offset: int) -> LeaderStep:
        """Set this replica's log start offset."""
        self.log_start_offset = log_start_offset
        return LeaderStep(low_watermark_moved=True) if self._advance_low() else NOTHING

    def reconsider(self, now_ms: int) -> LeaderStep:
        """Advance both watermarks after a change of a setting, a registration or the time."""
        high, low = self._advance(now_ms), self._advance_low()
        return LeaderStep(high, low) if high or low else NOTHING

    def check_replica(self, broker_id: int) -> None:
        """Raise unless this broker leads the partition and ``broker_id`` has a replica of it.

        Call this before anything is read for a follower.
        """
        if not self.is_leader:
            raise NotLeaderOrFollowerError(f"{self} is not led by this broker")
        if broker_id not in self.replicas:
            raise UnknownReplicaError(f"broker {broker_id} has no replica of {self}")

    def update_follower_fetch_state(
        self,
        broker_id: int,
        broker_epoch: int,
        fetch_offset: int,
        log_start_offset: int,
        leader_end_offset: int,
        now_ms: int,
        *,
        is_diverging: bool = False,
    ) -> LeaderStep:
        """Note a follower's fetch; ``leader_end_offset`` was the log end when the log was read.

        A fetch that is answered with a diverging epoch is not counted: its offset does not show how
        far the two logs agree (KAFKA-13141). Raises :class:`UnknownReplicaError` and
        :class:`NotLeaderOrFollowerError`, the latter also for a fetch by a broker's former
        incarnation.
        """
        self.check_replica(broker_id)
        broker = self._view.brokers.get(broker_id)
        if (
            broker_epoch != ANY_BROKER_EPOCH
            and broker is not None
            and not broker.fenced
            and broker.epoch > broker_epoch
        ):
            raise NotLeaderOrFollowerError(
                f"a fetch of broker {broker_id} in epoch {broker_epoch}, which has {broker.epoch}"
            )
        if is_diverging:
            return NOTHING
        replica = self.replicas[broker_id]
        moved_start = replica.log_start_offset != log_start_offset
        replica.update_fetch_state(
            fetch_offset, log_start_offset, broker_epoch, leader_end_offset, now_ms
        )
        change = None
        if self.state is IsrState.COMMITTED and broker_id not in self.maximal_isr:
            change = self._maybe_expand(replica)
        high, low = self._advance(now_ms), moved_start and self._advance_low()
        if change is None and not low:
            return _HIGH_WATERMARK_MOVED if high else NOTHING
        return LeaderStep(high, low, send=change)

    # --- the ISR ---

    def check_isr(self, now_ms: int) -> LeaderStep:
        """Propose removing lagging replicas from the ISR.

        Call it at intervals of half of ``replica.lag.time.max.ms``.
        """
        if not self.is_leader or self.state is not IsrState.COMMITTED:
            return NOTHING
        late = self._out_of_sync(now_ms)
        if not late:
            return NOTHING
        reason = "; ".join(self._describe_lag(broker_id, now_ms) for broker_id in late)
        return LeaderStep(send=self._propose(IsrTrigger.SHRINK, (), late, reason))

    def _out_of_sync(self, now_ms: int) -> tuple[int, ...]:
        lag, end = self._view.replica_lag_time_max_ms, self.log_end_offset
        late = []
        for broker_id in self.isr:
            replica = self.replicas.get(broker_id)
            if broker_id != self._view.broker_id and (
                replica is None or not replica.is_caught_up(end, now_ms, lag)
            ):
                late.append(broker_id)
        return tuple(late)

    def _describe_lag(self, broker_id: int, now_ms: int) -> str:
        replica = self.replicas.get(broker_id)
        if replica is None:
            return f"broker {broker_id} has no replica"
        end = replica.log_end_offset
        position = "has not fetched" if end == UNKNOWN_OFFSET else f"is at {end}"
        since = now_ms - replica.last_caught_up_ms
        lag = self._view.replica_lag_time_max_ms
        return (
            f"broker {broker_id} {position} of {self.log_end_offset}, "
            + ("never caught up" if replica.last_caught_up_ms == NEVER_MS else f"{since} ms behind")
            + f", more than replica.lag.time.max.ms={lag}"
        )

    def _maybe_expand(self, replica: ReplicaState) -> IsrChange | None:
        """Propose adding a replica at or above the high watermark and the leader epoch's start."""
        end = replica.log_end_offset
        # Records between the high watermark and the epoch's start may be committed although this
        # leader does not know it yet (KAFKA-7128).
        if end < max(self.high_watermark, self.epoch_start_offset) or not self._eligible(replica):
            return None
        reason = f"broker {replica.broker_id} is at {end}, the high watermark {self.high_watermark}"
        return self._propose(IsrTrigger.EXPAND, (replica.broker_id,), (), reason)

    def _eligible(self, replica: ReplicaState) -> bool:
        """Whether the controller would accept the replica into the ISR.

        The replica's broker must be active and registered with the broker epoch of its last fetch.
        """
        broker = self._view.brokers.get(replica.broker_id)
        return (
            broker is not None
            and broker.is_active
            and replica.broker_epoch is not None
            # Brokers that learn of other brokers by UpdateMetadata (ZooKeeper) get no broker
            # epochs.
            and (
                broker.epoch == ANY_BROKER_EPOCH
                or replica.broker_epoch in (ANY_BROKER_EPOCH, broker.epoch)
            )
        )

    def _propose(
        self, trigger: IsrTrigger, joins: tuple[int, ...], leaves: tuple[int, ...], reason: str
    ) -> IsrChange:
        members = tuple(broker_id for broker_id in self.isr + joins if broker_id not in leaves)
        change = IsrChange(
            topic=self.topic,
            topic_id=self.topic_id,
            index=self.index,
            leader_epoch=self.leader_epoch,
            partition_epoch=self.partition_epoch,
            new_isr=tuple((member, self._epoch_of(member)) for member in members),
            joins=joins,
            leaves=leaves,
            reason=reason,
        )
        self._transition(trigger)
        self.pending = change
        self.maximal_isr = frozenset(self.isr + joins)
        return change

    def _epoch_of(self, broker_id: int) -> int:
        if broker_id == self._view.broker_id:
            return self._view.broker_epoch
        replica = self.replicas.get(broker_id)
        if replica is None or replica.broker_epoch is None:
            return ANY_BROKER_EPOCH
        return replica.broker_epoch

    def alter_partition_answered(
        self, change: IsrChange, answer: int | AlteredPartition, now_ms: int
    ) -> LeaderStep:
        """Handle the controller's answer to ``change``: an error code, or the altered partition.

        An answer to a change that is no longer pending is ignored.
        """
        if self.pending is not change:
            return NOTHING
        if not isinstance(answer, AlteredPartition):
            return self._refused(change, answer)
        if answer.leader_epoch != self.leader_epoch or (
            answer.partition_epoch < self.partition_epoch
        ):
            return NOTHING
        was = self.isr
        self._commit(IsrTrigger.ACCEPTED, answer.isr)
        self.partition_epoch = answer.partition_epoch
        moved = self._advance(now_ms)
        events = () if set(was) == set(self.isr) else (self._isr_event(was, change.reason),)
        return LeaderStep(high_watermark_moved=moved, isr_changed=bool(events), events=events)

    def _refused(self, change: IsrChange, error: int) -> LeaderStep:
        trigger = ALTER_PARTITION_ERRORS.get(error, IsrTrigger.AGAIN)
        if trigger is IsrTrigger.REFUSED:
            self._commit(trigger, self.isr)
        else:
            self._transition(trigger)
        detail = {
            "error": error_name(error),
            "proposed": [broker_id for broker_id, _ in change.new_isr],
            "isr": list(self.isr),
            "leader_epoch": change.leader_epoch,
            "partition_epoch": change.partition_epoch,
        }
        failed = Event("isr-update-failed", str(self), detail, routine=trigger is IsrTrigger.AGAIN)
        again = change if trigger is IsrTrigger.AGAIN else None
        return LeaderStep(send=again, events=(failed,))

    def _commit(self, trigger: IsrTrigger, isr: tuple[int, ...]) -> None:
        self._transition(trigger)
        self.isr, self.maximal_isr, self.pending = isr, frozenset(isr), None

    def _transition(self, trigger: IsrTrigger) -> None:
        try:
            self.state = ISR_TRANSITIONS[self.state, trigger]
        except KeyError:
            raise InvariantViolation(f"{self}: {trigger.name} in {self.state}") from None

    def _leader_event(self, former: PartitionRegistration) -> Event:
        """Build the event of a new leadership, with its cause as far as registrations show it."""
        me, old = self._view.broker_id, former.leader
        reason = "the leader stays, in another epoch"
        if old < 0:
            reason = "it had no leader"
        elif old != me:
            reason = self._reason_not_live(old) or "the controller decided"
            first = self.registration is not None and self.registration.replicas[0]
            if reason == "the controller decided" and first == me:
                reason = "it is the preferred leader"
        detail = {
            "from": old,
            "to": me,
            "leader_epoch": self.leader_epoch,
            "start_offset": self.epoch_start_offset,
            "high_watermark": self.high_watermark,
            "isr": list(self.isr),
            "reason": reason,
        }
        return Event("became-leader", str(self), detail)

    def _reason_not_live(self, broker_id: int) -> str | None:
        broker = self._view.brokers.get(broker_id)
        if broker is None:
            return f"broker {broker_id} is not registered"
        if broker.fenced:
            return f"broker {broker_id} is fenced"
        return f"broker {broker_id} shuts down" if broker.in_controlled_shutdown else None

    def _reason_of_removal(self, was: tuple[int, ...]) -> str:
        """Return why the controller removed members, as far as the registrations show it."""
        left = (self._reason_not_live(broker_id) for broker_id in was if broker_id not in self.isr)
        reasons = [reason for reason in left if reason is not None]
        return "; ".join(reasons) or "the controller decided"

    def _isr_event(self, was: tuple[int, ...], reason: str) -> Event:
        removed = [broker_id for broker_id in was if broker_id not in self.isr]
        joined = [broker_id for broker_id in self.isr if broker_id not in was]
        kind = "isr-expanded" if not removed else "isr-shrunk" if not joined else "isr-changed"
        detail: dict[str, object] = {"isr": list(self.isr), "reason": reason}
        if removed:
            detail["left"] = removed
        if joined:
            detail["joined"] = joined
        detail["leader_epoch"] = self.leader_epoch
        if self.is_under_min_isr:
            detail["under_min_isr"] = self.effective_min_isr
        return Event(kind, str(self), detail)

    # --- watermarks ---

    def _advance(self, now_ms: int) -> bool:
        """Advance the high watermark to the lowest relevant offset; return whether it moved.

        The relevant offsets are the log end offsets of the maximal ISR and of caught-up replicas
        that may join it. The high watermark does not advance while the ISR is smaller than
        ``min.insync.replicas`` (KIP-966).
        """
        candidate = self.log_end_offset
        if candidate <= self.high_watermark or not self.is_leader or self.is_under_min_isr:
            return False
        lag, end = self._view.replica_lag_time_max_ms, candidate
        # Replicas that may join count as well: otherwise the high watermark could advance ahead of
        # them again and again, and they would never join.
        for replica in self.replicas.values():
            if replica.log_end_offset < candidate and (
                replica.broker_id in self.maximal_isr
                or (replica.is_caught_up(end, now_ms, lag) and self._eligible(replica))
            ):
                candidate = replica.log_end_offset
        if candidate <= self.high_watermark:
            return False
        self.high_watermark = candidate
        return True

    def _lowest_start(self) -> int:
        brokers, low = self._view.brokers, self.log_start_offset
        for replica in self.replicas.values():
            broker = brokers.get(replica.broker_id)
            if broker is not None and not broker.fenced:
                low = min(low, replica.log_start_offset)
        return low

    def _advance_low(self) -> bool:
        was, self.low_watermark = self.low_watermark, self._lowest_start()
        return self.low_watermark > was

    def acks_verdict(self, required_offset: int, leader_epoch: int) -> AcksVerdict:
        """Whether a write of ``leader_epoch`` that ends at ``required_offset`` may be answered."""
        # A broker that has followed another leader since the write may have truncated its records.
        if not self.is_leader or leader_epoch < self.leads_since_epoch:
            return AcksVerdict.NOT_LEADER_OR_FOLLOWER
        if self.high_watermark < required_offset:
            return AcksVerdict.WAITING
        if len(self.maximal_isr) < self.effective_min_isr:
            return AcksVerdict.NOT_ENOUGH_REPLICAS_AFTER_APPEND
        return AcksVerdict.DONE

    # --- metrics and checks ---

    @property
    def effective_min_isr(self) -> int:
        """``min.insync.replicas``, at most the number of replicas."""
        return min(self.min_insync_replicas, len(self.replicas) + 1)

    @property
    def is_under_min_isr(self) -> bool:
        """Whether writes with acks=all are refused (NOT_ENOUGH_REPLICAS)."""
        return self.is_leader and len(self.isr) < self.effective_min_isr

    @property
    def is_at_min_isr(self) -> bool:
        """Whether writes with acks=all would be refused if one more replica left the ISR."""
        return self.is_leader and len(self.isr) == self.effective_min_isr

    @property
    def is_reassigning(self) -> bool:
        """Whether a reassignment adds or removes replicas."""
        now = self.registration
        return now is not None and bool(now.adding_replicas or now.removing_replicas)

    @property
    def replication_factor(self) -> int:
        """The number of replicas, without those that a reassignment adds."""
        now = self.registration
        if now is None:
            return 0
        return sum(replica not in now.adding_replicas for replica in now.replicas)

    @property
    def is_under_replicated(self) -> bool:
        """Whether the ISR is smaller than the replication factor."""
        return self.is_leader and len(self.isr) < self.replication_factor

    @property
    def offsets_are_settled(self) -> bool:
        """Whether the high watermark has reached the start of the leader epoch.

        Until then clients that ask for the latest offset get OFFSET_NOT_AVAILABLE.
        """
        return self.high_watermark >= self.epoch_start_offset

    def __str__(self) -> str:
        return f"{self.topic}-{self.index}"
