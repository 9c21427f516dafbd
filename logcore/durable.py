"""How a partition gets to disk: by itself inside an append, or by a flusher that many share.

With a flusher the end of the log is *held* while a flush that ``flush.messages`` asked for is under
way: the high watermark stays where the disk is, readers see nothing beyond it, and who appended has
to wait until :attr:`ReadablePartition.recovery_point` is behind the append.

What a roll has sealed is forced to disk as well, by nobody's wish and with nobody waiting: from
then on a recovery has no business there, and no damage in it can cost what lies behind.

Source: ``UnifiedLog.flush``, ``UnifiedLog.roll``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Protocol

from fencepost.logcore.checkpoints import PARTITION_METADATA
from fencepost.logcore.errors import StorageError
from fencepost.logcore.flush import Flush, is_refusal
from fencepost.logcore.reading import STORAGE_FAILURES, ReadablePartition

SEALED_AT_ONCE: Final = 16
"""Sealed segments of one flush. After an upgrade, or a kill, there may be thousands; the recovery
point moves on the way, and others get their turn."""


class FlushQueue(Protocol):
    """Runs the flushes of partitions for whoever waits for them, several appends with one."""

    def join(self, partition: DurablePartition) -> None:
        """Flush the partition soon: plan, run, and hand the result to ``finish_flush``."""

    def join_sealed(self, partition: DurablePartition) -> None:
        """Flush what is sealed of it, when there is time: likewise, from ``plan_sealed`` on."""


class DurablePartition(ReadablePartition):
    """What a partition shows, and its flushes."""

    _flusher: FlushQueue | None = None

    @property
    def awaits_flush(self) -> bool:
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

        :meth:`finish_flush` has to follow.
        """
        self._throw_if_stopped()
        self._flushed_at_ms = now_ms
        log, point = self._log, self._recovery_point
        end = log.log_end_offset
        if (
            end <= point
            and not (end and log.directory_changed)
            and self._epochs.is_synced
            and not log.flushes.under_way
        ):
            return None
        return self._plan(end)

    def plan_sealed(self) -> Flush | None:
        """Plan the same for the oldest sealed segments that are not on disk; None without any.

        There may be more of them than go into one flush.
        """
        self._throw_if_stopped()
        if not self.has_unflushed_segments:
            return None
        segments = self._log.from_offset(self._recovery_point)
        return self._plan(segments[min(SEALED_AT_ONCE, len(segments) - 1)].base_offset)

    def _plan(self, upto: int) -> Flush:
        point = self._recovery_point
        self._log.flushes.take_back()
        further = self._producers.snapshots_in(point, upto)
        parent = None
        if self._is_new:
            further.append(f"{self._directory}/{PARTITION_METADATA}")
            parent = str(Path(self._directory).parent)
        epochs = self._epochs.plan_flush()
        flush = self._log.plan_flush(point, upto, further, epochs=epochs, parent=parent)
        was_new, self._is_new = self._is_new, False

        def again() -> None:
            self._is_new = self._is_new or was_new
            self._epochs.is_synced = self._epochs.is_synced and epochs is None

        flush.on_taken_back.append(again)
        return flush

    @property
    def has_unflushed_segments(self) -> bool:
        """Whether power loss may still take something of a sealed segment."""
        return self._log.active.base_offset > self._recovery_point

    def _flush_sealed(self) -> None:
        """See to it that what a roll has sealed gets to disk."""
        if self._flusher is not None:
            self._flusher.join_sealed(self)
            return
        while (flush := self.plan_sealed()) is not None:
            failure = flush.run()
            self.finish_flush(flush, failure)
            self._throw_if_stopped()
            if failure is not None:
                return  # it was refused; the next flush or roll tries again

    def give_up(self, error: Exception) -> None:
        """Go off line: what became of a flush is not known."""
        self._fail(error)

    def finish_flush(self, flush: Flush, failure: Exception | None) -> None:
        """Take over how a planned flush went. After a failed one the partition is off line.

        Where nobody waits for it, a flush that was refused is due again.
        """
        flush.done()
        if self._stopped is not None:
            return
        if failure is not None:
            is_awaited = self.awaits_flush and flush.end > self._high_watermark
            if is_refusal(failure) and not is_awaited:
                flush.take_back()
                return
            self._fail(failure)
            return
        self._recovery_point = max(self._recovery_point, flush.end)
        if flush.end > self._high_watermark:
            self._high_watermark = flush.end
            self._producers.high_watermark_moved(flush.end)
            self._notify()

    def flush_if_due(self, now_ms: int) -> bool:
        """Flush what ``flush_ms`` has waited for, also without a further append.

        And what is sealed, for a log that was recovered, or whose flush was refused. Whether it
        did, or will soon where there is a flusher.
        """
        if self._stopped is not None:
            return False
        if (
            now_ms - self._flushed_at_ms >= self._config.flush_ms
            and self._log.log_end_offset > self._recovery_point
        ):
            if self._flusher is None:
                self.flush()
            else:
                self._flusher.join(self)
            return True
        if self.has_unflushed_segments:
            self._flush_sealed()
            return True
        return False

    # --- the end ---

    def close(self) -> None:
        """Leave the files as a clean shutdown does: flushed, indexes trimmed, producers saved."""
        flush = self.plan_close()
        self.finish_close(flush, None if flush is None else flush.run())

    def plan_close(self) -> Flush | None:
        """Do all of :meth:`close` that needs no disk, and plan what does; None if nothing.

        :meth:`finish_close` has to follow. StorageError, and the partition is closed.
        """
        if self._stopped is not None:
            return None
        try:
            self._log.active.seal()
            self._producers.take_snapshot()
            self._log.remove_doomed(None)
            return self.plan_flush(self._clock.now_ms())
        except STORAGE_FAILURES as error:
            failure = self._fail(error)
            self._stop("is closed")
            raise failure from error

    def finish_close(self, flush: Flush | None, failure: Exception | None) -> None:
        """Take over how the flush went, and give all files back. StorageError if it failed."""
        try:
            if flush is not None:
                self.finish_flush(flush, failure)
            if failure is not None:
                raise self._fail(failure) from failure
        finally:
            if self._stopped is None:
                self._stop("is closed")
            elif not self._log.is_empty:
                self._log.close()

    def _stop(self, why: str) -> None:
        self._log.close()
        self._producers.release()
        if self._stopped is None:
            self._stopped = StorageError(f"{self.topic}-{self.index} {why}")
