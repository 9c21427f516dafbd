"""Compaction in the background: one partition at a time, its long steps in a thread of their own.

The event loop only chooses, plans and installs, which costs little whatever the size of the log. A
round that fails leaves the log as it was; that partition is then left alone until the next start.

Source: ``LogCleaner`` (its cleaner threads), ``LogCleanerManager``.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import structlog

from coordinator.config import BrokerConfig
from coordinator.replicas import Replicas
from logcore.cleaner_choice import CleanerChoice
from logcore.clock import Clock
from logcore.compaction import CompactionCancelled, CompactionRound, Throttle
from logcore.errors import LogError, StorageError
from logcore.fs import FileSystem
from logcore.index import CorruptIndexError
from logcore.partition import Partition

T = TypeVar("T")

_log = structlog.get_logger(__name__)


class Cleaner:
    """The cleaner of one broker. Its thread starts with the first round and ends with ``stop``."""

    def __init__(
        self, replicas: Replicas, config: BrokerConfig, clock: Clock, fs: FileSystem, directory: str
    ) -> None:
        self._replicas = replicas
        self._config = config
        self._clock = clock
        self._choice = CleanerChoice(fs, directory)
        self._stopping = threading.Event()
        """For the thread, which must not touch the loop's."""
        self._stopped = asyncio.Event()
        self._thread: ThreadPoolExecutor | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, unless ``log.cleaner.enable`` is off."""
        self._replicas.on_delete(self._forget)
        if self._config.bool("log.cleaner.enable"):
            self._task = asyncio.create_task(self._run(), name="cleaner")

    async def stop(self) -> None:
        """End the round under way without effect; returns when its thread has let go."""
        self._stopping.set()
        self._stopped.set()
        if self._task is not None:
            await self._task
            self._task = None
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    @property
    def uncleanable(self) -> Mapping[tuple[str, int], str]:
        """Partitions that are left alone because their cleaning failed, with the reason."""
        return self._choice.uncleanable

    async def _run(self) -> None:
        while not self._stopping.is_set():
            if not await self.run_once():
                await self._pause(self._config.int("log.cleaner.backoff.ms"))

    async def _pause(self, pause_ms: int) -> None:
        """Wait, but no longer than until ``stop``."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopped.wait(), pause_ms / 1000)

    async def run_once(self) -> bool:
        """Clean the partition that needs it most; False if none does."""
        try:
            found = self._choice.next_round(
                tuple(self._replicas),
                self._clock.now_ms(),
                budget_bytes=self._config.int("log.cleaner.dedupe.buffer.size"),
            )
        except LogError as error:
            _log.error("no round of compaction could be planned", cause=str(error))
            return False
        if found is None:
            return False
        partition, compaction = found
        begin = time.monotonic()
        try:
            if await self._clean(partition, compaction):
                self._choice.finished(partition, compaction)
                self._report(partition, compaction, time.monotonic() - begin)
        except (CompactionCancelled, StorageError):
            # Stopped, deleted, or off line, which has been reported: nothing more to say here.
            compaction.discard()
        except (OSError, LogError, CorruptIndexError) as error:
            compaction.discard()
            self._choice.failed(partition, error)
            _log.error(
                "partition can not be compacted",
                partition=f"{partition.topic}-{partition.index}",
                cause=f"{type(error).__name__}: {error}",
            )
        return True

    async def _clean(self, partition: Partition, compaction: CompactionRound) -> bool:
        """Run a round; False if the log changed under it and nothing more can be installed."""
        throttle = self._throttle()
        await self._in_thread(lambda: compaction.map_keys(throttle))
        while await self._in_thread(lambda: compaction.clean_next(throttle)):
            if not partition.install_cleaned(compaction):
                return False
        return True

    def _throttle(self) -> Callable[[int], None]:
        """Stop the round when the broker stops, and hold it to the configured bytes per second."""
        limit = self._config.number("log.cleaner.io.max.bytes.per.second")
        slow = Throttle(limit, self._clock, self._stopping.wait)

        def account(count: int) -> None:
            if self._stopping.is_set():
                raise CompactionCancelled("the broker stops")
            slow(count)

        return account

    async def _in_thread(self, step: Callable[[], T]) -> T:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cleaner")
        return await asyncio.get_running_loop().run_in_executor(self._thread, step)

    def _report(self, partition: Partition, compaction: CompactionRound, seconds: float) -> None:
        figures = compaction.figures
        _log.info(
            "compacted",
            partition=f"{partition.topic}-{partition.index}",
            clean_up_to=compaction.next_dirty_offset,
            bytes_read=figures.bytes_read,
            bytes_kept=figures.bytes_kept,
            records_read=figures.records_read,
            records_kept=figures.records_kept,
            seconds=round(seconds, 3),
        )

    def _forget(self, topic: str, index: int) -> None:
        try:
            self._choice.forget(topic, index)
        except OSError as error:
            _log.warning("cleaner checkpoint not written", cause=str(error))
