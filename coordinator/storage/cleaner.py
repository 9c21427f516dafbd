"""Log compaction in the background: one partition at a time, with its long steps in a thread.

The event loop only selects a partition, plans its round and installs the cleaned segments, which
takes little time however large the log is. A failed round leaves the log unchanged. If it failed
for lack of disk space or file descriptors, the partition is tried again later. After any other
failure the partition is uncleanable until the broker restarts, and the next round cleans another
partition.

Source: ``LogCleaner`` (its cleaner threads), ``LogCleanerManager``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial

import structlog

from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.runtime.background import Pace, Repeated, Threads, swallow
from fencepost.coordinator.storage.log_manager import LogManager
from fencepost.logcore.checkpoints import CLEANER_CHECKPOINT
from fencepost.logcore.cleaner_choice import CleanerChoice
from fencepost.logcore.clock import Clock, SystemClock, monotonic_s
from fencepost.logcore.compaction import CleanerThrottle, CompactionCancelled, CompactionRound
from fencepost.logcore.errors import LogError, NoSpaceError
from fencepost.logcore.fs import NO_HANDLES, NO_ROOM
from fencepost.logcore.partition import Partition

_log = structlog.get_logger(__name__)


class Cleaner:
    """The cleaner of one broker. Its thread starts with the first round and ends with ``stop``."""

    def __init__(self, logs: LogManager, config: BrokerConfig, clock: Clock) -> None:
        self._logs = logs
        self._config = config
        self._clock = clock
        self._choice = CleanerChoice(logs.cleaned, _report_failure)
        self._stopping = threading.Event()
        """Set to stop the thread, which must not access the event loop's objects."""
        self._thread = Threads("cleaner")
        self.task = Repeated(
            "cleaner", self.run_once, lambda: config.int("log.cleaner.backoff.ms"), clock
        )

    def start(self) -> None:
        """Start, unless ``log.cleaner.enable`` is off."""
        self._logs.on_delete(self._choice.forget)
        if self._config.bool("log.cleaner.enable"):
            self.task.start()

    async def stop(self) -> None:
        """Abort the current round; return when its thread has ended."""
        self._stopping.set()
        await self.task.stop()
        self._thread.close()

    @property
    def uncleanable(self) -> Mapping[tuple[str, int], str]:
        """Return the partitions that are not cleaned after a failure, with the reason."""
        return self._choice.uncleanable

    async def run_once(self) -> bool:
        """Clean the partition that needs it most; return whether to look for another at once."""
        pace, now_ms = Pace(), self._clock.now_ms()
        for partition in self._logs:
            self._choice.consider(partition, now_ms)
            await pace()
            if self._stopping.is_set():
                return False
        round_ = self._choice.next_round(
            now_ms, budget_bytes=self._config.int("log.cleaner.dedupe.buffer.size")
        )
        if round_ is None:
            return False
        partition, compaction = round_
        begin = monotonic_s()
        try:
            is_whole = await self._clean(partition, compaction)
        except CompactionCancelled:
            self._discard(partition, compaction)
        except Exception as error:  # noqa: BLE001 - the other partitions must be cleaned
            self._discard(partition, compaction)
            # An error of a deleted or offline partition was reported before.
            return not compaction.is_current or self._failed(partition, error)
        else:
            if is_whole and compaction.is_current:
                self._report(partition, compaction, monotonic_s() - begin)
                self._choice.finished(partition, compaction)
                await self._logs.save(CLEANER_CHECKPOINT)
        return True

    def _discard(self, partition: Partition, compaction: CompactionRound) -> None:
        """Remove the files of a round; files that cannot be removed stay until a restart."""
        with swallow("discard of a round", partition=partition.name):
            compaction.discard()

    def _failed(self, partition: Partition, error: Exception) -> bool:
        """Log why a round failed; return whether the next round may start at once.

        Marks the partition as uncleanable, unless only disk space or file descriptors were missing.
        """
        no_room = isinstance(error, OSError) and error.errno in NO_ROOM | NO_HANDLES
        if no_room or isinstance(error, NoSpaceError):
            _log.warning("compaction has to wait", partition=partition.name, cause=str(error))
            return False
        self._choice.failed(partition, error)
        return True

    async def _clean(self, partition: Partition, compaction: CompactionRound) -> bool:
        """Run a round; return False if the log has changed and nothing more can be installed."""
        throttle = self._throttle()
        flush = partition.flushes.plan(self._clock.now_ms())
        if flush is not None:
            failure = await self._thread.attempt(flush.run)
            partition.flushes.finish(flush, failure)
            if failure is not None:
                raise failure
        await self._thread.run(lambda: compaction.map_keys(throttle))
        while await self._thread.run(lambda: compaction.clean_next(throttle)):
            if not partition.cleanup.install_cleaned(compaction):
                return False
        return True

    def _throttle(self) -> Callable[[int], None]:
        """Return a function that aborts the round at shutdown, and limits its bytes per second."""
        rate = partial(self._config.number, "log.cleaner.io.max.bytes.per.second")
        # The thread waits in real time, so the throttle uses the system clock.
        slow = CleanerThrottle(rate, SystemClock(), self._stopping.wait)

        def account(count: int) -> None:
            if self._stopping.is_set():
                raise CompactionCancelled("the broker stops")
            slow(count)

        return account

    def _report(self, partition: Partition, compaction: CompactionRound, seconds: float) -> None:
        figures = compaction.figures
        _log.info(
            "compacted",
            partition=partition.name,
            clean_up_to=compaction.next_dirty_offset,
            bytes_read=figures.bytes_read,
            bytes_kept=figures.bytes_kept,
            records_read=figures.records_read,
            records_kept=figures.records_kept,
            seconds=round(seconds, 3),
        )


def _report_failure(partition: Partition, error: Exception) -> None:
    _log.error(
        "partition cannot be compacted",
        partition=partition.name,
        cause=f"{type(error).__name__}: {error}",
        # An error of the log or the file system explains itself; any other is a bug.
        exc_info=None if isinstance(error, (OSError, LogError)) else error,
    )
