"""What is done from time to time: retention, expiry of producers, checkpoints, flushes.

All of it runs on the event loop, one partition at a time with room for others in between. A
failure is logged and tried again next time.

Source: ``LogManager`` (its scheduled tasks), ``ProducerStateManager.removeExpiredProducers``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from coordinator.config import BrokerConfig
from coordinator.replicas import Replicas
from logcore.clock import Clock
from logcore.errors import LogError
from logcore.partition import Partition

FLUSH_CHECK_MS = 250
"""How often logs are looked at that have a finite ``flush.ms``: the precision of that setting."""

_log = structlog.get_logger(__name__)


class Maintenance:
    """The periodic tasks of one broker."""

    def __init__(self, replicas: Replicas, config: BrokerConfig, clock: Clock) -> None:
        self._replicas = replicas
        self._config = config
        self._clock = clock
        self._tasks: list[asyncio.Task[None]] = []
        self._forgotten = 0

    def start(self) -> None:
        """Begin; the first retention waits for ``log.initial.task.delay.ms``, as in Kafka."""
        config, replicas = self._config, self._replicas
        first_ms = config.int("log.initial.task.delay.ms")
        high_watermark_ms = config.int("replica.high.watermark.checkpoint.interval.ms")
        recovery_ms = config.int("log.flush.offset.checkpoint.interval.ms")
        start_ms = config.int("log.flush.start.offset.checkpoint.interval.ms")
        retention_ms = config.int("log.retention.check.interval.ms")
        expiry_ms = config.int("producer.id.expiration.check.interval.ms")
        self._each(retention_ms, self.run_retention, first_ms)
        self._each(expiry_ms, self.run_producer_expiry)
        self._call(expiry_ms, self.report_forgotten_producers)
        self._each(FLUSH_CHECK_MS, self.run_flush)
        self._call(high_watermark_ms, replicas.checkpoint_high_watermarks)
        self._call(recovery_ms, replicas.checkpoint_recovery_points)
        self._call(start_ms, replicas.checkpoint_log_starts)

    async def stop(self) -> None:
        """End all tasks; none is cut off inside a step on a partition."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    def run_retention(self, partition: Partition) -> None:
        """Delete what ``retention.ms``, ``retention.bytes`` and the log start offset let go."""
        deleted = partition.retention(self._clock.now_ms())
        if deleted:
            _log.info(
                "segments deleted",
                partition=f"{partition.topic}-{partition.index}",
                count=deleted,
                log_start_offset=partition.log_start_offset,
            )

    def run_producer_expiry(self, partition: Partition) -> None:
        """Forget producers that wrote nothing for ``producer.id.expiration.ms``."""
        limit_ms = self._config.int("producer.id.expiration.ms")
        partition.expire_producers(self._clock.now_ms(), limit_ms)

    def report_forgotten_producers(self) -> None:
        """Say that ``max.producer.ids`` is too low for what the clients do."""
        limit = self._replicas.producer_limit
        if limit.forgotten > self._forgotten:
            _log.warning(
                "producers forgotten before their time",
                count=limit.forgotten - self._forgotten,
                config="max.producer.ids",
                limit=limit.maximum,
            )
            self._forgotten = limit.forgotten

    def run_flush(self, partition: Partition) -> None:
        """Force a log to disk that holds unforced records for longer than its ``flush.ms``."""
        partition.flush_if_due(self._clock.now_ms())

    def _each(
        self, interval_ms: int, step: Callable[[Partition], None], first_ms: int | None = None
    ) -> None:
        async def run() -> None:
            await asyncio.sleep((interval_ms if first_ms is None else first_ms) / 1000)
            while True:
                for partition in self._replicas:
                    if partition.offline is None:
                        _guarded(step, partition)
                    await asyncio.sleep(0)
                await asyncio.sleep(interval_ms / 1000)

        self._tasks.append(asyncio.create_task(run(), name=f"maintenance {step.__name__}"))

    def _call(self, interval_ms: int, step: Callable[[], None]) -> None:
        async def run() -> None:
            while True:
                await asyncio.sleep(interval_ms / 1000)
                step()

        self._tasks.append(asyncio.create_task(run(), name=f"maintenance {step.__name__}"))


def _guarded(step: Callable[[Partition], None], partition: Partition) -> None:
    try:
        step(partition)
    except (LogError, OSError) as error:
        _log.error(
            "maintenance failed",
            step=step.__name__,
            partition=f"{partition.topic}-{partition.index}",
            cause=f"{type(error).__name__}: {error}",
        )
