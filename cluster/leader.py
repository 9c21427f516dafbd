"""One partition that this broker leads: what its followers hold, its ISR and its high watermark.

The shell tells it what happened (records appended, a follower's fetch, an image, an answer of the
controller, time) and does what the :class:`LeaderStep` says. One rule stands above the others:
while a change of the ISR is on its way to the controller nobody knows which ISR holds, so that the
high watermark waits for every replica that may be a member of either (KIP-497, the *maximal* ISR).

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
    NOT_LEADER_OR_FOLLOWER = "this broker does not lead any more, or not without a break"


@dataclass(frozen=True, slots=True)
class LeaderStep:
    """What an event has brought about."""

    high_watermark_moved: bool = False
    low_watermark_moved: bool = False
    isr_changed: bool = False
    """The committed ISR is another: writes that wait may have to be refused."""
    send: IsrChange | None = None
    """To be handed to :class:`~fencepost.cluster.alter_partition.AlterPartitions`."""
    epoch_entry: tuple[int, int] | None = None
    """(leader epoch, start offset) for the epoch cache, before anything else is done."""
    is_new_leader: bool = False
    """This broker did not lead before."""
    events: tuple[Event, ...] = ()


NOTHING: Final = LeaderStep()
_HIGH_WATERMARK_MOVED: Final = LeaderStep(high_watermark_moved=True)


class PartitionLeader:
    """The state machine of one led partition; see the module.

    It may outlive a leadership: :meth:`resign` keeps the epochs, so that an older registration that
    arrives late is known as such.
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
        """The topic's setting; after a change of it call :meth:`reconsider`."""
        self.is_leader = False
        self.leader_epoch = -1
        self.partition_epoch = -1
        self.leads_since_epoch = -1
        """The leader epoch in which this broker began to lead without a break."""
        self.epoch_start_offset = UNKNOWN_OFFSET
        self.registration: PartitionRegistration | None = None
        """The latest one applied; its ISR may be older than :attr:`isr`."""
        self.isr: tuple[int, ...] = ()
        """The committed one."""
        self.pending: IsrChange | None = None
        self.state = IsrState.COMMITTED
        self.maximal_isr: frozenset[int] = frozenset()
        """Who may be a member: the committed ISR and whoever is on the way into it."""
        self.replicas: dict[int, ReplicaState] = {}
        """The other replicas of the assignment."""
        self.log_end_offset = 0
        self.log_start_offset = 0
        self.high_watermark = 0
        self.low_watermark = 0
        """The lowest log start of this replica and of those on brokers that are up; −1 while one of
        them has not said (DeleteRecords waits for it)."""

    # --- leadership ---

    def become_leader(
        self,
        registration: PartitionRegistration,
        log_start_offset: int,
        log_end_offset: int,
        high_watermark: int,
        now_ms: int,
    ) -> LeaderStep:
        """Lead by ``registration``, at once or on with it.

        An older partition epoch is ignored, and so is an equal one within the same leader epoch:
        an answer of the controller has brought it already, and a change that was proposed since is
        still on its way. The high watermark given counts where this broker did not lead before.

        Where leader epochs lie between, whose images were left out, others may have led: followers
        may have cut and appended under them, and nothing that is known of them holds any more.
        """
        if registration.partition_epoch < self.partition_epoch or (
            self.is_leader and registration.partition_epoch == self.partition_epoch
        ):
            return NOTHING
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
            reason = self._why_the_controller(was)
            if pending is not None and {one for one, _ in pending.new_isr} == set(self.isr):
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
        """Lead no more, by that registration or because the partition is gone.

        False, and nothing happens, where the registration is older than what is known. Every
        operation that waits on the partition has to be looked at afterwards.
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
        me, known = self._view.broker_id, self.replicas
        self.replicas = {
            one: known.get(one) or ReplicaState(one) for one in registration.replicas if one != me
        }

    # --- logs ---

    def appended(self, log_end_offset: int, now_ms: int) -> LeaderStep:
        """The own log ends there now."""
        self.log_end_offset = log_end_offset
        return _HIGH_WATERMARK_MOVED if self._advance(now_ms) else NOTHING

    def log_start_moved(self, log_start_offset: int) -> LeaderStep:
        """The own log begins there now."""
        self.log_start_offset = log_start_offset
        return LeaderStep(low_watermark_moved=True) if self._advance_low() else NOTHING

    def reconsider(self, now_ms: int) -> LeaderStep:
        """Try both watermarks again: a setting, a broker's registration or the time has changed."""
        high, low = self._advance(now_ms), self._advance_low()
        return LeaderStep(high, low) if high or low else NOTHING

    def check_replica(self, broker_id: int) -> None:
        """Refuse who has no replica here, before anything is read for it."""
        if not self.is_leader:
            raise NotLeaderOrFollowerError(f"{self} is not led by this broker")
        if broker_id not in self.replicas:
            raise UnknownReplicaError(f"broker {broker_id} has no replica of {self}")

    def fetched(
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
        """A follower has been read for, up to the leader's end at that moment.

        One whose answer is a diverging epoch does not count: its offset says nothing of what the
        two logs share (KAFKA-13141). Raises :class:`UnknownReplicaError` and
        :class:`NotLeaderOrFollowerError` (also for a fetch of a broker's former incarnation).
        """
        self.check_replica(broker_id)
        known = self._view.brokers.get(broker_id)
        if (
            broker_epoch != ANY_BROKER_EPOCH
            and known is not None
            and not known.fenced
            and known.epoch > broker_epoch
        ):
            raise NotLeaderOrFollowerError(
                f"a fetch of broker {broker_id} in epoch {broker_epoch}, which has {known.epoch}"
            )
        if is_diverging:
            return NOTHING
        replica = self.replicas[broker_id]
        moved_start = replica.log_start_offset != log_start_offset
        replica.fetched(fetch_offset, log_start_offset, broker_epoch, leader_end_offset, now_ms)
        change = None
        if self.state is IsrState.COMMITTED and broker_id not in self.maximal_isr:
            change = self._maybe_expand(replica)
        high, low = self._advance(now_ms), moved_start and self._advance_low()
        if change is None and not low:
            return _HIGH_WATERMARK_MOVED if high else NOTHING
        return LeaderStep(high, low, send=change)

    # --- the ISR ---

    def check_isr(self, now_ms: int) -> LeaderStep:
        """Propose to leave out who lags; to be called every half of ``replica.lag.time.max.ms``."""
        if not self.is_leader or self.state is not IsrState.COMMITTED:
            return NOTHING
        late = self._out_of_sync(now_ms)
        if not late:
            return NOTHING
        told = "; ".join(self._tell_lag(one, now_ms) for one in late)
        return LeaderStep(send=self._propose(IsrTrigger.SHRINK, (), late, told))

    def _out_of_sync(self, now_ms: int) -> tuple[int, ...]:
        lag, end = self._view.replica_lag_time_max_ms, self.log_end_offset
        late = []
        for one in self.isr:
            replica = self.replicas.get(one)
            if one != self._view.broker_id and (
                replica is None or not replica.is_caught_up(end, now_ms, lag)
            ):
                late.append(one)
        return tuple(late)

    def _tell_lag(self, broker_id: int, now_ms: int) -> str:
        replica = self.replicas.get(broker_id)
        if replica is None:
            return f"broker {broker_id} has no replica"
        known = replica.log_end_offset
        where = "has not fetched" if known == UNKNOWN_OFFSET else f"is at {known}"
        since = now_ms - replica.last_caught_up_ms
        lag = self._view.replica_lag_time_max_ms
        return (
            f"broker {broker_id} {where} of {self.log_end_offset}, "
            + ("never caught up" if replica.last_caught_up_ms == NEVER_MS else f"{since} ms behind")
            + f", more than replica.lag.time.max.ms={lag}"
        )

    def _maybe_expand(self, replica: ReplicaState) -> IsrChange | None:
        """A replica joins at the high watermark, but not below the start of the leader's epoch.

        What lies between the two may be committed, though this leader does not know it yet
        (KAFKA-7128).
        """
        end = replica.log_end_offset
        if end < max(self.high_watermark, self.epoch_start_offset) or not self._eligible(replica):
            return None
        reason = f"broker {replica.broker_id} is at {end}, the high watermark {self.high_watermark}"
        return self._propose(IsrTrigger.EXPAND, (replica.broker_id,), (), reason)

    def _eligible(self, replica: ReplicaState) -> bool:
        """Whether the controller would take it: active, and the incarnation that fetched."""
        known = self._view.brokers.get(replica.broker_id)
        return (
            known is not None
            and known.is_active
            and replica.broker_epoch is not None
            # Brokers that are told by UpdateMetadata do not know the epochs of the others.
            and (
                known.epoch == ANY_BROKER_EPOCH
                or replica.broker_epoch in (ANY_BROKER_EPOCH, known.epoch)
            )
        )

    def _propose(
        self, trigger: IsrTrigger, joins: tuple[int, ...], leaves: tuple[int, ...], reason: str
    ) -> IsrChange:
        members = tuple(one for one in self.isr + joins if one not in leaves)
        change = IsrChange(
            topic=self.topic,
            topic_id=self.topic_id,
            index=self.index,
            leader_epoch=self.leader_epoch,
            partition_epoch=self.partition_epoch,
            new_isr=tuple((one, self._epoch_of(one)) for one in members),
            joins=joins,
            leaves=leaves,
            reason=reason,
        )
        self._move(trigger)
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
        """The controller's answer to ``change``: an error's code, or the partition as it is now.

        An answer to a change that is not the pending one comes too late and means nothing.
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
            self._move(trigger)
        detail = {
            "error": error_name(error),
            "proposed": [one for one, _ in change.new_isr],
            "isr": list(self.isr),
            "leader_epoch": change.leader_epoch,
            "partition_epoch": change.partition_epoch,
        }
        failed = Event("isr-update-failed", str(self), detail, routine=trigger is IsrTrigger.AGAIN)
        again = change if trigger is IsrTrigger.AGAIN else None
        return LeaderStep(send=again, events=(failed,))

    def _commit(self, trigger: IsrTrigger, isr: tuple[int, ...]) -> None:
        self._move(trigger)
        self.isr, self.maximal_isr, self.pending = isr, frozenset(isr), None

    def _move(self, trigger: IsrTrigger) -> None:
        try:
            self.state = ISR_TRANSITIONS[self.state, trigger]
        except KeyError:
            raise InvariantViolation(f"{self}: {trigger.name} in {self.state}") from None

    def _leader_event(self, former: PartitionRegistration) -> Event:
        """That this broker leads instead of another, and why as far as the registrations tell."""
        me, old = self._view.broker_id, former.leader
        reason = "the leader stays, in another epoch"
        if old < 0:
            reason = "it had no leader"
        elif old != me:
            reason = self._what_is_wrong_with(old) or "the controller decided"
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

    def _what_is_wrong_with(self, broker_id: int) -> str | None:
        known = self._view.brokers.get(broker_id)
        if known is None:
            return f"broker {broker_id} is not registered"
        if known.fenced:
            return f"broker {broker_id} is fenced"
        return f"broker {broker_id} shuts down" if known.in_controlled_shutdown else None

    def _why_the_controller(self, was: tuple[int, ...]) -> str:
        """Why it may have taken members out, as far as the registrations tell."""
        left = (self._what_is_wrong_with(one) for one in was if one not in self.isr)
        told = [one for one in left if one is not None]
        return "; ".join(told) or "the controller decided"

    def _isr_event(self, was: tuple[int, ...], reason: str) -> Event:
        left = [one for one in was if one not in self.isr]
        joined = [one for one in self.isr if one not in was]
        kind = "isr-expanded" if not left else "isr-shrunk" if not joined else "isr-changed"
        detail: dict[str, object] = {"isr": list(self.isr), "reason": reason}
        if left:
            detail["left"] = left
        if joined:
            detail["joined"] = joined
        detail["leader_epoch"] = self.leader_epoch
        if self.is_under_min_isr:
            detail["under_min_isr"] = self.effective_min_isr
        return Event(kind, str(self), detail)

    # --- watermarks ---

    def _advance(self, now_ms: int) -> bool:
        """Move the high watermark up as far as all hold what is below it.

        All: the maximal ISR, and who is caught up and may join, for it would otherwise run after
        the high watermark for ever. Not while the ISR is too small for a promise (KIP-966).
        """
        candidate = self.log_end_offset
        if candidate <= self.high_watermark or not self.is_leader or self.is_under_min_isr:
            return False
        lag, end = self._view.replica_lag_time_max_ms, candidate
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
            known = brokers.get(replica.broker_id)
            if known is not None and not known.fenced:
                low = min(low, replica.log_start_offset)
        return low

    def _advance_low(self) -> bool:
        was, self.low_watermark = self.low_watermark, self._lowest_start()
        return self.low_watermark > was

    def acks_verdict(self, required_offset: int, leader_epoch: int) -> AcksVerdict:
        """Whether a write of ``leader_epoch`` that ends at ``required_offset`` may be answered.

        A leader that was another's follower in between may have lost it: who waits from before
        hears that this broker does not lead.
        """
        if not self.is_leader or leader_epoch < self.leads_since_epoch:
            return AcksVerdict.NOT_LEADER_OR_FOLLOWER
        if self.high_watermark < required_offset:
            return AcksVerdict.WAITING
        if len(self.maximal_isr) < self.effective_min_isr:
            return AcksVerdict.NOT_ENOUGH_REPLICAS_AFTER_APPEND
        return AcksVerdict.DONE

    # --- facts ---

    @property
    def effective_min_isr(self) -> int:
        """``min.insync.replicas``, as far as there are replicas."""
        return min(self.min_insync_replicas, len(self.replicas) + 1)

    @property
    def is_under_min_isr(self) -> bool:
        """Whether writes with acks=all are refused (NOT_ENOUGH_REPLICAS)."""
        return self.is_leader and len(self.isr) < self.effective_min_isr

    @property
    def is_at_min_isr(self) -> bool:
        """Whether one more loss would have writes refused."""
        return self.is_leader and len(self.isr) == self.effective_min_isr

    @property
    def is_reassigning(self) -> bool:
        """Whether replicas come or go."""
        now = self.registration
        return now is not None and bool(now.adding_replicas or now.removing_replicas)

    @property
    def replication_factor(self) -> int:
        """How many replicas there are to be, those that a reassignment adds left out."""
        now = self.registration
        if now is None:
            return 0
        return sum(one not in now.adding_replicas for one in now.replicas)

    @property
    def is_under_replicated(self) -> bool:
        """Whether fewer replicas are in sync than there are to be."""
        return self.is_leader and len(self.isr) < self.replication_factor

    @property
    def offsets_are_settled(self) -> bool:
        """Whether the high watermark has reached the start of the epoch.

        Only then is it told to clients as the latest offset (otherwise OFFSET_NOT_AVAILABLE).
        """
        return self.high_watermark >= self.epoch_start_offset

    def __str__(self) -> str:
        return f"{self.topic}-{self.index}"
