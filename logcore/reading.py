"""The reading side of a partition: its marks, fetches, look-ups, and who waits for news.

Source: ``UnifiedLog``, ``Partition``.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Final, NamedTuple

from fencepost.logcore.batch import BatchHeader
from fencepost.logcore.clock import Clock
from fencepost.logcore.config import LogConfig
from fencepost.logcore.epoch_check import agree, epochs_of
from fencepost.logcore.epochs import UNDEFINED_EPOCH, LeaderEpochs
from fencepost.logcore.errors import (
    CorruptRecordError,
    FencedLeaderEpochError,
    NoRoomError,
    OffsetOutOfRangeError,
    StorageError,
    UnknownLeaderEpochError,
)
from fencepost.logcore.file_range import MIN_RANGE_BYTES, FileRange
from fencepost.logcore.fs import NO_HANDLES, NO_ROOM, FileSystem
from fencepost.logcore.index import CorruptIndexError
from fencepost.logcore.log import Log
from fencepost.logcore.producers import ProducerState, ProducerStateManager
from fencepost.logcore.recovery import LoadedLog, RecoveryReport
from fencepost.logcore.timestamps import Search, first_not_before, latest

STORAGE_FAILURES: Final = (OSError, CorruptIndexError)
"""After one of these a partition is off line."""


class Isolation(IntEnum):
    """How far a reader may see."""

    READ_UNCOMMITTED = 0
    READ_COMMITTED = 1


class LogReadInfo(NamedTuple):
    """Whole batches and the partition's marks. ``aborted`` has (producer id, first offset) pairs.

    It is None for ``READ_UNCOMMITTED``, and may name transactions behind ``records``.
    """

    records: bytes | FileRange
    high_watermark: int
    last_stable_offset: int
    log_start_offset: int
    aborted: tuple[tuple[int, int], ...] | None
    is_behind: bool
    """Whether the reader is in an older segment than the end: to wait would bring nothing more."""


class ReadablePartition:
    """What a partition shows. ``Partition`` adds what changes it."""

    def __init__(
        self,
        fs: FileSystem,
        directory: str,
        *,
        topic: str,
        index: int,
        topic_id: uuid.UUID,
        config: LogConfig,
        clock: Clock,
        leader_epoch: int,
        producers: ProducerStateManager,
        epochs: LeaderEpochs,
        loaded: LoadedLog,
    ) -> None:
        self._fs = fs
        self._directory = directory
        self.topic = topic
        self.index = index
        self.topic_id = topic_id
        self._config = config
        self._clock = clock
        # What is in the log can't be from the future of its leader.
        self.leader_epoch = max(leader_epoch, epochs.latest)
        self._log: Log = loaded.log
        self._producers = producers
        self._epochs = epochs
        self._log_start_offset = loaded.log_start_offset
        self._high_watermark = loaded.log.log_end_offset
        self._recovery_point = loaded.log_start_offset
        self._flushed_at_ms = clock.now_ms()
        self._metadata_pending = False
        self._is_new = False
        """Whether power loss may still take the directory's name and identity."""
        self._listeners: dict[int, Callable[[], None]] = {}
        self._next_listener = 0
        self._stopped: StorageError | None = None
        self.offline: StorageError | None = None
        """Why the partition is off line, None while it serves and after a clean close."""
        self.on_offline: Callable[[ReadablePartition, StorageError], None] | None = None
        """Called once, with the cause, when the file system fails under the partition."""
        self.recovery: RecoveryReport | None = loaded.report
        """What recovery found at open, None if nothing had to be scanned."""

    # --- marks ---

    @property
    def name(self) -> str:
        """Topic and index as logs and messages have them."""
        return f"{self.topic}-{self.index}"

    @property
    def directory(self) -> str:
        """Where the files are."""
        return self._directory

    @property
    def config(self) -> LogConfig:
        """The topic's settings; a change holds from the next append on."""
        return self._config

    @config.setter
    def config(self, config: LogConfig) -> None:
        self._config = config
        self._log.config = config

    @property
    def log_start_offset(self) -> int:
        """The first offset that can be read."""
        return self._log_start_offset

    @property
    def log_end_offset(self) -> int:
        """The offset that the next record gets."""
        return self._log.log_end_offset

    @property
    def high_watermark(self) -> int:
        """The offset below which every replica has the log; readers see nothing beyond."""
        return self._high_watermark

    @property
    def last_stable_offset(self) -> int:
        """The offset below which no transaction is open; the end for ``READ_COMMITTED``."""
        stable = self._producers.last_stable_offset(self._high_watermark)
        return max(stable, self._log_start_offset)

    @property
    def recovery_point(self) -> int:
        """The offset below which everything survives power loss."""
        return self._recovery_point

    @property
    def size_bytes(self) -> int:
        """Bytes of all log files."""
        return self._log.size_bytes

    def _fail(self, error: Exception) -> StorageError:
        """Take the partition off line: what is on disk is known again after recovery only."""
        failure = StorageError(f"{self.topic}-{self.index} is off line: {error}")
        if self._stopped is None:
            self.offline = self._stopped = failure
            if self.on_offline is not None:
                self.on_offline(self, failure)
            self._notify()
        return failure

    def _refuse(self, error: Exception) -> StorageError:
        """Say what a failure means: off line, but where it has changed nothing.

        That is so without room on disk, and where no further file may be opened.
        """
        if isinstance(error, OSError) and error.errno in NO_ROOM | NO_HANDLES:
            return NoRoomError(f"{self.topic}-{self.index} can't go on now: {error}")
        return self._fail(error)

    def _throw_if_stopped(self) -> None:
        if self._stopped is not None:
            raise self._stopped

    # --- reading ---

    def has_open_transaction(self, producer_id: int, producer_epoch: int | None = None) -> bool:
        """Whether the producer has a transaction open here, under this epoch or under any."""
        return self._producers.has_open_transaction(producer_id, producer_epoch)

    def fetch(
        self,
        offset: int,
        max_bytes: int,
        isolation: Isolation,
        *,
        at_least_one: bool,
        min_range_bytes: int = MIN_RANGE_BYTES,
    ) -> LogReadInfo:
        """Read whole batches from the one that holds ``offset`` on, ``max_bytes`` at most.

        ``at_least_one``: the first batch comes even if it is larger. The bytes may begin before
        ``offset`` and are those of one segment. What has ``min_range_bytes`` stays in its file.
        OffsetOutOfRangeError outside of log start … end.
        """
        if self._stopped is not None:
            raise self._stopped
        log = self._log
        if not self._log_start_offset <= offset <= log.log_end_offset:
            raise OffsetOutOfRangeError(
                f"offset {offset} is outside of {self._log_start_offset} … {log.log_end_offset}"
            )
        high_watermark, stable = self._high_watermark, self.last_stable_offset
        committed = isolation == Isolation.READ_COMMITTED
        limit = stable if committed else high_watermark
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
            raise self._refuse(error) from error
        return LogReadInfo(
            read.records,
            high_watermark,
            stable,
            self._log_start_offset,
            aborted,
            read.is_behind,
        )

    def available_bytes(self, offset: int, isolation: Isolation) -> int:
        """Count the bytes a reader at ``offset`` could get; 0 outside of the log."""
        if self._stopped is not None or offset < self._log_start_offset:
            return 0
        limit = self._limit(isolation)
        if offset >= limit:
            return 0
        try:
            return self._log.bytes_between(offset, limit)
        except STORAGE_FAILURES as error:
            raise self._refuse(error) from error

    def _limit(self, isolation: Isolation) -> int:
        if isolation == Isolation.READ_COMMITTED:
            return self.last_stable_offset
        return self._high_watermark

    def offset_for_timestamp(self, timestamp_ms: int, isolation: Isolation) -> Search:
        """Find, in steps, the first readable record that is not older than ``timestamp_ms``."""
        search = first_not_before(self._log, timestamp_ms, self._log_start_offset)
        return self._searched(search, isolation)

    def max_timestamp_offset(self, isolation: Isolation) -> Search:
        """Find, in steps, the first record with the largest timestamp.

        None if no record has one, or it can't be read yet. (Kafka answers none where the record
        that a batch's header promises is gone.)
        """
        return self._searched(latest(self._log, self._log_start_offset), isolation)

    def _searched(self, search: Search, isolation: Isolation) -> Search:
        self._throw_if_stopped()
        limit = self._limit(isolation)
        try:
            found = yield from search
        except STORAGE_FAILURES as error:
            raise self._refuse(error) from error
        self._throw_if_stopped()
        return found if found is not None and found.offset < limit else None

    def offset_for_leader_epoch(self, epoch: int) -> tuple[int, int]:
        """Return (epoch, end offset) of the largest epoch not above ``epoch``; (−1, −1) if none."""
        return self._checked_epochs().end_offset_for(epoch, self.log_end_offset)

    def end_of_epoch(self, epoch: int) -> tuple[int, int]:
        """Return the same as a client sees it, to whom our epoch exists before its first batch."""
        if epoch == self.leader_epoch:
            return epoch, self.log_end_offset
        return self.offset_for_leader_epoch(epoch)

    def epoch_of(self, offset: int) -> int:
        """Return the epoch under which ``offset`` was written, −1 if that is not known."""
        return self._checked_epochs().epoch_at(offset)

    def _checked_epochs(self) -> LeaderEpochs:
        self._throw_if_stopped()
        try:
            self._check_epochs()
        except STORAGE_FAILURES as error:
            raise self._refuse(error) from error
        return self._epochs

    def _check_epochs(self) -> None:
        """Compare what a file said of leader epochs with the log, before anybody relies on it.

        A log that can't be walked has other worries; the file is believed then.
        """
        epochs = self._epochs
        if epochs.is_checked:
            return
        try:
            if not agree(self._log, self._log_start_offset, epochs.entries):
                epochs.replace(epochs_of(self._log, self._log_start_offset))
        except CorruptRecordError:
            pass
        epochs.is_checked = True

    def check_leader_epoch(self, epoch: int) -> None:
        """Compare a request's epoch with ours; −1 is not checked.

        Raises FencedLeaderEpochError, UnknownLeaderEpochError.
        """
        if epoch in {UNDEFINED_EPOCH, self.leader_epoch}:
            return
        if epoch < self.leader_epoch:
            raise FencedLeaderEpochError(f"leader epoch {epoch}, ours is {self.leader_epoch}")
        raise UnknownLeaderEpochError(f"leader epoch {epoch}, ours is {self.leader_epoch}")

    def read_all(self) -> Iterator[tuple[BatchHeader, memoryview]]:
        """Yield header and bytes of each batch from log start to log end.

        The first batch may begin before the log start. What is appended meanwhile comes as well.
        """
        self._throw_if_stopped()
        try:
            for _, header, batch in self._log.batches(self._log_start_offset):
                yield header, batch
        except STORAGE_FAILURES as error:
            raise self._refuse(error) from error

    def producers(self) -> Iterator[ProducerState]:
        """Every producer that is remembered now, one by one: they may be very many."""
        return self._producers.view()

    def listen(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Have ``callback`` called after each change of the marks; return what ends that.

        It is called after an append, marker, truncation or deletion, and when the partition goes
        off line. It must not append to this partition.
        """
        token = self._next_listener
        self._next_listener += 1
        self._listeners[token] = callback

        def unsubscribe() -> None:
            self._listeners.pop(token, None)

        return unsubscribe

    def _notify(self) -> None:
        for callback in tuple(self._listeners.values()):
            callback()
