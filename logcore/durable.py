"""Flushing a log: inside of its appends, or by a scheduler that many logs share.

While a scheduler runs a flush that ``flush.messages`` has made due, :attr:`Marks.flushed_end` stays
at the flushed offset, and so does the high watermark of a log that has a single replica. Readers
see nothing beyond the high watermark, and an append is answered once :attr:`Marks.recovery_point`
has passed its last record.

After a roll, the sealed segment is flushed as well. No setting asks for that flush, and no request
waits for it. Recovery then skips the segment, so damage in it cannot remove later records.

Source: ``UnifiedLog.flush``, ``UnifiedLog.roll``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Protocol

from fencepost.logcore.checkpoints import PARTITION_METADATA
from fencepost.logcore.epochs import LeaderEpochs
from fencepost.logcore.flush import Flush, is_refusal
from fencepost.logcore.log import Log
from fencepost.logcore.marks import Marks
from fencepost.logcore.producers import ProducerStateManager
from fencepost.logcore.segment import Segment

SEALED_AT_ONCE: Final = 16
"""The maximum number of sealed segments in one flush. After an upgrade, or a kill, thousands may be
due. The recovery point moves after each flush, and other logs are flushed in between."""


class FlushScheduler(Protocol):
    """Runs the flushes of logs; one flush may serve several appends."""

    def join(self, flushes: FlushState) -> None:
        """Flush the log soon: plan, run, and pass the result to ``finish``."""

    def join_sealed(self, flushes: FlushState) -> None:
        """Flush the log's sealed segments at low priority, beginning with ``plan_sealed``."""


class FlushState:
    """The unflushed part of one log: plans its flushes, and starts them when they are due."""

    def __init__(
        self,
        log: Log,
        producers: ProducerStateManager,
        epochs: LeaderEpochs,
        marks: Marks,
        scheduler: FlushScheduler | None,
        now_ms: int,
    ) -> None:
        self.marks = marks
        self._log = log
        self._producers = producers
        self._epochs = epochs
        self._scheduler = scheduler
        self._flushed_at_ms = now_ms
        self.is_new = False
        """Whether power loss may still remove the directory's name and topic id."""

    @property
    def is_awaited(self) -> bool:
        """Whether the log end waits for a flush, and is not yet visible to clients."""
        marks = self.marks
        return marks.flushed_end != self._log.log_end_offset and marks.stopped is None

    def appended(self, offset: int, now_ms: int) -> None:
        """Advance the marks after an append at ``offset``, and flush if that is due.

        With a scheduler, an append that makes a flush due by ``flush_messages`` waits for the
        flush, and :attr:`Marks.flushed_end` moves afterwards. No append waits for a flush that
        ``flush_ms`` makes due.
        """
        marks, config, end = self.marks, self._log.config, self._log.log_end_offset
        held = marks.flushed_end != offset or end - marks.recovery_point >= config.flush_messages
        if held or now_ms - self._flushed_at_ms >= config.flush_ms:
            self.begin(now_ms)
            held = held and self._scheduler is not None
        if not held:
            marks.move_flushed_end(end)
        if not held or marks.is_replicated:
            marks.notify()

    def recovered(self, now_ms: int) -> None:
        """Flush records that ``flush.messages`` made due before the process was killed.

        Before the kill, these records were neither visible nor acknowledged. Now they are visible,
        and a producer that sends them again is answered at once, because they are duplicates.
        """
        if self._log.log_end_offset - self.marks.recovery_point >= self._log.config.flush_messages:
            self.run(now_ms)

    def begin(self, now_ms: int) -> None:
        """Have the whole log flushed soon; immediately if there is no scheduler."""
        if self._scheduler is None:
            self.run(now_ms)
        else:
            self._scheduler.join(self)

    def roll(self, now_ms: int) -> Segment:
        """Begin a new segment, and have the sealed one flushed."""
        # The snapshot comes first: if it fails, the next append must still find that a roll is due.
        self._producers.take_snapshot()
        segment = self._log.roll(now_ms)
        self._run_sealed()
        return segment

    def run(self, now_ms: int) -> None:
        """Make everything survive power loss: the recovery point becomes the log end."""
        flush = self.plan(now_ms)
        if flush is not None:
            self.finish(flush, flush.run())
            self.marks.raise_if_stopped()

    def plan(self, now_ms: int) -> Flush | None:
        """Plan the flush of all unflushed data; None without any. Raises StorageError.

        :meth:`finish` must follow.
        """
        self.marks.raise_if_stopped()
        self._flushed_at_ms = now_ms
        log, point = self._log, self.marks.recovery_point
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
        """Plan a flush of the oldest sealed segments that are not on disk; None without any.

        A flush covers at most SEALED_AT_ONCE segments.
        """
        self.marks.raise_if_stopped()
        if not self.has_sealed:
            return None
        segments = self._log.from_offset(self.marks.recovery_point)
        return self._plan(segments[min(SEALED_AT_ONCE, len(segments) - 1)].base_offset)

    def _plan(self, upto: int) -> Flush:
        point = self.marks.recovery_point
        self._log.flushes.reschedule()
        further = self._producers.snapshots_in(point, upto)
        parent = None
        if self.is_new:
            further.append(f"{self._log.directory}/{PARTITION_METADATA}")
            parent = str(Path(self._log.directory).parent)
        epochs = self._epochs.plan_flush()
        flush = self._log.plan_flush(point, upto, further, epochs=epochs, parent=parent)
        was_new, self.is_new = self.is_new, False

        def mark_unsynced() -> None:
            self.is_new = self.is_new or was_new
            self._epochs.is_synced = self._epochs.is_synced and epochs is None

        flush.on_reschedule.append(mark_unsynced)
        return flush

    @property
    def has_sealed(self) -> bool:
        """Whether power loss may still damage a sealed segment."""
        return self._log.active.base_offset > self.marks.recovery_point

    def _run_sealed(self) -> None:
        """Have the sealed segments flushed."""
        if self._scheduler is not None:
            self._scheduler.join_sealed(self)
            return
        while (flush := self.plan_sealed()) is not None:
            failure = flush.run()
            self.finish(flush, failure)
            self.marks.raise_if_stopped()
            if failure is not None:
                return  # it was refused; the next flush or roll tries again

    def finish(self, flush: Flush, failure: Exception | None) -> None:
        """Apply the result of a planned flush. After a failed flush the log is off line.

        A refused flush that no append waits for is due again.
        """
        flush.done()
        if self.marks.stopped is not None:
            return
        if failure is not None:
            is_awaited = self.is_awaited and flush.end > self.marks.flushed_end
            if is_refusal(failure) and not is_awaited:
                flush.reschedule()
                return
            self.marks.fail(failure)
            return
        marks = self.marks
        marks.recovery_point = max(marks.recovery_point, min(flush.end, marks.recovery_limit))
        if flush.end > self.marks.flushed_end:
            self.marks.move_flushed_end(flush.end)
            self.marks.notify()

    def run_if_due(self, now_ms: int) -> bool:
        """Flush if ``flush_ms`` has passed, even without a further append.

        Sealed segments that a recovery or a refused flush has left unflushed are flushed as well.
        Return whether a flush was started.
        """
        if self.marks.stopped is not None:
            return False
        if (
            now_ms - self._flushed_at_ms >= self._log.config.flush_ms
            and self._log.log_end_offset > self.marks.recovery_point
        ):
            self.begin(now_ms)
            return True
        if self.has_sealed:
            self._run_sealed()
            return True
        return False
