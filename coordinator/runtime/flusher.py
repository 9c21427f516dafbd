"""Group commit: one fsync per file for all appends of a turn of the event loop.

A partition whose ``flush.messages`` is reached joins the next round of flushes. The round starts at
the end of the turn, and its fsyncs run in threads; appends during a round join the next round. At
most one round runs at a time, so a partition is never flushed twice concurrently. A caller that
must wait for the disk before its response calls :meth:`Flusher.after`.

A failed fsync takes its partition offline (``FlushState.finish``). The callbacks are called in this
case, too, and must check the partition: no record that shared the fsync may be acknowledged.

Without ``flush.messages`` and ``flush.ms`` no partition joins, and no caller waits. Segments sealed
by a roll have their own queue (``sealed_flushes.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from fencepost.coordinator.runtime.background import Threads, log_failure, spawn, swallow
from fencepost.coordinator.runtime.histogram import Histogram
from fencepost.coordinator.runtime.sealed_flushes import SealedFlushes
from fencepost.logcore.clock import Clock, monotonic_s
from fencepost.logcore.durable import FlushState
from fencepost.logcore.errors import NoSpaceError, StorageError
from fencepost.logcore.flush import Flush
from fencepost.logcore.partition import Partition
from fencepost.logcore.tracebacks import without_traceback

FLUSH_THREADS: Final = 4
"""The number of files flushed concurrently. A journaling file system completes overlapping fsyncs
with one commit of its journal; more threads only add context switches."""

Callback = Callable[[], None]


class Flusher:
    """The flusher of one broker's partitions, for use on the event loop only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._joined: dict[FlushState, None] = {}
        self._after_joined: list[Callback] = []
        self._running: dict[FlushState, None] = {}
        self._after_running: list[Callback] = []
        self._task: asyncio.Task[None] | None = None
        self._threads = Threads("fsync", FLUSH_THREADS)
        self.sealed = SealedFlushes()
        self.rounds = 0
        """The number of rounds of flushes so far."""
        self.seconds = Histogram()
        """The durations of flushes, one per log."""

    @property
    def is_idle(self) -> bool:
        """Return whether no flush is pending."""
        return self._task is None

    def join(self, flushes: FlushState) -> None:
        """Flush the log in the next round."""
        self._joined[flushes] = None
        if self._task is None:
            self._task = spawn(self._flush(), "group commit")

    def join_sealed(self, flushes: FlushState) -> None:
        """Flush the log's sealed segments in the background, not as part of a group commit."""
        self.sealed.join(flushes)

    def after(self, partitions: Iterable[Partition], callback: Callback) -> bool:
        """Call ``callback`` once all current records of the partitions are flushed, or have failed.

        Return False, without calling it, if no partition needs a wait. Callbacks are called in the
        order of their requests.
        """
        held = [partition.flushes for partition in partitions if partition.flushes.is_awaited]
        if not held:
            return False
        if any(request in self._joined for request in held):
            self._after_joined.append(callback)
        else:
            self._after_running.append(callback)
        return True

    def forced(self, partition: Partition) -> asyncio.Future[None] | None:
        """Start flushing all current records of the partition; return None if they are on disk.

        The future raises StorageError if the flush fails.
        """
        end = partition.log_end_offset
        if partition.recovery_point >= end:
            return None
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def settle() -> None:
            if done.done():
                return
            if partition.recovery_point < end:
                why = partition.offline or NoSpaceError(f"{partition.name} is not on disk")
                done.set_exception(without_traceback(why))
            else:
                done.set_result(None)

        self.join(partition.flushes)
        self._after_joined.append(settle)
        return done

    async def drain(self) -> None:
        """Return once no flush is pending."""
        while self._task is not None:
            await asyncio.wait({self._task})

    async def close(self) -> None:
        """Finish the pending flushes and end the threads."""
        await self.drain()
        await self.sealed.close()
        self._threads.close()

    async def _flush(self) -> None:
        try:
            while self._joined:
                await self._flush_group()
                # Clients that have just got a response can join the next round with a new request.
                await asyncio.sleep(0)
        finally:
            self._task = None

    async def _flush_group(self) -> None:
        self._running, self._joined = self._joined, {}
        self._after_running, self._after_joined = self._after_joined, []
        self.rounds += 1
        now_ms = self._clock.now_ms()
        planned: list[tuple[FlushState, Flush]] = []
        for flushes in self._running:
            try:
                flush = flushes.plan(now_ms)
            except StorageError:
                continue  # offline by now, or deleted: callers check the partition
            except Exception as error:  # noqa: BLE001 - callers must learn that the data is not on disk
                log_failure("flush", error, partition=flushes.marks.name)
                flushes.marks.fail(error)
                continue
            if flush is not None:
                planned.append((flushes, flush))
        failures = await self._run([flush for _, flush in planned])
        for (flushes, flush), failure in zip(planned, failures, strict=True):
            with swallow("flush", partition=flushes.marks.name):
                flushes.finish(flush, failure)
        self._running = {}
        callbacks, self._after_running = self._after_running, []
        for callback in callbacks:
            # Other callers wait for the same flush.
            with swallow("what waited for a flush"):
                callback()

    async def _run(self, flushes: Sequence[Flush]) -> list[Exception | None]:
        count = min(FLUSH_THREADS, len(flushes))
        shares = [flushes[at::count] for at in range(count)]
        done = await asyncio.gather(*(self._run_share(share) for share in shares))
        failures: list[Exception | None] = [None] * len(flushes)
        for at, share in enumerate(done):
            failures[at::count] = share
        return failures

    async def _run_share(self, flushes: Sequence[Flush]) -> list[Exception | None]:
        """Run flushes one after the other in a thread; return the failure of each, or None."""
        try:
            done = await self._threads.run(lambda: [_result_of(flush) for flush in flushes])
        except Exception as error:  # noqa: BLE001 - no thread could be started
            return [without_traceback(error)] * len(flushes)
        for _, seconds in done:
            self.seconds.note(seconds)
        return [failure for failure, _ in done]


def _result_of(flush: Flush) -> tuple[Exception | None, float]:
    """Run a flush; return its failure or None, and its duration in seconds."""
    since = monotonic_s()
    failure: Exception | None
    try:
        failure = flush.run()
    except Exception as error:  # noqa: BLE001 - the data is not on disk, whatever the reason
        failure = without_traceback(error)
    return failure, monotonic_s() - since
