"""What rolls have sealed, forced to disk in the background: one flush at a time, in one thread.

Nobody waits for it, so it stays out of the groups that somebody waits for (``flusher.py``): a
segment of 1 GiB keeps a disk busy for seconds. A partition stands in the queue once, whatever it
has rolled meanwhile, and takes its turn again while there is more: the queue is as long as there
are partitions, and a disk that is slower than the producers slows them down through the kernel's
limit of dirty pages, not through memory of ours.

When a recovery point has moved it is written down at once, for until then a start would read, and
distrust, what is on disk already.

Source: ``UnifiedLog.roll`` (its ``flush-log`` task), ``LogManager.checkpointLogRecoveryOffsets``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from fencepost.coordinator.runtime.background import Threads, spawn, survived
from fencepost.coordinator.runtime.histogram import Histogram
from fencepost.logcore.clock import monotonic_s
from fencepost.logcore.durable import FlushState
from fencepost.logcore.errors import StorageError


class SealedFlushes:
    """The queue, its task and its thread. Belongs to the event loop."""

    def __init__(self) -> None:
        self.checkpoint: Callable[[], Awaitable[object]] | None = None
        """Writes the recovery points down; called when some have moved."""
        self.seconds = Histogram()
        """Of each flush."""
        self._waiting: dict[FlushState, None] = {}
        self._task: asyncio.Task[None] | None = None
        self._thread = Threads("fsync-sealed")

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return self._task is None

    def join(self, flushes: FlushState) -> None:
        """Flush what is sealed of the log when its turn comes."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return  # a command, which closes the log and so flushes it
        self._waiting[flushes] = None
        if self._task is None:
            self._task = spawn(self._run(), "flush of sealed segments")

    async def close(self) -> None:
        """Finish the flush under way; what waits is flushed when its log is closed."""
        self._waiting.clear()
        while self._task is not None:
            await asyncio.wait({self._task})
        self._thread.close()

    async def _run(self) -> None:
        try:
            while self._waiting:
                flushes = next(iter(self._waiting))
                del self._waiting[flushes]
                with survived("flush of sealed segments", partition=flushes.marks.name):
                    await self._flush(flushes)
        finally:
            self._task = None

    async def _flush(self, flushes: FlushState) -> None:
        try:
            flush = flushes.plan_sealed()
        except StorageError:
            return  # off line by now, closed or deleted
        if flush is None:
            return
        since = monotonic_s()
        failure = await self._thread.attempt(flush.run)
        self.seconds.note(monotonic_s() - since)
        flushes.finish(flush, failure)
        if flushes.marks.recovery_point < flush.end:
            return  # it was refused; the next look at the log finds it again
        if flushes.has_sealed:
            self._waiting[flushes] = None
        if self.checkpoint is not None:
            await self.checkpoint()
