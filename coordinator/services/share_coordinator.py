"""The share coordinator of this broker: ``groups.share.state`` on ``__share_group_state``.

It keeps the state that leaders of share partitions write. Its log is not compacted. Instead, the
coordinator deletes all records that precede the latest snapshot of every share partition. A share
partition that is no longer written would prevent the deletion of all later records, so the upkeep
writes old snapshots again.

Source: ``ShareCoordinatorService``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Final, Protocol
from uuid import UUID

from fencepost.cluster.image import NO_LEADER, MetadataImage, deleted_topics
from fencepost.coordinator.metadata.metadata import InternalTopic
from fencepost.coordinator.metadata.names import SHARE_GROUP_STATE
from fencepost.coordinator.runtime.background import Pace, each_in_turn, spawn, swallow
from fencepost.coordinator.runtime.commits import PendingRecords
from fencepost.coordinator.runtime.late_imports import SHARE_STATE_MODULES
from fencepost.coordinator.runtime.shard import Remember, ShardRuntime
from fencepost.coordinator.runtime.shard_state import ShardState
from fencepost.coordinator.services.base import PRUNE, ShardedCoordinator
from fencepost.coordinator.storage.storage import Storage
from fencepost.groups.share.coordinator_key import coordinator_key
from fencepost.logcore.budget import Account
from fencepost.logcore.checkpoints import LOG_START_CHECKPOINT
from fencepost.logcore.machine import DomainError, InvariantViolation, Machine
from fencepost.logcore.partition import Partition
from fencepost.logcore.tracebacks import without_traceback

if TYPE_CHECKING:
    from fencepost.groups.share.state import ShareStateMachine, StateCommand

PRUNE_INTERVAL: Final = "share.coordinator.state.topic.prune.interval.ms"
COLD_INTERVAL: Final = "share.coordinator.cold.partition.snapshot.interval.ms"


class OtherShareCoordinators(Protocol):
    """The connections to the share coordinators of other brokers."""

    def send(self, broker_id: int, command: StateCommand) -> asyncio.Future[object]:
        """Send a command, without retries. The future returns the reply or raises a DomainError."""


class ShareCoordinator(ShardedCoordinator["ShareStateMachine"]):
    """Keeps the state of share partitions (``services.share_coordinator``)."""

    MODULES = SHARE_STATE_MODULES

    def __init__(self, storage: Storage, remember: Remember, internal_topic: InternalTopic) -> None:
        super().__init__(
            storage,
            remember,
            internal_topic,
            SHARE_GROUP_STATE,
            upkeep=None,
            interval=COLD_INTERVAL,
            commit_timeout="share.coordinator.write.timeout.ms",
        )
        self._logs = storage.logs
        self.others: OtherShareCoordinators | None = None
        """Sends commands to other brokers; None if there are none."""
        self.ask_for_topic: Callable[[], None] | None = None
        """Asks the controller to create the topic; None if this process is the controller."""
        self._memory = self._budget("fencepost.share.state.max.bytes")
        self._deleted: set[bytes] = set()
        """The ids of deleted topics whose state remains to be deleted."""
        self._state_deletion: asyncio.Task[None] | None = None
        self._pruning: asyncio.Task[None] | None = None
        self._redundant: dict[int, tuple[int, PendingRecords]] = {}
        """The result of the last pruning, by partition: the offset below which no record is needed,
        and the records from which the state machine computed this offset."""
        self._pruned: dict[int, int] = {}
        """The log start offset of each partition after its last pruning."""

    async def start(self) -> None:
        """See :class:`ShardedCoordinator`."""
        await super().start()
        self._set_prune()

    async def stop(self) -> None:
        """Close every shard; requests in progress get NOT_COORDINATOR."""
        await each_in_turn(
            (
                ("forget deleted topics", self.forgotten),
                ("prune the share state", self.pruned),
                ("close the shards", self._shards.close),
            )
        )

    def send(self, command: StateCommand) -> asyncio.Future[object]:
        """Send a command, without retries, to the coordinator of the command's share partition.

        The first command creates the topic.
        """
        key = coordinator_key(command.key)
        leader = self._leader_of(key)
        if leader not in (NO_LEADER, self._replicas.node_id) and self.others is not None:
            return self.others.send(leader, command)
        if not self._is_open:
            reply: asyncio.Future[object] = asyncio.get_running_loop().create_future()
            spawn(self._open_and_send(key, command, reply), "open the share coordinator")
            return reply
        return self._shards.submit(key, command)

    async def _open_and_send(
        self, key: str, command: StateCommand, reply: asyncio.Future[object]
    ) -> None:
        """Open the coordinator, send the command, and set the result of ``reply``.

        Errors that the caller retries, such as those during the topic's creation, are not logged.
        """
        try:
            await self._opened(key)
            result = await self._shards.submit(key, command)
        except DomainError as error:
            if not reply.done():
                reply.set_exception(without_traceback(error))
        else:
            if not reply.done():
                reply.set_result(result)
        finally:
            reply.cancel()

    async def _opened(self, key: str) -> None:
        try:
            for _ in self.open_in_steps(key):
                await asyncio.sleep(0)
        except DomainError:
            if self.ask_for_topic is not None:
                self.ask_for_topic()
            raise

    def _leader_of(self, key: str) -> int:
        topic = self._metadata.topic(self._shards.topic)
        return NO_LEADER if topic is None else topic.partitions[self.partition_for(key)].leader

    # --- upkeep ----------------------------------------------------------------------------------

    def _send_upkeep(self, key: Hashable, now_ms: int) -> None:
        if key == PRUNE:
            self._set_prune()
            if self._pruning is None or self._pruning.done():
                self._pruning = spawn(self._prune(), "prune the share state")
            return
        if not self._shards.shards:
            self._set_upkeep()
            return
        from fencepost.groups.share.state import SnapshotColdPartitions  # noqa: PLC0415 - not needed by a broker without share groups

        self._upkeep = SnapshotColdPartitions()
        super()._send_upkeep(key, now_ms)

    def _set_prune(self) -> None:
        interval_ms = self._config.int(PRUNE_INTERVAL)
        self._upkeep_timer.set(PRUNE, self._clock.now_ms() + interval_ms)

    async def pruned(self) -> None:
        """Wait until no pruning is in progress."""
        if self._pruning is not None and not self._pruning.done():
            await asyncio.shield(self._pruning)

    async def _prune(self) -> None:
        """Delete the redundant records at the beginning of each shard's log."""
        pace, has_moved = Pace(), False
        redundant: dict[int, tuple[int, PendingRecords]] = {}
        for shard in self._shards.shards:
            if shard.state is not ShardState.ACTIVE:
                continue
            partition = shard.partition
            now = shard.machine.redundant_offset(), PendingRecords.of(partition)
            redundant[partition.index] = now
            former = self._redundant.get(partition.index, now)
            # The redundant offset is used only once all records that the state machine had replayed
            # are committed: an election may remove an uncommitted snapshot, and the state would
            # then need the records below it. Source: CoordinatorRuntime, where a read waits for the
            # commit of everything written before it.
            offset = next((known for known, end in (now, former) if _is_committed(end)), 0)
            if offset > partition.log_start_offset:
                with swallow("prune the share state", shard=shard.name):
                    partition.cleanup.delete_records_before(offset)
                    self._replicas.log_start_moved(partition)
                    self._pruned[partition.index] = offset
                    has_moved = True
            await pace()
        self._redundant = redundant
        if has_moved:
            await self._logs.save(LOG_START_CHECKPOINT)

    @property
    def last_pruned(self) -> dict[int, int]:
        """Return, by partition, the offset up to which this process has deleted records."""
        return self._pruned

    # --- deleted topics --------------------------------------------------------------------------

    def publish(self, old: MetadataImage, image: MetadataImage) -> None:
        """See :class:`ShardedCoordinator`; delete the state of deleted topics as well."""
        super().publish(old, image)
        if self._count_partitions() == 0:
            return
        gone = deleted_topics(old, image)
        if gone:
            self._deleted.update(topic.topic_id.bytes for topic in gone)
            if self._state_deletion is None or self._state_deletion.done():
                self._state_deletion = spawn(self._delete_states(), "forget deleted topics")

    async def _delete_states(self) -> None:
        # If this fails, the topics stay in the set, and the next deletion retries.
        from fencepost.groups.share.state import ForgetTopics  # noqa: PLC0415 - as above

        while deleted := frozenset(self._deleted):
            # Until the deletion's records are durable, a power failure may restore the topics.
            await self._replicas.durable()
            await self._shards.send_to_all(ForgetTopics(deleted))
            self._deleted -= deleted

    async def forgotten(self) -> None:
        """Wait until all active shards have deleted the state of deleted topics.

        Raises LogError.
        """
        while self._state_deletion is not None and not self._state_deletion.done():
            await asyncio.shield(self._state_deletion)

    # --- state machines --------------------------------------------------------------------------

    def _build(self, _partition: Partition, _coordinator_epoch: int) -> ShareStateMachine:
        from fencepost.groups.share.state import ShareStateLimits, ShareStateMachine  # noqa: PLC0415 - as above

        config = self._config
        memory = Account(self._memory)
        updates = "share.coordinator.snapshot.update.records.per.snapshot"
        machine = ShareStateMachine(
            ShareStateLimits(
                update_records_per_snapshot=config.int(updates),
                cold_snapshot_interval_ms=config.int(COLD_INTERVAL),
            ),
            self._partition_count,
            memory,
        )
        self._release_with(machine, memory)
        return machine

    def _partition_count(self, topic_id: bytes) -> int | None:
        topic = self._metadata.topic_by_id(UUID(bytes=topic_id))
        return None if topic is None else len(topic.partitions)

    def _run_effect(
        self,
        _shard: ShardRuntime[Machine],
        effect: object,
        _now_ms: int,
        _first_attempt_done: Callable[[], None],
    ) -> None:
        raise InvariantViolation(f"the share coordinator's machine has no effects: {effect!r}")


def _is_committed(pending: PendingRecords) -> bool:
    """Return whether the records survive every election and every power loss from now on."""
    return pending.is_committed and pending.partition.high_watermark >= pending.end
