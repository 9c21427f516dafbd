"""Periodic tasks: retention, expiry of producers, checkpoints, flushes.

The tasks run on the event loop, one partition at a time, and yield in between; only retention waits
for the disk in a thread. A failure on a partition is logged, and the next round tries that
partition again.

Source: ``LogManager`` (its scheduled tasks), ``ProducerStateManager.removeExpiredProducers``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import structlog

from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.runtime.background import Pace, Repeated, Threads, Work, log_failure
from fencepost.coordinator.storage.log_manager import LogManager
from fencepost.logcore.checkpoints import (
    HIGH_WATERMARK_CHECKPOINT,
    LOG_START_CHECKPOINT,
    RECOVERY_POINT_CHECKPOINT,
)
from fencepost.logcore.clock import Clock
from fencepost.logcore.partition import Partition

FLUSH_CHECK_MS: Final = 250
"""The interval at which logs with a finite ``flush.ms`` are checked: the precision of that setting.
"""

_log = structlog.get_logger(__name__)

Step = Callable[[Partition], Awaitable[None] | None]


class Maintenance:
    """The periodic tasks of one broker."""

    def __init__(self, logs: LogManager, config: BrokerConfig, clock: Clock) -> None:
        self._logs = logs
        self._config = config
        self._clock = clock
        self.tasks: list[Repeated] = []
        """The tasks. Tasks whose decisions depend on the time use the broker's clock; tasks that
        only write to the disk use the system clock."""
        self._thread = Threads("retention")
        self._forgotten = 0
        self._troubled: dict[str, dict[str, str]] = {}
        """By step and partition: the last failure."""

    def start(self) -> None:
        """Start; retention first runs after ``log.initial.task.delay.ms``, as in Kafka."""
        config = self._config
        expiry = "producer.id.expiration.check.interval.ms"
        self._each(
            "retention",
            config.int("log.retention.check.interval.ms"),
            self.run_retention,
            config.int("log.initial.task.delay.ms"),
            self._clock,
        )
        self._each(
            "producer expiry", config.int(expiry), self.run_producer_expiry, clock=self._clock
        )
        self._each("flush", FLUSH_CHECK_MS, self.run_flush)
        self._repeat("producer report", self.report_forgotten_producers, config.int(expiry))
        for name, interval in (
            (HIGH_WATERMARK_CHECKPOINT, "replica.high.watermark.checkpoint.interval.ms"),
            (RECOVERY_POINT_CHECKPOINT, "log.flush.offset.checkpoint.interval.ms"),
            (LOG_START_CHECKPOINT, "log.flush.start.offset.checkpoint.interval.ms"),
        ):
            self._repeat(name, partial(self._save, name), config.int(interval))

    async def _save(self, checkpoint: str) -> None:
        await self._logs.save(checkpoint)

    def _repeat(
        self,
        what: str,
        work: Work,
        interval_ms: int,
        first_ms: int | None = None,
        clock: Clock | None = None,
    ) -> Repeated:
        task = Repeated(what, work, lambda: interval_ms, clock)
        task.start(interval_ms if first_ms is None else first_ms)
        self.tasks.append(task)
        return task

    async def stop(self) -> None:
        """Stop all tasks; a step on a partition is never interrupted."""
        while self.tasks:
            await self.tasks.pop().stop()
        self._thread.close()

    async def run_retention(self, partition: Partition) -> None:
        """Delete segments by ``retention.ms``, ``retention.bytes`` and the log start offset."""
        deleted = await self._thread.drive(
            partition.cleanup.delete_old_segments(self._clock.now_ms())
        )
        if deleted:
            _log.info(
                "segments deleted",
                partition=partition.name,
                count=deleted,
                log_start_offset=partition.log_start_offset,
            )

    def run_producer_expiry(self, partition: Partition) -> None:
        """Remove producers that wrote nothing for ``producer.id.expiration.ms``."""
        limit_ms = self._config.int("producer.id.expiration.ms")
        partition.producers.expire(self._clock.now_ms(), limit_ms)

    def report_forgotten_producers(self) -> None:
        """Log a warning if ``max.producer.ids`` is too low for the clients."""
        limit = self._logs.producer_limit
        if limit.forgotten > self._forgotten:
            _log.warning(
                "producers forgotten before their time",
                count=limit.forgotten - self._forgotten,
                config="max.producer.ids",
                limit=limit.maximum,
            )
            self._forgotten = limit.forgotten

    def run_flush(self, partition: Partition) -> None:
        """Flush a log that has had unflushed records for longer than its ``flush.ms``."""
        partition.flushes.run_if_due(self._clock.now_ms())

    def _each(
        self,
        what: str,
        interval_ms: int,
        step: Step,
        first_ms: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        async def work() -> None:
            pace = Pace()
            failed: dict[str, str] = {}
            for partition in self._logs:
                if task.is_stopping:
                    return
                if partition.offline is None:
                    await self._run_step(what, step, partition, failed)
                await pace()
            self._troubled[what] = failed

        task = self._repeat(what, work, interval_ms, first_ms, clock)

    async def _run_step(
        self, what: str, step: Step, partition: Partition, failed: dict[str, str]
    ) -> None:
        """Run a step on one partition. A repeated failure is logged only once."""
        try:
            done = step(partition)
            if done is not None:
                await done
        except Exception as error:  # noqa: BLE001 - the other partitions must be served
            if self._logs.find_open((partition.topic, partition.index)) is not partition:
                return  # it was deleted in the meantime
            cause = failed[partition.name] = f"{type(error).__name__}: {error}"
            if self._troubled.get(what, {}).get(partition.name) != cause:
                log_failure(what, error, partition=partition.name)
