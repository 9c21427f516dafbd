"""Removal of data while a partition serves requests: DeleteRecords, retention, compaction.

Source: ``UnifiedLog.deleteOldSegments``, ``UnifiedLog.maybeIncrementLogStartOffset``,
``LogCleaner``.
"""

from __future__ import annotations

from fencepost.logcore.clock import Clock
from fencepost.logcore.compaction import (
    DEDUPE_BUFFER_BYTES,
    CompactionRound,
    DirtyRange,
    dirty_range,
    plan_round,
)
from fencepost.logcore.disk_steps import DiskSteps
from fencepost.logcore.durable import FlushState
from fencepost.logcore.epochs import LeaderEpochs
from fencepost.logcore.errors import OffsetOutOfRangeError
from fencepost.logcore.fs import FileSystem
from fencepost.logcore.log import Log
from fencepost.logcore.marks import STORAGE_FAILURES
from fencepost.logcore.producers import ProducerStateManager
from fencepost.logcore.retention import beyond_age, beyond_log_start, beyond_size
from fencepost.logcore.segment import Segment


class Cleanup:
    """Removes data from one log: at its beginning, and in its sealed segments by compaction."""

    def __init__(
        self,
        fs: FileSystem,
        log: Log,
        producers: ProducerStateManager,
        epochs: LeaderEpochs,
        flushes: FlushState,
        clock: Clock,
    ) -> None:
        self._fs = fs
        self._log = log
        self._producers = producers
        self._epochs = epochs
        self._flushes = flushes
        self._marks = flushes.marks
        self._clock = clock

    # --- log start and retention ---

    def delete_records_before(self, offset: int) -> int:
        """Move the log start up to ``offset``, and return it; −1 stands for the high watermark.

        The next :meth:`delete_old_segments` removes the files; the owner must checkpoint the log
        start. Raises OffsetOutOfRangeError for any other negative offset, and for an offset above
        the high watermark.
        """
        self._marks.raise_if_stopped()
        target = self._marks.high_watermark if offset == -1 else offset
        if not 0 <= target <= self._marks.high_watermark:
            raise OffsetOutOfRangeError(
                f"offset {offset} is not in 0 to {self._marks.high_watermark}, the high watermark"
            )
        self._move_log_start(target)
        self._marks.notify()
        return self._marks.log_start_offset

    def _move_log_start(self, offset: int) -> None:
        if offset <= self._marks.log_start_offset:
            return
        self._marks.log_start_offset = offset
        try:
            self._epochs.truncate_from_start(offset)
        except STORAGE_FAILURES as error:
            raise self._marks.fail(error) from error

    def delete_old_segments(self, now_ms: int) -> DiskSteps[int]:
        """Remove the segments below the log start, or over the size or age limit; return how many.

        The files of these segments are renamed ``.deleted``, and a later call removes them after
        ``file_delete_delay_ms``. There may be thousands of segments, so each step between two
        yields is short.
        """
        self._marks.raise_if_stopped()
        removed, mark = 0, self._marks.high_watermark
        try:
            self._log.remove_deleted_files(now_ms)
            # Leave segments that are added meanwhile to the next call, so that this call ends.
            while segments := self._removable_segments(now_ms, mark):
                yield from self._remove_segments(segments, now_ms)
                removed += len(segments)
                if self._marks.stopped is not None:
                    break
        except STORAGE_FAILURES as error:
            raise self._marks.refuse(error) from error
        if removed:
            self._marks.notify()
        return removed

    def _removable_segments(self, now_ms: int, mark: int) -> list[Segment]:
        log, config = self._log, self._log.config
        segments = beyond_log_start(log, self._marks.log_start_offset, mark)
        if not segments and "delete" in config.cleanup_policy:
            segments = beyond_size(log, config.retention_bytes, mark) or beyond_age(
                log, config.retention_ms, mark, now_ms
            )
        return segments

    def _remove_segments(self, segments: list[Segment], now_ms: int) -> DiskSteps[None]:
        log = self._log
        if segments[-1] is log.active:
            self._flushes.roll(now_ms)
        following = log.segments[len(segments)]
        # The start moves first: a kill in between leaves extra files, never a hole.
        self._move_log_start(following.base_offset)
        for segment in segments:
            self._producers.snapshot_offsets.discard(segment.base_offset)
        yield from log.remove_in_steps(
            segments, now_ms=now_ms, delay_ms=log.config.file_delete_delay_ms
        )

    # --- compaction ---

    def dirty_range(self, checkpoint: int | None, now_ms: int) -> DirtyRange:
        """Return the range that a compaction round could clean, from the last round's end on."""
        self._marks.raise_if_stopped()
        try:
            return dirty_range(
                self._log,
                checkpoint,
                log_start_offset=self._marks.log_start_offset,
                last_stable_offset=self._marks.last_stable_offset,
                now_ms=now_ms,
            )
        except STORAGE_FAILURES as error:
            raise self._marks.refuse(error) from error

    def plan_compaction(
        self, dirty: DirtyRange, *, now_ms: int, budget_bytes: int = DEDUPE_BUFFER_BYTES
    ) -> CompactionRound | None:
        """Begin a round over ``dirty``; None if there is nothing to clean.

        Only one round runs at a time. ``budget_bytes`` bounds the memory for keys; a round with
        more keys cleans less. The caller must flush the log before any segments are replaced:
        see :attr:`CompactionRound.relies_on`.
        """
        self._marks.raise_if_stopped()
        log = self._log
        truncation_count = log.truncation_count
        try:
            compaction = plan_round(
                self._fs,
                log,
                dirty,
                last_records=self._producers.last_records(),
                now_ms=now_ms,
                budget_bytes=budget_bytes,
                is_current=lambda: (
                    self._marks.stopped is None and log.truncation_count == truncation_count
                ),
            )
        except STORAGE_FAILURES as error:
            raise self._marks.refuse(error) from error
        if compaction is not None:
            compaction.relies_on = log.log_end_offset
        return compaction

    def install_cleaned(self, compaction: CompactionRound) -> bool:
        """Replace the segments that the round has just rewritten.

        Return False, which ends the round, if the log was truncated since the plan, or is not
        flushed up to :attr:`CompactionRound.relies_on`. If retention has removed one of the
        segments, the round rewrites the remaining ones. Readers of an old segment continue. Raises
        StorageError.
        """
        self._marks.raise_if_stopped()
        cleaned = compaction.cleaned
        if cleaned is None:
            raise ValueError("the round has written nothing")
        log = self._log
        try:
            if not compaction.is_current or self._marks.recovery_point < compaction.relies_on:
                compaction.discard()
                return False
            if not log.holds(cleaned.replaced):
                compaction.repeat()
                return True
            log.replace(
                cleaned.replaced,
                cleaned.base_offset,
                cleaned.suffixes,
                now_ms=self._clock.now_ms(),
                delay_ms=self._log.config.file_delete_delay_ms,
            )
            compaction.cleaned = None
        except STORAGE_FAILURES as error:
            raise self._marks.fail(error) from error
        for segment in cleaned.replaced:
            if segment.base_offset != cleaned.base_offset:
                self._producers.snapshot_offsets.discard(segment.base_offset)
        return True
