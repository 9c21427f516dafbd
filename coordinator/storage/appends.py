"""The stages of a Produce request: check, verify, append, commit.

*Check*: each batch is parsed and validated (``logcore/validation.py``), on the event loop if it is
small enough for one turn of the loop, otherwise in a thread. *Verify*: the transaction coordinator
confirms that the partition is in the producer's transaction. *Append* follows in the same turn, so
that the transaction cannot end in between (KIP-890). *Commit*: a request with acks other than 0
waits for a flush if ``flush.messages`` requires it, and with acks=-1 for the other replicas, up to
the client's timeout. Appended records stay in the log even if the response is an error.

If time allows, a request passes all stages in the turn in which it arrives. A longer request takes
several turns, and later requests to any of its partitions wait for it, even if they arrive on other
connections. Later requests may overtake it only while it waits for the transaction coordinator.

Source: ``ReplicaManager.appendRecords``, ``DelayedProduce``, ``AddPartitionsToTxnManager``.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterable, Mapping, Sequence
from dataclasses import field
from functools import partial
from itertools import islice
from typing import Any, Final, Protocol

import structlog

from fencepost.cluster.errors import NotLeaderOrFollowerError
from fencepost.coordinator.errors import (
    InvalidRequiredAcksError,
    InvalidTopicError,
    NotEnoughReplicasAfterAppendError,
    NotEnoughReplicasError,
    RequestTimedOutError,
    TransactionalIdMissingError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
)
from fencepost.coordinator.metadata.names import INTERNAL_TOPICS
from fencepost.coordinator.runtime.background import SLICE_MS, call_later, spawn
from fencepost.coordinator.runtime.fair_threads import FairThreads
from fencepost.coordinator.runtime.origin import Origin
from fencepost.coordinator.runtime.turns import Work
from fencepost.coordinator.storage.storage import Storage
from fencepost.logcore.batch import HEADER_SIZE
from fencepost.logcore.clock import monotonic_s
from fencepost.logcore.errors import (
    CorruptRecordError,
    InvalidProducerEpochError,
    InvalidRecordError,
    InvalidTimestampError,
    LogError,
    NotOneBatchError,
    RecordListTooLargeError,
    RecordTooLargeError,
    StorageError,
)
from fencepost.logcore.machine import DomainError
from fencepost.logcore.partition import Appended, Partition
from fencepost.logcore.record_check import MAX_RECORD_ERRORS, CheckBudget, CheckBudgetExceededError
from fencepost.logcore.steps import Steps, finish
from fencepost.logcore.tracebacks import without_traceback
from fencepost.logcore.validation import ValidatedBatch, validate_in_steps
from fencepost.logcore.values import dataclass
from fencepost.txn.errors import InvalidProducerIdMappingError

FIRST_WITH_ZSTD: Final = 7
FIRST_ADDING_TO_TRANSACTION: Final = 12

_HALF_A_SLICE_S: Final = SLICE_MS / 2000
"""The time in seconds that a request may spend in one turn on checking batches, and then on
appending batches. The first append to a partition creates its files, which takes 0.3 ms, or several
milliseconds on a busy disk."""

MAX_REQUEST_RECORD_ERRORS: Final = 10 * MAX_RECORD_ERRORS
"""The maximum number of records listed in the errors of a request, for all partitions together."""

CHECK_THREADS: Final = 2
"""The number of threads that check batches. More threads would only make the event loop wait for
the global interpreter lock."""

_VALID_ACKS: Final = frozenset({-1, 0, 1})
ALL: Final = -1
"""acks=-1: all in-sync replicas must have the records. For a partition with one replica, acks=1
means the same."""

_WITH_LOG_START: Final = (LogError, NotEnoughReplicasError)
_WITHOUT_LOG_START: Final = (
    CorruptRecordError,
    NotOneBatchError,
    RecordTooLargeError,
    RecordListTooLargeError,
    StorageError,
)
"""Errors whose response contains no log start offset (``ReplicaManager.appendToLocalLog``)."""

_ATTRIBUTES_AT: Final = 22
_TRANSACTIONAL: Final = 0x10
_PRODUCER_AT: Final = 43
_PRODUCER: Final = struct.Struct(">qh")

_log = structlog.get_logger(__name__)

TopicPartition = tuple[str, int]
Check = Callable[[], Steps[ValidatedBatch]]
Verdicts = Mapping[TopicPartition, DomainError | None]
"""For each partition, the error with which its batch is refused, or None if it may be appended."""


RequestState = dict[str, object]
"""State of the transaction coordinator between calls of :class:`Verify` for a request."""


class Verify(Protocol):
    """Queries the transaction coordinator: ``TxnCoordinator.verify``."""

    def __call__(
        self,
        api: str,
        version: int,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: Sequence[TopicPartition],
        origin: Origin | None = None,
        request_state: RequestState | None = None,
    ) -> Verdicts | asyncio.Future[None]:
        """Return the verdicts, or a future: call again with the same state when it is done."""


class RequestCharges(Protocol):
    """The quotas of a request's client: ``Throttle``."""

    def timed(self, work: Coroutine[Any, Any, None]) -> Awaitable[None]:
        """Count the time of ``work`` on the event loop."""

    def took_in_thread(self, seconds: float) -> None:
        """Count processor time of a thread."""


@dataclass(slots=True)
class Part:
    """One partition of a Produce request, and its result.

    When the request has ended, ``appended`` or ``error`` is set; both are set if the records were
    appended but not committed. ``topic`` is None if no topic has the requested id.
    """

    topic: str | None
    index: int
    data: bytes | None
    partition: Partition | None = None
    admitted: ValidatedBatch | None = None
    appended: Appended | None = None
    error: DomainError | None = None
    leader_epoch: int = -1
    """The leader epoch of the append."""

    @property
    def key(self) -> TopicPartition:
        """Return topic and index; the name is empty if the topic is unknown."""
        return self.topic or "", self.index

    @property
    def log_start_offset(self) -> int:
        """Return the log start offset if the error response must contain it, else −1."""
        error = self.error
        if not isinstance(error, _WITH_LOG_START) or isinstance(error, _WITHOUT_LOG_START):
            return -1
        return -1 if self.partition is None else self.partition.log_start_offset

    @property
    def producer(self) -> tuple[int, int] | None:
        """Return producer id and epoch of a transactional batch; None for any other batch."""
        data = self.data
        if not data or len(data) < HEADER_SIZE or not data[_ATTRIBUTES_AT] & _TRANSACTIONAL:
            return None
        producer: tuple[int, int] = _PRODUCER.unpack_from(data, _PRODUCER_AT)
        return producer


@dataclass(slots=True)
class Append:
    """One Produce request. With ``acks`` 0 the client expects no response.

    ``version`` is the request's API version. With ``acks`` −1, ``timeout_ms`` limits the wait for
    other replicas.
    """

    parts: list[Part]
    version: int
    transactional_id: str | None
    origin: Origin
    acks: int
    timeout_ms: int = 30_000
    client: Hashable = None
    """The connection; connections share the checking threads fairly."""
    throttle: RequestCharges | None = None
    """Counts the time that the request takes."""
    refusal: DomainError | None = field(init=False, default=None)
    """The reason why nothing is appended. Errors of the batch itself take precedence."""
    producers: set[tuple[int, int]] = field(init=False)
    """The producer ids and epochs of the transactional batches."""
    listed_errors: int = field(init=False, default=0)
    request_state: RequestState = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.producers = {
            producer for part in self.parts if (producer := part.producer) is not None
        }
        if self.acks not in _VALID_ACKS:
            self.refusal = InvalidRequiredAcksError(f"acks={self.acks}")

    def refuse(self, part: Part, error: DomainError) -> None:
        """Record why a batch is not appended; omit details if the response gets too large."""
        part.error = without_traceback(error)
        if isinstance(error, StorageError):
            _log.error("append failed", topic=part.topic, partition=part.index, cause=str(error))
        if isinstance(error, InvalidRecordError | InvalidTimestampError) and error.record_errors:
            left = MAX_REQUEST_RECORD_ERRORS - self.listed_errors
            error.record_errors = error.record_errors[:left]
            self.listed_errors += len(error.record_errors)


@dataclass(slots=True)
class _AppendState:
    """The progress of a request, whose parts are checked and appended in order."""

    checked: int = 0
    """The number of parts that are checked, or in ``left``."""
    left: list[tuple[Part, Check]] = field(default_factory=list)
    """Checks too long for one turn, which run in a thread."""
    ready: deque[Part] = field(default_factory=deque)
    """Parts that are checked, or in ``left``, but not appended yet."""
    verification: asyncio.Future[None] | None = None
    """The verification that the next append waits for; None if it need not wait."""
    commits: list[asyncio.Future[None]] = field(default_factory=list)
    """The flushes and commits that the response waits for."""


class Appends:
    """Serves Produce requests (``services.appends``), on the event loop only."""

    def __init__(self, storage: Storage, *, verify: Verify) -> None:
        self._clock, self._replicas = storage.clock, storage.replicas
        self._flusher, self._commits = storage.flusher, storage.commits
        self._ask = verify
        self._last: dict[TopicPartition, asyncio.Future[None]] = {}
        """For each partition, the gate of its last request: a future that the next request awaits.
        """
        self._tasks: set[asyncio.Task[None]] = set()
        self._threads = FairThreads("check", CHECK_THREADS)

    def run(self, append: Append) -> Work[None]:
        """Take a request through all stages. Errors are stored in the parts.

        If the client disconnects and the generator is closed, appends in progress continue.
        """
        if append.producers and append.transactional_id is None:
            # Without the id no coordinator can verify the transaction.
            missing = "a transactional batch without a transactional id"
            for part in append.parts:
                append.refuse(part, TransactionalIdMissingError(missing))
            return
        progress = _AppendState()
        if not self._try_at_once(append, progress):
            task = asyncio.shield(self._begin(append, progress))
            yield task
            task.result()
        yield from progress.commits

    def _try_at_once(self, append: Append, progress: _AppendState) -> bool:
        """Check, verify and append in this turn; return False if that is unfinished."""
        if self._last and any(part.key in self._last for part in append.parts):
            return False
        self._check(append, progress)
        if progress.checked < len(append.parts) or progress.left:
            return False
        self._append(append, progress)
        return not progress.ready

    def _begin(self, append: Append, progress: _AppendState) -> asyncio.Task[None]:
        ahead = {last for part in append.parts if (last := self._last.get(part.key)) is not None}
        gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        work = self._in_turns(append, progress, ahead, gate)
        if append.throttle is not None:
            work = _awaited(append.throttle.timed(work))
        task = spawn(work, "append")
        for part in append.parts:
            self._last[part.key] = gate
        self._tasks.add(task)
        task.add_done_callback(partial(self._done, append, gate))
        return task

    async def close(self) -> None:
        """Drop unfinished requests, for which no client waits now, and end the threads."""
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._threads.close()

    async def _in_turns(
        self,
        append: Append,
        progress: _AppendState,
        ahead: set[asyncio.Future[None]],
        gate: asyncio.Future[None],
    ) -> None:
        """Process a request after the requests in ``ahead``, over as many turns as needed."""
        if ahead:
            await asyncio.wait(ahead)
        while True:
            await self._check_elsewhere(append, progress)
            while progress.ready:
                if progress.verification is not None:
                    # The coordinator may be on a slow broker, so the requests of other clients no
                    # longer wait. Later requests on this connection still wait for this response.
                    self._resume_queued(append, gate)
                    await progress.verification
                else:
                    await asyncio.sleep(0)
                self._append(append, progress)
            if progress.checked == len(append.parts):
                return
            await asyncio.sleep(0)
            self._check(append, progress)

    def _resume_queued(self, append: Append, gate: asyncio.Future[None]) -> None:
        """Resume the requests queued behind this one."""
        for part in append.parts:
            if self._last.get(part.key) is gate:
                del self._last[part.key]
        if not gate.done():
            gate.set_result(None)

    def _done(self, append: Append, gate: asyncio.Future[None], task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._resume_queued(append, gate)

    # --- check ---

    def _check(self, append: Append, progress: _AppendState) -> None:
        """Find partitions and check their batches while there is time."""
        budget = CheckBudget()
        now_ms = self._clock.now_ms()
        until = monotonic_s() + _HALF_A_SLICE_S
        for part in islice(append.parts, progress.checked, None):
            try:
                check = self._validated(append, part, now_ms)
                part.admitted = finish(check(budget=budget))
            except CheckBudgetExceededError:
                progress.left.append((part, check))
            except DomainError as error:
                self._refuse(append, part, error)
            progress.ready.append(part)
            progress.checked += 1
            if monotonic_s() > until:
                return

    def _validated(self, append: Append, part: Part, now_ms: int) -> partial[Steps[ValidatedBatch]]:
        if part.topic is None:
            raise UnknownTopicIdError("no topic has this id")
        partition = self._replicas.leader(part.topic, part.index)
        if part.topic in INTERNAL_TOPICS:
            if append.refusal is not None:
                raise without_traceback(append.refusal)
            raise InvalidTopicError(f"clients may not write to {part.topic}")
        part.partition = partition
        if append.acks == ALL:
            self._replicas.check_min_isr(part.topic, part.index)
        if not part.data:
            raise NotOneBatchError("a produce request must hold exactly one batch per partition")
        return partial(
            validate_in_steps,
            part.data,
            partition.log.config,
            now_ms=now_ms,
            min_zstd_ok=append.version >= FIRST_WITH_ZSTD,
        )

    async def _check_elsewhere(self, append: Append, progress: _AppendState) -> None:
        """Check in a thread the batches that are too large for one turn."""
        left, progress.left = progress.left, []
        took = None if append.throttle is None else append.throttle.took_in_thread
        for part, check in left:
            try:
                part.admitted = await self._threads.run(check(), append.client, took)
            except DomainError as error:
                append.refuse(part, error)

    # --- verify and append ---

    def _append(self, append: Append, progress: _AppendState) -> None:
        """Verify the ready parts, and append them while there is time.

        Verification and append share a turn of the event loop, so that the transaction cannot end
        between them; parts left for a later turn are verified again. If the coordinator cannot
        answer at once, nothing is appended, and ``progress.verification`` is set.
        """
        verified = self._verify(append, progress.ready)
        if isinstance(verified, asyncio.Future):
            progress.verification = verified
            return
        progress.verification = None
        until = monotonic_s() + _HALF_A_SLICE_S
        done: list[Part] = []
        while progress.ready:
            done.append(progress.ready.popleft())
            self._append_one(append, done[-1], verified)
            if monotonic_s() > until:
                break
        if append.acks and not self._commits.is_idle:
            self._wait_for_disk(append, progress, done)
            if append.acks == ALL and self._commits.has_replicated:
                self._wait_for_replicas(append, progress, done)

    def _append_one(self, append: Append, part: Part, verified: Verdicts) -> None:
        partition = part.partition
        if partition is None:
            return
        try:
            if self._replicas.leader(*part.key) is not partition:
                raise _deleted()
            if append.acks == ALL:
                self._replicas.check_min_isr(*part.key)
            error = verified.get(part.key)
            if error is not None:
                partition.producers.note_refused_bytes(part.data or b"")
                # The log was not asked to append, so the response must not contain its offsets.
                part.partition = None
                raise error
            if append.refusal is not None and not isinstance(part.error, NotOneBatchError):
                raise without_traceback(append.refusal)
            if part.admitted is not None:
                part.leader_epoch = partition.marks.leader_epoch
                part.appended = partition.append_validated(
                    part.admitted,
                    transaction_verified=part.key in verified,
                    transaction_version=2 if append.version >= FIRST_ADDING_TO_TRANSACTION else 0,
                )
        except DomainError as error:
            self._refuse(append, part, error)

    def _refuse(self, append: Append, part: Part, error: DomainError) -> None:
        """Refuse a part; keep later batches of its producer from overtaking the producer's retry.

        Later batches may be in flight already, and arrive after this broker has become the leader
        or the ISR has grown. (Kafka would accept them, and then refuse the first batch as out of
        order when the producer sends it again.)
        """
        append.refuse(part, error)
        if isinstance(error, NotLeaderOrFollowerError | NotEnoughReplicasError):
            replica = self._replicas.replica(*part.key)
            if replica is not None and replica.partition is not None:
                replica.partition.producers.note_refused_bytes(part.data or b"")

    def _verify(self, append: Append, parts: Iterable[Part]) -> Verdicts | asyncio.Future[None]:
        """Ask the transaction coordinator about each partition where a transaction would begin.

        Return an error or None for each such partition, or a future: call again once the future is
        done. A partition with an open transaction of this producer is not in the result. A
        partition whose producer state has a newer epoch gets an error without a query.
        """
        if append.transactional_id is None or not append.producers:
            return {}
        batches = [
            (part.key, part.partition)
            for part in parts
            if part.partition is not None and part.producer is not None
        ]
        if len(append.producers) > 1:
            mixed = InvalidProducerIdMappingError(
                "transactional batches of more than one producer id and epoch in a request"
            )
            return {key: mixed for key, _ in batches}
        ((producer_id, epoch),) = append.producers
        verdicts: dict[TopicPartition, DomainError | None] = {}
        unverified: list[TopicPartition] = []
        for key, partition in batches:
            try:
                partition.producers.check_epoch(producer_id, epoch)
            except InvalidProducerEpochError as error:
                verdicts[key] = without_traceback(error)
                continue
            if not partition.producers.has_open_transaction(producer_id, epoch):
                unverified.append(key)
        if not unverified:
            return verdicts
        tid, origin = append.transactional_id, append.origin
        request_state = append.request_state
        outcome = self._ask(
            "Produce", append.version, tid, producer_id, epoch, unverified, origin, request_state
        )
        return outcome if isinstance(outcome, asyncio.Future) else {**verdicts, **outcome}

    # --- commit ---

    def _wait_for_disk(self, append: Append, progress: _AppendState, parts: Iterable[Part]) -> None:
        """Make the response wait for the disk if records of ``parts`` are not flushed.

        A duplicate waits for the original batch. A part whose flush fails is refused: its records
        are not durable.
        """
        held = [
            (part, part.partition, part.appended)
            for part in parts
            if part.appended is not None
            and part.partition is not None
            and part.partition.flushes.is_awaited
            and not (append.acks == ALL and part.partition.marks.is_replicated)
        ]
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def settle() -> None:
            for part, partition, appended in held:
                if partition.recovery_point <= appended.base_offset:
                    append.refuse(part, partition.offline or _deleted())
            if not future.done():
                future.set_result(None)

        if self._flusher.after((partition for _, partition, _ in held), settle):
            progress.commits.append(future)

    def _wait_for_replicas(
        self, append: Append, progress: _AppendState, parts: Iterable[Part]
    ) -> None:
        """Make the response wait until the high watermark has passed the records.

        A duplicate waits as well, because the original batch may not be committed yet.
        """
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()
        # Emptied at the end, so that callbacks which run later keep no batch alive.
        waiting: dict[TopicPartition, tuple[Part, Partition, Appended]] = {}

        def settle(key: TopicPartition) -> None:
            settled = waiting.pop(key, None)
            if settled is not None:
                settled[0].error = self._verdict(*settled)
                if not (waiting or over.done()):
                    over.set_result(None)

        def expire() -> None:
            while waiting:
                _, (part, _, _) = waiting.popitem()
                part.error = RequestTimedOutError(
                    "other replicas did not fetch the records in time"
                )
            if not over.done():
                over.set_result(None)

        for part in parts:
            partition, appended = part.partition, part.appended
            if appended is None or partition is None or not partition.marks.is_replicated:
                continue
            pending = part, partition, appended
            if self._commits.after((partition,), partial(settle, part.key)):
                waiting[part.key] = pending
            else:
                part.error = self._verdict(*pending)
        if waiting:
            timer = call_later(loop, append.timeout_ms, "acks", expire)

            def end(_over: asyncio.Future[None]) -> None:
                timer.cancel()
                waiting.clear()  # the client may have disconnected

            over.add_done_callback(end)
            progress.commits.append(over)

    def _verdict(self, part: Part, partition: Partition, appended: Appended) -> DomainError | None:
        """Return the error for an appended part after its wait; None if it is acknowledged."""
        marks = partition.marks
        if marks.stopped is not None:
            return partition.offline or _deleted()
        if not marks.is_replicated:
            return None  # the other replicas were removed, and this log is complete
        from fencepost.cluster.leader import AcksVerdict  # noqa: PLC0415 - most brokers are standalone

        machine = self._replicas.led(*part.key)
        verdict = AcksVerdict.NOT_LEADER_OR_FOLLOWER
        if machine is not None:
            verdict = machine.acks_verdict(appended.last_offset + 1, part.leader_epoch)
        if verdict is AcksVerdict.DONE:
            return None
        if verdict is AcksVerdict.NOT_ENOUGH_REPLICAS_AFTER_APPEND:
            return NotEnoughReplicasAfterAppendError("the ISR is now below min.insync.replicas")
        return NotLeaderOrFollowerError(f"this broker no longer leads {partition.name}")


async def _awaited(work: Awaitable[None]) -> None:
    await work


def _deleted() -> UnknownTopicOrPartitionError:
    return UnknownTopicOrPartitionError("the topic was deleted meanwhile")
