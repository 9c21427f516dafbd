"""The queues of end markers for the partitions' leaders, with answers and retries.

Every broker that leads partitions of ended transactions has a queue, including this broker. Each
other broker gets one request at a time; the next one waits for the answer. This broker's own
markers are written at once, even while earlier ones are in flight, and in one request per
transaction, so that no transaction waits for the replication of another transaction's markers.
Markers without a known leader, or with a retriable error, wait for :meth:`MarkerQueues.retry`.
:meth:`MarkerQueues.route` looks up leaders for as long as its caller allows. Nothing is sent or
reported under an outdated coordinator epoch.

Writing a marker twice is harmless, so every marker without a positive answer is sent again.

Source: ``TransactionMarkerChannelManager``, ``TransactionMarkerRequestCompletionHandler``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from enum import Enum, auto
from types import MappingProxyType
from typing import Final

from fencepost.logcore.machine import EndMarker
from fencepost.logcore.values import dataclass
from fencepost.txn.commands import TopicPartition, WriteMarkers

MAX_PARTITIONS_PER_REQUEST: Final = 2_000
"""The maximum number of partitions in a request, which takes a few milliseconds to build and to
parse. Further partitions go into the next request."""

PARTITIONS_ROUTED_AT_ONCE: Final = 100
"""The number of partitions whose leaders are looked up between two calls of ``is_over``; the
look-ups take about 0.1 ms."""


class MarkerOutcome(Enum):
    """The meaning of an answer for one partition."""

    WRITTEN = auto()
    """The partition has the marker, or needs none."""
    RETRY = auto()
    """The broker does not lead the partition, or cannot accept the marker yet: look up the leader
    and send the marker again."""
    CANCEL = auto()
    """A newer producer or coordinator owns the transaction: send none of its markers again."""


OUTCOMES: Mapping[str, MarkerOutcome] = MappingProxyType(
    {
        "NONE": MarkerOutcome.WRITTEN,
        # A broker with such a message format has refused the producer's batches as well.
        "UNSUPPORTED_FOR_MESSAGE_FORMAT": MarkerOutcome.WRITTEN,
        "UNSUPPORTED_VERSION": MarkerOutcome.WRITTEN,
        "UNKNOWN_TOPIC_OR_PARTITION": MarkerOutcome.RETRY,
        "NOT_LEADER_OR_FOLLOWER": MarkerOutcome.RETRY,
        "NOT_ENOUGH_REPLICAS": MarkerOutcome.RETRY,
        "NOT_ENOUGH_REPLICAS_AFTER_APPEND": MarkerOutcome.RETRY,
        "REQUEST_TIMED_OUT": MarkerOutcome.RETRY,
        "KAFKA_STORAGE_ERROR": MarkerOutcome.RETRY,
        "INVALID_PRODUCER_EPOCH": MarkerOutcome.CANCEL,
        "TRANSACTION_COORDINATOR_FENCED": MarkerOutcome.CANCEL,
    }
)
"""The outcome of each of Kafka's errors. A marker with any other error is retried; in Kafka such an
error raises an exception that ends the sender thread."""


class NoDestination(Enum):
    """The reason why a marker cannot be sent to a broker."""

    NO_LEADER = auto()
    """The partition has no leader, or the leader is not registered: the marker waits."""
    NO_PARTITION = auto()
    """The partition was deleted: the transaction ends without this marker."""


LeaderOf = Callable[[TopicPartition], int | NoDestination]
"""Returns the leader of a partition according to this broker's metadata."""

EpochOf = Callable[[int], int | None]
"""Returns the coordinator epoch of a partition of ``__transaction_state``; None if it is not
served."""

Codes = Mapping[int, Mapping[TopicPartition, str]]
"""An answer: Kafka's error names by producer id and partition."""


@dataclass(frozen=True, slots=True)
class Marker:
    """The end marker of a transaction, for its partitions on one broker."""

    transactional_id: str
    end: EndMarker
    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class SendMarkers:
    """A request to a broker; ``number`` identifies it in :meth:`MarkerQueues.on_answer`."""

    broker_id: int
    number: int
    markers: tuple[Marker, ...]


@dataclass(frozen=True, slots=True)
class WrittenMarkers:
    """Partitions that have their marker: the caller must report them to the coordinator."""

    request: WriteMarkers
    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class CancelledMarkers:
    """A request whose remaining markers are not sent, and the cause."""

    request: WriteMarkers
    cause: str


Result = WrittenMarkers | CancelledMarkers


@dataclass(slots=True, eq=False)
class _PendingMarkers:
    request: WriteMarkers
    shard: int
    """The partition of ``__transaction_state``."""
    left: int
    """The number of partitions without a marker. Each is unrouted, in a queue, in flight or
    waiting."""
    routes: int = 0
    """The number of entries for this request in ``MarkerQueues._unrouted``."""
    waiting: list[TopicPartition] = field(default_factory=list)
    """Partitions that wait for a retry."""


_Queue = dict[_PendingMarkers, list[TopicPartition]]


@dataclass(slots=True)
class _MarkerDestination:
    queue: _Queue = field(default_factory=dict)
    sent: dict[int, _Queue] = field(default_factory=dict)
    """The requests in flight, by number. Only the broker's requests to itself can be several."""


class MarkerQueues:
    """The markers that one broker's transaction coordinator sends to the partitions' leaders.

    ``own_id`` is the id of that broker. Its markers for the partitions that it leads itself do not
    wait for earlier answers.
    """

    def __init__(self, leader_of: LeaderOf, epoch_of: EpochOf, own_id: int | None = None) -> None:
        self._leader_of, self._epoch_of, self._own_id = leader_of, epoch_of, own_id
        self._jobs: dict[str, _PendingMarkers] = {}
        self._unrouted: deque[tuple[_PendingMarkers, Sequence[TopicPartition], int]] = deque()
        """Lists of partitions whose leaders must be looked up, each with the index of the next
        partition."""
        self._destinations: dict[int, _MarkerDestination] = {}
        self._newly_waiting: list[str] = []
        self._numbers = 0

    def __len__(self) -> int:
        """Return the number of transactions with unwritten markers."""
        return len(self._jobs)

    def __contains__(self, transactional_id: str) -> bool:
        """Whether a transaction has unwritten markers."""
        return transactional_id in self._jobs

    @property
    def unknown(self) -> int:
        """The number of markers that wait for a retry (Kafka: ``UnknownDestinationQueueSize``)."""
        return sum(len(job.waiting) for job in self._jobs.values())

    # --- jobs ---

    def add(self, request: WriteMarkers, shard: int) -> None:
        """Queue the markers of a request; the caller must call :meth:`route` afterwards.

        A request for the same transactional id replaces the earlier one.
        """
        job = _PendingMarkers(request, shard, len(request.partitions))
        self._jobs[request.transactional_id] = job
        job.routes += 1
        self._unrouted.appendleft((job, request.partitions, 0))

    def forget(self, transactional_id: str) -> None:
        """Send no further markers of a transaction: all are written."""
        self._jobs.pop(transactional_id, None)

    def unload(self, shard: int) -> None:
        """Drop the requests of a shard that this broker no longer serves."""
        for job in [job for job in self._jobs.values() if job.shard == shard]:
            del self._jobs[job.request.transactional_id]

    # --- requests ---

    @property
    def is_idle(self) -> bool:
        """Whether nothing can be routed or sent before an answer or a retry."""
        return not self._unrouted and not any(
            destination.queue and (not destination.sent or broker_id == self._own_id)
            for broker_id, destination in self._destinations.items()
        )

    def is_begun(self, transactional_id: str) -> bool:
        """Whether all markers of a transaction are routed, and this broker's own are sent."""
        job = self._jobs.get(transactional_id)
        if job is None:
            return True
        destination = None if self._own_id is None else self._destinations.get(self._own_id)
        return not job.routes and (destination is None or job not in destination.queue)

    def route(self, is_over: Callable[[], bool] = lambda: False) -> list[Result]:
        """Queue markers for the leaders of their partitions until ``is_over()`` returns True.

        Markers of deleted partitions count as written. At least one chunk of partitions is routed.
        The chunks of different transactions alternate, so that no transaction waits for a large
        one.
        """
        results: list[Result] = []
        while self._unrouted:
            job, partitions, at = self._unrouted.popleft()
            if self._is_current(job):
                end = at + PARTITIONS_ROUTED_AT_ONCE
                if end < len(partitions):
                    self._unrouted.append((job, partitions, end))
                else:
                    job.routes -= 1
                results += self._routed(job, partitions[at:end])
            if is_over():
                break
        return results

    def next_requests(self) -> Iterator[SendMarkers]:
        """Yield the requests to send now, at most one for each other broker.

        Markers that the caller does not iterate over stay queued.
        """
        for broker_id, destination in tuple(self._destinations.items()):
            if broker_id == self._own_id:
                for job in tuple(destination.queue):
                    while job in destination.queue:
                        yield from self._send(broker_id, destination, (job,))
            elif not destination.sent:
                yield from self._send(broker_id, destination, tuple(destination.queue))

    def _send(
        self, broker_id: int, destination: _MarkerDestination, jobs: Iterable[_PendingMarkers]
    ) -> Iterator[SendMarkers]:
        """Take the content of one request from a queue; yield nothing if the queue is empty."""
        room, markers, sent = MAX_PARTITIONS_PER_REQUEST, [], _Queue()
        for job in jobs:
            if not self._is_current(job):
                del destination.queue[job]
                continue
            if not room:
                break
            partitions = destination.queue[job]
            sent[job] = partitions[:room]
            del partitions[:room]
            if not partitions:
                del destination.queue[job]
            room -= len(sent[job])
            request = job.request
            markers.append(Marker(request.transactional_id, request.marker, tuple(sent[job])))
        if markers:
            self._numbers += 1
            destination.sent[self._numbers] = sent
            yield SendMarkers(broker_id, self._numbers, tuple(markers))

    # --- answers ---

    def on_answer(self, send: SendMarkers, codes: Codes) -> list[Result]:
        """Handle the answer to a request; ignore it if the request is no longer in flight."""
        results: list[Result] = []
        for job, partitions in self._sent(send).items():
            if not self._is_current(job):
                continue
            errors = codes.get(job.request.stamp.producer_id, {})
            by_outcome: dict[MarkerOutcome, list[TopicPartition]] = {
                outcome: [] for outcome in MarkerOutcome
            }
            for partition in partitions:
                outcome = OUTCOMES.get(errors.get(partition, ""), MarkerOutcome.RETRY)
                by_outcome[outcome].append(partition)
            written, cancelled = by_outcome[MarkerOutcome.WRITTEN], by_outcome[MarkerOutcome.CANCEL]
            results += self._written(job, written)
            if cancelled:
                del self._jobs[job.request.transactional_id]
                (topic, index), cause = cancelled[0], errors[cancelled[0]]
                results.append(CancelledMarkers(job.request, f"{topic}-{index}: {cause}"))
            else:
                self._wait(job, by_outcome[MarkerOutcome.RETRY])
        return results

    def on_failure(self, send: SendMarkers) -> None:
        """Let all markers of a request wait for a retry, because the connection failed."""
        for job, partitions in self._sent(send).items():
            self._wait(job, partitions)

    def _sent(self, send: SendMarkers) -> _Queue:
        destination = self._destinations.get(send.broker_id)
        return {} if destination is None else destination.sent.pop(send.number, {})

    # --- retries ---

    def newly_waiting(self) -> list[str]:
        """Return the transactions that have begun to wait for :meth:`retry` since the last call."""
        names, self._newly_waiting = self._newly_waiting, []
        return names

    def retry(self, transactional_id: str | None = None) -> None:
        """Route the waiting markers of one transaction, or of all, again.

        The caller must call :meth:`route` afterwards.
        """
        if transactional_id is None:
            jobs = list(self._jobs.values())
        else:
            job = self._jobs.get(transactional_id)
            jobs = [] if job is None else [job]
        for job in jobs:
            waiting, job.waiting = job.waiting, []
            self._route_later(job, waiting)

    def leaders_changed(self) -> list[int]:
        """Route all markers again, except those in flight to a broker that still leads partitions.

        Return the brokers whose requests are abandoned; an answer that still arrives is ignored.
        The caller must call :meth:`route` afterwards.
        """
        abandoned: list[int] = []
        for broker_id, destination in self._destinations.items():
            for job, partitions in destination.queue.items():
                self._route_later(job, partitions)
            destination.queue.clear()
            if broker_id == self._own_id:
                continue  # the local appends need no connection, so they get an answer
            # A broker that no longer leads any of a request's partitions may be dead. Giving up the
            # request saves the transactions from waiting until it times out.
            for number, sent in tuple(destination.sent.items()):
                if not self._leads_any(broker_id, sent):
                    abandoned.append(broker_id)
                    del destination.sent[number]
                    for job, partitions in sent.items():
                        self._route_later(job, partitions)
        self.retry()
        return abandoned

    # --- helpers ---

    def _leads_any(self, broker_id: int, sent: _Queue) -> bool:
        return any(
            self._leader_of(partition) == broker_id
            for job, partitions in sent.items()
            if self._is_current(job)
            for partition in partitions
        )

    def _is_current(self, job: _PendingMarkers) -> bool:
        """Whether no later request replaced ``job``, and its coordinator epoch is current."""
        transactional_id = job.request.transactional_id
        if self._jobs.get(transactional_id) is not job:
            return False
        if self._epoch_of(job.shard) != job.request.coordinator_epoch:
            del self._jobs[transactional_id]
            return False
        return True

    def _wait(self, job: _PendingMarkers, partitions: Sequence[TopicPartition]) -> None:
        if partitions and self._jobs.get(job.request.transactional_id) is job:
            if not job.waiting:
                self._newly_waiting.append(job.request.transactional_id)
            job.waiting += partitions

    def _route_later(self, job: _PendingMarkers, partitions: Sequence[TopicPartition]) -> None:
        if partitions:
            job.routes += 1
            self._unrouted.append((job, partitions, 0))

    def _routed(self, job: _PendingMarkers, partitions: Iterable[TopicPartition]) -> list[Result]:
        """Queue a few markers for the leaders of their partitions."""
        by_leader: dict[int | NoDestination, list[TopicPartition]] = {}
        for partition in partitions:
            by_leader.setdefault(self._leader_of(partition), []).append(partition)
        for leader, led in by_leader.items():
            if not isinstance(leader, NoDestination):
                destination = self._destinations.setdefault(leader, _MarkerDestination())
                destination.queue.setdefault(job, []).extend(led)
        self._wait(job, by_leader.get(NoDestination.NO_LEADER, ()))
        return self._written(job, by_leader.get(NoDestination.NO_PARTITION, ()))

    def _written(self, job: _PendingMarkers, partitions: Sequence[TopicPartition]) -> list[Result]:
        if not partitions:
            return []
        job.left -= len(partitions)
        if not job.left:
            del self._jobs[job.request.transactional_id]
        return [WrittenMarkers(job.request, tuple(partitions))]
