"""Background flushes of sealed segments: one flush at a time, in one thread.

No request waits for these flushes. They are not part of the group commit (``flusher.py``), for
which requests may wait, because a segment of 1 GiB keeps a disk busy for seconds. The queue has at
most one entry per partition, however many segments the partition has rolled; a partition with more
segments to flush is queued again. Producers that are faster than the disk are slowed down by the
kernel's limit on dirty pages, and do not fill the broker's memory.

A new recovery point is checkpointed at once. Otherwise the broker would read and verify data that
is already on disk when it starts after a crash.

Source: ``UnifiedLog.roll`` (its ``flush-log`` task), ``LogManager.checkpointLogRecoveryOffsets``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from fencepost.coordinator.runtime.background import Threads, spawn, swallow
from fencepost.coordinator.runtime.histogram import Histogram
from fencepost.logcore.clock import monotonic_s
from fencepost.logcore.durable import FlushState
from fencepost.logcore.errors import StorageError


class SealedFlushes:
    """The queue, its task and its thread, for use on the event loop only."""

    def __init__(self) -> None:
        self.checkpoint: Callable[[], Awaitable[object]] | None = None
        """Writes the recovery point checkpoint; called after each flush that advances one."""
        self.seconds = Histogram()
        """The durations of flushes."""
        self._waiting: dict[FlushState, None] = {}
        self._task: asyncio.Task[None] | None = None
        self._thread = Threads("fsync-sealed")

    @property
    def is_idle(self) -> bool:
        """Return whether no flush is running or queued."""
        return self._task is None

    def join(self, flushes: FlushState) -> None:
        """Queue the flush of the log's sealed segments."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return  # in a command without an event loop, which flushes logs as it closes them
        self._waiting[flushes] = None
        if self._task is None:
            self._task = spawn(self._run(), "flush of sealed segments")

    async def close(self) -> None:
        """Finish the current flush; queued logs are flushed when they are closed."""
        self._waiting.clear()
        while self._task is not None:
            await asyncio.wait({self._task})
        self._thread.close()

    async def _run(self) -> None:
        try:
            while self._waiting:
                flushes = next(iter(self._waiting))
                del self._waiting[flushes]
                with swallow("flush of sealed segments", partition=flushes.marks.name):
                    await self._flush(flushes)
        finally:
            self._task = None

    async def _flush(self, flushes: FlushState) -> None:
        try:
            flush = flushes.plan_sealed()
        except StorageError:
            return  # offline by now, closed or deleted
        if flush is None:
            return
        since = monotonic_s()
        failure = await self._thread.attempt(flush.run)
        self.seconds.note(monotonic_s() - since)
        flushes.finish(flush, failure)
        if flushes.marks.recovery_point < flush.end:
            return  # the flush failed; the next check of the log queues it again
        if flushes.has_sealed:
            self._waiting[flushes] = None
        if self.checkpoint is not None:
            await self.checkpoint()
