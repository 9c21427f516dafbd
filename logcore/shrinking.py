"""How a partition gets smaller while it serves: log start, retention, expiry, compaction.

Source: ``UnifiedLog.deleteOldSegments``, ``UnifiedLog.maybeIncrementLogStartOffset``,
``LogCleaner``.
"""

from __future__ import annotations

from fencepost.logcore.compaction import (
    DEDUPE_BUFFER_BYTES,
    CompactionRound,
    DirtyRange,
    dirty_range,
    plan_round,
)
from fencepost.logcore.disk_steps import DiskSteps
from fencepost.logcore.durable import DurablePartition
from fencepost.logcore.errors import OffsetOutOfRangeError
from fencepost.logcore.reading import STORAGE_FAILURES
from fencepost.logcore.retention import beyond_age, beyond_log_start, beyond_size
from fencepost.logcore.segment import Segment


class ShrinkingPartition(DurablePartition):
    """What takes away from a log, at its beginning and in its sealed part."""

    def _roll(self, now_ms: int) -> Segment:
        # The snapshot comes first: a roll that is refused half-way is begun anew, and then has it.
        self._producers.take_snapshot()
        segment = self._log.roll(now_ms)
        self._flush_sealed()
        return segment

    # --- at the beginning ---

    def delete_records_before(self, offset: int) -> int:
        """Move the log start up to ``offset``, −1 for the high watermark; return the log start.

        The files go with the next :meth:`retaining`; the owner has to checkpoint the log start.
        Raises OffsetOutOfRangeError beyond the high watermark.
        """
        self._throw_if_stopped()
        target = self._high_watermark if offset == -1 else offset
        if not 0 <= target <= self._high_watermark:
            raise OffsetOutOfRangeError(
                f"offset {offset} is beyond the high watermark {self._high_watermark}"
            )
        self._move_log_start(target)
        self._notify()
        return self._log_start_offset

    def _move_log_start(self, offset: int) -> None:
        if offset <= self._log_start_offset:
            return
        self._log_start_offset = offset
        try:
            self._epochs.truncate_from_start(offset)
        except STORAGE_FAILURES as error:
            raise self._fail(error) from error

    def retaining(self, now_ms: int) -> DiskSteps[int]:
        """Remove the segments that log start, size or age give up; return how many.

        Their files are renamed ``.deleted``, and removed by a later call after
        ``file_delete_delay_ms``. There may be thousands: little is done between two
        yields.
        """
        self._throw_if_stopped()
        removed, mark = 0, self._high_watermark
        try:
            self._log.remove_doomed(now_ms)
            # What is appended meanwhile is for the next call, or this one might never end.
            while segments := self._given_up(now_ms, mark):
                yield from self._removing(segments, now_ms)
                removed += len(segments)
                if self._stopped is not None:
                    break
        except STORAGE_FAILURES as error:
            raise self._refuse(error) from error
        if removed:
            self._notify()
        return removed

    def _given_up(self, now_ms: int, mark: int) -> list[Segment]:
        log, config = self._log, self._config
        found = beyond_log_start(log, self._log_start_offset, mark)
        if not found and "delete" in config.cleanup_policy:
            found = beyond_size(log, config.retention_bytes, mark) or beyond_age(
                log, config.retention_ms, mark, now_ms
            )
        return found

    def _removing(self, segments: list[Segment], now_ms: int) -> DiskSteps[None]:
        log = self._log
        if segments[-1] is log.active:
            self._roll(now_ms)
        following = log.segments[len(segments)]
        # The start moves first: a kill in between leaves a few files too many, never a hole.
        self._move_log_start(following.base_offset)
        for segment in segments:
            self._producers.snapshot_offsets.discard(segment.base_offset)
        yield from log.removing(segments, now_ms=now_ms, delay_ms=self._config.file_delete_delay_ms)

    def expire_producers(self, now_ms: int, producer_id_expiration_ms: int | None = None) -> int:
        """Forget producers that were silent too long and have nothing open; return how many."""
        if producer_id_expiration_ms is not None:
            self._producers.expiration_ms = producer_id_expiration_ms
        return self._producers.expire(now_ms)

    # --- compaction ---

    def dirty_range(self, checkpoint: int | None, now_ms: int) -> DirtyRange:
        """Work out what a round of compaction could clean, from the last round's end on."""
        self._throw_if_stopped()
        try:
            return dirty_range(
                self._log,
                checkpoint,
                log_start_offset=self._log_start_offset,
                last_stable_offset=self.last_stable_offset,
                now_ms=now_ms,
            )
        except STORAGE_FAILURES as error:
            raise self._refuse(error) from error

    def plan_compaction(
        self, dirty: DirtyRange, *, now_ms: int, budget_bytes: int = DEDUPE_BUFFER_BYTES
    ) -> CompactionRound | None:
        """Begin a round over ``dirty``, None if there is nothing to clean.

        One round at a time. ``budget_bytes`` bounds the memory for keys; a round that meets more
        keys cleans less. Where there is a flusher the caller has to flush the log before anything
        is installed: see :attr:`CompactionRound.relies_on`.
        """
        self._throw_if_stopped()
        log = self._log
        cuts = log.cuts
        try:
            found = plan_round(
                self._fs,
                log,
                dirty,
                last_records=self._producers.last_records(),
                now_ms=now_ms,
                budget_bytes=budget_bytes,
                is_current=lambda: self._stopped is None and log.cuts == cuts,
            )
        except STORAGE_FAILURES as error:
            raise self._refuse(error) from error
        if found is not None:
            found.relies_on = log.log_end_offset
            if self._flusher is None:
                self._flush_now(now_ms)
        return found

    def install_cleaned(self, compaction: CompactionRound) -> bool:
        """Replace the segments that the round has just written anew.

        False, and the round is over, if the log was cut since the plan, or what the round relies on
        is not on disk. Where retention has removed one of them, the round will write what is left.
        Readers in the middle of an old segment go on. Raises StorageError.
        """
        self._throw_if_stopped()
        cleaned = compaction.cleaned
        if cleaned is None:
            raise ValueError("the round has written nothing")
        log = self._log
        try:
            if not compaction.is_current or self._recovery_point < compaction.relies_on:
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
                delay_ms=self._config.file_delete_delay_ms,
            )
            compaction.cleaned = None
        except STORAGE_FAILURES as error:
            raise self._fail(error) from error
        for segment in cleaned.replaced:
            if segment.base_offset != cleaned.base_offset:
                self._producers.snapshot_offsets.discard(segment.base_offset)
        return True
