"""Writing the end markers of transactions to partitions of this broker.

The transaction coordinator says which partitions get a marker; a :class:`LocalMarkerWriter` gets
them there, whatever it takes. On one node that is a call per partition inside the coordinator's own
turn. Reports may come at any later time. Those that other brokers lead are the business of
``replication/marker_sender.py``.

Source: ``TransactionMarkerChannelManager``; the answers it knows are listed in
:meth:`LocalMarkerWriter.write_one`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import field
from functools import partial
from typing import TYPE_CHECKING

import structlog

from fencepost.coordinator.data.storage import Storage
from fencepost.coordinator.errors import UnknownTopicOrPartitionError
from fencepost.coordinator.metadata.names import CONSUMER_OFFSETS, OUTSIDE_TRANSACTIONS
from fencepost.coordinator.runtime.background import SLICE_MS, spawn, survived, tell
from fencepost.coordinator.runtime.commits import Held
from fencepost.coordinator.runtime.timers import TimerQueue
from fencepost.logcore.clock import monotonic_s
from fencepost.logcore.errors import (
    InvalidProducerEpochError,
    TransactionCoordinatorFencedError,
)
from fencepost.logcore.machine import DomainError, EndMarker
from fencepost.logcore.values import dataclass
from fencepost.txn.commands import TopicPartition, WriteMarkers

if TYPE_CHECKING:
    from fencepost.txn.marker_queues import Report

RETRY_BACKOFF_MS = 50
"""Wait before markers are tried again, doubling up to :data:`MAX_RETRY_BACKOFF_MS`: at start the
offsets partitions may still be loading for a moment."""

MAX_RETRY_BACKOFF_MS = 5_000
"""The longest wait; a partition that is off line stays so for as long as its disk is bad."""

MIN_SLICE_PARTITIONS = 4
"""Partitions that are tried before the clock is read. A transaction of common size is over in one
turn then, on a busy machine too. To open a partition that was never used takes about 1 ms."""

Elsewhere = Callable[[WriteMarkers, int, "Report", Sequence[TopicPartition]], None]
"""Takes what is left of a request, with its shard and who is told of progress."""

CompleteOffsets = Callable[[int, EndMarker], None]
"""Ends a transaction on one offsets partition: ``GroupCoordinator.complete_transaction``."""

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Job:
    request: WriteMarkers
    shard: int
    report: Report
    left: Sequence[TopicPartition]
    """The partitions of this attempt, or of the next one."""
    first_attempt_done: Callable[[], None] | None
    at: int = 0
    """How many of them the attempt has tried."""
    refused: list[TopicPartition] = field(default_factory=list)
    held: dict[TopicPartition, Held] = field(default_factory=dict)
    """Markers that wait for other replicas."""
    backoff_ms: int = RETRY_BACKOFF_MS


class LocalMarkerWriter:
    """Writes markers into this broker's own partitions, synchronously where it can.

    A transaction may span 10,000 of them, and some may have to be opened first. So an attempt that
    takes longer than a slice goes on between the requests of others, together with all such.
    A marker is reported when it is committed. For that of other replicas no answer waits: the first
    attempt is over when all is written here. ``elsewhere`` takes a request of which this broker
    leads a partition no more.
    """

    def __init__(
        self, storage: Storage, timers: TimerQueue, complete_offsets: CompleteOffsets
    ) -> None:
        self._logs, self._commits = storage.logs, storage.commits
        self._replicas = storage.replicas
        self.elsewhere: Elsewhere | None = None
        self._clock = storage.clock
        self._complete_offsets = complete_offsets
        self._retries = timers.timers(self._retry)
        self._jobs: dict[str, _Job] = {}
        self._unfinished: deque[_Job] = deque()
        self._worker: asyncio.Task[None] | None = None

    def write(
        self,
        request: WriteMarkers,
        shard: int,
        report: Report,
        first_attempt_done: Callable[[], None],
    ) -> None:
        """See :class:`MarkerWriter`. What can be written in a slice of time is before this returns.

        ``first_attempt_done`` is called when the first attempt at all of them is over and reported.
        """
        self._retries.set(request.transactional_id, None)
        former = self._jobs.pop(request.transactional_id, None)
        self._attempt(_Job(request, shard, report, request.partitions, first_attempt_done))
        if former is not None:
            _first_attempt_done(former)

    def unload(self, shard: int) -> None:
        """See :class:`MarkerWriter`."""
        for name in [name for name, job in self._jobs.items() if job.shard == shard]:
            self._retries.set(name, None)
            del self._jobs[name]

    def leaders_changed(self) -> None:
        """See :class:`MarkerWriter`; the next attempt looks by itself."""

    def close(self) -> None:
        """Give up; the next load of the transaction's shard begins again."""
        self._retries.clear()
        self._jobs.clear()
        self._unfinished.clear()

    def _attempt(self, job: _Job) -> None:
        """Try what is left, all of it now or some of it later."""
        job.at = 0
        job.refused.clear()
        job.held.clear()
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
        end = monotonic_s() + SLICE_MS / 1000
        left, begun_at = job.left, job.at
        while job.at < len(left):
            if job.at >= begun_at + MIN_SLICE_PARTITIONS and monotonic_s() >= end:
                return False
            partition = left[job.at]
            job.at += 1
            if not self._is_settled(job.request, partition):
                job.refused.append(partition)
            elif self._commits.has_replicated:
                found = self._logs.find_open(partition)
                if found is not None and found.marks.is_replicated:
                    job.held[partition] = Held.of(found)
        if not job.refused and self._commits.is_idle:
            self._conclude(job, left, ())
            return True
        refused = set(job.refused)
        done = [partition for partition in left if partition not in refused]
        held = [one for one in map(self._logs.find_open, done) if one is not None]
        if not self._commits.after(held, partial(self._committed, job, done)):
            self._conclude(job, done, job.refused)
        elif job.held:
            _first_attempt_done(job)
        return True

    def _committed(self, job: _Job, done: list[TopicPartition]) -> None:
        """Go on when the markers are committed; those that can not be are written anew."""
        if self._is_current(job):
            lost = [partition for partition in done if self._is_lost(job, partition)]
            gone = set(lost)
            kept = [partition for partition in done if partition not in gone] if lost else done
            self._conclude(job, kept, job.refused + lost)

    def _is_lost(self, job: _Job, partition: TopicPartition) -> bool:
        held = job.held.get(partition)
        if held is not None and not held.is_committed:
            return True
        return self._logs.is_offline(*partition)

    def _conclude(
        self, job: _Job, done: Sequence[TopicPartition], left: Sequence[TopicPartition]
    ) -> None:
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
        if job is None:
            return
        if self.elsewhere is None or all(map(self._is_here, job.left)):
            self._attempt(job)
        else:
            self.elsewhere(job.request, job.shard, job.report, job.left)

    def _is_here(self, partition: TopicPartition) -> bool:
        leader = self._replicas.leader_of(*partition)
        return leader is None or leader[0] == self._replicas.node_id

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
        except DomainError as error:
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
        Raises :class:`ShardError` for an offsets partition whose shard does not serve now,
        :class:`LogError` (InvalidProducerEpoch, TransactionCoordinatorFenced, Storage),
        NotLeaderOrFollowerError, NotEnoughReplicasError.
        """
        topic, index = partition
        if topic in OUTSIDE_TRANSACTIONS:
            return False
        try:
            found = self._replicas.leader(topic, index)
        except UnknownTopicOrPartitionError:
            return False
        if topic == CONSUMER_OFFSETS:
            self._complete_offsets(index, marker)
        else:
            self._replicas.check_min_isr(topic, index)
            found.append_marker(marker, self._clock.now_ms())
        return True

    def _is_open(self, producer_id: int, partition: TopicPartition) -> bool:
        found = self._logs.find_open(partition)
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
