"""All shards of one internal topic: opened together, addressed by key, closed together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from fencepost.coordinator.runtime.background import Pace, call_later, spawn, survived
from fencepost.coordinator.runtime.errors import NotCoordinatorError, ShardError
from fencepost.coordinator.runtime.flusher import Flusher
from fencepost.coordinator.runtime.key_partition import partition_for
from fencepost.coordinator.runtime.origin import Origin
from fencepost.coordinator.runtime.shard import (
    Remember,
    RunEffect,
    ShardRuntime,
    ShardServices,
    ShardState,
    WhileLoading,
)
from fencepost.coordinator.runtime.timers import TimerQueue
from fencepost.logcore.clock import Clock
from fencepost.logcore.machine import Machine
from fencepost.logcore.partition import Partition

START_WAIT_MS = 200
"""How long a start waits for the shards: a small log is read before the first client comes, and a
large one does not keep the daemon from answering COORDINATOR_LOAD_IN_PROGRESS."""

RETRY_MS = 1_000
"""Wait before a command that must not get lost is sent again to a shard that does not serve."""


class PartitionSource(Protocol):
    """Where the partitions of the internal topic come from."""

    def partition(self, topic: str, index: int) -> Partition:
        """The open partition."""


Build = Callable[[Partition], Machine]


class ShardSet:
    """The shards of ``topic``. Belongs to the event loop that runs when it is made.

    ``build`` makes an empty machine for a partition; ``run_effect`` carries out what the machines
    ask of the world, ``while_loading`` answers what a loading shard may answer, ``remember`` keeps
    the causes of what they decide. ``flusher`` knows when their partitions are on disk.
    """

    def __init__(
        self,
        topic: str,
        clock: Clock,
        *,
        build: Build,
        run_effect: RunEffect,
        while_loading: WhileLoading,
        remember: Remember,
        flusher: Flusher,
    ) -> None:
        self.topic = topic
        self.shards: list[ShardRuntime] = []
        self._loop = asyncio.get_running_loop()
        self.timers = TimerQueue(clock, self._loop)
        self._build = build
        self._services = ShardServices(
            clock, self._loop, self.timers, run_effect, while_loading, remember, flusher
        )
        self._loading: asyncio.Task[None] | None = None
        self._closed = False

    def open(self, source: PartitionSource, partitions: int) -> None:
        """Make the shards and begin to load them: the empty ones at once, the small ones first.

        Raises :class:`fencepost.logcore.errors.StorageError` if a partition can't be opened; no
        shard is made then.
        """
        opened = [source.partition(self.topic, index) for index in range(partitions)]
        self.shards = [self._shard(partition) for partition in opened]
        waiting = [shard for shard in self.shards if not shard.load_empty()]
        if waiting:
            waiting.sort(key=lambda shard: shard.partition.log.size_bytes)
            self._loading = spawn(self._load(waiting), f"load {self.topic}")

    def _shard(self, partition: Partition) -> ShardRuntime:
        return ShardRuntime(partition, lambda: self._build(partition), self._services)

    async def unload(self, index: int) -> None:
        """Stop serving one partition; its requests are answered NOT_COORDINATOR from now on."""
        await self.shards[index].close()

    async def reload(self, index: int) -> None:
        """Serve one partition anew, from its log; until that is read it is loading."""
        await self.unload(index)
        self.shards[index] = shard = self._shard(self.shards[index].partition)
        await shard.load(Pace())

    async def _load(self, shards: list[ShardRuntime]) -> None:
        pace = Pace()
        for shard in shards:
            if shard.state is ShardState.INITIAL:
                with survived("load", shard=shard.name):
                    await shard.load(pace)

    async def loaded(self, timeout_ms: int = START_WAIT_MS) -> bool:
        """Wait until every log was read once, at most ``timeout_ms``; says whether it is so."""
        if self._loading is None:
            return True
        done, _ = await asyncio.wait({self._loading}, timeout=timeout_ms / 1000)
        return bool(done)

    @property
    def is_open(self) -> bool:
        """Whether the topic exists and its shards were made."""
        return bool(self.shards)

    def index_for(self, key: str) -> int:
        """The partition that ``key`` belongs to; :class:`NotCoordinatorError` without a topic."""
        if not self.shards:
            raise NotCoordinatorError(f"{self.topic} does not exist")
        return partition_for(key, len(self.shards))

    def shard_for(self, key: str) -> ShardRuntime | None:
        """The shard that ``key`` belongs to, None without a topic."""
        return self.shards[partition_for(key, len(self.shards))] if self.shards else None

    def submit(
        self,
        key: str,
        command: object,
        origin: Origin | None = None,
        *,
        reply_before_flush: bool = False,
    ) -> asyncio.Future[object]:
        """Send ``command`` to the shard of ``key``; see :meth:`ShardRuntime.submit`."""
        if self.shards:
            shard = self.shards[partition_for(key, len(self.shards))]
            return shard.submit(command, origin, reply_before_flush=reply_before_flush)
        future: asyncio.Future[object] = self._loop.create_future()
        future.set_exception(NotCoordinatorError(f"{self.topic} does not exist"))
        return future

    def sweep(self, command: object, what: str) -> None:
        """Send a command of upkeep to all shards in turn, to each while its result has ``more``.

        Others are served meanwhile. A shard that does not serve is passed over.
        """
        spawn(self._sweep(command, what), what)

    async def _sweep(self, command: object, what: str) -> None:
        pace = Pace()
        for shard in list(self.shards):
            with survived(what, shard=shard.name), suppress(ShardError):
                while not self._closed and getattr(await shard.submit(command), "more", False):
                    await pace()
            await pace()

    def send(self, shard: ShardRuntime, command: object) -> None:
        """Send a command that must not get lost, and again while its result has ``more``.

        Each time in a turn of its own; a shard that does not serve is asked again later, until it
        is closed.
        """

        def again(future: asyncio.Future[object]) -> None:
            if future.cancelled() or self._closed:
                return
            error = future.exception()
            if error is None and getattr(future.result(), "more", False):
                self.send(shard, command)
            elif isinstance(error, ShardError):
                call_later(self._loop, RETRY_MS, f"upkeep of {shard.name}", resend)

        def resend() -> None:
            if not self._closed:
                self.send(shard, command)

        shard.submit(command).add_done_callback(again)

    async def close(self) -> None:
        """Close every shard: all that wait are answered NOT_COORDINATOR."""
        self._closed = True
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)
        for shard in self.shards:
            with survived("close", shard=shard.name):
                await shard.close()
        self.timers.close()
