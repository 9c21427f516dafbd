"""ShareFetch: wait for records, read them, and acquire them for a member.

A fetch waits at its share partitions until enough bytes are available, until records or locks are
released, or until MaxWaitMs has passed. Then it takes the fetch lock of each share partition that
it can acquire from, reads the logs, and acquires records. Only the batch headers are parsed.

Source: ``SharePartitionManager.processShareFetch``, ``DelayedShareFetch``, ``ShareFetchUtils``,
``PartitionMaxBytesStrategy``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.runtime.background import call_later, log_failure
from fencepost.coordinator.runtime.histogram import Histogram
from fencepost.coordinator.runtime.turns import Work
from fencepost.coordinator.services.served_partition import ServedPartition
from fencepost.coordinator.services.share_partitions import SharePartitions
from fencepost.groups.share.acquire import sent_batches
from fencepost.groups.share.commands import (
    AbortedTransaction,
    AcquiredRange,
    AcquireMode,
    AcquireRequest,
    Fetched,
    FetchedBatch,
    IsolationLevel,
    SharePartitionKey,
)
from fencepost.groups.share.errors import SharePartitionFailedError
from fencepost.groups.share.states import PartitionState
from fencepost.logcore.batch import BatchHeader, ControlType, first_control
from fencepost.logcore.clock import monotonic_s
from fencepost.logcore.errors import OffsetOutOfRangeError
from fencepost.logcore.file_range import MIN_RANGE_BYTES, FileRange
from fencepost.logcore.machine import DomainError
from fencepost.logcore.marks import STORAGE_FAILURES
from fencepost.logcore.read_batches import batch_headers, part_bytes, part_of
from fencepost.logcore.reading import Isolation, LogReadInfo
from fencepost.logcore.tracebacks import without_traceback
from fencepost.logcore.values import dataclass
from fencepost.protocol.steps import Steps

_ISOLATIONS: Final = {
    IsolationLevel.READ_UNCOMMITTED: Isolation.READ_UNCOMMITTED,
    IsolationLevel.READ_COMMITTED: Isolation.READ_COMMITTED,
}

HEADERS_PER_STEP: Final = 64
"""How many batch headers are parsed, in well under a millisecond, between checks of the time."""

MAX_GROUPS: Final = 1_000
"""The maximum number of groups with a histogram of lock waits. At this number, the histograms of
groups without a share session are removed."""


@dataclass(slots=True)
class ShareFetch:
    """One fetch. ``partitions`` are in the order in which they are read."""

    group_id: str
    member_id: str
    partitions: Iterable[tuple[SharePartitionKey, str]]
    """Share partitions that the client may read, with the names of their topics."""
    max_wait_ms: int
    min_bytes: int
    max_bytes: int
    max_records: int
    batch_size: int
    mode: AcquireMode = AcquireMode.BATCH_OPTIMIZED
    may_acquire: Callable[[], bool] | None = None
    """Returns whether the client's quota allows another response with records now. Called before
    records are acquired, since a throttled client would not receive them."""


class FetchedShare:
    """The result for one share partition."""

    __slots__ = ("acquired", "error", "is_read", "key", "ready", "records", "served", "topic")

    def __init__(self, key: SharePartitionKey, topic: str) -> None:
        self.key = key
        self.topic = topic
        self.served: ServedPartition | None = None
        self.ready: asyncio.Future[object] | None = None
        """A future that is done when the state is read; None if it was read already."""
        self.error: DomainError | None = None
        self.is_read = False
        """Whether the log was read; if so, the first response of a session contains the
        partition."""
        self.records: bytes | FileRange = b""
        self.acquired: list[AcquiredRange] = []


class ShareFetches:
    """Serves ShareFetch requests, on the event loop only."""

    def __init__(self, shares: SharePartitions, config: BrokerConfig) -> None:
        self.shares, self.config = shares, config
        self.waiting = 0
        """The number of waiting fetches."""
        self.expired = 0
        """The number of fetches whose MaxWaitMs has elapsed."""
        self.failed = 0
        """The number of fetches with an error for a partition: FailedShareFetchRequestsPerSec."""
        self.acquire_seconds: dict[str, Histogram] = {}
        """By group: how long fetches waited for fetch locks (TopicPartitionsAcquireTimeMs). A wait
        begins when the fetch arrives, or when it last took locks."""

    def note_acquired(self, group_id: str, seconds: float) -> None:
        """Record how long a fetch has waited for fetch locks."""
        histograms = self.acquire_seconds
        if group_id not in histograms:
            if len(histograms) >= MAX_GROUPS:
                self.acquire_seconds = histograms = {
                    group: took
                    for group, took in histograms.items()
                    if self.shares.sessions.has_group(group)
                }
            histograms[group_id] = Histogram()
        histograms[group_id].note(seconds)

    def run(self, fetch: ShareFetch) -> Work[list[FetchedShare]]:
        """Return the result of each share partition, in order."""
        parts: list[FetchedShare] = []
        for key, topic in fetch.partitions:
            parts.append(FetchedShare(key, topic))
            yield None
        if parts and fetch.max_records > 0 and fetch.max_bytes > 0:
            reading = _Reading(self, fetch, parts)
            try:
                yield from reading.run()
            finally:
                reading.end()
        return parts


class _Reading:
    """One fetch, from its arrival to its response: a :class:`WaitingFetch`."""

    def __init__(self, fetches: ShareFetches, fetch: ShareFetch, parts: list[FetchedShare]) -> None:
        self._fetches, self._shares = fetches, fetches.shares
        self._fetch, self._parts = fetch, parts
        self._loop = asyncio.get_running_loop()
        self._wake: asyncio.Future[None] | None = None
        self._is_woken = False
        self._is_due = fetch.max_wait_ms <= 0
        self._since_s = monotonic_s()
        self._timer: asyncio.TimerHandle | None = None
        self._undo: list[Callable[[], None]] = []
        self._has_answer = False
        self._is_throttled = False
        self._read_offsets: dict[SharePartitionKey, int] = {}
        """The fetch offsets of the last read."""
        self._max_bytes = min(fetch.max_bytes, fetches.config.int("fetch.max.bytes"))

    # --- waiting ---------------------------------------------------------------------------------

    def wake(self) -> None:
        """Try again, in another turn of the event loop."""
        self._is_woken = True
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _expire(self) -> None:
        self._is_due = True
        self._fetches.expired += 1
        self.wake()

    def end(self) -> None:
        """Stop waiting, and release all fetch locks."""
        if self._timer is not None:
            self._timer.cancel()
        for undo in self._undo:
            undo()
        self._undo.clear()
        for part in self._parts:
            served = part.served
            if served is not None:
                served.waiting.pop(self, None)
                served.release_fetch_lock(self)
            if part.ready is not None:
                part.ready.cancel()
        if self._wake is not None:
            self._wake.cancel()

    def _listen(self) -> Work[None]:
        """Register this fetch with its share partitions and their logs, once."""
        self._timer = call_later(self._loop, self._fetch.max_wait_ms, "share fetch", self._expire)
        for part in self._parts:
            served = part.served
            if served is not None and part.error is None:
                served.waiting[self] = None
                marks = served.log.marks
                self._undo.append(marks.listen(partial(self._log_changed, served)))
            yield None

    def _log_changed(self, served: ServedPartition) -> None:
        """Try again if a log's change may matter; the fetch then counts the bytes of all logs."""
        if self._is_woken:
            return
        marks, share = served.log.marks, served.share
        if (
            marks.stopped is not None
            or marks.leader_epoch != share.leader_epoch
            or marks.high_watermark > share.next_fetch_offset()
        ):
            self.wake()

    # --- the loop --------------------------------------------------------------------------------

    def run(self) -> Work[None]:
        """Read until the fetch can be answered."""
        for part in self._parts:
            self._open(part)
            yield None
        while True:
            self._is_woken = False
            locked = yield from self._lock()
            if all(part.error is not None for part in self._parts):
                return
            if locked and (self._is_due or self._has_enough(locked)):
                yield from self._read(locked)
                self._unlock(locked)
                if self._has_answer or self._is_throttled or self._fetch.min_bytes <= 0:
                    return
                if self._has_moved(locked):
                    continue
            else:
                self._unlock(locked)
            if self._is_due:
                return
            if self._timer is None:
                # No change could wake this fetch until now, so it tries once more before it waits.
                yield from self._listen()
            elif self._is_woken:
                yield None
            else:
                yield from self._wait()

    def _wait(self) -> Work[None]:
        self._wake = self._loop.create_future()
        self._fetches.waiting += 1
        try:
            yield self._wake
        finally:
            self._fetches.waiting -= 1

    def _open(self, part: FetchedShare) -> None:
        try:
            part.served = self._shares.open(part.key, part.topic)
            part.ready = self._shares.initialized(part.served)
        except DomainError as error:
            part.error = without_traceback(error)
            return
        if part.ready is not None:
            part.ready.add_done_callback(partial(self._initialized, part))

    def _initialized(self, part: FetchedShare, ready: asyncio.Future[object]) -> None:
        if ready.cancelled():
            return
        part.ready = None
        error = ready.exception()
        if isinstance(error, DomainError):
            part.error = error
        elif error is not None:
            part.error = SharePartitionFailedError(str(error))
        self.wake()

    def _lock(self) -> Steps[list[FetchedShare]]:
        """Take the fetch lock of each share partition from which records can be acquired."""
        locked: list[FetchedShare] = []
        for part in self._parts:
            served = part.served
            if part.ready is not None and part.ready.done():
                self._initialized(part, part.ready)
            if part.error is None and served is not None:
                share = served.share
                if share.is_gone:
                    part.error = share.gone_error()
                elif (
                    share.state is PartitionState.ACTIVE
                    and share.can_acquire()
                    and served.take_fetch_lock(self)
                ):
                    locked.append(part)
            yield
        if locked:
            since_s, self._since_s = self._since_s, monotonic_s()
            self._fetches.note_acquired(self._fetch.group_id, self._since_s - since_s)
        return locked

    def _unlock(self, locked: list[FetchedShare]) -> None:
        for part in locked:
            if part.served is not None:
                part.served.release_fetch_lock(self)

    def _has_enough(self, locked: list[FetchedShare]) -> bool:
        """Return whether MinBytes are available, or waiting for them is pointless."""
        total, min_bytes = 0, min(self._fetch.min_bytes, self._max_bytes)
        if min_bytes <= 0:
            return True
        isolation = self._isolation
        for part, most in zip(locked, self._shares_of(len(locked)), strict=True):
            served = part.served
            if served is None:
                continue
            offset = served.share.next_fetch_offset()
            if offset < served.log.log_start_offset:
                return True
            try:
                total += min(served.log.reader.available_bytes(offset, isolation), most)
            except DomainError:
                return True
            if total >= min_bytes:
                return True
        return False

    def _has_moved(self, locked: list[FetchedShare]) -> bool:
        """Return whether a read that acquired nothing has advanced its share partition."""
        isolation = self._isolation
        return any(
            part.error is None
            and part.served is not None
            and part.served.share.state is PartitionState.ACTIVE
            and part.served.share.next_fetch_offset() > self._read_offsets.get(part.key, -1)
            and part.served.share.can_acquire()
            and part.served.log.reader.end_of(isolation) > part.served.share.next_fetch_offset()
            for part in locked
        )

    @property
    def _isolation(self) -> Isolation:
        return _ISOLATIONS[self._shares.settings.of(self._fetch.group_id).isolation_level]

    def _shares_of(self, count: int) -> list[int]:
        """Split the bytes evenly; if they are too few, some partitions get none (KAFKA-19823)."""
        each, rest = divmod(self._max_bytes, count)
        return [each + (index < rest) for index in range(count)]

    # --- reading ---------------------------------------------------------------------------------

    def _read(self, locked: list[FetchedShare]) -> Work[None]:
        """Read the logs of locked share partitions, and acquire records."""
        fetch, room, has_records = self._fetch, self._fetch.max_records, False
        self._read_offsets.clear()
        if fetch.may_acquire is not None and not fetch.may_acquire():
            self._is_throttled = True
            return
        for part, most in zip(locked, self._shares_of(len(locked)), strict=True):
            served = part.served
            if served is None or room <= 0 or most <= 0:
                continue
            try:
                yield from self._read_one(part, served, most, room, is_first=not has_records)
            except DomainError as error:
                part.error = without_traceback(error)
            except Exception as error:  # noqa: BLE001 - the other partitions can be read
                log_failure(
                    "read a share partition", error, partition=f"{part.topic}-{part.key.partition}"
                )
                part.error = SharePartitionFailedError(f"not read: {error}")
            room -= sum(entry.size for entry in part.acquired)
            has_records |= bool(part.acquired)
            self._has_answer |= bool(part.acquired) or part.error is not None
            yield None

    def _read_one(
        self, part: FetchedShare, served: ServedPartition, most: int, room: int, *, is_first: bool
    ) -> Steps[None]:
        share, log, isolation = served.share, served.log, self._isolation
        part.is_read = True
        if share.next_fetch_offset() < log.log_start_offset:
            self._shares.log_start_moved(served)
        offset = self._read_offsets[part.key] = share.next_fetch_offset()
        try:
            read = log.reader.fetch(
                offset, most, isolation, at_least_one=is_first, min_range_bytes=MIN_RANGE_BYTES
            )
        except OffsetOutOfRangeError:
            # The start offset was altered to an offset beyond the log end offset, or the log was
            # truncated. Nothing can be read until the log grows, and the client gets no error.
            return
        if not read.records:
            return
        fetch = self._fetch
        try:
            batches, positions = yield from self._headers(served, read, room)
        except STORAGE_FAILURES as error:
            raise log.marks.refuse(error) from error
        if not batches:
            return
        aborted = tuple([AbortedTransaction(*transaction) for transaction in read.aborted or ()])
        acquired = self._shares.acquire(
            served,
            AcquireRequest(fetch.member_id, room, max(1, fetch.batch_size), fetch.mode),
            Fetched(offset, tuple(batches), aborted),
        )
        if acquired:
            begin, end = sent_batches(batches, acquired)
            part.acquired = acquired
            part.records = part_of(read.records, positions[begin], positions[end])
            log.traffic.bytes_out += len(part.records)

    def _headers(
        self, served: ServedPartition, read: LogReadInfo, room: int
    ) -> Steps[tuple[list[FetchedBatch], list[int]]]:
        """Return the batches that may be acquired, and their positions in the read bytes.

        The positions include the end of the last batch. At most ``room`` offsets can be acquired.
        They begin after the share partition's end offset, or at the first batch if that batch
        begins later. The batches after these offsets are not parsed.
        """
        share = served.share
        batches: list[FetchedBatch] = []
        positions: list[int] = []
        room = min(room, share.settings().max_record_locks)
        limit = -1
        for position, header in batch_headers(read.records):
            if not batches:
                limit = max(header.base_offset, share.end_offset + 1) + room
            elif header.base_offset >= limit:
                positions.append(position)
                return batches, positions
            batches.append(_batch(read, position, header))
            positions.append(position)
            if len(batches) % HEADERS_PER_STEP == 0:
                yield
        positions.append(len(read.records))
        return batches, positions


def _batch(read: LogReadInfo, position: int, header: BatchHeader) -> FetchedBatch:
    is_abort_marker = False
    if read.aborted and header.is_control:
        control = first_control(part_bytes(read.records, position, header.size), 0, header)
        is_abort_marker = control is not None and control.type is ControlType.ABORT
    return FetchedBatch(
        header.base_offset,
        header.last_offset,
        header.producer_id,
        header.is_transactional,
        is_abort_marker,
    )


def bytes_of(parts: Iterable[FetchedShare]) -> int:
    """Return the bytes of all records."""
    return sum(len(part.records) for part in parts)
