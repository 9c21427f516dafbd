"""Which markers go to which broker, what its answer means, and what is tried again.

Every broker that leads partitions of ended transactions has a queue, this broker as well. What is
in it goes out with one request, and the next one waits for the answer; this broker writes its own
markers at once, whatever else is under way, and each transaction's by themselves, so that none
waits for another one's replicas. Markers whose leader is not known, or that were refused in
passing, wait for :meth:`MarkerQueues.retry`, which looks their leaders up again. Nothing is sent or
reported under a coordinator epoch that is over.

Writing a marker again is harmless: whoever is not sure that it was written sends it once more.

Source: ``TransactionMarkerChannelManager``, ``TransactionMarkerRequestCompletionHandler``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from enum import Enum, auto
from itertools import islice
from types import MappingProxyType
from typing import Final

from fencepost.logcore.machine import EndMarker
from fencepost.logcore.values import dataclass
from fencepost.txn.commands import TopicPartition, WriteMarkers

MAX_PARTITIONS_PER_REQUEST: Final = 2_000
"""The rest goes with the next request: to make and to read one takes a few milliseconds."""


class Outcome(Enum):
    """What an answer means for one partition."""

    WRITTEN = auto()
    """It holds the marker, or needs none."""
    RETRY = auto()
    """Another broker may lead it now, or this one may soon: look its leader up, send again."""
    CANCEL = auto()
    """The transaction is another one's business now: send no marker of it any more."""


OUTCOMES: Mapping[str, Outcome] = MappingProxyType(
    {
        "NONE": Outcome.WRITTEN,
        # Who has such a format refused the producer's data as well.
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
    """What one producer's partitions at a broker get."""

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
    """Partitions of a request hold their marker: they are to be reported."""

    request: WriteMarkers
    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class Cancelled:
    """No marker of a request is sent any more, and why."""

    request: WriteMarkers
    cause: str


Result = Written | Cancelled


@dataclass(slots=True, eq=False)
class _Job:
    request: WriteMarkers
    shard: int
    """The partition of ``__transaction_state``."""
    left: set[TopicPartition]
    """What is not written."""


_Queue = dict[_Job, dict[TopicPartition, None]]


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
        self._destinations: dict[int, _Destination] = {}
        self._waiting: _Queue = {}
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
        return sum(len(partitions) for partitions in self._waiting.values())

    # --- what is to be written ---

    def add(
        self, request: WriteMarkers, shard: int, partitions: Iterable[TopicPartition]
    ) -> list[Result]:
        """Send the markers of a request to ``partitions``, which may be some of its own.

        One for the same transactional id takes the place of the former.
        """
        job = self._jobs[request.transactional_id] = _Job(request, shard, set(partitions))
        return self._route(job, sorted(job.left))

    def forget(self, transactional_id: str) -> None:
        """Send no more markers of a transaction: all are written."""
        self._jobs.pop(transactional_id, None)

    def unload(self, shard: int) -> None:
        """Forget what a shard has asked for: the broker serves it no more."""
        for job in [one for one in self._jobs.values() if one.shard == shard]:
            del self._jobs[job.request.transactional_id]

    # --- what is to be sent ---

    def sends(self) -> Iterator[Send]:
        """The requests to be sent now, one at most for each other broker."""
        for broker_id, one in self._destinations.items():
            is_own = broker_id == self._own_id
            while one.queue and (not one.sent or is_own):
                jobs = tuple(islice(one.queue, 1)) if is_own else tuple(one.queue)
                markers, sent = self._taken(one.queue, jobs)
                if markers:
                    self._numbers += 1
                    one.sent[self._numbers] = sent
                    yield Send(broker_id, self._numbers, markers)

    def _taken(self, queue: _Queue, jobs: Sequence[_Job]) -> tuple[tuple[Marker, ...], _Queue]:
        """Take from a queue what goes into one request."""
        room, markers, taken = MAX_PARTITIONS_PER_REQUEST, [], _Queue()
        for job in jobs:
            if not self._is_current(job):
                del queue[job]
                continue
            if not room:
                break
            partitions = queue[job]
            now = tuple(partitions)[:room]
            room -= len(now)
            taken[job] = dict.fromkeys(now)
            request = job.request
            markers.append(Marker(request.transactional_id, request.marker, now))
            for partition in now:
                del partitions[partition]
            if not partitions:
                del queue[job]
        return tuple(markers), taken

    # --- what has come of it ---

    def answered(self, send: Send, codes: Codes) -> list[Result]:
        """Take the answer to a request; one that is not under way any more changes nothing."""
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
        """The connection broke, or nobody answered in time: all of it is tried again."""
        for job, partitions in self._sent(send).items():
            self._wait(job, partitions)

    def _sent(self, send: Send) -> _Queue:
        one = self._destinations.get(send.broker_id)
        return {} if one is None else one.sent.pop(send.number, {})

    # --- what is tried again ---

    @property
    def has_waiting(self) -> bool:
        """Whether :meth:`retry` has anything to do."""
        return bool(self._waiting)

    @property
    def first_waiting(self) -> str | None:
        """The transaction that has waited longest for :meth:`retry`."""
        return next((job.request.transactional_id for job in self._waiting), None)

    def retry(self) -> list[Result]:
        """Look up the leaders of all that waits, and queue it."""
        waiting, self._waiting = self._waiting, {}
        results: list[Result] = []
        for job, partitions in waiting.items():
            if self._is_current(job):
                results += self._route(job, partitions)
        return results

    def leaders_changed(self) -> tuple[list[Result], list[int]]:
        """Look up all leaders again; the second list are brokers whose answers are not awaited now.

        A request to a broker that leads none of its partitions any more is over: it may be dead,
        and its silence would hold up the transactions for as long as a request may take.
        """
        abandoned: list[int] = []
        for broker_id, one in self._destinations.items():
            for job, partitions in one.queue.items():
                self._wait(job, partitions)
            one.queue.clear()
            for number, sent in tuple(one.sent.items()):
                if not self._leads_any(broker_id, sent):
                    abandoned.append(broker_id)
                    del one.sent[number]
                    for job, partitions in sent.items():
                        self._wait(job, partitions)
        return self.retry(), abandoned

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

    def _wait(self, job: _Job, partitions: Iterable[TopicPartition]) -> None:
        if self._jobs.get(job.request.transactional_id) is job:
            for partition in partitions:
                self._waiting.setdefault(job, {})[partition] = None

    def _route(self, job: _Job, partitions: Iterable[TopicPartition]) -> list[Result]:
        """Queue markers where their leaders are; those that need none are written."""
        gone: list[TopicPartition] = []
        for partition in partitions:
            leader = self._leader_of(partition)
            if leader is Nowhere.NO_PARTITION:
                gone.append(partition)
            elif leader is Nowhere.NO_LEADER:
                self._waiting.setdefault(job, {})[partition] = None
            else:
                found = self._destinations.setdefault(leader, _Destination())
                found.queue.setdefault(job, {})[partition] = None
        return self._written(job, gone)

    def _written(self, job: _Job, partitions: Sequence[TopicPartition]) -> list[Result]:
        if not partitions:
            return []
        job.left.difference_update(partitions)
        if not job.left:
            del self._jobs[job.request.transactional_id]
        return [Written(job.request, tuple(partitions))]
