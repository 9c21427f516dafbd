"""The shards of one internal topic: started and stopped by elections, addressed by keys."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, Protocol

from fencepost.coordinator.runtime.background import Pace, call_later, spawn, swallow
from fencepost.coordinator.runtime.commits import Commits
from fencepost.coordinator.runtime.errors import (
    CoordinatorLoadInProgressError,
    NotCoordinatorError,
    ShardError,
)
from fencepost.coordinator.runtime.key_partition import partition_for
from fencepost.coordinator.runtime.origin import Origin
from fencepost.coordinator.runtime.shard import (
    Admit,
    Build,
    M_co,
    Remember,
    RunEffect,
    ShardRuntime,
    ShardServices,
    WhileLoading,
)
from fencepost.coordinator.runtime.shard_state import ShardState
from fencepost.coordinator.runtime.timers import TimerQueue
from fencepost.logcore.clock import Clock
from fencepost.logcore.partition import Partition
from fencepost.logcore.tracebacks import without_traceback

START_WAIT_MS = 200
"""How long a starting broker waits for its shards: a small log is read before the first client
connects. A large log does not delay the broker, which answers COORDINATOR_LOAD_IN_PROGRESS."""

RETRY_MS = 1_000
"""The delay before a command that must not be lost is sent again to an inactive shard."""


class PartitionSource(Protocol):
    """The source of the internal topic's partitions."""

    def leader(self, topic: str, index: int) -> Partition:
        """Return the log of a partition that this broker leads; open it if necessary."""


CountPartitions = Callable[[], int]
"""Returns the number of partitions of the topic; 0 if it does not exist."""


class ShardSet(Generic[M_co]):
    """The shards of ``topic``, one for each partition that this broker leads.

    :meth:`elected` adds a shard and :meth:`resigned` removes it. The object belongs to the event
    loop that runs when the object is created.

    ``build`` returns an empty state machine for a partition; ``run_effect`` executes the effects of
    state machines, ``while_loading`` answers commands to a loading shard, ``remember`` records the
    causes of decisions. ``commits`` waits for commits of the partitions, for at most
    ``commit_timeout_ms``; ``admit`` decides whether a shard may write now.

    Source: ``CoordinatorRuntime.scheduleLoadOperation``, ``scheduleUnloadOperation``;
    ``TransactionStateManager.loadTransactionsForTxnTopicPartition``.
    """

    def __init__(
        self,
        topic: str,
        clock: Clock,
        *,
        source: PartitionSource,
        partitions: CountPartitions,
        build: Build[M_co],
        run_effect: RunEffect,
        while_loading: WhileLoading,
        remember: Remember,
        commits: Commits,
        commit_timeout_ms: Callable[[], int],
        admit: Admit | None = None,
    ) -> None:
        self.topic = topic
        self._loop = asyncio.get_running_loop()
        self.timers = TimerQueue(clock, self._loop)
        self._source, self._partitions = source, partitions
        self._build = build
        self._services = ShardServices(
            clock,
            self._loop,
            self.timers,
            run_effect,
            while_loading,
            remember,
            commits,
            commit_timeout_ms,
            admit,
        )
        self._shards: dict[int, ShardRuntime[M_co]] = {}
        self._unopened: dict[int, int] = {}
        """The leader epochs of partitions that this broker leads and has not opened yet."""
        self._loading: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def shards(self) -> list[ShardRuntime[M_co]]:
        """Return the shards of the partitions that this broker leads, ordered by partition."""
        return [self._shards[index] for index in sorted(self._shards)]

    # --- elections ---

    def elected(self, index: int, leader_epoch: int) -> None:
        """Serve a partition that this broker now leads in ``leader_epoch``.

        The partition is opened and read in the background, small logs first. Nothing happens if the
        partition is already served in this epoch or a newer one: a change of the ISR alone is not
        an election.
        """
        if not self._closed and self._is_newer(index, leader_epoch):
            self._drop(index)
            self._unopened[index] = leader_epoch
            self._begin_to_load()

    def resigned(self, index: int, leader_epoch: int | None) -> None:
        """Stop serving a partition; all waiting requests get NOT_COORDINATOR.

        ``leader_epoch`` is the new leader's; None if the topic or the replica was deleted. An
        epoch that is not above the served one is stale and ignored.
        """
        if leader_epoch is None or self._is_newer(index, leader_epoch):
            self._drop(index)

    def serve(self, index: int, leader_epoch: int) -> None:
        """Call :meth:`elected` and open the partition now; with an empty log the shard is active.

        Raises the errors of :class:`PartitionSource` if the partition cannot be opened.
        """
        self.elected(index, leader_epoch)
        if index in self._unopened:
            self._open(index)

    def _is_newer(self, index: int, leader_epoch: int) -> bool:
        shard = self._shards.get(index)
        if shard is None:
            return self._unopened.get(index, -1) < leader_epoch
        return shard.leader_epoch < leader_epoch or shard.state is ShardState.CLOSED

    def _drop(self, index: int) -> None:
        self._unopened.pop(index, None)
        shard = self._shards.pop(index, None)
        if shard is not None:
            with swallow("unload", shard=shard.name):
                shard.end()

    def _open(self, index: int) -> None:
        """Open an elected partition and create its shard, which is active if the log is empty."""
        leader_epoch = self._unopened.pop(index)
        partition = self._source.leader(self.topic, index)
        shard = ShardRuntime(partition, leader_epoch, self._build, self._services)
        self._shards[index] = shard
        shard.load_empty()

    def _open_next(self) -> None:
        index = next(iter(self._unopened))
        with swallow("load", shard=f"{self.topic}-{index}"):
            self._open(index)

    def _begin_to_load(self) -> None:
        if self._loading is None:
            self._loading = spawn(self._load(), f"load {self.topic}")

    async def _load(self) -> None:
        """Open all elected partitions, then read those that are not empty, the smallest first."""
        pace = Pace()
        try:
            while not self._closed:
                await pace()
                unread = [
                    shard for shard in self._shards.values() if shard.state is ShardState.INITIAL
                ]
                if self._unopened:
                    self._open_next()
                elif unread:
                    shard = min(unread, key=lambda shard: shard.partition.log.size_bytes)
                    with swallow("load", shard=shard.name):
                        await shard.load(pace)
                else:
                    break
        finally:
            self._loading = None

    async def loaded(self, timeout_ms: int = START_WAIT_MS) -> bool:
        """Wait until every log was read once, at most ``timeout_ms``; return whether all were."""
        if self._loading is None:
            return True
        done, _ = await asyncio.wait({self._loading}, timeout=timeout_ms / 1000)
        return bool(done)

    @property
    def is_open(self) -> bool:
        """Return whether each partition that this broker leads has a shard."""
        return not self._unopened

    # --- requests ---

    def index_for(self, key: str) -> int:
        """Return the partition of ``key``; raise NotCoordinatorError if the topic is missing."""
        partitions = self._partitions()
        if not partitions:
            raise NotCoordinatorError(f"{self.topic} does not exist")
        return partition_for(key, partitions)

    def shard_at(self, index: int) -> ShardRuntime[M_co]:
        """Return the shard of a partition. Raises :class:`ShardError` if it is not served here."""
        shard = self._shards.get(index)
        if shard is None:
            if index in self._unopened:
                raise CoordinatorLoadInProgressError(f"{self.topic}-{index} is being opened")
            raise NotCoordinatorError(f"{self.topic}-{index} is not served here")
        return shard

    async def open_all(self) -> None:
        """Open all elected partitions; those that are not empty remain to be read."""
        pace = Pace()
        while self._unopened and not self._closed:
            self._open_next()
            await pace()

    def shard_for(self, key: str) -> ShardRuntime[M_co]:
        """Return the shard that ``key`` belongs to. Raises like :meth:`shard_at`."""
        return self.shard_at(self.index_for(key))

    def submit(
        self,
        key: str,
        command: object,
        origin: Origin | None = None,
        *,
        reply_before_flush: bool = False,
    ) -> asyncio.Future[object]:
        """Send ``command`` to the shard of ``key``; see :meth:`ShardRuntime.submit`."""
        try:
            shard = self.shard_for(key)
        except ShardError as error:
            future: asyncio.Future[object] = self._loop.create_future()
            future.set_exception(without_traceback(error))
            return future
        return shard.submit(command, origin, reply_before_flush=reply_before_flush)

    def sweep(self, command: object, what: str) -> None:
        """Send an upkeep command to each shard in turn, repeatedly while its result has ``more``.

        Requests are served in between. Shards that are not active are skipped.
        """
        spawn(self._sweep(command, what), what)

    async def _sweep(self, command: object, what: str) -> None:
        pace = Pace()
        for shard in self.shards:
            with swallow(what, shard=shard.name), suppress(ShardError):
                while not self._closed and getattr(await shard.submit(command), "more", False):
                    await pace()
            await pace()

    async def send_to_all(self, command: object) -> None:
        """Send all shards, including loading ones, a command that must not be lost."""
        pace = Pace()
        for index in sorted({*self._shards, *self._unopened}):
            if index in self._unopened:
                with swallow("load", shard=f"{self.topic}-{index}"):
                    self._open(index)
            if index in self._shards:
                self._send(self._shards[index], command)
            await pace()

    def _send(self, shard: ShardRuntime[M_co], command: object) -> None:
        """Send a command that must not be lost, and repeat it while its result has ``more``.

        Each repetition is a separate turn; an inactive shard gets it again later, until it is
        closed.
        """

        def again(future: asyncio.Future[object]) -> None:
            if future.cancelled() or shard.state is ShardState.CLOSED:
                return
            error = future.exception()
            if error is None and getattr(future.result(), "more", False):
                self._send(shard, command)
            elif isinstance(error, ShardError):
                call_later(self._loop, RETRY_MS, f"upkeep of {shard.name}", resend)

        def resend() -> None:
            if shard.state is not ShardState.CLOSED:
                self._send(shard, command)

        shard.submit(command).add_done_callback(again)

    async def close(self) -> None:
        """Close every shard; all waiting requests get NOT_COORDINATOR."""
        self._closed = True
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)
        for shard in self.shards:
            with swallow("close", shard=shard.name):
                await shard.close()
        self.timers.close()
