"""The reading side of a partition: fetches and look-ups.

Source: ``UnifiedLog``, ``Partition``.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

from fencepost.logcore.batch import BatchHeader
from fencepost.logcore.epoch_check import agree, epochs_of
from fencepost.logcore.epochs import LeaderEpochs
from fencepost.logcore.errors import (
    CorruptRecordError,
    OffsetOutOfRangeError,
)
from fencepost.logcore.file_range import MIN_RANGE_BYTES, FileRange
from fencepost.logcore.log import Log
from fencepost.logcore.marks import STORAGE_FAILURES, Marks
from fencepost.logcore.timestamps import Search, first_not_before, latest


class Isolation(IntEnum):
    """Which offsets a reader may see."""

    READ_UNCOMMITTED = 0
    READ_COMMITTED = 1
    LOG_END = 2
    """For other replicas: everything up to the log end. No client may ask for it."""


class LogReadInfo(NamedTuple):
    """Whole batches, the partition's marks, and the transactions that were aborted.

    ``aborted`` has (producer id, first offset) of each aborted transaction. It may include
    transactions that begin after ``records``, and is None unless the isolation is
    ``READ_COMMITTED``.
    """

    records: bytes | FileRange
    high_watermark: int
    last_stable_offset: int
    log_start_offset: int
    aborted: tuple[tuple[int, int], ...] | None
    is_behind: bool
    """Whether the limit lies in a later segment: waiting would not extend this read."""


class LogReader:
    """Reads one log up to its marks. All methods raise StorageError once the log is off line."""

    def __init__(self, log: Log, epochs: LeaderEpochs, marks: Marks) -> None:
        self._log = log
        self._epochs = epochs
        self._marks = marks

    def fetch(
        self,
        offset: int,
        max_bytes: int,
        isolation: Isolation,
        *,
        at_least_one: bool,
        min_range_bytes: int = MIN_RANGE_BYTES,
    ) -> LogReadInfo:
        """Read up to ``max_bytes`` in whole batches; the first is the one that holds ``offset``.

        ``at_least_one`` returns the first batch even if it is larger. The result may begin before
        ``offset`` and comes from one segment; if it has ``min_range_bytes`` or more, it is a range
        of the file. Raises OffsetOutOfRangeError if ``offset`` is outside of the log.
        """
        log, marks = self._log, self._marks
        marks.raise_if_stopped()
        if not marks.log_start_offset <= offset <= log.log_end_offset:
            raise OffsetOutOfRangeError(
                f"offset {offset} is outside of {marks.log_start_offset} … {log.log_end_offset}"
            )
        high_watermark, stable = marks.high_watermark, marks.last_stable_offset
        committed = isolation == Isolation.READ_COMMITTED
        limit = stable if committed else high_watermark
        if isolation == Isolation.LOG_END:
            limit = log.log_end_offset
        aborted: tuple[tuple[int, int], ...] | None = None
        try:
            read = log.read(
                offset,
                max_bytes,
                limit,
                at_least_one=at_least_one,
                min_range_bytes=min_range_bytes,
            )
            if committed:
                aborted = ()
                if read.records:
                    aborted = tuple(log.aborted_between(offset, read.upper_bound))
        except STORAGE_FAILURES as error:
            raise self._marks.refuse(error) from error
        return LogReadInfo(
            read.records,
            high_watermark,
            stable,
            self._marks.log_start_offset,
            aborted,
            read.is_behind,
        )

    def available_bytes(self, offset: int, isolation: Isolation) -> int:
        """Count the bytes that a reader at ``offset`` could get; 0 outside of the log."""
        if self._marks.stopped is not None or offset < self._marks.log_start_offset:
            return 0
        limit = self.end_of(isolation)
        if offset >= limit:
            return 0
        try:
            return self._log.bytes_between(offset, limit)
        except STORAGE_FAILURES as error:
            raise self._marks.refuse(error) from error

    def end_of(self, isolation: Isolation) -> int:
        """Return the offset up to which a reader may read."""
        if isolation == Isolation.READ_COMMITTED:
            return self._marks.last_stable_offset
        if isolation == Isolation.LOG_END:
            return self._log.log_end_offset
        return self._marks.high_watermark

    def offset_for_timestamp(self, timestamp_ms: int, isolation: Isolation) -> Search:
        """Find, in steps, the first readable record that is not older than ``timestamp_ms``."""
        search = first_not_before(self._log, timestamp_ms, self._marks.log_start_offset)
        return self._run_search(search, isolation)

    def max_timestamp_offset(self, isolation: Isolation) -> Search:
        """Find, in steps, the first record with the largest timestamp.

        Return None if no record has a timestamp, or if that record is not readable yet. (Kafka also
        returns none if a batch header has the timestamp of a record that has been removed.)
        """
        return self._run_search(latest(self._log, self._marks.log_start_offset), isolation)

    def _run_search(self, search: Search, isolation: Isolation) -> Search:
        self._marks.raise_if_stopped()
        limit = self.end_of(isolation)
        try:
            match = yield from search
        except STORAGE_FAILURES as error:
            raise self._marks.refuse(error) from error
        self._marks.raise_if_stopped()
        return match if match is not None and match.offset < limit else None

    def offset_for_leader_epoch(self, epoch: int) -> tuple[int, int]:
        """Return (epoch, end offset) of the largest epoch not above ``epoch``; (−1, −1) if none."""
        return self._checked_epochs().end_offset_for(epoch, self._log.log_end_offset)

    def end_of_epoch(self, epoch: int) -> tuple[int, int]:
        """Return (epoch, end offset) for a client; the current epoch may have no batch yet."""
        if epoch == self._marks.leader_epoch:
            return epoch, self._log.log_end_offset
        return self.offset_for_leader_epoch(epoch)

    def epoch_of(self, offset: int) -> int:
        """Return the epoch under which ``offset`` was written, −1 if it is unknown."""
        return self._checked_epochs().epoch_at(offset)

    @property
    def latest_epoch(self) -> int:
        """The newest leader epoch, −1 while there is none."""
        return self._checked_epochs().latest

    def _checked_epochs(self) -> LeaderEpochs:
        self._marks.raise_if_stopped()
        try:
            self.check_epochs()
        except STORAGE_FAILURES as error:
            raise self._marks.refuse(error) from error
        return self._epochs

    def check_epochs(self) -> None:
        """Compare the leader epochs from the file with the log, before their first use.

        If the log cannot be walked, the file is trusted.
        """
        epochs = self._epochs
        if epochs.is_checked:
            return
        try:
            if not agree(self._log, self._marks.log_start_offset, epochs.entries):
                epochs.replace(epochs_of(self._log, self._marks.log_start_offset))
        except CorruptRecordError:
            pass
        epochs.is_checked = True

    def read_all(self) -> Iterator[tuple[BatchHeader, memoryview]]:
        """Yield header and bytes of each batch from log start to log end.

        The first batch may begin before the log start. Batches appended meanwhile are included.
        """
        self._marks.raise_if_stopped()
        try:
            for _, header, batch in self._log.batches(self._marks.log_start_offset):
                yield header, batch
        except STORAGE_FAILURES as error:
            raise self._marks.refuse(error) from error
