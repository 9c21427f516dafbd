"""Replica fetchers: connections to leaders, and appends of fetched records to the followers' logs.

For each leader there are ``num.replica.fetchers`` connections with one request in flight on each.
The state machines (``cluster/fetcher.py``, ``cluster/follower.py``) decide what to request and how
to act on a response; this module sends requests, appends records and truncates logs. A partition
that is followed again gets a new state machine; work for its previous state machine is dropped.

Source: ``ReplicaFetcherManager``, ``AbstractFetcherThread``, ``ReplicaFetcherThread``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Final, Protocol
from uuid import UUID

import structlog

from fencepost.cluster.errors import Errors, error_name
from fencepost.cluster.fetcher import (
    SESSION_ERRORS,
    FetchRequest,
    LeaderFetcher,
    PartitionResult,
    fetcher_id,
)
from fencepost.cluster.follower import (
    FollowerStep,
    ListOffsetsRequest,
    PartitionFollower,
    Truncation,
)
from fencepost.cluster.image import LocalPartition, MetadataImage
from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.replication.fetch_wire import (
    FetchSizes,
    fetch_answer,
    fetch_entity,
    list_offsets_entity,
    listed_offsets,
)
from fencepost.coordinator.replication.followed_log import FollowedLog
from fencepost.coordinator.replication.peers import Peers, Purpose
from fencepost.coordinator.runtime.background import (
    AFTER_FAILURE_MS,
    Pace,
    call_later,
    log_failure,
    spawn,
    swallow,
)
from fencepost.coordinator.runtime.key_partition import java_string_hash
from fencepost.coordinator.security.replication_quota import ReplicationQuota, ReplicationSide
from fencepost.logcore.clock import Clock
from fencepost.logcore.errors import (
    CorruptRecordError,
    InvalidRecordError,
    LogError,
    NoSpaceError,
    StorageError,
    UnexpectedAppendOffsetError,
)
from fencepost.logcore.machine import Event
from fencepost.logcore.partition import Partition
from fencepost.logcore.tracebacks import without_traceback
from fencepost.logcore.values import dataclass
from fencepost.protocol.errors import WireError
from fencepost.protocol.schema import Entity

_log = structlog.get_logger(__name__)

Key = tuple[UUID, int]
"""A partition: topic id and index."""

BATCHES_AT_ONCE: Final = 512
"""How many batches are appended, small ones in 3 ms, before the event loop runs other tasks."""

FETCHERS_KEY: Final = "num.replica.fetchers"


class Logs(Protocol):
    """The part of the log manager that truncation needs."""

    def plan_truncation(self, partition: Partition, offset: int) -> set[str]:
        """Lower a log's checkpointed offsets before it is truncated or restarted at ``offset``.

        Return the names of the checkpoints to save before the truncation.
        """

    async def save_all(self, names: Collection[str]) -> bool:
        """Write checkpoints, and return whether they are on disk."""


@dataclass(slots=True, eq=False)
class FollowedPartition:
    """One partition that is being fetched."""

    local: LocalPartition
    partition: Partition
    machine: PartitionFollower
    fetcher: _ReplicaFetcher | None = None


class ReplicaFetcherManager:
    """The replica fetchers of a broker, for use on the event loop only."""

    def __init__(
        self,
        config: BrokerConfig,
        peers: Peers,
        logs: Logs,
        clock: Clock,
        *,
        node_id: int,
        image: Callable[[], MetadataImage],
        broker_epoch: Callable[[], int],
        log_of: Callable[[LocalPartition], Partition],
        on_disk: Callable[[Iterable[Partition], Callable[[], None]], bool],
        remember: Callable[[LocalPartition, Event], None] | None = None,
    ) -> None:
        """``log_of`` opens a replica, or raises StorageError. ``on_disk`` is ``Flusher.after``.

        ``remember`` writes an event of a state machine to the history; it must not raise.
        """
        self.config, self.peers, self.logs, self.clock = config, peers, logs, clock
        self.node_id = node_id
        self.image, self.broker_epoch, self.on_disk = image, broker_epoch, on_disk
        self._log_of, self._remember = log_of, remember
        self.quota = ReplicationQuota(config, clock, ReplicationSide.FOLLOWER, node_id=node_id)
        """The replication quota of this broker as a follower."""
        self._followed: dict[Key, FollowedPartition] = {}
        self._fetchers: dict[tuple[int, int], _ReplicaFetcher] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._count = config.int(FETCHERS_KEY)
        self._to_retry: dict[Key, LocalPartition] = {}
        """Partitions that are followed again after a pause, because of an unexpected error."""
        self._retry: asyncio.TimerHandle | None = None
        self._closed = False
        config.listen(self._reconfigure)

    # --- followed partitions ---------------------------------------------------------------------

    def follow(self, partitions: Sequence[LocalPartition]) -> None:
        """Fetch partitions from their leaders.

        A partition that is already being fetched keeps its fetcher, unless its leader epoch has
        increased. A partition whose log cannot be opened is skipped until a later call contains it.
        """
        for local in partitions:
            key = local.topic_id, local.index
            followed = self._followed.get(key)
            epoch = local.registration.leader_epoch
            if followed is not None and followed.local.registration.leader_epoch >= epoch:
                followed.local = local
                with self.confine_errors(followed):
                    self._do(followed, followed.machine.become_follower(local.registration))
                continue
            self._remove(key)
            try:
                self._begin(local)
            except Exception as error:  # noqa: BLE001 - the partition needs a fetcher
                self._try_again(local, error)

    def _try_again(self, local: LocalPartition, error: Exception) -> None:
        """Follow a partition again, from its log's end, after a pause."""
        log_failure("follow", error, partition=_name(local))
        key = local.topic_id, local.index
        self._remove(key)
        self._to_retry[key] = local
        if self._retry is None and not self._closed:
            loop = asyncio.get_running_loop()
            self._retry = call_later(loop, AFTER_FAILURE_MS, "follow again", self._follow_again)

    def _follow_again(self) -> None:
        self._retry = None
        again, self._to_retry = self._to_retry, {}
        self.follow(list(again.values()))

    def _begin(self, local: LocalPartition) -> None:
        try:
            partition = self._log_of(local)
        except StorageError as error:
            _log.error("replica not followed", partition=_name(local), cause=str(error))
            return
        # Cancels earlier work on the partition, above all a truncation.
        partition.replica.follow(local.registration.leader_epoch)
        machine = PartitionFollower(
            local.topic,
            local.topic_id,
            local.index,
            FollowedLog(partition),
            backoff_ms=self.config.int("replica.fetch.backoff.ms"),
        )
        followed = FollowedPartition(local, partition, machine)
        self._followed[machine.key] = followed
        step = machine.become_follower(local.registration)
        self._assign(followed)
        self._do(followed, step)

    def _assign(self, followed: FollowedPartition) -> None:
        """Add a partition to the fetcher of its leader."""
        leader = followed.machine.leader
        n = fetcher_id(java_string_hash(followed.local.topic), followed.local.index, self._count)
        fetcher = self._fetchers.get((leader, n))
        if fetcher is None:
            fetcher = self._fetchers[leader, n] = _ReplicaFetcher(self, leader, n)
        followed.fetcher = fetcher
        fetcher.add(followed)

    def stop(self, partitions: Iterable[Key]) -> None:
        """Stop fetching these partitions; responses in flight no longer change their logs."""
        for key in partitions:
            self._remove(key)

    def _remove(self, key: Key) -> None:
        self._to_retry.pop(key, None)
        followed = self._followed.pop(key, None)
        if followed is None:
            return
        followed.machine.stop()
        fetcher, followed.fetcher = followed.fetcher, None
        if fetcher is not None and fetcher.remove(followed):
            self._end(fetcher)

    def _end(self, fetcher: _ReplicaFetcher) -> None:
        """End a fetcher without partitions."""
        del self._fetchers[fetcher.machine.leader, fetcher.machine.fetcher]
        fetcher.is_over = True
        self.peers.hang_up(fetcher.machine.leader, Purpose.FETCHER, fetcher.machine.fetcher)
        if not fetcher.task.done():
            self._ending.add(fetcher.task)
            fetcher.task.add_done_callback(self._ending.discard)
            fetcher.task.cancel()

    def ended(self, fetcher: _ReplicaFetcher) -> None:
        """Follow a fetcher's partitions again, if its task ended unexpectedly."""
        if not fetcher.is_over:
            error = RuntimeError(f"{fetcher.task.get_name()} has ended")
            for follower in fetcher.followed:
                self._try_again(follower.local, error)

    def _reconfigure(self) -> None:
        """Apply the new backoff; redistribute the partitions if the number of fetchers changed."""
        backoff_ms = self.config.int("replica.fetch.backoff.ms")
        for follower in self._followed.values():
            follower.machine.backoff_ms = backoff_ms
        count = self.config.int(FETCHERS_KEY)
        if count == self._count or self._closed:
            return
        self._count = count
        every = [follower.local for follower in self._followed.values()]
        # Stopping a fetcher also cancels work in progress, above all truncations.
        self.stop((log.topic_id, log.index) for log in every)
        self.follow(every)

    def is_followed(self, followed: FollowedPartition) -> bool:
        """Return whether the partition is still fetched with this state machine."""
        return self._followed.get(followed.machine.key) is followed

    def __iter__(self) -> Iterator[PartitionFollower]:
        """Yield the state machines of all fetched partitions, in no order."""
        return (follower.machine for follower in self._followed.values())

    @property
    def max_lag(self) -> int:
        """The lag, in records, of the partition furthest behind its leader (kafka: ``MaxLag``)."""
        return max((follower.lag or 0 for follower in self), default=0)

    async def close(self) -> None:
        """Stop fetching, and return once nothing is in progress."""
        self._closed = True
        if self._retry is not None:
            self._retry.cancel()
        self.stop(list(self._followed))
        while self._ending:
            await asyncio.wait(set(self._ending))

    # --- steps of the state machines -------------------------------------------------------------

    def _do(self, followed: FollowedPartition, step: FollowerStep) -> None:
        """Apply the synchronous part of a step; queue the other parts with the fetcher."""
        for event in step.events:
            self._record_event(followed.local, event)
        partition = followed.partition
        if step.high_watermark is not None:
            before = partition.high_watermark
            if partition.replica.move_high_watermark(step.high_watermark):
                _log.warning(
                    "high watermark goes down",
                    partition=_name(followed.local),
                    offset=partition.high_watermark,
                    before=before,
                )
        if step.log_start_offset is not None:
            partition.cleanup.delete_records_before(step.log_start_offset)
        if followed.fetcher is not None:
            followed.fetcher.queue_step(followed, step)

    def _record_event(self, local: LocalPartition, event: Event) -> None:
        below = event.detail.get("below_high_watermark") is not None
        failed = event.kind == "follower-failed"
        level = logging.ERROR if failed else logging.WARNING if below else logging.INFO
        _log.log(level, event.kind, **{**event.detail, "partition": event.subject})
        if self._remember is not None:
            self._remember(local, event)

    def do(self, followed: FollowedPartition, step: FollowerStep) -> None:
        """Apply a step; an exception affects only this partition."""
        with self.confine_errors(followed):
            self._do(followed, step)

    @contextmanager
    def confine_errors(self, followed: FollowedPartition) -> Iterator[None]:
        """Confine an exception to one partition, which fails (LogError) or is followed again."""
        try:
            yield
        except LogError as error:
            self._do(followed, followed.machine.fail(str(error)))
        except Exception as error:  # noqa: BLE001 - else its state machine would wait forever
            if self.is_followed(followed):
                self._try_again(followed.local, error)
            else:
                log_failure("follow", error, partition=_name(followed.local))


class _ReplicaFetcher:
    """One connection to one leader, and the task that uses it."""

    def __init__(self, owner: ReplicaFetcherManager, leader: int, n: int) -> None:
        self._owner = owner
        self.machine = LeaderFetcher(leader, n)
        self._parts: dict[Key, FollowedPartition] = {}
        self._truncations: dict[FollowedPartition, Truncation] = {}
        self._offset_requests: dict[FollowedPartition, ListOffsetsRequest] = {}
        self._wake = asyncio.Event()
        self._pace = Pace()
        self._last_error = ""
        """The cause of the last request's failure; empty after a response."""
        self.is_over = False
        """Whether the task should end, as there is nothing left to fetch."""
        self.task = spawn(self._run(), f"fetcher {n} of leader {leader}")
        self.task.add_done_callback(lambda _: owner.ended(self))

    # --- its partitions ---

    @property
    def followed(self) -> list[FollowedPartition]:
        """The partitions of this fetcher."""
        return list(self._parts.values())

    def add(self, followed: FollowedPartition) -> None:
        self._parts[followed.machine.key] = followed
        self.machine.add(followed.machine)
        self._wake.set()

    def remove(self, followed: FollowedPartition) -> bool:
        """Remove a partition; return whether the fetcher has no partitions left."""
        self._parts.pop(followed.machine.key, None)
        self.machine.remove(followed.machine.key)
        self._truncations.pop(followed, None)
        self._offset_requests.pop(followed, None)
        return not self._parts

    def queue_step(self, followed: FollowedPartition, step: FollowerStep) -> None:
        """Queue the part of a step that takes time."""
        if step.truncate is not None:
            self._truncations[followed] = step.truncate
        if step.offset_request is not None:
            self._offset_requests[followed] = step.offset_request
        self._wake.set()

    def _now(self) -> int:
        return self._owner.clock.monotonic_ms()

    # --- rounds ---

    async def _run(self) -> None:
        while not self.is_over:
            await self._pace()
            pause_ms: int | None = AFTER_FAILURE_MS
            with swallow("fetch from a leader", leader=self.machine.leader):
                try:
                    pause_ms = await self._round()
                except asyncio.CancelledError as error:
                    if self.task.cancelling():
                        raise
                    raise RuntimeError("a fetcher's future was cancelled") from error
            if pause_ms is None or pause_ms > 0:
                await self._pause(pause_ms)

    async def _pause(self, pause_ms: int | None) -> None:
        """Wait until there is work, or the pause is over."""
        self._wake.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(None if pause_ms is None else pause_ms / 1000):
                await self._wake.wait()

    async def _round(self) -> int | None:
        """Do the work that is due; return the pause in ms, or None to wait for new work."""
        backoff_ms = self._owner.config.int("replica.fetch.backoff.ms")
        if self._truncations and not await self._truncate():
            return max(1, backoff_ms)
        if self._offset_requests:
            await self._list_offsets()
            return 0
        request = self.machine.next_request(self._now(), self._is_throttled)
        if request is None:
            wake_at = self.machine.wake_at()
            if wake_at is not None:
                return max(1, wake_at - self._now())
            # Check throttled partitions again after the backoff.
            return max(1, backoff_ms) if self.machine.followers else None
        try:
            await self._fetch(request)
        except BaseException:
            # The next request starts a new fetch session, and names all partitions again.
            self.machine.on_failure(self._now())
            raise
        return 0

    def _is_throttled(self, machine: PartitionFollower) -> bool:
        owner = self._owner
        return self._counts_against_quota(machine) and owner.quota.is_exceeded

    def _counts_against_quota(self, machine: PartitionFollower) -> bool:
        """Return whether a partition's bytes count against the replication quota."""
        owner = self._owner
        configs = owner.image().topic_configs(machine.topic)
        return bool(configs) and owner.quota.covers(configs, machine.index)

    # --- fetching --------------------------------------------------------------------------------

    @property
    def _metadata_version(self) -> int:
        return self._owner.image().features.get("metadata.version", 0)

    async def _send(self, entity: Entity) -> Entity | None:
        """Return the leader's response, or None if there is none."""
        leader, n = self.machine.leader, self.machine.fetcher
        try:
            answer = await self._owner.peers.channel(leader, Purpose.FETCHER, n).request(entity)
        except WireError as error:
            cause = str(error)
            level = logging.DEBUG if cause == self._last_error else logging.WARNING
            _log.log(level, "leader does not answer", leader=leader, fetcher=n, cause=cause)
            self._last_error = cause
            return None
        self._last_error = ""
        return answer

    async def _fetch(self, request: FetchRequest) -> None:
        owner, config = self._owner, self._owner.config
        sizes = FetchSizes(
            config.int("replica.fetch.wait.max.ms"),
            config.int("replica.fetch.min.bytes"),
            config.int("replica.fetch.response.max.bytes"),
            config.int("replica.fetch.max.bytes"),
        )
        answer = await self._send(
            fetch_entity(
                request,
                self._metadata_version,
                sizes,
                broker_id=owner.node_id,
                broker_epoch=owner.broker_epoch(),
            )
        )
        if answer is None:
            self.machine.on_failure(self._now())
            return
        appended: list[Partition] = []
        if answer.error_code not in (Errors.NONE, *SESSION_ERRORS):
            leader, error = self.machine.leader, error_name(int(answer.error_code))
            _log.warning("leader refuses a fetch", leader=leader, error=error)
        for result in self.machine.on_answer(fetch_answer(answer), self._now()):
            followed = self._parts.get(result.follower.key)
            if followed is None or followed.machine is not result.follower:
                continue
            with owner.confine_errors(followed):
                owner.do(followed, result.step)
                if result.step.append_up_to_epoch is not None:
                    await self._append(followed, result)
                    appended.append(followed.partition)
            await self._pace()
        await self._on_disk(appended)

    async def _append(self, followed: FollowedPartition, result: PartitionResult) -> None:
        """Append a response's records, directly from the receive buffer."""
        owner, machine, partition = self._owner, followed.machine, followed.partition
        records, at, began = result.answer.records, 0, partition.log_end_offset
        limit = result.step.append_up_to_epoch
        if self._counts_against_quota(machine):
            owner.quota.record(len(records))
        error: LogError | None = None
        try:
            while at < len(records) and limit is not None:
                arrived = partition.append_as_follower(
                    records, limit, start=at, most=BATCHES_AT_ONCE
                )
                for warning in arrived.warnings:
                    _log.warning("odd batch of a leader", partition=str(machine), cause=warning)
                at = arrived.taken
                await self._pace()
                if not owner.is_followed(followed):
                    return
        except LogError as caught:
            error = without_traceback(caught)
            _log.warning("answer not appended", partition=str(machine), cause=str(error))
        if partition.log_end_offset != began and not isinstance(error, StorageError):
            # The records from the corrupt batch on are fetched again.
            owner.do(followed, machine.on_appended())
        elif error is None or isinstance(error, NoSpaceError):
            # No record was usable, and the cause may be temporary.
            owner.do(followed, machine.delay(self._now()))
        else:
            owner.do(followed, machine.append_failed(_code_of(error), self._now()))

    async def _on_disk(self, partitions: Sequence[Partition]) -> None:
        """Wait for a flush if flush.messages requires it.

        The next Fetch acknowledges the records to the leader, so it must not precede the flush.
        """
        done = asyncio.get_running_loop().create_future()

        def settle() -> None:
            if not done.done():
                done.set_result(None)

        if partitions and self._owner.on_disk(partitions, settle):
            await done

    # --- truncation ------------------------------------------------------------------------------

    async def _truncate(self) -> bool:
        """Do the queued truncations; return False if the checkpoints cannot be written."""
        owner, names = self._owner, set[str]()
        for followed, truncation in list(self._truncations.items()):
            is_planned = False
            with owner.confine_errors(followed):
                names |= owner.logs.plan_truncation(followed.partition, truncation.offset)
                is_planned = True
            if not is_planned:
                self._truncations.pop(followed, None)
        truncations = dict(self._truncations)
        if not await owner.logs.save_all(names):
            return False
        for followed, truncation in truncations.items():
            if self._truncations.pop(followed, None) is not truncation:
                continue
            with owner.confine_errors(followed):
                replica = followed.partition.replica
                if truncation.full:
                    replica.restart_at(truncation.offset)
                else:
                    replica.truncate_to(truncation.offset)
                owner.do(followed, followed.machine.on_truncated())
            await self._pace()
        return True

    async def _list_offsets(self) -> None:
        """Ask the leader for the offsets at which its logs start or end."""
        owner, lookups = self._owner, self._offset_requests
        self._offset_requests = {}
        timeout_ms = owner.config.int("replica.socket.timeout.ms")
        requests = [(follower.machine, request) for follower, request in lookups.items()]
        offsets: Mapping[Key, tuple[int, int]] = {}
        try:
            answer = await self._send(
                list_offsets_entity(
                    requests, self._metadata_version, broker_id=owner.node_id, timeout_ms=timeout_ms
                )
            )
            if answer is not None:
                offsets = listed_offsets(answer, requests)
        finally:
            # Each state machine gets an answer, even after a failed request.
            for followed, request in lookups.items():
                offset, error = offsets.get(followed.machine.key, (-1, Errors.NETWORK_EXCEPTION))
                if owner.is_followed(followed):
                    with owner.confine_errors(followed):
                        step = followed.machine.on_offset(request, offset, error, self._now())
                        owner.do(followed, step)


def _code_of(error: LogError) -> int:
    """Return the error code of a failed append, for the state machine."""
    if isinstance(error, CorruptRecordError):
        return Errors.CORRUPT_MESSAGE
    if isinstance(error, InvalidRecordError):
        return Errors.INVALID_RECORD
    if isinstance(error, UnexpectedAppendOffsetError):
        return Errors.OFFSET_OUT_OF_RANGE
    return Errors.KAFKA_STORAGE_ERROR


def _name(local: LocalPartition) -> str:
    return f"{local.topic}-{local.index}"
