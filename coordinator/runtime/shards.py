"""The shards of one internal topic: elections bring them and take them, keys address them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, Protocol

from fencepost.coordinator.runtime.background import Pace, call_later, spawn, survived
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
"""How long a start waits for the shards: a small log is read before the first client comes, and a
large one does not keep the daemon from answering COORDINATOR_LOAD_IN_PROGRESS."""

RETRY_MS = 1_000
"""Wait before a command that must not get lost is sent again to a shard that does not serve."""


class PartitionSource(Protocol):
    """Where the partitions of the internal topic come from."""

    def leader(self, topic: str, index: int) -> Partition:
        """The log of a partition that this broker leads, opened if it was not used yet."""


CountPartitions = Callable[[], int]
"""How many partitions the topic has; 0 where it does not exist."""


class ShardSet(Generic[M_co]):
    """The shards of ``topic``, one for each partition that this broker leads.

    They come with :meth:`elected` and go with :meth:`resigned`. Belongs to the event loop that runs
    when it is made.

    ``build`` makes an empty machine for a partition; ``run_effect`` carries out what the machines
    ask of the world, ``while_loading`` answers what a loading shard may answer, ``remember`` keeps
    the causes of what they decide. ``commits`` knows what of their partitions is committed, and
    ``commit_timeout_ms`` how long to wait for that; ``admit`` whether a shard may write now.

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
        """Leader epochs of partitions that were won and are not open yet."""
        self._loading: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def shards(self) -> list[ShardRuntime[M_co]]:
        """The shards of the partitions that are led here, in the order of these."""
        return [self._shards[index] for index in sorted(self._shards)]

    # --- elections ---

    def elected(self, index: int, leader_epoch: int) -> None:
        """Serve a partition that this broker has come to lead in ``leader_epoch``.

        It is opened and read in the background, the small ones first. Nothing happens if it is
        served in this epoch or a newer one already: a change of the ISR alone is no election.
        """
        if not self._closed and self._is_news(index, leader_epoch):
            self._drop(index)
            self._unopened[index] = leader_epoch
            self._begin_to_load()

    def resigned(self, index: int, leader_epoch: int | None) -> None:
        """Serve a partition no more: all that wait are answered NOT_COORDINATOR.

        ``leader_epoch`` is that of the other leader; None where the topic or the replica is gone.
        Old news, of an epoch that is not above the one that is served, changes nothing.
        """
        if leader_epoch is None or self._is_news(index, leader_epoch):
            self._drop(index)

    def serve(self, index: int, leader_epoch: int) -> None:
        """Do as :meth:`elected`, and open the partition now: an empty one is served at once.

        Raises what :class:`PartitionSource` does if it can't be opened.
        """
        self.elected(index, leader_epoch)
        if index in self._unopened:
            self._open(index)

    def _is_news(self, index: int, leader_epoch: int) -> bool:
        shard = self._shards.get(index)
        if shard is None:
            return self._unopened.get(index, -1) < leader_epoch
        return shard.leader_epoch < leader_epoch or shard.state is ShardState.CLOSED

    def _drop(self, index: int) -> None:
        self._unopened.pop(index, None)
        shard = self._shards.pop(index, None)
        if shard is not None:
            with survived("unload", shard=shard.name):
                shard.end()

    def _open(self, index: int) -> None:
        """Open a partition that was won, and make its shard; an empty one serves then."""
        leader_epoch = self._unopened.pop(index)
        partition = self._source.leader(self.topic, index)
        shard = ShardRuntime(partition, leader_epoch, self._build, self._services)
        self._shards[index] = shard
        shard.load_empty()

    def _open_next(self) -> None:
        index = next(iter(self._unopened))
        with survived("load", shard=f"{self.topic}-{index}"):
            self._open(index)

    def _begin_to_load(self) -> None:
        if self._loading is None:
            self._loading = spawn(self._load(), f"load {self.topic}")

    async def _load(self) -> None:
        """Open all that was won, then read what is not empty, the smallest first."""
        pace = Pace()
        try:
            while not self._closed:
                await pace()
                unread = [one for one in self._shards.values() if one.state is ShardState.INITIAL]
                if self._unopened:
                    self._open_next()
                elif unread:
                    shard = min(unread, key=lambda shard: shard.partition.log.size_bytes)
                    with survived("load", shard=shard.name):
                        await shard.load(pace)
                else:
                    break
        finally:
            self._loading = None

    async def loaded(self, timeout_ms: int = START_WAIT_MS) -> bool:
        """Wait until every log was read once, at most ``timeout_ms``; says whether it is so."""
        if self._loading is None:
            return True
        done, _ = await asyncio.wait({self._loading}, timeout=timeout_ms / 1000)
        return bool(done)

    @property
    def is_open(self) -> bool:
        """Whether a shard was made for each partition that is led here."""
        return not self._unopened

    # --- requests ---

    def index_for(self, key: str) -> int:
        """The partition that ``key`` belongs to; :class:`NotCoordinatorError` without a topic."""
        partitions = self._partitions()
        if not partitions:
            raise NotCoordinatorError(f"{self.topic} does not exist")
        return partition_for(key, partitions)

    def shard_at(self, index: int) -> ShardRuntime[M_co]:
        """The shard of a partition. Raises a :class:`ShardError` where it is not served here."""
        shard = self._shards.get(index)
        if shard is None:
            if index in self._unopened:
                raise CoordinatorLoadInProgressError(f"{self.topic}-{index} is being opened")
            raise NotCoordinatorError(f"{self.topic}-{index} is not served here")
        return shard

    async def opened(self) -> None:
        """Open all that was won and is not open yet; what is not empty is still to be read then."""
        pace = Pace()
        while self._unopened and not self._closed:
            self._open_next()
            await pace()

    def shard_for(self, key: str) -> ShardRuntime[M_co]:
        """The shard that ``key`` belongs to. Raises a :class:`ShardError`, as :meth:`shard_at`."""
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
        """Send a command of upkeep to all shards in turn, to each while its result has ``more``.

        Others are served meanwhile. A shard that does not serve is passed over.
        """
        spawn(self._sweep(command, what), what)

    async def _sweep(self, command: object, what: str) -> None:
        pace = Pace()
        for shard in self.shards:
            with survived(what, shard=shard.name), suppress(ShardError):
                while not self._closed and getattr(await shard.submit(command), "more", False):
                    await pace()
            await pace()

    async def send_to_all(self, command: object) -> None:
        """Send a command that must not get lost to all shards, those that load among them."""
        pace = Pace()
        for index in sorted({*self._shards, *self._unopened}):
            if index in self._unopened:
                with survived("load", shard=f"{self.topic}-{index}"):
                    self._open(index)
            if index in self._shards:
                self._send(self._shards[index], command)
            await pace()

    def _send(self, shard: ShardRuntime[M_co], command: object) -> None:
        """Send a command that must not get lost, and again while its result has ``more``.

        Each time in a turn of its own; a shard that does not serve is asked again later, until it
        is closed.
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
        """Close every shard: all that wait are answered NOT_COORDINATOR."""
        self._closed = True
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)
        for shard in self.shards:
            with survived("close", shard=shard.name):
                await shard.close()
        self.timers.close()
