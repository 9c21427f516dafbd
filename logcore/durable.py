"""How a partition gets to disk: by itself inside an append, or by a flusher that many share.

With a flusher the end of the log is *held* while a flush that ``flush.messages`` asked for is under
way: the high watermark stays where the disk is, readers see nothing beyond it, and who appended has
to wait until :attr:`ReadablePartition.recovery_point` is behind the append.

Source: ``UnifiedLog.flush``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from logcore.checkpoints import PARTITION_METADATA
from logcore.flush import Flush
from logcore.reading import ReadablePartition


class Flusher(Protocol):
    """Runs the flushes of partitions for whoever waits for them, several appends with one."""

    def join(self, partition: DurablePartition) -> None:
        """Flush the partition soon: plan, run, and hand the result to ``finish_flush``."""


class DurablePartition(ReadablePartition):
    """What a partition shows, and its flushes."""

    _flusher: Flusher | None = None

    @property
    def is_held(self) -> bool:
        """Whether the end of the log waits for a flush and nobody may be told of it yet."""
        return self._high_watermark != self._log.log_end_offset and self._stopped is None

    def flush(self) -> int:
        """Make everything survive power loss; return the recovery point, now the log end."""
        self._throw_if_stopped()
        self._flush_now(self._clock.now_ms())
        return self._recovery_point

    def _flush_now(self, now_ms: int) -> None:
        flush = self.plan_flush(now_ms)
        if flush is not None:
            self.finish_flush(flush, flush.run())
            self._throw_if_stopped()

    def plan_flush(self, now_ms: int) -> Flush | None:
        """Plan to force to disk what is not there yet; None if all is. StorageError.

        :meth:`finish_flush` has to follow. No second plan is made before.
        """
        self._throw_if_stopped()
        self._flushed_at_ms = now_ms
        log, point = self._log, self._recovery_point
        end = log.log_end_offset
        if end <= point and not (end and log.directory_changed) and self._epochs.is_synced:
            return None
        further = self._producers.snapshots_from(point)
        parent = None
        if self._is_new:
            self._is_new = False
            further.append(f"{self._directory}/{PARTITION_METADATA}")
            parent = str(Path(self._directory).parent)
        return log.plan_flush(point, further, epochs=self._epochs.plan_flush(), parent=parent)

    def give_up(self, error: Exception) -> None:
        """Go off line: what became of a flush is not known."""
        self._fail(error)

    def finish_flush(self, flush: Flush, failure: Exception | None) -> None:
        """Take over how a planned flush went. After a failure the partition is off line."""
        flush.done()
        if self._stopped is not None:
            return
        if failure is not None:
            self._fail(failure)
            return
        if flush.cuts != self._log.cuts:
            # What it forced to disk may be gone, and other records in its place.
            if self.is_held and self._flusher is not None:
                self._flusher.join(self)
            return
        self._recovery_point = max(self._recovery_point, flush.end)
        if flush.end > self._high_watermark:
            self._high_watermark = flush.end
            self._producers.high_watermark_moved(flush.end)
            self._notify()

    def flush_if_due(self, now_ms: int) -> bool:
        """Flush what ``flush_ms`` has waited for, also without a further append.

        Whether it did, or will soon where there is a flusher.
        """
        if (
            self._stopped is not None
            or now_ms - self._flushed_at_ms < self._config.flush_ms
            or self._log.log_end_offset <= self._recovery_point
        ):
            return False
        if self._flusher is None:
            self.flush()
        else:
            self._flusher.join(self)
        return True
