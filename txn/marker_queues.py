"""Queues of end markers by the brokers that lead their partitions; answers and retries.

Every broker that leads partitions of ended transactions has a queue, this broker as well. Another
broker gets one request at a time, and the next one waits for the answer. This broker writes its own
markers at once, even while former ones are under way, and each transaction's by themselves, so that
none waits for another one's replicas. Markers whose leader is not known, or that got a retriable
error, wait for :meth:`MarkerQueues.retry`. :meth:`MarkerQueues.route` looks leaders up, for as long
as its caller has time. Nothing is sent or reported under a coordinator epoch that is over.

Writing a marker again is harmless: it is sent once more if it may not have been written.

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
"""The rest goes with the next request: to make and to read one takes a few milliseconds."""

PARTITIONS_ROUTED_AT_ONCE: Final = 100
"""Partitions whose leaders are looked up before the time is; that takes about 0.1 ms."""


class Outcome(Enum):
    """The meaning of an answer for one partition."""

    WRITTEN = auto()
    """It holds the marker, or needs none."""
    RETRY = auto()
    """Another broker may lead it now, or this one may soon: look its leader up, send again."""
    CANCEL = auto()
    """A newer producer or coordinator has the transaction now: send no further marker of it."""


OUTCOMES: Mapping[str, Outcome] = MappingProxyType(
    {
        "NONE": Outcome.WRITTEN,
        # A broker with such a format has refused the producer's data as well.
        "UNSUPPORTED_FOR_MESSAGE_FORMAT": Outcome.WRITTEN,
        "UNSUPPORTED_VERSION": Outcome.WRITTEN,
        "UNKNOWN_TOPIC_OR_PARTITION": Outcome.RETRY,
        "NOT_LEADER_OR_FOLLOWER": Outcome.RETRY,
        "NOT_ENOUGH_REPLICAS": Outcome.RETRY,
        "NOT_ENOUGH_REPLICAS_AFTER_APPEND": Outcome.RETRY,
        "REQUEST_TIMED_OUT": Outcome.RETRY,
        "KAFKA_STORAGE_ERROR": Outcome.RETRY,
        "INVALID_PRODUCER_EPOCH": Outcome.CANCEL,
        "TRANSACTION_COORDINATOR_FENCED": Outcome.CANCEL,
    }
)
"""By Kafka's name of an error. Any other is tried again (in Kafka it ends the sender's thread)."""


class Nowhere(Enum):
    """Why a marker has no broker to go to."""

    NO_LEADER = auto()
    """There is none now, or it is not registered: the marker waits."""
    NO_PARTITION = auto()
    """It was deleted: the transaction ends without it."""


LeaderOf = Callable[[TopicPartition], int | Nowhere]
"""The broker that leads a partition, as far as is known here."""

EpochOf = Callable[[int], int | None]
"""The coordinator epoch in which a partition of ``__transaction_state`` is served; None if not."""

Codes = Mapping[int, Mapping[TopicPartition, str]]
"""An answer: Kafka's names of errors by producer id and partition."""


@dataclass(frozen=True, slots=True)
class Marker:
    """The end marker of a transaction, for its partitions at one broker."""

    transactional_id: str
    end: EndMarker
    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class Send:
    """A request to a broker; ``number`` names it to :meth:`MarkerQueues.answered`."""

    broker_id: int
    number: int
    markers: tuple[Marker, ...]


@dataclass(frozen=True, slots=True)
class Written:
    """Partitions of a request hold their marker: the caller reports them."""

    request: WriteMarkers
    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class Cancelled:
    """No further marker of a request is sent, and why."""

    request: WriteMarkers
    cause: str


Result = Written | Cancelled


@dataclass(slots=True, eq=False)
class _Job:
    request: WriteMarkers
    shard: int
    """The partition of ``__transaction_state``."""
    left: int
    """How many partitions are not written. Each is in one place: not routed yet, in a queue, under
    way or waiting."""
    routes: int = 0
    """How many lists of its partitions are not routed to the end."""
    waiting: list[TopicPartition] = field(default_factory=list)
    """Partitions that wait for a retry."""


_Queue = dict[_Job, list[TopicPartition]]


@dataclass(slots=True)
class _Destination:
    queue: _Queue = field(default_factory=dict)
    sent: dict[int, _Queue] = field(default_factory=dict)
    """The requests under way, by number: one at most, but for this broker's own."""


class MarkerQueues:
    """The markers that one broker's transaction coordinator has under way.

    ``own_id`` is that broker, whose own markers wait for no answer to former ones.
    """

    def __init__(self, leader_of: LeaderOf, epoch_of: EpochOf, own_id: int | None = None) -> None:
        self._leader_of, self._epoch_of, self._own_id = leader_of, epoch_of, own_id
        self._jobs: dict[str, _Job] = {}
        self._unrouted: deque[tuple[_Job, Sequence[TopicPartition], int]] = deque()
        """Partitions to look up, from an index on."""
        self._destinations: dict[int, _Destination] = {}
        self._newly_waiting: list[str] = []
        self._numbers = 0

    def __len__(self) -> int:
        """Transactions with markers under way."""
        return len(self._jobs)

    def __contains__(self, transactional_id: str) -> bool:
        """Whether markers of a transaction are under way."""
        return transactional_id in self._jobs

    @property
    def unknown(self) -> int:
        """Markers that wait to be tried again (kafka: ``UnknownDestinationQueueSize``)."""
        return sum(len(job.waiting) for job in self._jobs.values())

    # --- jobs ---

    def add(self, request: WriteMarkers, shard: int) -> None:
        """Have the markers of a request sent; :meth:`route` has to follow.

        One for the same transactional id takes the place of the former.
        """
        job = _Job(request, shard, len(request.partitions))
        self._jobs[request.transactional_id] = job
        job.routes += 1
        self._unrouted.appendleft((job, request.partitions, 0))

    def forget(self, transactional_id: str) -> None:
        """Send no further markers of a transaction: all are written."""
        self._jobs.pop(transactional_id, None)

    def unload(self, shard: int) -> None:
        """Forget the requests of a shard: this broker no longer serves it."""
        for job in [one for one in self._jobs.values() if one.shard == shard]:
            del self._jobs[job.request.transactional_id]

    # --- requests ---

    @property
    def is_at_rest(self) -> bool:
        """Whether there is nothing to route and nothing to send before an answer or a retry."""
        return not self._unrouted and not any(
            one.queue and (not one.sent or broker_id == self._own_id)
            for broker_id, one in self._destinations.items()
        )

    def is_begun(self, transactional_id: str) -> bool:
        """Whether all markers of a transaction are routed, and those for this broker under way."""
        job = self._jobs.get(transactional_id)
        if job is None:
            return True
        own = None if self._own_id is None else self._destinations.get(self._own_id)
        return not job.routes and (own is None or job not in own.queue)

    def route(self, is_over: Callable[[], bool] = lambda: False) -> list[Result]:
        """Queue markers where their leaders are, until ``is_over``; without one they are written.

        At least one piece is queued. Transactions take turns: none waits for a large one.
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

    def sends(self) -> Iterator[Send]:
        """The requests to be sent now, one at most for each other broker.

        Markers that the caller does not ask for stay queued.
        """
        for broker_id, one in tuple(self._destinations.items()):
            if broker_id == self._own_id:
                for job in tuple(one.queue):
                    while job in one.queue:
                        yield from self._send(broker_id, one, (job,))
            elif not one.sent:
                yield from self._send(broker_id, one, tuple(one.queue))

    def _send(self, broker_id: int, one: _Destination, jobs: Iterable[_Job]) -> Iterator[Send]:
        """Take from a queue what goes into one request, if anything."""
        room, markers, sent = MAX_PARTITIONS_PER_REQUEST, [], _Queue()
        for job in jobs:
            if not self._is_current(job):
                del one.queue[job]
                continue
            if not room:
                break
            partitions = one.queue[job]
            sent[job] = partitions[:room]
            del partitions[:room]
            if not partitions:
                del one.queue[job]
            room -= len(sent[job])
            request = job.request
            markers.append(Marker(request.transactional_id, request.marker, tuple(sent[job])))
        if markers:
            self._numbers += 1
            one.sent[self._numbers] = sent
            yield Send(broker_id, self._numbers, tuple(markers))

    # --- answers ---

    def answered(self, send: Send, codes: Codes) -> list[Result]:
        """Take the answer to a request; without effect if the request is no longer under way."""
        results: list[Result] = []
        for job, partitions in self._sent(send).items():
            if not self._is_current(job):
                continue
            told = codes.get(job.request.stamp.producer_id, {})
            by_outcome: dict[Outcome, list[TopicPartition]] = {one: [] for one in Outcome}
            for partition in partitions:
                outcome = OUTCOMES.get(told.get(partition, ""), Outcome.RETRY)
                by_outcome[outcome].append(partition)
            written, cancelled = by_outcome[Outcome.WRITTEN], by_outcome[Outcome.CANCEL]
            results += self._written(job, written)
            if cancelled:
                del self._jobs[job.request.transactional_id]
                (topic, index), cause = cancelled[0], told[cancelled[0]]
                results.append(Cancelled(job.request, f"{topic}-{index}: {cause}"))
            else:
                self._wait(job, by_outcome[Outcome.RETRY])
        return results

    def failed(self, send: Send) -> None:
        """The connection broke, or no answer came in time: all of it is tried again."""
        for job, partitions in self._sent(send).items():
            self._wait(job, partitions)

    def _sent(self, send: Send) -> _Queue:
        one = self._destinations.get(send.broker_id)
        return {} if one is None else one.sent.pop(send.number, {})

    # --- retries ---

    def newly_waiting(self) -> list[str]:
        """Transactions that have begun to wait for :meth:`retry` since the last call."""
        names, self._newly_waiting = self._newly_waiting, []
        return names

    def retry(self, transactional_id: str | None = None) -> None:
        """Have leaders looked up of what waits, of one transaction or of all.

        :meth:`route` has to follow.
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
        """Have all leaders looked up again; return brokers whose answers are not awaited now.

        A request to a broker that no longer leads any of its partitions is over: the broker may be
        dead, and its silence would hold up the transactions for as long as a request may take.
        This broker's own are over soon without that. :meth:`route` has to follow.
        """
        abandoned: list[int] = []
        for broker_id, one in self._destinations.items():
            for job, partitions in one.queue.items():
                self._route_later(job, partitions)
            one.queue.clear()
            if broker_id == self._own_id:
                continue
            for number, sent in tuple(one.sent.items()):
                if not self._leads_any(broker_id, sent):
                    abandoned.append(broker_id)
                    del one.sent[number]
                    for job, partitions in sent.items():
                        self._route_later(job, partitions)
        self.retry()
        return abandoned

    # --- inside ---

    def _leads_any(self, broker_id: int, sent: _Queue) -> bool:
        return any(
            self._leader_of(partition) == broker_id
            for job, partitions in sent.items()
            if self._is_current(job)
            for partition in partitions
        )

    def _is_current(self, job: _Job) -> bool:
        """Whether a job is the last one of its id, and its coordinator epoch still holds."""
        transactional_id = job.request.transactional_id
        if self._jobs.get(transactional_id) is not job:
            return False
        if self._epoch_of(job.shard) != job.request.coordinator_epoch:
            del self._jobs[transactional_id]
            return False
        return True

    def _wait(self, job: _Job, partitions: Sequence[TopicPartition]) -> None:
        if partitions and self._jobs.get(job.request.transactional_id) is job:
            if not job.waiting:
                self._newly_waiting.append(job.request.transactional_id)
            job.waiting += partitions

    def _route_later(self, job: _Job, partitions: Sequence[TopicPartition]) -> None:
        if partitions:
            job.routes += 1
            self._unrouted.append((job, partitions, 0))

    def _routed(self, job: _Job, partitions: Iterable[TopicPartition]) -> list[Result]:
        """Queue a few markers where their leaders are."""
        by_leader: dict[int | Nowhere, list[TopicPartition]] = {}
        for partition in partitions:
            by_leader.setdefault(self._leader_of(partition), []).append(partition)
        for leader, led in by_leader.items():
            if not isinstance(leader, Nowhere):
                found = self._destinations.setdefault(leader, _Destination())
                found.queue.setdefault(job, []).extend(led)
        self._wait(job, by_leader.get(Nowhere.NO_LEADER, ()))
        return self._written(job, by_leader.get(Nowhere.NO_PARTITION, ()))

    def _written(self, job: _Job, partitions: Sequence[TopicPartition]) -> list[Result]:
        if not partitions:
            return []
        job.left -= len(partitions)
        if not job.left:
            del self._jobs[job.request.transactional_id]
        return [Written(job.request, tuple(partitions))]
