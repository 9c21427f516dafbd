"""Requests of share groups that change or delete state of the share coordinator.

The state machine of the groups decides which partitions are concerned, and records the operations
in progress. This module sends the requests to the share coordinator, and reports the results to the
state machine. Work that has begun
is completed even if the client disconnects: a half-altered offset would be initialized again later,
at another offset.

Source: ``GroupCoordinatorService`` (persisterInitialize, deleteShareGroups, deleteShareGroupOffsets
and the methods that they call).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar, cast

import structlog

from fencepost.cluster.errors import NotLeaderOrFollowerError
from fencepost.cluster.image import NO_LEADER
from fencepost.coordinator.runtime.background import Pace, spawn
from fencepost.coordinator.runtime.origin import Origin
from fencepost.coordinator.runtime.rate_limited_log import RateLimitedLog
from fencepost.coordinator.services.groups import GroupCoordinator
from fencepost.coordinator.services.share_persister import SharePersister
from fencepost.coordinator.storage.end_offsets import end_offset
from fencepost.coordinator.storage.replica_manager import ReplicaManager
from fencepost.groups.commands import DeleteGroup
from fencepost.groups.consumer_commands import NamedPartitions
from fencepost.groups.errors import GroupIdNotFoundError
from fencepost.groups.share.commands import SharePartitionKey
from fencepost.groups.share.state import StateSummary
from fencepost.groups.share_commands import (
    AlteredShareOffsets,
    AlterShareOffsets,
    AlterShareOffsetsResult,
    DeletedShareOffsets,
    DeleteShareOffsets,
    DeleteShareState,
    ListShareState,
    ListShareStateResult,
    ShareHeartbeat,
    ShareHeartbeatResult,
    ShareStateDeleted,
    ShareStateInitialized,
    StateToDelete,
    StateToInitialize,
)
from fencepost.logcore.clock import monotonic_s
from fencepost.logcore.machine import DomainError
from fencepost.logcore.tracebacks import without_traceback

T = TypeVar("T")

Errors = dict[SharePartitionKey, DomainError | None]

TopicPartition = tuple[str, int]

AskLeader = Callable[
    [int, Collection[TopicPartition]], Awaitable[Mapping[TopicPartition, int | DomainError]]
]
"""Asks a broker for the end offsets of partitions that it leads."""

_log = structlog.get_logger(__name__)


class ShareGroups:
    """The share groups that this broker coordinates (``services.share_groups``)."""

    def __init__(
        self,
        groups: GroupCoordinator,
        persister: SharePersister,
        replicas: ReplicaManager,
        ask_leader: AskLeader | None,
    ) -> None:
        self._groups = groups
        self._persister = persister
        self._replicas = replicas
        self._ask_leader = ask_leader
        self._failures = RateLimitedLog("more share partitions were not initialized")
        self._tasks: set[asyncio.Task[Any]] = set()
        self._initializing: set[SharePartitionKey] = set()
        """Share partitions that the share coordinator is initializing for members. The state
        machine repeats its request after a while, but a second initialization could undo the
        progress since the first."""

    async def stop(self) -> None:
        """End all work; later heartbeats or requests begin unfinished work again."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- requests --------------------------------------------------------------------------------

    def heartbeat(self, command: ShareHeartbeat, origin: Origin | None) -> asyncio.Future[object]:
        """Submit a heartbeat; initialize share partitions afterwards, if that is necessary."""
        sent = self._groups.submit(command.group_id, command, origin)
        if sent.done():
            self._answered(command.group_id, sent)
            return sent
        sent.add_done_callback(lambda _: self._answered(command.group_id, sent))
        return asyncio.shield(sent)

    def alter_offsets(
        self, command: AlterShareOffsets, origin: Origin | None
    ) -> asyncio.Future[AlteredShareOffsets | DomainError]:
        """Set start offsets. An error of the whole request is the result of the future."""
        return self._run(self._alter(command, origin), "alter share offsets")

    def delete_offsets(
        self, command: DeleteShareOffsets, origin: Origin | None
    ) -> asyncio.Future[DeletedShareOffsets | DomainError]:
        """Delete the state of topics. An error of the whole request is the result of the future."""
        return self._run(self._delete_offsets(command, origin), "delete share offsets")

    def delete_group(self, group_id: str, origin: Origin | None) -> asyncio.Future[Any]:
        """Delete a group of any kind; for a share group, delete its state first.

        The future returns or raises the error. After an error of the share coordinator the group
        stays, so that the deletion can be repeated.
        """
        begun = self._groups.submit(group_id, DeleteShareState(group_id), origin)
        if begun.done() and isinstance(begun.exception(), GroupIdNotFoundError):
            return self._groups.submit(group_id, DeleteGroup(group_id), origin)
        return self._run(self._delete_group(group_id, begun, origin), "delete a share group")

    def summaries(
        self, keys: Collection[SharePartitionKey]
    ) -> asyncio.Future[dict[SharePartitionKey, StateSummary | DomainError]]:
        """Read the offsets of share partitions; any broker may coordinate their groups."""
        return spawn(self._persister.summaries(keys), "read share offsets")

    def end_offsets(
        self, partitions: Collection[TopicPartition]
    ) -> asyncio.Future[dict[TopicPartition, int | DomainError]]:
        """Return the end offset of each partition, or its error; ask other brokers if necessary."""
        return spawn(self._end_offsets(partitions), "read end offsets")

    async def _end_offsets(
        self, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, int | DomainError]:
        offsets: dict[TopicPartition, int | DomainError] = {}
        elsewhere: dict[int, list[TopicPartition]] = {}
        pace = Pace()
        for topic, index in partitions:
            await pace()
            try:
                offsets[topic, index] = end_offset(self._replicas, topic, index)
            except NotLeaderOrFollowerError as error:
                offsets[topic, index] = without_traceback(error)
                leader = self._replicas.leader_of(topic, index)
                if leader is not None and leader[0] != NO_LEADER:
                    elsewhere.setdefault(leader[0], []).append((topic, index))
            except DomainError as error:
                offsets[topic, index] = without_traceback(error)
        if self._ask_leader is not None:
            for outcomes in await asyncio.gather(
                *(
                    self._ask_leader(broker_id, led_elsewhere)
                    for broker_id, led_elsewhere in elsewhere.items()
                )
            ):
                offsets.update(outcomes)
        return offsets

    # --- the share coordinator -------------------------------------------------------------------

    def _answered(self, group_id: str, sent: asyncio.Future[object]) -> None:
        if sent.cancelled() or sent.exception() is not None:
            return
        states = cast("ShareHeartbeatResult", sent.result()).to_initialize
        if states is not None:
            self._track(spawn(self._initialize_new(group_id, states), "initialize share state"))

    async def _initialize_new(self, group_id: str, states: StateToInitialize) -> None:
        """Initialize partitions that members subscribe to, unless that is in progress or done.

        A heartbeat that begins the initialization again is answered once its record is committed.
        By then the share coordinator may have answered the first request, and members may have
        acknowledged records: a second initialization would deliver these records again.
        """
        # If the group has moved meanwhile, its new coordinator repeats the initialization.
        with suppress(DomainError):
            listed = cast(
                "ListShareStateResult",
                await self._groups.submit(group_id, ListShareState(group_id)),
            )
            begun = self._initializing.union(_keys(group_id, listed.partitions))
            offsets = {
                key: start
                for key, start in _start_offsets(group_id, states).items()
                if key not in begun
            }
            self._initializing.update(offsets)
            try:
                await self._initialize(group_id, states.state_epoch, offsets)
            finally:
                self._initializing.difference_update(offsets)

    async def _initialize(
        self, group_id: str, state_epoch: int, offsets: Mapping[SharePartitionKey, int]
    ) -> Errors:
        """Ask the share coordinator, and report its answers to the group. Raises DomainError."""
        errors = await self._persister.initialize(state_epoch, offsets)
        failed = {key: error for key, error in errors.items() if error is not None}
        if failed and self._failures.may_log(monotonic_s() * 1000):
            _log.warning(
                "share partitions were not initialized",
                group=group_id,
                count=len(failed),
                cause=str(next(iter(failed.values()))),
            )
        if errors:
            report = ShareStateInitialized(
                group_id, _places(errors.keys() - failed.keys()), _places(failed)
            )
            await self._groups.submit(group_id, report)
        return errors

    async def _alter(
        self, command: AlterShareOffsets, origin: Origin | None
    ) -> AlteredShareOffsets:
        group_id = command.group_id
        begun = cast(
            "AlterShareOffsetsResult", await self._groups.submit(group_id, command, origin)
        )
        states = begun.to_initialize
        errors = await self._initialize(
            group_id, states.state_epoch, _start_offsets(group_id, states)
        )
        failed = {key[1:]: error for key, error in errors.items() if error is not None}
        return AlteredShareOffsets(begun.unknown, failed)

    async def _delete_offsets(
        self, command: DeleteShareOffsets, origin: Origin | None
    ) -> DeletedShareOffsets:
        group_id = command.group_id
        begun = cast("StateToDelete", await self._groups.submit(group_id, command, origin))
        failed = await self._delete_states(group_id, begun.partitions)
        gone = frozenset(topic.topic_id for topic in begun.partitions) - failed.keys()
        if gone:
            await self._groups.submit(group_id, ShareStateDeleted(group_id, gone))
        return DeletedShareOffsets(begun, failed)

    async def _delete_group(
        self, group_id: str, begun: asyncio.Future[object], origin: Origin | None
    ) -> object:
        with suppress(GroupIdNotFoundError):
            states = cast("StateToDelete", await begun)
            for error in (await self._delete_states(group_id, states.partitions)).values():
                raise error
        return await self._groups.submit(group_id, DeleteGroup(group_id), origin)

    async def _delete_states(
        self, group_id: str, topics: Collection[NamedPartitions]
    ) -> dict[bytes, DomainError]:
        """Delete the state of topics; return one error for each topic that failed."""
        failed: dict[bytes, DomainError] = {}
        deleted = await self._persister.delete(_keys(group_id, topics))
        for key, error in deleted.items():
            if error is not None:
                failed.setdefault(key.topic_id, error)
        return failed

    # --- tasks -----------------------------------------------------------------------------------

    def _run(self, work: Coroutine[Any, Any, T], what: str) -> asyncio.Future[T | DomainError]:
        """Run work to its end, even if the caller cancels the future."""
        return asyncio.shield(self._track(spawn(_settled(work), what)))

    def _track(self, task: asyncio.Task[T]) -> asyncio.Task[T]:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _settled(work: Coroutine[Any, Any, T]) -> T | DomainError:
    """Return the result. A domain error is returned too, because it is not a broker failure."""
    try:
        return await work
    except DomainError as error:
        return without_traceback(error)


def _keys(group_id: str, topics: Collection[NamedPartitions]) -> list[SharePartitionKey]:
    return [
        SharePartitionKey(group_id, topic.topic_id, index)
        for topic in topics
        for index in topic.partitions
    ]


def _start_offsets(group_id: str, states: StateToInitialize) -> dict[SharePartitionKey, int]:
    return {
        SharePartitionKey(group_id, topic_id, index): start
        for topic_id, index, start in states.offsets
    }


def _places(keys: Collection[SharePartitionKey]) -> frozenset[tuple[bytes, int]]:
    return frozenset((key.topic_id, key.partition) for key in keys)
