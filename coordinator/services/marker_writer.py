"""Writer of transaction markers to partitions of this broker and of others.

The transaction coordinator decides which partitions get a marker; :class:`MarkerWriter` retries
until each partition has its marker. The queues of ``txn/marker_queues.py`` decide which broker gets
which markers, and which markers are sent again. Markers for this broker are appended in the turn in
which the coordinator decides; ``coordinator/replication/marker_sender.py`` sends the markers for
other brokers.

Source: ``TransactionMarkerChannelManager``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import field
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

import structlog
from kio.schema.errors import ErrorCode

from fencepost.cluster.image import MetadataImage
from fencepost.coordinator.errors import UnknownTopicOrPartitionError
from fencepost.coordinator.metadata.names import CONSUMER_OFFSETS, OUTSIDE_TRANSACTIONS
from fencepost.coordinator.metadata.publication import Subscriber
from fencepost.coordinator.runtime.background import SLICE_MS, log_failure, spawn, swallow
from fencepost.coordinator.runtime.timers import TimerQueue
from fencepost.coordinator.services.marker_appends import MarkerAppends
from fencepost.coordinator.storage.storage import Storage
from fencepost.logcore.clock import monotonic_s
from fencepost.logcore.errors import InvalidProducerEpochError, TransactionCoordinatorFencedError
from fencepost.logcore.machine import EndMarker
from fencepost.logcore.values import dataclass
from fencepost.txn.commands import MarkersWritten, TopicPartition, WriteMarkers

if TYPE_CHECKING:
    from fencepost.txn.marker_queues import (
        Codes,
        EpochOf,
        LeaderOf,
        Marker,
        MarkerQueues,
        Result,
        SendMarkers,
    )

RETRY_MS: Final = 20
"""The delay before a transaction's markers are retried, doubling up to :data:`MAX_RETRY_MS`. It is
short because the offsets partitions may still be loading right after the broker starts."""

MAX_RETRY_MS: Final = 5_000
"""The maximum delay for partitions of this broker, whose disk may be faulty for a long time.
A leader change ends the delay."""

MAX_RETRY_ELSEWHERE_MS: Final = 1_000
"""The maximum delay if another broker has refused a marker or not responded, or if a leader is
unknown. It is shorter, because such an attempt does not use this broker's disk."""

MIN_SLICE_PARTITIONS = 4
"""The number of partitions that are tried before the clock is read, so that a transaction with few
partitions finishes in one turn even on a busy machine. Opening a partition that was never used
takes about 1 ms."""

Report = Callable[[MarkersWritten], None]
"""Receives a request's written markers."""

CompleteOffsets = Callable[[int, EndMarker], None]
"""Ends a transaction on one offsets partition: ``GroupCoordinator.complete_transaction``."""

_log = structlog.get_logger(__name__)


class OtherBrokers(Protocol):
    """The connections to the other brokers of a cluster."""

    async def send(self, send: SendMarkers) -> Codes | None:
        """Return a broker's response to its markers; None if none arrived."""

    def hang_up(self, broker_id: int) -> None:
        """Close the connection to a broker whose response is no longer awaited."""


@dataclass(slots=True, eq=False)
class _PendingCompleteTxn:
    """A :class:`WriteMarkers` request in progress."""

    shard: int
    report: Report
    first_attempt_done: Callable[[], None] | None
    appended: set[TopicPartition]
    """Partitions whose marker was appended in the coordinator's turn and is not reported yet."""
    backoff_ms: int = RETRY_MS
    """The delay before the next retry."""
    attempts: int = 1
    """The number of unfinished attempts at partitions of this broker. Until all attempts have begun
    the count is one higher, so that it does not reach 0 too early."""

    def attempted(self) -> None:
        """Report the end of the first attempt, once."""
        first_attempt_done, self.first_attempt_done = self.first_attempt_done, None
        if first_attempt_done is not None:
            first_attempt_done()

    def attempt_over(self) -> None:
        """Count an attempt as finished; report the end of the last one."""
        self.attempts -= 1
        if not self.attempts:
            with swallow("markers"):
                self.attempted()


@dataclass(slots=True, eq=False)
class _LocalWrite:
    """Markers of a transaction that are being written to partitions of this broker."""

    send: SendMarkers
    marker: Marker
    appends: MarkerAppends
    transaction: _PendingCompleteTxn
    tried: int = 0
    """The number of markers that the attempt has tried to write."""
    is_awaited: bool = True
    """Whether the transaction's response waits for this write."""
    failures: dict[tuple[str, type[Exception]], _Failure] = field(default_factory=dict)
    """By topic and type of error, which thousands of partitions may share."""


@dataclass(slots=True, eq=False)
class _Failure:
    """The reason why markers were not written, logged when the attempt is finished."""

    index: int
    """The first partition with this failure."""
    cause: str
    partitions: int = 0


class MarkerWriter:
    """Executes :class:`WriteMarkers`, on the event loop only.

    A transaction may span 10,000 partitions of this broker, some of which must be opened first.
    Work that takes longer than a time slice (looking up leaders, or appending the markers of one or
    many transactions) therefore continues in later turns, between other requests. A marker is
    reported once it is committed. The response waits neither for other replicas of a partition nor
    for other brokers: the first attempt is finished when all markers of this broker are appended.
    """

    def __init__(
        self,
        storage: Storage,
        timers: TimerQueue,
        complete_offsets: CompleteOffsets,
        *,
        leader_of: LeaderOf,
        epoch_of: EpochOf,
    ) -> None:
        self._storage, self._logs, self._replicas = storage, storage.logs, storage.replicas
        self._commits = storage.commits
        self._clock, self._node_id = storage.clock, storage.node_id
        self._complete_offsets = complete_offsets
        self._leader_of, self._epoch_of = leader_of, epoch_of
        self._queues: MarkerQueues | None = None
        self._transactions: dict[str, _PendingCompleteTxn] = {}
        self._beginning: dict[str, _PendingCompleteTxn] = {}
        """Transactions for which some markers have no destination yet, or some attempts on this
        broker have not begun."""
        self._unfinished: deque[_LocalWrite] = deque()
        self._results: deque[Result] = deque()
        """Results that are not reported yet. A report may complete a transaction, which appends a
        record."""
        self._worker: asyncio.Task[None] | None = None
        self._others: OtherBrokers | None = None
        self._sends: set[asyncio.Task[None]] = set()
        self._retries = timers.timers(self._retry)
        self._closed = False

    @property
    def queues(self) -> MarkerQueues:
        """Return the queues of markers in progress."""
        if self._queues is None:
            # Imported late, so that a broker without transactions starts faster.
            from fencepost.txn.marker_queues import MarkerQueues  # noqa: PLC0415

            self._queues = MarkerQueues(self._leader_of, self._epoch_of, self._node_id)
        return self._queues

    def join(self, others: OtherBrokers) -> None:
        """Start to use ``others`` for the markers of partitions that other brokers lead."""
        self._others = others
        self._storage.metadata.subscribe(Subscriber.MARKERS, self._published)

    def _published(self, old: MetadataImage, image: MetadataImage) -> None:
        if self._transactions and (
            old.topics is not image.topics or old.brokers is not image.brokers
        ):
            asyncio.get_running_loop().call_soon(self.leaders_changed)

    # --- coordinator ---

    def write(
        self,
        request: WriteMarkers,
        shard: int,
        report: Report,
        first_attempt_done: Callable[[], None],
    ) -> None:
        """Write the markers; call ``report``, at once or later, whenever some are committed.

        ``shard`` is the partition of ``__transaction_state`` that decided on the transaction.
        Before this returns, this broker writes as many markers as fit into a time slice.
        ``first_attempt_done`` is called once, when the first attempt at all partitions of this
        broker is finished and reported. A new request for a transactional id replaces the previous
        one.
        """
        partitions, previous, end = request.partitions, None, _end_of_slice()
        if self._transactions:
            previous = self._transactions.pop(request.transactional_id, None)
            self._retries.set(request.transactional_id, None)
        done = self._write_in_turn(request, end) if self._commits.is_idle else 0
        if done == len(partitions) and (self._commits.is_idle or not partitions):
            if previous is not None:
                self.queues.forget(request.transactional_id)
            report(request.written())
            first_attempt_done()
        else:
            pending = _PendingCompleteTxn(shard, report, first_attempt_done, set(partitions[:done]))
            self._transactions[request.transactional_id] = pending
            self._beginning[request.transactional_id] = pending
            self.queues.add(request, shard)
            self._go_on(end)
            if self._closed:
                pending.attempted()
        if previous is not None:
            previous.attempted()

    def _write_in_turn(self, request: WriteMarkers, end: float) -> int:
        """Append markers until ``end`` or until one fails; return the number of appended markers.

        Most transactions finish here, without the queues, which cost more than appending a marker.
        """
        marker = request.marker
        for done, partition in enumerate(request.partitions):
            if self._leader_of(partition) != self._node_id or (
                done >= MIN_SLICE_PARTITIONS and monotonic_s() >= end
            ):
                return done
            try:
                if not self.write_one(partition, marker):
                    return done
            except Exception:  # noqa: BLE001 - the queues retry it and report the error
                return done
        return len(request.partitions)

    def unload(self, shard: int) -> None:
        """Drop the requests of a shard that this broker no longer serves."""
        if self._queues is not None:
            self._queues.unload(shard)
        for name in [
            name for name, pending in self._transactions.items() if pending.shard == shard
        ]:
            del self._transactions[name]
            self._retries.set(name, None)
        if self._beginning:
            self._leave_to_worker()

    def leaders_changed(self) -> None:
        """Look up all leaders again; disconnect from brokers whose requests are abandoned."""
        if self._closed:
            return
        self._retries.clear()
        for transaction in self._transactions.values():
            transaction.backoff_ms = RETRY_MS
        for broker_id in self.queues.leaders_changed():
            if self._others is not None:
                self._others.hang_up(broker_id)
        self._go_on(_end_of_slice())

    def close(self) -> None:
        """Stop writing. A coordinator that loads its shard again requests the markers again."""
        self._closed = True
        self._retries.clear()
        self._transactions.clear()
        self._beginning.clear()
        self._unfinished.clear()
        self._results.clear()
        for task in self._sends:
            task.cancel()

    # --- queues ---

    def _go_on(self, end: float) -> None:
        """Report, look up leaders, send and write until ``end``; then the worker continues.

        A minimum of work is done even after ``end``, so that a transaction with few partitions
        finishes in one turn.
        """
        if self._closed:
            return
        self._results.extend(self.queues.route(lambda: monotonic_s() >= end))
        while self._results:
            self._report_result(self._results.popleft())
            if monotonic_s() >= end:
                break
        self._set_retries(MAX_RETRY_ELSEWHERE_MS)
        begun: list[_LocalWrite] = []
        for send in self.queues.next_requests():
            if send.broker_id == self._node_id:
                begun.append(self._new_write(send))
            else:
                task = spawn(self._exchange(send), f"markers to broker {send.broker_id}")
                self._sends.add(task)
                task.add_done_callback(self._sends.discard)
            if monotonic_s() >= end:
                break
        self._unfinished.extendleft(reversed(begun))  # a small write does not wait for large ones
        while self._unfinished:
            write = self._unfinished.popleft()
            if not self._advance(write, end):
                self._unfinished.append(write)
            if monotonic_s() >= end:
                break
        if not self._results:  # an attempt is over once its markers are reported
            for name, beginning in tuple(self._beginning.items()):
                if self.queues.is_begun(name):
                    del self._beginning[name]
                    beginning.attempt_over()
        if self._has_work:
            self._leave_to_worker()

    @property
    def _has_work(self) -> bool:
        return bool(self._unfinished or self._beginning or self._results) or not self.queues.is_idle

    def _leave_to_worker(self) -> None:
        if self._worker is None and not self._closed:
            self._worker = spawn(self._work(), "markers")

    async def _work(self) -> None:
        """Continue, one time slice per turn, until nothing is left."""
        try:
            while not self._closed and self._has_work:
                await asyncio.sleep(0)
                with swallow("markers"):
                    self._go_on(_end_of_slice())
        finally:
            self._worker = None

    def _set_retries(self, limit_ms: int) -> None:
        """Schedule the retry of markers that have just begun to wait."""
        for name in self.queues.newly_waiting():
            transaction = self._transactions.get(name)
            if transaction is not None:
                wait_ms = min(transaction.backoff_ms, limit_ms)
                transaction.backoff_ms = min(2 * wait_ms, MAX_RETRY_MS)
                self._retries.set(name, self._clock.now_ms() + wait_ms)

    def _retry(self, name: Hashable, _now_ms: int) -> None:
        self.queues.retry(str(name))
        if self._worker is None:  # otherwise the worker sends the markers
            self._go_on(_end_of_slice())

    async def _exchange(self, send: SendMarkers) -> None:
        codes: Codes | None = None
        try:
            codes = None if self._others is None else await self._others.send(send)
        except Exception as error:  # noqa: BLE001 - the transactions must end after any error
            log_failure("markers", error, broker=send.broker_id)
        # One response may end 2,000 transactions.
        self._results.extend(self._answered(send, codes))
        self._go_on(_end_of_slice())

    def _answered(self, send: SendMarkers, codes: Codes | None) -> list[Result]:
        results = []
        if codes is None:
            self.queues.on_failure(send)
        else:
            results = self.queues.on_answer(send, codes)
        is_own = send.broker_id == self._node_id
        self._set_retries(MAX_RETRY_MS if is_own else MAX_RETRY_ELSEWHERE_MS)
        return results

    def _report_result(self, result: Result) -> None:
        from fencepost.txn.marker_queues import CancelledMarkers  # noqa: PLC0415 - as in ``queues``

        request = result.request
        transaction = self._transactions.get(request.transactional_id)
        if request.transactional_id not in self.queues:
            self._transactions.pop(request.transactional_id, None)
        if isinstance(result, CancelledMarkers):
            _log.warning(
                "markers given up",
                transactional_id=request.transactional_id,
                coordinator_epoch=request.coordinator_epoch,
                cause=result.cause,
            )
        elif transaction is not None:
            with swallow("markers"):  # the other transactions must still be reported
                transaction.report(request.written(result.partitions))

    # --- partitions of this broker ---

    def appends(self) -> MarkerAppends:
        """Return the appender for the markers of one request to partitions of this broker."""
        return MarkerAppends(self._storage, self.write_one)

    def _new_write(self, send: SendMarkers) -> _LocalWrite:
        """Return a new attempt."""
        (marker,) = send.markers
        transaction = self._transactions[marker.transactional_id]
        transaction.attempts += 1
        return _LocalWrite(send, marker, self.appends(), transaction)

    def _advance(self, write: _LocalWrite, end: float) -> bool:
        """Call :meth:`_try_partitions`; an attempt that raises is finished, and repeated."""
        try:
            return self._try_partitions(write, end)
        except Exception as error:  # noqa: BLE001 - the transaction must end
            log_failure("markers", error, transactional_id=write.marker.transactional_id)
            self._answered(write.send, None)
            self._attempted(write)
            return True

    def _try_partitions(self, write: _LocalWrite, end: float) -> bool:
        """Try partitions until ``end``; return True when the attempt is finished."""
        first, marker, transaction = write.tried, write.marker, write.transaction
        while write.tried < len(marker.partitions):
            if write.tried >= first + MIN_SLICE_PARTITIONS and monotonic_s() >= end:
                return False
            if self._transactions.get(marker.transactional_id) is not transaction:
                break  # its shard was unloaded, or a newer request replaced it
            partition = marker.partitions[write.tried]
            write.tried += 1
            if partition in transaction.appended:
                transaction.appended.discard(partition)
                write.appends.appended(marker.end, partition)
            else:
                self._write(write, partition)
        self._log_failures(write)
        committed = write.appends.committed()
        if committed is None:
            self._settle(write)
        else:
            committed.add_done_callback(partial(self._committed, write))
            if write.appends.waits_for_replicas:
                self._attempted(write)
        return True

    def _committed(self, write: _LocalWrite, _done: asyncio.Future[None]) -> None:
        with swallow("markers"):
            if not self._closed:
                self._settle(write)

    def _settle(self, write: _LocalWrite) -> None:
        """Report the committed markers, and schedule the uncommitted markers again."""
        write.appends.settle()
        codes = {
            producer_id: {partition: code.name.upper() for partition, code in errors.items()}
            for producer_id, errors in write.appends.codes.items()
        }
        for result in self._answered(write.send, codes):  # results of one transaction
            self._report_result(result)
        self._attempted(write)

    def _attempted(self, write: _LocalWrite) -> None:
        if write.is_awaited:
            write.is_awaited = False
            write.transaction.attempt_over()

    def _write(self, write: _LocalWrite, partition: TopicPartition) -> None:
        """Append a marker; a marker that is no longer due counts as written."""
        end, appends = write.marker.end, write.appends
        producer_id = end.stamp.producer_id
        try:
            error = appends.write(end, partition)
        except Exception as unexpected:  # noqa: BLE001 - the transaction must end after any error
            if _record_failure(write, partition, unexpected):
                log_failure(
                    "marker",
                    unexpected,
                    to=partition,
                    transactional_id=write.marker.transactional_id,
                )
            appends.codes[producer_id][partition] = ErrorCode.unknown_server_error
            return
        codes = appends.codes[producer_id]
        if error is not None:
            _record_failure(write, partition, error)
            if isinstance(error, InvalidProducerEpochError | TransactionCoordinatorFencedError):
                # The partition has seen a higher epoch: another coordinator or an administrator has
                # written a marker. If the transaction is still open there, this marker is still
                # needed, and each retry logs a line.
                is_open = self._is_open(producer_id, partition)
                codes[partition] = ErrorCode.unknown_server_error if is_open else ErrorCode.none
        elif codes[partition] is ErrorCode.unknown_topic_or_partition:
            _log.info(
                "marker dropped", transactional_id=write.marker.transactional_id, to=partition
            )
            codes[partition] = ErrorCode.none

    def _log_failures(self, write: _LocalWrite) -> None:
        """Log why markers are not written: one line for each topic and type of error."""
        for (topic, _), failure in write.failures.items():
            _log.warning(
                "marker not written",
                transactional_id=write.marker.transactional_id,
                to=f"{topic}-{failure.index}",
                partitions=failure.partitions,
                cause=failure.cause,
            )
        write.failures.clear()

    def write_one(self, partition: TopicPartition, marker: EndMarker) -> bool:
        """Append one marker; return False if the partition must not get one.

        Such a partition does not exist, or its topic takes no part in transactions.
        Raises :class:`ShardError` for an offsets partition whose shard is not active,
        :class:`LogError` (InvalidProducerEpoch, TransactionCoordinatorFenced, Storage),
        NotLeaderOrFollowerError, NotEnoughReplicasError.
        """
        topic, index = partition
        if topic in OUTSIDE_TRANSACTIONS:
            return False
        try:
            local = self._replicas.leader(topic, index)
        except UnknownTopicOrPartitionError:
            return False
        if topic == CONSUMER_OFFSETS:
            self._complete_offsets(index, marker)
        else:
            self._replicas.check_min_isr(topic, index)
            local.append_marker(marker, self._clock.now_ms())
        return True

    def _is_open(self, producer_id: int, partition: TopicPartition) -> bool:
        log = self._logs.find_open(partition)
        return log is not None and log.producers.has_open_transaction(producer_id)


def _record_failure(write: _LocalWrite, partition: TopicPartition, error: Exception) -> bool:
    """Record a failure; return True for the first of its type in the topic."""
    topic, index = partition
    failure = write.failures.get((topic, type(error)))
    is_first = failure is None
    if failure is None:
        failure = _Failure(index, f"{type(error).__name__}: {error}")
        write.failures[topic, type(error)] = failure
    failure.partitions += 1
    return is_first


def _end_of_slice() -> float:
    """Return the end of a time slice that begins now, in seconds."""
    return monotonic_s() + SLICE_MS / 1000
