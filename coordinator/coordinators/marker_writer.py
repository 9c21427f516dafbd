"""Writing the end markers of transactions.

The transaction coordinator says which partitions get a marker; a :class:`LocalMarkerWriter` gets
them there, whatever it takes. On one node that is a call per partition inside the coordinator's own
turn. Reports may come at any later time.

Source: ``TransactionMarkerChannelManager``; the answers it knows are listed in
:meth:`LocalMarkerWriter.write_one`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial

import structlog

from fencepost.coordinator.data.storage import Storage
from fencepost.coordinator.metadata.names import CONSUMER_OFFSETS, OUTSIDE_TRANSACTIONS
from fencepost.coordinator.runtime.background import SLICE_MS, spawn, survived, tell
from fencepost.coordinator.runtime.errors import ShardError
from fencepost.coordinator.runtime.timers import TimerQueue
from fencepost.logcore.errors import (
    InvalidProducerEpochError,
    LogError,
    TransactionCoordinatorFencedError,
)
from fencepost.logcore.machine import EndMarker
from fencepost.txn.commands import MarkersWritten, TopicPartition, WriteMarkers

RETRY_BACKOFF_MS = 50
"""Wait before markers are tried again, doubling up to :data:`MAX_RETRY_BACKOFF_MS`: at start the
offsets partitions may still be loading for a moment."""

MAX_RETRY_BACKOFF_MS = 5_000
"""The longest wait; a partition that is off line stays so for as long as its disk is bad."""

MIN_SLICE_PARTITIONS = 4
"""Partitions that are tried before the clock is read. A transaction of common size is over in one
turn then, on a busy machine too. To open a partition that was never used takes about 1 ms."""

Report = Callable[[MarkersWritten], None]


CompleteOffsets = Callable[[int, EndMarker], None]
"""Ends a transaction on one offsets partition: ``GroupCoordinator.complete_transaction``."""

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Job:
    request: WriteMarkers
    report: Report
    left: Sequence[TopicPartition]
    """The partitions of this attempt, or of the next one."""
    first_attempt_done: Callable[[], None] | None
    at: int = 0
    """How many of them the attempt has tried."""
    refused: list[TopicPartition] = field(default_factory=list)
    backoff_ms: int = RETRY_BACKOFF_MS


class LocalMarkerWriter:
    """Writes markers into this broker's own partitions, synchronously where it can.

    A transaction may span 10,000 of them, and some may have to be opened first. So an attempt that
    takes longer than a slice goes on between the requests of others, together with all such.
    A marker is reported when it is on disk, where ``flush.messages`` asks for that.
    """

    def __init__(
        self, storage: Storage, timers: TimerQueue, complete_offsets: CompleteOffsets
    ) -> None:
        self._logs, self._flusher = storage.logs, storage.flusher
        self._clock = storage.clock
        self._complete_offsets = complete_offsets
        self._retries = timers.timers(self._retry)
        self._jobs: dict[str, _Job] = {}
        self._unfinished: deque[_Job] = deque()
        self._worker: asyncio.Task[None] | None = None

    def write(
        self, request: WriteMarkers, report: Report, first_attempt_done: Callable[[], None]
    ) -> None:
        """Write the markers; call ``report`` with each progress, at once or later, until all are.

        What can be written in a slice of time is before this returns. ``first_attempt_done``
        is called once, when the first attempt at all of them is over and reported. A new request
        for a transactional id takes the place of the former one.
        """
        self._retries.set(request.transactional_id, None)
        former = self._jobs.pop(request.transactional_id, None)
        self._attempt(_Job(request, report, request.partitions, first_attempt_done))
        if former is not None:
            _first_attempt_done(former)

    def close(self) -> None:
        """Give up; the next load of the transaction's shard begins again."""
        self._retries.clear()
        self._jobs.clear()
        self._unfinished.clear()

    def _attempt(self, job: _Job) -> None:
        """Try what is left, all of it now or some of it later."""
        job.at = 0
        job.refused.clear()
        self._jobs[job.request.transactional_id] = job
        if not self._is_through(job):
            self._unfinished.append(job)
            if self._worker is None:
                self._worker = spawn(self._work(), "markers")

    async def _work(self) -> None:
        """Go on with all attempts in turn, a slice at a time."""
        try:
            while self._unfinished:
                await asyncio.sleep(0)
                job = self._unfinished.popleft() if self._unfinished else None
                with survived("markers"):
                    if job is not None and self._is_current(job) and not self._is_through(job):
                        self._unfinished.append(job)
        finally:
            self._worker = None

    def _is_current(self, job: _Job) -> bool:
        return self._jobs.get(job.request.transactional_id) is job

    def _is_through(self, job: _Job) -> bool:
        """Try partitions for a slice of time; True, and the attempt is over, after the last one."""
        end = time.perf_counter() + SLICE_MS / 1000
        left, begun_at = job.left, job.at
        while job.at < len(left):
            if job.at >= begun_at + MIN_SLICE_PARTITIONS and time.perf_counter() >= end:
                return False
            partition = left[job.at]
            job.at += 1
            if not self._is_settled(job.request, partition):
                job.refused.append(partition)
        refused = set(job.refused)
        done = [partition for partition in left if partition not in refused]
        held = [one for one in map(self._logs.find_open, done) if one is not None]
        if not self._flusher.after(held, partial(self._flushed, job, done)):
            self._conclude(job, done, job.refused)
        return True

    def _flushed(self, job: _Job, done: list[TopicPartition]) -> None:
        """Go on when the markers are on disk; those on a partition that failed are written anew."""
        if self._is_current(job):
            offline = self._logs.is_offline
            kept = [partition for partition in done if not offline(*partition)]
            lost = [partition for partition in done if offline(*partition)]
            self._conclude(job, kept, job.refused + lost)

    def _conclude(self, job: _Job, done: list[TopicPartition], left: list[TopicPartition]) -> None:
        request = job.request
        self._jobs.pop(request.transactional_id, None)
        if not left:
            job.report(request.written())
            _first_attempt_done(job)
            return
        job.left = tuple(left)
        self._jobs[request.transactional_id] = job
        deadline_ms = self._clock.now_ms() + job.backoff_ms
        job.backoff_ms = min(2 * job.backoff_ms, MAX_RETRY_BACKOFF_MS)
        self._retries.set(request.transactional_id, deadline_ms)
        if done:
            job.report(request.written(tuple(done)))
        _first_attempt_done(job)

    def _retry(self, key: Hashable, _now_ms: int) -> None:
        job = self._jobs.pop(str(key), None)
        if job is not None:
            self._attempt(job)

    def _is_settled(self, request: WriteMarkers, partition: TopicPartition) -> bool:
        """Write one marker; True if the partition needs none any more."""
        try:
            exists = self.write_one(partition, request.marker)
        except (InvalidProducerEpochError, TransactionCoordinatorFencedError) as error:
            # A producer or coordinator with a higher epoch has written here. On one node that can
            # only be a marker that an administrator has sent. If it left the transaction open, the
            # partition is not settled, and a log line says so at each retry.
            settled = not self._is_open(request.stamp.producer_id, partition)
            self._complain(request, partition, error)
            return settled
        except (LogError, ShardError) as error:
            self._complain(request, partition, error)
            return False
        except Exception as error:  # noqa: BLE001 - whatever it is, the transaction has to end
            tell("marker", error, to=partition, transactional_id=request.transactional_id)
            return False
        if not exists:
            _log.info("marker dropped", transactional_id=request.transactional_id, to=partition)
        return True

    def write_one(self, partition: TopicPartition, marker: EndMarker) -> bool:
        """Append one marker; False where none can be due.

        The partition does not exist (any more) then, or nobody writes to it in transactions.
        Raises :class:`ShardError` for an offsets partition whose shard does not serve now, and
        :class:`LogError`: InvalidProducerEpoch, TransactionCoordinatorFenced, Storage.
        """
        topic, index = partition
        found = None if topic in OUTSIDE_TRANSACTIONS else self._logs.find(topic, index)
        if found is None:
            return False
        if topic == CONSUMER_OFFSETS:
            self._complete_offsets(index, marker)
        else:
            found.append_marker(marker, self._clock.now_ms())
        return True

    def _is_open(self, producer_id: int, partition: TopicPartition) -> bool:
        try:
            found = self._logs.find(*partition)
        except LogError:
            return True
        return found is not None and found.producers.has_open_transaction(producer_id)

    def _complain(self, request: WriteMarkers, partition: TopicPartition, error: Exception) -> None:
        _log.warning(
            "marker not written",
            transactional_id=request.transactional_id,
            to=f"{partition[0]}-{partition[1]}",
            cause=f"{type(error).__name__}: {error}",
        )


def _first_attempt_done(job: _Job) -> None:
    first_attempt_done, job.first_attempt_done = job.first_attempt_done, None
    if first_attempt_done is not None:
        first_attempt_done()
