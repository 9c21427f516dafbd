"""The partitions that this broker leads and follows, according to the latest metadata image.

A partition whose only replica is on this broker is led *alone*: it has no :class:`Replica`, only
its log, which is opened on first use. Every other partition with a replica on this broker has a
:class:`Replica` with a state machine, ``PartitionLeader`` (``cluster/leader.py``), which also
tracks the epochs while another broker leads. Requests rely on this invariant: an open log with
``marks.is_replicated`` false is led alone, in the epoch ``marks.leader_epoch``.

The state machine of a led partition is notified of every append (``Marks.on_flushed_end``) and of
every follower's fetch. Its steps advance the high watermark, wake requests, and send ISR changes to
the controller.

Source: ``ReplicaManager``, ``Partition``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final
from uuid import UUID

import structlog

from fencepost.cluster.errors import NotLeaderOrFollowerError
from fencepost.cluster.image import (
    NO_LEADER,
    LocalChanges,
    LocalPartition,
    MetadataImage,
    PartitionRegistration,
    local_changes,
)
from fencepost.cluster.isr import AlteredPartition, IsrChange, ReplicationView
from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.errors import (
    InconsistentTopicIdError,
    NotEnoughReplicasError,
    UnknownTopicOrPartitionError,
)
from fencepost.coordinator.runtime.background import Repeated, spawn, swallow
from fencepost.coordinator.runtime.commits import Commits
from fencepost.coordinator.storage.due_changes import DueChanges
from fencepost.coordinator.storage.log_manager import LogManager
from fencepost.coordinator.storage.replica import OnPlaced, Replica, ReplicaFetchers, partitions_in
from fencepost.coordinator.storage.replica_counts import ReplicaCounts, SoleReplicaCounter, count
from fencepost.logcore.clock import Clock
from fencepost.logcore.epochs import UNDEFINED_EPOCH, check_leader_epoch
from fencepost.logcore.errors import LogError, StorageError
from fencepost.logcore.machine import Event
from fencepost.logcore.partition import Partition

if TYPE_CHECKING:
    from fencepost.cluster.leader import LeaderStep, PartitionLeader

LAG_TIME: Final = "replica.lag.time.max.ms"
MIN_ISR: Final = "min.insync.replicas"

_log = structlog.get_logger(__name__)

TopicPartition = tuple[str, int]
Remember = Callable[[LocalPartition, Event], None]
"""Records an event of a partition in the history; never raises."""


class ReplicaManager:
    """The replicas on this broker (``services.replicas``), for use on the event loop only."""

    def __init__(
        self,
        logs: LogManager,
        commits: Commits,
        config: BrokerConfig,
        clock: Clock,
        *,
        node_id: int,
        image: MetadataImage,
        durable: Callable[[], Awaitable[None]],
    ) -> None:
        self._logs, self._commits, self._config, self._clock = logs, commits, config, clock
        self.node_id = node_id
        self.view = ReplicationView(node_id, replica_lag_time_max_ms=config.int(LAG_TIME))
        """The brokers and settings that the state machines of all replicas share."""
        self.image = image
        """The latest image."""
        self.durable = durable
        """Returns once the latest image is durable; raises StorageError."""
        self._sole_replicas = SoleReplicaCounter(node_id)
        self._replicas: dict[TopicPartition, Replica] = {}
        self._open = logs.opened
        self._due = DueChanges(self._begin_with)
        self.fetchers: ReplicaFetchers | None = None
        """Fetches the partitions that other brokers lead; set before the first image arrives."""
        self.alter_partition: Callable[[IsrChange], None] | None = None
        """Sends a change of an ISR to the controller; set before the first image arrives."""
        self.remember: Remember | None = None
        """Records ISR changes and their causes in the history."""
        self.on_placed: OnPlaced | None = None
        """Called when this broker begins to lead or follow a replica, and after a disk failure."""
        self.isr_shrinks = self.isr_expands = self.failed_isr_updates = 0
        self._isr_check = Repeated("ISRs", self.check_isr, self._check_interval_ms, self._clock)
        """The periodic check of the ISRs; it starts with the first replicated partition."""
        self._deleting: asyncio.Task[None] | None = None
        self._has_started = False
        config.listen(self._reconfigure)

    # --- leaders and followers -------------------------------------------------------------------

    def leader(self, topic: str, index: int, leader_epoch: int = UNDEFINED_EPOCH) -> Partition:
        """Return the log of a partition that this broker leads.

        ``leader_epoch`` is the client's current leader epoch; −1 is not checked. Raises
        UnknownTopicOrPartitionError, StorageError, FencedLeaderEpochError, UnknownLeaderEpochError,
        NotLeaderOrFollowerError, in this order.
        """
        key = topic, index
        if self._due.partitions:
            self._due.settle(key)
        partition = self._open.get(key)
        if partition is None or partition.marks.is_replicated:
            return self._find(topic, index, leader_epoch, only_leader=True)
        if leader_epoch != UNDEFINED_EPOCH:
            check_leader_epoch(leader_epoch, partition.marks.leader_epoch)
        return partition

    def led_with_id(
        self, topic: str, index: int, leader_epoch: int, topic_id: UUID | None
    ) -> Partition:
        """Check the topic id (InconsistentTopicIdError), then do the same as :meth:`leader`."""
        self._check_id(topic, index, topic_id)
        return self.leader(topic, index, leader_epoch)

    def readable(
        self,
        topic: str,
        index: int,
        leader_epoch: int = UNDEFINED_EPOCH,
        topic_id: UUID | None = None,
    ) -> Partition:
        """Return the log of any replica on this broker. Raises like :meth:`led_with_id`."""
        if (topic, index) not in self._replicas and not self._due.partitions:
            return self.leader(topic, index, leader_epoch)
        self._check_id(topic, index, topic_id)
        return self._find(topic, index, leader_epoch, only_leader=False)

    def _check_id(self, topic: str, index: int, topic_id: UUID | None) -> None:
        replica = self.replica(topic, index)
        if replica is not None and topic_id is not None and topic_id != replica.local.topic_id:
            raise InconsistentTopicIdError(f"{topic} has another id here than {topic_id}")

    def _find(self, topic: str, index: int, leader_epoch: int, *, only_leader: bool) -> Partition:
        replica = self.replica(topic, index)
        if replica is None:
            return self._sole_replica(topic, index, leader_epoch)
        partition, machine = replica.log, replica.machine
        check_leader_epoch(leader_epoch, machine.leader_epoch)
        if only_leader and not machine.is_leader:
            raise NotLeaderOrFollowerError(f"{machine} is not led by this broker")
        return partition

    def _sole_replica(self, topic: str, index: int, leader_epoch: int) -> Partition:
        """Return the log of a partition whose only replica is on this broker."""
        registration = self.registration(topic, index)
        if registration is None:
            # The message omits the name: it may be long, and a request may name 100,000 partitions.
            raise UnknownTopicOrPartitionError(f"there is no partition {index} of this topic")
        if not registration.is_sole_replica_on(self.node_id):
            raise NotLeaderOrFollowerError(f"{topic}-{index} has no replica on this broker")
        partition = self._logs.partition(topic, index)
        marks = partition.marks
        if marks.is_replicated or marks.leader_epoch != registration.leader_epoch:
            self._lead_sole_replica(partition, registration)
        check_leader_epoch(leader_epoch, registration.leader_epoch)
        return partition

    def registration(self, topic: str, index: int) -> PartitionRegistration | None:
        """Return the state of a partition in the latest image; None if it does not exist."""
        topic_image = self.image.topics.get(topic)
        if topic_image is None or not 0 <= index < len(topic_image.partitions):
            return None
        return topic_image.partitions[index]

    def has_one(self, topic: str, index: int) -> bool:
        """Return whether a partition has a replica on this broker."""
        registration = self.registration(topic, index)
        return registration is not None and self.node_id in registration.replicas

    def replica(self, topic: str, index: int) -> Replica | None:
        """Return this broker's replica of a replicated partition; None if there is none."""
        key = topic, index
        if self._due.partitions:
            self._due.settle(key)
        return self._replicas.get(key)

    def led(self, topic: str, index: int) -> PartitionLeader | None:
        """Return the state machine of a replicated partition that this broker leads, or None."""
        replica = self.replica(topic, index)
        return replica.machine if replica is not None and replica.machine.is_leader else None

    def __iter__(self) -> Iterator[Replica]:
        """Iterate over this broker's replicas of replicated partitions, in no order."""
        return iter(self._replicas.values())

    def leader_of(self, topic: str, index: int) -> tuple[int, int] | None:
        """Return a partition's leader and leader epoch, for error responses (KIP-951)."""
        replica = self.replica(topic, index)
        registration = (
            self.registration(topic, index) if replica is None else replica.local.registration
        )
        return None if registration is None else (registration.leader, registration.leader_epoch)

    def counts(self, offline: int) -> ReplicaCounts:
        """Count the partitions with a replica here; ``offline`` is the number of offline logs."""
        return count(self._replicas.values(), self._sole_replicas.count(self.image), offline)

    # --- metadata images -------------------------------------------------------------------------

    def start(self) -> None:
        """Lead and follow the partitions of the installed image, on the running loop."""
        self._has_started = True
        self.publish(MetadataImage(), self.image)

    def publish(self, old: MetadataImage, image: MetadataImage) -> None:
        """Apply the changes since ``old``; before :meth:`start`, only store ``image``."""
        if not self._has_started:
            self.image = image
            return
        self.apply(local_changes(old, image, self.node_id, sole_replicas=False), image)

    def apply(self, changes: LocalChanges, image: MetadataImage) -> None:
        """Apply the changes up to ``image``: deletes, then leaders, then followers.

        A failure affects one partition, and is logged.
        """
        others = image.brokers is not self.view.brokers
        self.view.brokers = image.brokers
        registration = image.brokers.get(self.node_id)
        if registration is not None:
            self.view.broker_epoch = registration.epoch
        configs, self.image = self.image.configs, image
        if image.configs is not configs:
            self._set_min_isr()
        # A topic may have 100,000 partitions, most of which were never used.
        due, tables = self._due, self._logs.tables
        gone = changes.deleted_sole_replicas
        used = partitions_in(gone, self._replicas, due.partitions, due.failed, *tables)
        self._delete([*changes.deletes, *used])
        self._due.add((*changes.leaders, *changes.followers))
        if others:
            self._reconsider()

    def _check_interval_ms(self) -> int:
        return max(1, self._config.int(LAG_TIME) // 2)

    def _begin_with(self, local: LocalPartition) -> None:
        """Lead or follow one partition."""
        if local.registration.leader == self.node_id:
            replica = self._replicas.get((local.topic, local.index))
            if replica is None or not replica.machine.is_leader:
                self._stop_fetching([local])
            self._lead(local)
        elif self._follow(local) and self.fetchers is not None:
            self._stop_fetching([local])
            if local.registration.leader != NO_LEADER:
                self.fetchers.follow([local])
            self._replicas[
                local.topic, local.index
            ].followed_epoch = local.registration.leader_epoch

    def stop_following(self, partitions: Sequence[tuple[UUID, int]]) -> None:
        """Stop fetching partitions ahead of the next image, during a controlled shutdown."""
        if not partitions:
            return
        self._due.finish()
        if self.fetchers is not None:
            self.fetchers.stop(partitions)

    def _stop_fetching(self, partitions: Iterable[LocalPartition]) -> None:
        if self.fetchers is not None:
            self.fetchers.stop([(partition.topic_id, partition.index) for partition in partitions])

    def _delete(self, deletes: Sequence[LocalPartition]) -> None:
        if not deletes:
            return
        self._stop_fetching(deletes)
        for deleted in deletes:
            self._due.drop(deleted)
            key = deleted.topic, deleted.index
            replica = self._replicas.get(key)
            if replica is not None and replica.local.topic_id == deleted.topic_id:
                del self._replicas[key]
                replica.machine.resign()
                self._wake_waiting(replica)
            partition = self._logs.find_open(key)
            if partition is None or partition.topic_id == deleted.topic_id:
                self._logs.mark_partition_deleted(key)
        self._commits.has_replicated = bool(self._replicas)
        if self._deleting is None or self._deleting.done():
            self._deleting = spawn(self._delete_directories(), "directories of deleted replicas")

    async def _delete_directories(self) -> None:
        # If the wait fails, the partitions stay marked as deleted until the next deletion.
        while deleted := self._logs.removals.deleted:
            # Directories are renamed only when a power failure cannot restore their topics.
            # Partitions that are deleted during the wait are handled in the next round.
            await self.durable()
            await self._logs.remove_deleted(deleted)

    async def deletions_done(self) -> None:
        """Wait until the directories of all deleted replicas are renamed."""
        while self._deleting is not None and not self._deleting.done():
            await asyncio.shield(self._deleting)

    def _lead(self, local: LocalPartition) -> None:
        registration = local.registration
        if registration.is_sole_replica_on(self.node_id):
            self._become_sole_replica(local)
            return
        replica = self._hosted(local)
        machine, now_ms = replica.machine, self._clock.monotonic_ms()
        if registration.partition_epoch < machine.partition_epoch:
            return
        replica.local = local
        try:
            partition = replica.partition or self._logs.partition(local.topic, local.index)
            self._replicate(replica, partition)
            step = machine.become_leader(
                registration,
                partition.log_start_offset,
                partition.log_end_offset,
                partition.high_watermark,
                now_ms,
            )
            if step.epoch_entry is not None:
                partition.replica.lead(registration.leader_epoch)
        except LogError as error:
            self._failed(replica, error)
            return
        partition.marks.on_flushed_end = partial(self._appended, replica)
        self._execute_step(replica, step, notifies=True)
        self._report_directory(replica)

    def _become_sole_replica(self, local: LocalPartition) -> None:
        """Lead a partition whose other replicas were removed, or never existed."""
        key = local.topic, local.index
        replica = self._replicas.pop(key, None)
        if replica is not None:
            replica.machine.resign()
        if (partition := self._logs.find_open(key)) is not None:
            self._lead_sole_replica(partition, local.registration)
        if replica is not None:
            replica.low_watermark_moved()
            self._commits.has_replicated = bool(self._replicas)

    def _lead_sole_replica(self, partition: Partition, registration: PartitionRegistration) -> None:
        partition.marks.leader_epoch = registration.leader_epoch
        partition.marks.end_replication()
        partition.marks.notify()

    def _follow(self, local: LocalPartition) -> bool:
        """Follow a partition; return whether to restart its fetches in a new leader epoch."""
        registration = local.registration
        replica = self._hosted(local)
        led = replica.machine.is_leader
        if not replica.machine.resign(registration):
            return False
        replica.local = local
        is_new = registration.leader_epoch > replica.followed_epoch
        # The log is created even without a leader, so that the checkpoints contain it (KAFKA-1647).
        try:
            partition = replica.partition or self._logs.partition(local.topic, local.index)
            self._replicate(replica, partition)
            partition.marks.on_flushed_end = None
            partition.replica.follow(registration.leader_epoch)
        except LogError as error:
            self._failed(replica, error)
        else:
            self._report_directory(replica)
        if led or is_new:
            self._wake_waiting(replica)
        return is_new and not replica.is_offline

    def _hosted(self, local: LocalPartition) -> Replica:
        key = local.topic, local.index
        replica = self._replicas.get(key)
        if replica is None:
            replica = self._replicas[key] = Replica.of(self.view, local)
            replica.machine.min_insync_replicas = self._min_isr(local.topic)
            self._commits.has_replicated = bool(self._replicas)
            if not self._isr_check.is_started:
                self._isr_check.start(self._check_interval_ms())
        return replica

    def _replicate(self, replica: Replica, partition: Partition) -> None:
        """Treat the log as replicated: the leader, here or remote, sets the high watermark."""
        if replica.partition is None:
            replica.partition, replica.failure = partition, None
            marks = partition.marks
            marks.on_offline = partial(self._on_offline, replica, marks.on_offline)
        if not partition.marks.is_replicated:
            partition.marks.replicate(partition.high_watermark)

    def _wake_waiting(self, replica: Replica) -> None:
        """Wake all requests that wait for a partition that this broker no longer leads."""
        if (partition := replica.partition) is not None:
            self._commits.give_up(partition)
            partition.marks.notify()
        replica.low_watermark_moved()

    # --- disks -----------------------------------------------------------------------------------

    def _failed(self, replica: Replica, error: LogError) -> None:
        """Take offline a replica whose log cannot be opened, or cannot begin a leader epoch."""
        local = replica.local
        _log.error("replica off line", partition=f"{local.topic}-{local.index}", cause=str(error))
        if replica.partition is None:
            replica.failure = StorageError(str(error))
            self._report_directory(replica)
        else:
            replica.partition.marks.fail(error)

    def _report_directory(self, replica: Replica) -> None:
        if self.on_placed is not None:
            self.on_placed(replica.local, is_offline=replica.is_offline)

    def _on_offline(
        self, replica: Replica, tell: Callable[[StorageError], None] | None, error: StorageError
    ) -> None:
        if tell is not None:
            tell(error)
        if self._replicas.get((replica.local.topic, replica.local.index)) is replica:
            self._report_directory(replica)

    # --- appends, fetches, answers, time ---------------------------------------------------------

    def check_min_isr(self, topic: str, index: int) -> None:
        """Refuse an append with acks=all if the ISR is too small: NotEnoughReplicasError."""
        replica = self.replica(topic, index) if self._replicas else None
        if replica is None:
            return
        machine = replica.machine
        if machine.is_under_min_isr:
            raise NotEnoughReplicasError(
                f"the ISR of {machine} has {len(machine.isr)} members,"
                f" {MIN_ISR} asks for {machine.effective_min_isr}"
            )

    def _appended(self, replica: Replica, end: int) -> None:
        """Handle an append. The log itself then notifies its listeners."""
        self._execute_step(replica, replica.machine.on_appended(end, self._clock.monotonic_ms()))

    def fetched(
        self,
        topic: str,
        index: int,
        replica_id: int,
        broker_epoch: int,
        offset: int,
        log_start_offset: int,
        leader_end_offset: int,
    ) -> None:
        """Record a follower's fetch; the log ended at ``leader_end_offset`` when it was read.

        Raises NotLeaderOrFollowerError for a stale broker epoch, UnknownReplicaError.
        """
        replica = self.replica(topic, index)
        if replica is None:
            return
        step = replica.machine.update_follower_fetch_state(
            replica_id,
            broker_epoch,
            offset,
            log_start_offset,
            leader_end_offset,
            self._clock.monotonic_ms(),
        )
        self._execute_step(replica, step, notifies=True)

    def log_start_moved(self, partition: Partition) -> None:
        """Handle a new log start offset of a led partition."""
        replica = self.replica(partition.topic, partition.index)
        if replica is not None:
            self._execute_step(replica, replica.machine.log_start_moved(partition.log_start_offset))

    def alter_partition_answered(self, change: IsrChange, answer: int | AlteredPartition) -> None:
        """Handle the controller's response to a change of an ISR."""
        replica = self.replica(change.topic, change.index)
        if replica is None or replica.local.topic_id != change.topic_id:
            return
        step = replica.machine.alter_partition_answered(change, answer, self._clock.monotonic_ms())
        self._execute_step(replica, step, notifies=True)

    def check_isr(self) -> None:
        """Propose removing lagging replicas from ISRs, every half ``replica.lag.time.max.ms``."""
        now_ms = self._clock.monotonic_ms()
        for replica in list(self._replicas.values()):
            machine = replica.machine
            with swallow("ISR check", partition=str(machine)):
                if machine.is_leader and not replica.is_offline:
                    self._execute_step(replica, machine.check_isr(now_ms), notifies=True)

    def _reconsider(self, chosen: Iterable[Replica] | None = None) -> None:
        """Recompute the watermarks after a change of the brokers or of a setting."""
        now_ms = self._clock.monotonic_ms()
        for replica in list(self._replicas.values() if chosen is None else chosen):
            if replica.machine.is_leader:
                self._execute_step(replica, replica.machine.reconsider(now_ms), notifies=True)

    def _execute_step(self, replica: Replica, step: LeaderStep, *, notifies: bool = False) -> None:
        """Execute a step; with ``notifies``, notify listeners of a higher high watermark."""
        partition = replica.partition
        if partition is not None:
            marks = partition.marks
            # If flush.messages requires a flush of records, they are not committed before it.
            mark = min(replica.machine.high_watermark, marks.flushed_end)
            if mark > marks.high_watermark and replica.machine.is_leader:
                marks.move_high_watermark(mark)
                if notifies:
                    marks.notify()
        for event in step.events:
            self._record_event(replica.local, event)
        if step.send is not None and self.alter_partition is not None:
            self.alter_partition(step.send)
        if step.low_watermark_moved:
            replica.low_watermark_moved()

    def _record_event(self, local: LocalPartition, event: Event) -> None:
        detail = event.detail
        self.isr_shrinks += "left" in detail
        self.isr_expands += "joined" in detail
        self.failed_isr_updates += event.kind == "isr-update-failed"
        level = logging.DEBUG if event.routine or event.quiet else logging.INFO
        if _log.is_enabled_for(level):
            _log.log(level, event.kind, **{**detail, "partition": event.subject})
        if self.remember is not None:
            self.remember(local, event)

    # --- the low watermark -----------------------------------------------------------------------

    def low_watermark(self, partition: Partition) -> int:
        """Return the lowest log start offset of all live replicas; −1 while any is unknown."""
        machine = self.led(partition.topic, partition.index)
        return partition.log_start_offset if machine is None else machine.low_watermark

    def low_watermark_reaches(
        self, partition: Partition, offset: int
    ) -> asyncio.Future[None] | None:
        """Return a future that is done when the low watermark reaches ``offset``.

        Return None if it already has. The future is also done when the leadership ends.
        """
        replica = self.replica(partition.topic, partition.index)
        if replica is None or self.low_watermark(partition) >= offset:
            return None
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def check_low_watermark() -> None:
            machine = replica.machine
            if not done.done() and (not machine.is_leader or machine.low_watermark >= offset):
                done.set_result(None)

        replica.waiting.append(check_low_watermark)
        done.add_done_callback(lambda _: replica.waiting.remove(check_low_watermark))
        return done

    # --- settings --------------------------------------------------------------------------------

    def _set_min_isr(self) -> None:
        """Apply ``min.insync.replicas``, whose value may have changed for topics or brokers."""
        min_isr: dict[str, int] = {}
        changed = []
        for replica in self._replicas.values():
            name, machine = replica.local.topic, replica.machine
            if name not in min_isr:
                min_isr[name] = self._min_isr(name)
            if machine.min_insync_replicas != min_isr[name]:
                machine.min_insync_replicas = min_isr[name]
                changed.append(replica)
        self._reconsider(changed)

    def _min_isr(self, topic: str) -> int:
        value = self._config.topic_value(MIN_ISR, self.image.topic_configs(topic))
        return value if isinstance(value, int) else 1

    def _reconfigure(self) -> None:
        self.view.replica_lag_time_max_ms = self._config.int(LAG_TIME)
        self._set_min_isr()

    async def stop(self) -> None:
        """Stop periodic work. Later images are stored but not applied."""
        self._has_started = False
        await self._due.close()
        await self._isr_check.stop()
        if self._deleting is not None:
            await asyncio.wait({self._deleting})
