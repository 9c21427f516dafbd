"""The share partitions of this broker: their steps, effects, timers and waiting fetches.

A share partition (``fencepost.groups.share.partition``) is soft state of the partition's leader.
The first fetch of a group creates it, under the leader epoch. It is dropped when the leadership or
the group's last share session ends, or when the partition is deleted; the next fetch reads its
state again.

Each input is one *step*, which runs to completion without yielding to the event loop. The effects
of a step are carried out after it, and their results are steps of their own.

A dropped share partition may still have writes in progress. Its successor reads the state only
after these writes. They have the successor's epochs, so the share coordinator would accept them
even after the read, and a record could reach a final state twice.

Source: ``SharePartitionManager``, ``SharePartitionCache``, ``SharePartition``.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar
from uuid import UUID

from fencepost.cluster.image import MetadataImage, TopicImage
from fencepost.coordinator.metadata.metadata import SHARE_VERSION
from fencepost.coordinator.metadata.names import SHARE_SCOPE
from fencepost.coordinator.runtime.background import Pace, log_failure, spawn, swallow
from fencepost.coordinator.runtime.errors import ShardError
from fencepost.coordinator.runtime.histogram import Histogram
from fencepost.coordinator.runtime.shard import Remember
from fencepost.coordinator.runtime.timers import TimerQueue
from fencepost.coordinator.services.dead_letters import DeadLetterQueues
from fencepost.coordinator.services.served_partition import ServedPartition
from fencepost.coordinator.services.share_clients import ShareClients
from fencepost.coordinator.services.share_persister import SharePersister
from fencepost.coordinator.services.share_settings import ShareSettingsCache
from fencepost.coordinator.services.share_start import offset_at
from fencepost.coordinator.storage.storage import Storage
from fencepost.groups.share import errors
from fencepost.groups.share.acknowledge import acknowledge, expire_locks, release
from fencepost.groups.share.acquire import acquire
from fencepost.groups.share.commands import (
    AcknowledgeBatch,
    AcquiredRange,
    AcquireRequest,
    DropPartition,
    Fetched,
    LookUpStartOffset,
    ReadState,
    SendToDeadLetterQueue,
    SharePartitionKey,
    StateRead,
    WakeFetches,
    WriteState,
)
from fencepost.groups.share.completion import dead_lettered, state_written
from fencepost.groups.share.partition import LOCK_TIMER, SharePartition
from fencepost.groups.share.session import (
    SessionKey,
    ShareSessions,
    TopicPartition,
)
from fencepost.groups.share.state import UNKNOWN_PARTITION, ReadShareState, WriteShareState
from fencepost.groups.share.states import Cause, PartitionState
from fencepost.logcore.machine import DecisionBuilder, DomainError, Token
from fencepost.logcore.partition import Partition
from fencepost.logcore.tracebacks import without_traceback

MAX_SESSIONS: Final = "group.share.max.share.sessions"

FENCED_PER_TURN: Final = 200
"""The number of share partitions that are dropped in one turn of the event loop, in about 10 ms."""

SHARE_PARTITION: Final = "share-partition"
"""The ``shard`` of share partitions' events in the history."""

LOCK_TRIGGER: Final = f"timer {LOCK_TIMER}"
"""The trigger, in the history, of events about acquisition locks that have timed out."""

T = TypeVar("T")


class SharePartitions:
    """The share partitions and share sessions of this broker (``services.shares``)."""

    def __init__(
        self,
        storage: Storage,
        persister: SharePersister,
        dead_letters: DeadLetterQueues,
        remember: Remember,
    ) -> None:
        self._clock, self._replicas = storage.clock, storage.replicas
        self._metadata = storage.metadata
        self._persister, self._remember = persister, remember
        self.dead_letters = dead_letters
        """Sends records to the groups' dead-letter queues."""
        self._loop = asyncio.get_running_loop()
        self.settings = ShareSettingsCache(storage.config, storage.metadata)
        """The settings of groups."""
        self.sessions = ShareSessions(storage.config.int(MAX_SESSIONS))
        """The share sessions of this broker."""
        self.clients = ShareClients()
        """The clients that have opened share sessions."""
        self.timers = TimerQueue(storage.clock, self._loop)
        """The deadlines of acquisition locks."""
        self._timers = self.timers.timers(self._fire)
        self._served: dict[SharePartitionKey, ServedPartition] = {}
        self._by_topic: dict[bytes, set[SharePartitionKey]] = {}
        self._ending: dict[SharePartitionKey, list[SharePartition]] = {}
        """Dropped share partitions that still have writes in progress."""
        self._held_reads: dict[SharePartitionKey, tuple[SharePartition, ReadState]] = {}
        """Reads that wait for the writes of :attr:`_ending`."""
        self._replies: dict[Token, asyncio.Future[object]] = {}
        self._last_token: Token = 0
        self._effects: deque[tuple[SharePartition, object]] = deque()
        self._in_effects = False
        self.lock_timeouts = 0
        """The number of offsets whose acquisition locks have timed out:
        AcquisitionLockTimeoutPerSec."""
        self.acknowledged: Counter[int] = Counter()
        """The number of acknowledged offsets by type."""
        self.acknowledgement_requests = 0
        """The number of requests with acknowledgements: TotalShareAcknowledgementRequestsPerSec."""
        self.failed_acknowledgement_requests = 0
        """The number of requests with a failed acknowledgement:
        FailedShareAcknowledgementRequestsPerSec."""
        self.load_seconds = Histogram()
        """The time from the first fetch until the state is read: PartitionLoadTimeMs."""
        self.is_closed = False

    def __len__(self) -> int:
        return len(self._served)

    def __iter__(self) -> Iterator[ServedPartition]:
        """Iterate over the share partitions, for inspection."""
        return iter(tuple(self._served.values()))

    # --- share partitions ------------------------------------------------------------------------

    def get(self, key: SharePartitionKey) -> ServedPartition | None:
        """Return a share partition that a fetch has opened."""
        return self._served.get(key)

    def open(self, key: SharePartitionKey, topic: str) -> ServedPartition:
        """Return a share partition; create it if this broker leads its partition.

        Raises the errors of :meth:`ReplicaManager.leader`, and SharePartitionFencedError while the
        broker is stopping.
        """
        log = self._replicas.leader(topic, key.partition)
        served = self._served.get(key)
        if served is not None:
            if served.log is log and served.share.leader_epoch == log.marks.leader_epoch:
                return served
            self._fence(served, "the leader epoch has changed")
        if self.is_closed:
            raise errors.SharePartitionFencedError("The broker stops.")
        settings = partial(self.settings.of, key.group_id)
        share = SharePartition(key, log.marks.leader_epoch, settings, topic)
        served = self._served[key] = ServedPartition(share, log)
        self._by_topic.setdefault(key.topic_id, set()).add(key)
        return served

    def initialized(self, served: ServedPartition) -> asyncio.Future[object] | None:
        """Return a future that is done once the state is read; None if it was read already.

        The future fails with a DomainError if the state cannot be read.
        """
        if served.share.state is PartitionState.ACTIVE:
            return None
        token, future = self._token()
        self._ask(token, served.share, partial(served.share.initialize, token=token))
        return future

    def acquire(
        self, served: ServedPartition, request: AcquireRequest, fetched: Fetched
    ) -> list[AcquiredRange]:
        """Acquire fetched records for a member."""
        share = served.share
        return self._step(share, lambda decision: acquire(share, decision, request, fetched))

    def log_start_moved(self, served: ServedPartition) -> None:
        """Move the start offset of a share partition up to the log start offset."""
        start_offset = served.log.log_start_offset
        self._step(
            served.share, lambda decision: served.share.log_start_moved(decision, start_offset)
        )

    def acknowledge(
        self, key: SharePartitionKey, member_id: str, batches: Sequence[AcknowledgeBatch]
    ) -> asyncio.Future[object]:
        """Acknowledge records; the future is done once the new states are written."""
        token, future = self._token()
        future.add_done_callback(partial(self._count, batches))
        served = self._served.get(key)
        if served is None:
            self._answer(token, errors.UnknownSharePartitionError(UNKNOWN_PARTITION))
            return future
        share = served.share
        step = partial(acknowledge, share, token=token, member_id=member_id, batches=batches)
        self._ask(token, share, step)
        return future

    def _count(self, batches: Sequence[AcknowledgeBatch], future: asyncio.Future[object]) -> None:
        if future.cancelled() or future.exception() is not None:
            return
        for batch in batches:
            if len(batch.types) == 1:
                self.acknowledged[batch.types[0]] += batch.last - batch.first + 1
            else:
                self.acknowledged.update(batch.types)

    def release(
        self, key: SharePartitionKey, member_id: str, cause: Cause = Cause.SESSION_CLOSED
    ) -> None:
        """Release the records that a member holds; no caller waits for the write."""
        served = self._served.get(key)
        if served is not None:
            share = served.share
            self._step(share, lambda decision: release(share, decision, None, member_id, cause))

    # --- sessions --------------------------------------------------------------------------------

    def end_session(self, key: SessionKey) -> None:
        """End a session whose member has closed it, and release its records."""
        partitions = self.sessions.end(key)
        spawn(self._release_all(key, partitions, Cause.SESSION_CLOSED), "end a share session")

    def connection_closed(self, connection_id: str) -> None:
        """End the sessions of a closed connection.

        The share partitions of a group whose last session has ended are dropped.
        """
        end = self.sessions.connection_closed(connection_id)
        if (end.ended or end.emptied_groups) and not self.is_closed:
            spawn(self._end_sessions(end.ended, end.emptied_groups), "end share sessions")

    async def _end_sessions(
        self, ended: dict[SessionKey, list[TopicPartition]], emptied_groups: Iterable[str]
    ) -> None:
        for key, partitions in ended.items():
            await self._release_all(key, partitions, Cause.CONNECTION_CLOSED)
        pace, emptied = Pace(), frozenset(emptied_groups)
        for served in self:
            group_id = served.share.key.group_id
            # A member may have opened a session meanwhile.
            if group_id in emptied and not self.sessions.has_group(group_id):
                self._fence(served, "the group has no share session")
            await pace()

    async def _release_all(
        self, key: SessionKey, partitions: Iterable[TopicPartition], cause: Cause
    ) -> None:
        pace = Pace()
        for partition in partitions:
            self.release(SharePartitionKey(key.group_id, *partition), key.member_id, cause)
            await pace()

    # --- the end of share partitions -------------------------------------------------------------

    def publish(self, old: MetadataImage, image: MetadataImage) -> None:
        """Drop the share partitions that this broker no longer leads in the same epoch."""
        if image.features is not old.features:
            self.settings.forget()
        if image.features.get(SHARE_VERSION, 0) < 1 <= old.features.get(SHARE_VERSION, 0):
            self.sessions.clear()
            self._fence_all(tuple(self), "share.version was set to 0")
        if old.topics is image.topics:
            return
        gone: list[ServedPartition] = []
        moved: list[ServedPartition] = []
        for topic_id, keys in self._by_topic.items():
            before, after = (
                metadata.topics_by_id.get(UUID(bytes=topic_id)) for metadata in (old, image)
            )
            if after is None:
                gone += (self._served[key] for key in keys)
            elif before is not after:
                moved += (
                    self._served[key]
                    for key in keys
                    if not self._leads_on(before, after, key.partition)
                )
        self._fence_all(gone, "the topic was deleted")
        self._fence_all(moved, "the leader has changed")

    def _leads_on(self, before: TopicImage | None, after: TopicImage, index: int) -> bool:
        """Return whether this broker still leads a partition in the same epoch."""
        if before is None:
            return False
        was, now = before.partitions[index], after.partitions[index]
        return now.leader == self._replicas.node_id and now.leader_epoch == was.leader_epoch

    def _fence_all(self, served: Sequence[ServedPartition], reason: str) -> None:
        """Drop share partitions, at most :data:`FENCED_PER_TURN` per turn of the event loop.

        Until a share partition is dropped, the share coordinator refuses its writes, and fetches
        find that the leader has changed.
        """
        for partition in served[:FENCED_PER_TURN]:
            self._fence(partition, reason)
        if len(served) > FENCED_PER_TURN:
            rest = partial(self._fence_all, served[FENCED_PER_TURN:], reason)
            self._loop.call_soon(rest)

    def _fence(self, served: ServedPartition, reason: str) -> None:
        share = served.share
        with swallow("fence a share partition", partition=share.key):
            self._step(share, lambda decision: share.fence(decision, reason))

    def close(self) -> None:
        """Drop all share partitions; waiting requests get NOT_LEADER_OR_FOLLOWER."""
        self.is_closed = True
        self.dead_letters.close()
        for served in self:
            self._fence(served, "the broker stops")
        self.timers.close()
        for token in tuple(self._replies):
            self._answer(token, errors.SharePartitionFencedError("The broker stops."))

    def _drop(self, share: SharePartition) -> None:
        key = share.key
        served = self._served.get(key)
        if served is None or served.share is not share:
            return
        del self._served[key]
        keys = self._by_topic[key.topic_id]
        keys.discard(key)
        if not keys:
            del self._by_topic[key.topic_id]
        self._hold_successor(share)
        served.wake()

    def _hold_successor(self, share: SharePartition) -> None:
        """Make the successor of a removed share partition wait for the removed one's writes."""
        former = self._ending.get(share.key, [])
        if share.writes and share not in former:
            self._ending[share.key] = [*former, share]

    def _write_ended(self, share: SharePartition) -> None:
        """Let a share partition read its state after the last write of its predecessors."""
        former = self._ending.get(share.key)
        if former is None or share.writes or share not in former:
            return
        former.remove(share)
        if not former:
            del self._ending[share.key]
            held = self._held_reads.pop(share.key, None)
            if held is not None:
                self._effects.append(held)
                self._run_effects()

    # --- steps -----------------------------------------------------------------------------------

    def _token(self) -> tuple[Token, asyncio.Future[object]]:
        self._last_token = token = self._last_token + 1
        future = self._replies[token] = self._loop.create_future()
        return token, future

    def _ask(
        self, token: Token, share: SharePartition, step: Callable[[DecisionBuilder], None]
    ) -> None:
        """Run a step that will answer ``token``. Raises like :meth:`_step`."""
        try:
            self._step(share, step)
        except DomainError:
            self._replies.pop(token, None)
            raise

    def _step(
        self,
        share: SharePartition,
        step: Callable[[DecisionBuilder], T],
        *,
        timer_ms: int | None = None,
    ) -> T:
        """Run one step, then its effects; ``timer_ms`` is the deadline of the timer that caused it.

        Raises SharePartitionFailedError after a bug, and drops the share partition.
        """
        decision = DecisionBuilder(self._clock.now_ms() if timer_ms is None else timer_ms)
        try:
            result = step(decision)
        except DomainError:
            raise
        except Exception as error:  # noqa: BLE001 - after any failure the state is suspect
            log_failure("a step of a share partition", error, partition=share.key)
            self._break(share)
            raise errors.SharePartitionFailedError("The share partition has failed.") from None
        self._carry_out(share, decision, None if timer_ms is None else LOCK_TRIGGER)
        return result

    def _break(self, share: SharePartition) -> None:
        """Drop a share partition whose state is suspect; the next fetch reads it again."""
        decision = DecisionBuilder(self._clock.now_ms())
        share.fence(decision, "a step has failed")
        self._carry_out(share, decision)
        for pending in share.writes.values():
            if pending.token is not None:
                self._answer(pending.token, share.gone_error())

    def _carry_out(
        self, share: SharePartition, builder: DecisionBuilder, trigger: str | None = None
    ) -> None:
        decision = builder.build()
        for timer in decision.timers:
            self._timers.set(timer.key, timer.deadline_ms, builder.now_ms)
        for event in decision.events:
            named_event = self.clients.named(event)
            self._remember(SHARE_SCOPE, SHARE_PARTITION, named_event, None, trigger)
        for reply in decision.replies:
            self._answer(reply.token, reply.response)
        self._effects += ((share, effect) for effect in decision.effects)
        self._run_effects()

    def _run_effects(self) -> None:
        """Run the waiting effects, unless a call further up the stack is running them."""
        if self._in_effects:
            return
        self._in_effects = True
        try:
            while self._effects:
                share, effect = self._effects.popleft()
                with swallow("an effect of a share partition", partition=share.key):
                    self._run_effect(share, effect)
        finally:
            self._in_effects = False

    def _answer(self, token: Token, response: object) -> None:
        # A future is done if its request's connection is closed.
        future = self._replies.pop(token, None)
        if future is None or future.done():
            return
        if isinstance(response, DomainError):
            future.set_exception(without_traceback(response))
        else:
            future.set_result(response)

    def _fire(self, key: Hashable, now_ms: int) -> None:
        if not isinstance(key, tuple):
            raise TypeError(f"not a timer of a share partition: {key!r}")
        served = self._served.get(key[1])
        if served is not None:
            share = served.share
            count = self._step(
                share, lambda decision: expire_locks(share, decision), timer_ms=now_ms
            )
            served.lock_timeouts += count
            self.lock_timeouts += count

    # --- effects ---------------------------------------------------------------------------------

    def _run_effect(self, share: SharePartition, effect: object) -> None:
        match effect:
            case WriteState():
                self._write(share, effect)
            case WakeFetches():
                served = self._served.get(share.key)
                if served is not None:
                    served.wake()
            case ReadState():
                self._read(share, effect)
            case LookUpStartOffset():
                spawn(self._look_up(share, effect.timestamp), "look up a start offset")
            case DropPartition():
                self._drop(share)
            case SendToDeadLetterQueue():
                self._send_dead_letters(share, effect)
            case _:
                raise TypeError(f"a share partition has no such effect: {effect!r}")

    def _send_dead_letters(self, share: SharePartition, effect: SendToDeadLetterQueue) -> None:
        log = self._log_of(share)
        if log is None or self.is_closed:
            return

        def done(ranges: Sequence[tuple[int, int]], queue: str, failure: str | None) -> None:
            def archive(decision: DecisionBuilder) -> None:
                dead_lettered(share, decision, ranges, queue=queue, failure=failure)

            with swallow("archive records", partition=share.key):
                if self._sends(share, log):
                    self._step(share, archive)

        self.dead_letters.put(share, log, effect, done, partial(self._sends, share, log))

    def _log_of(self, share: SharePartition) -> Partition | None:
        """Return the log of a share partition, if this broker leads it in the same epoch."""
        topic = self._metadata.topic_by_id(UUID(bytes=share.key.topic_id))
        if topic is None:
            return None
        with suppress(DomainError):
            log = self._replicas.leader(topic.name, share.key.partition)
            return log if log.marks.leader_epoch == share.leader_epoch else None
        return None

    def _sends(self, share: SharePartition, log: Partition) -> bool:
        """Return whether a share partition sends to the dead-letter queue.

        It continues to send after its group's last session has ended. If it has a successor, it
        stops sending, because the successor finds the records ARCHIVING and sends them.
        """
        served = self._served.get(share.key)
        return self._log_of(share) is log and (served is None or served.share is share)

    def _read(self, share: SharePartition, effect: ReadState) -> None:
        if share.key in self._ending:
            self._held_reads[share.key] = share, effect
            return

        def done(reply: object) -> None:
            result = (
                reply
                if isinstance(reply, StateRead | DomainError)
                else errors.SharePartitionFailedError(f"not a state: {reply!r}")
            )
            self._step(share, lambda decision: share.state_read(decision, result))
            self._wake_initialized(share)

        self._persister.begin(ReadShareState(share.key, effect.leader_epoch), done)

    def _wake_initialized(self, share: SharePartition) -> None:
        served = self._served.get(share.key)
        if served is not None and share.state is PartitionState.ACTIVE:
            self.load_seconds.note(served.age_s)
            served.wake()

    async def _look_up(self, share: SharePartition, timestamp: int) -> None:
        offset: int | DomainError
        try:
            offset = await self._offset_at(share, timestamp)
        except DomainError as error:
            offset = without_traceback(error)
        self._step(share, lambda decision: share.start_offset_found(decision, offset))
        self._wake_initialized(share)

    async def _offset_at(self, share: SharePartition, timestamp: int) -> int:
        served = self._served.get(share.key)
        if served is None or served.share is not share:
            raise share.gone_error()
        return await offset_at(served.log, timestamp)

    def _write(self, share: SharePartition, effect: WriteState) -> None:
        if share.state is PartitionState.FENCED:
            self._hold_successor(share)

        def done(reply: object) -> None:
            error = reply if isinstance(reply, DomainError) else None
            if isinstance(error, ShardError):
                error = errors.ShareCoordinatorUnavailableError(str(error))
            try:
                self._step(
                    share, lambda decision: state_written(share, decision, effect.write_id, error)
                )
            finally:
                self._write_ended(share)

        self._persister.begin(
            WriteShareState(
                effect.key,
                effect.state_epoch,
                effect.leader_epoch,
                effect.start_offset,
                effect.delivery_complete_count,
                effect.batches,
            ),
            done,
        )
