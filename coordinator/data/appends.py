"""What a Produce request has done to the log, stage by stage: check, verify, append, flush.

*Check*: each batch is opened and judged (``logcore/validation.py``), at once as far as one turn of
the event loop has room for it, otherwise in a thread. *Verify*: the transaction coordinator has the
partition in the producer's transaction. *Append* follows in the same turn, so that no end of the
transaction can slip in (KIP-890). *Flush*: who asked for acknowledgement waits for the disk where a
topic says so.

A request goes through all stages in the turn in which it came, if there is time. Otherwise it takes
several, and a later request to one of its partitions waits behind it, whichever connection that
comes from.

Source: ``ReplicaManager.appendRecords``, ``AddPartitionsToTxnManager``.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from time import perf_counter
from typing import Final, Protocol

import structlog

from fencepost.coordinator.data.storage import Storage
from fencepost.coordinator.errors import (
    InvalidRequiredAcksError,
    InvalidTopicError,
    TransactionalIdMissingError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
)
from fencepost.coordinator.metadata.names import INTERNAL_TOPICS
from fencepost.coordinator.runtime.background import SLICE_MS, Threads, spawn
from fencepost.coordinator.runtime.origin import Origin
from fencepost.coordinator.runtime.turns import Work
from fencepost.logcore.batch import HEADER_SIZE
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
from fencepost.logcore.record_check import MAX_RECORD_ERRORS, Room, TooMuchForATurnError
from fencepost.logcore.validation import Admitted, admit
from fencepost.txn.errors import InvalidProducerIdMappingError

FIRST_WITH_ZSTD: Final = 7
FIRST_ADDING_TO_TRANSACTION: Final = 12

_HALF_A_SLICE_S: Final = SLICE_MS / 2000
"""How long a request checks batches in one turn of the event loop, and how long it appends. The
first append to a partition makes its files, which takes 0.3 ms, and several on a busy disk."""

MAX_REQUEST_RECORD_ERRORS: Final = 10 * MAX_RECORD_ERRORS
"""Records that the refusals of one request list, over all its partitions."""

CHECK_THREADS: Final = 2
"""Batches that are checked at the same time outside of the event loop, each inflated to 128 MiB at
most. More of them would only make the loop wait for the interpreter."""

_VALID_ACKS: Final = frozenset({-1, 0, 1})
"""On one node 1 and −1 mean the same."""

_BEFORE_THE_LOG: Final = (
    CorruptRecordError,
    NotOneBatchError,
    RecordTooLargeError,
    RecordListTooLargeError,
    StorageError,
)
"""Errors whose answer tells no log start offset (``ReplicaManager.appendToLocalLog``)."""

_ATTRIBUTES_AT: Final = 22
_TRANSACTIONAL: Final = 0x10
_PRODUCER_AT: Final = 43
_PRODUCER: Final = struct.Struct(">qh")

_log = structlog.get_logger(__name__)

TopicPartition = tuple[str, int]
Check = Callable[[], Admitted]
Verdicts = Mapping[TopicPartition, DomainError | None]
"""Why a partition may not be written to; None where it may."""


class Verify(Protocol):
    """Asks the transaction coordinator: ``TxnCoordinator.verify``."""

    def __call__(
        self,
        api: str,
        version: int,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: Sequence[TopicPartition],
        origin: Origin | None = None,
    ) -> Verdicts | asyncio.Future[None]:
        """A future is done when it is time to ask anew."""


@dataclass(slots=True)
class Part:
    """One partition of a Produce request, and what became of it.

    In the end there is either ``appended`` or an ``error``. ``topic`` is None where no topic has
    the id that the request names.
    """

    topic: str | None
    index: int
    data: bytes | None
    partition: Partition | None = None
    admitted: Admitted | None = None
    appended: Appended | None = None
    error: DomainError | None = None

    @property
    def key(self) -> TopicPartition:
        """Topic and index; the name is empty where there is none."""
        return self.topic or "", self.index

    @property
    def log_start_offset(self) -> int:
        """What a refusal tells of the log; −1 where the log was not asked."""
        asked = isinstance(self.error, LogError) and not isinstance(self.error, _BEFORE_THE_LOG)
        return self.partition.log_start_offset if asked and self.partition is not None else -1

    @property
    def producer(self) -> tuple[int, int] | None:
        """Producer id and epoch of a transactional batch."""
        data = self.data
        if not data or len(data) < HEADER_SIZE or not data[_ATTRIBUTES_AT] & _TRANSACTIONAL:
            return None
        producer: tuple[int, int] = _PRODUCER.unpack_from(data, _PRODUCER_AT)
        return producer


@dataclass(slots=True)
class Append:
    """One Produce request. ``version`` is the request's, ``acks`` 0 if it wants no answer."""

    parts: list[Part]
    version: int
    transactional_id: str | None
    origin: Origin
    acks: int
    refusal: DomainError | None = field(init=False, default=None)
    """Why nothing of it is appended. What keeps a batch from the log at all is told first."""
    producers: set[tuple[int, int]] = field(init=False)
    """Of its transactional batches."""
    listed_errors: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.producers = {one for part in self.parts if (one := part.producer) is not None}
        if self.acks not in _VALID_ACKS:
            self.refusal = InvalidRequiredAcksError(f"acks={self.acks}")

    def refuse(self, part: Part, error: DomainError) -> None:
        """Take down why a batch is not appended, less what would make the answer too large."""
        part.error = error
        if isinstance(error, StorageError):
            _log.error("append failed", topic=part.topic, partition=part.index, cause=str(error))
        if isinstance(error, InvalidRecordError | InvalidTimestampError) and error.record_errors:
            left = MAX_REQUEST_RECORD_ERRORS - self.listed_errors
            error.record_errors = error.record_errors[:left]
            self.listed_errors += len(error.record_errors)


@dataclass(slots=True)
class _Progress:
    """How far a request has come: its parts are checked in order, and appended in order."""

    checked: int = 0
    left: list[tuple[Part, Check]] = field(default_factory=list)
    """Checks that a turn had no room for."""
    ready: deque[Part] = field(default_factory=deque)
    """Checked, but for those ``left``, and not appended."""
    disk: asyncio.Future[None] | None = None
    """What the next append has to wait for."""
    flushes: list[asyncio.Future[None]] = field(default_factory=list)
    """What the answer has to wait for."""


class Appends:
    """``services.appends``. Belongs to the event loop."""

    def __init__(self, storage: Storage, *, verify: Verify) -> None:
        self._clock, self._logs, self._flusher = storage.clock, storage.logs, storage.flusher
        self._ask = verify
        self._last: dict[TopicPartition, asyncio.Task[None]] = {}
        self._threads = Threads("check", CHECK_THREADS)

    def run(self, append: Append) -> Work[None]:
        """Take a request through all stages. Errors are left in the parts.

        A client may leave and drop these steps; what has begun goes on.
        """
        if append.producers and append.transactional_id is None:
            # Without its id nobody could say whether the transaction is the producer's own.
            missing = "a transactional batch without a transactional id"
            for part in append.parts:
                append.refuse(part, TransactionalIdMissingError(missing))
            return
        progress = _Progress()
        if not self._at_once(append, progress):
            task = asyncio.shield(self._begin(append, progress))
            yield task
            task.result()
        yield from progress.flushes

    def _at_once(self, append: Append, progress: _Progress) -> bool:
        """Check, verify and append in this turn; whether that was all."""
        if self._last and any(part.key in self._last for part in append.parts):
            return False
        self._check(append, progress)
        if progress.checked < len(append.parts) or progress.left:
            return False
        self._append(append, progress)
        return not progress.ready

    def _begin(self, append: Append, progress: _Progress) -> asyncio.Task[None]:
        ahead = {task for part in append.parts if (task := self._last.get(part.key)) is not None}
        task = spawn(self._in_turns(append, progress, ahead), "append")
        for part in append.parts:
            self._last[part.key] = task
        task.add_done_callback(partial(self._done, append))
        return task

    async def close(self) -> None:
        """Drop what is not appended yet, and end the threads: nobody waits for an answer now."""
        tasks = set(self._last.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._threads.close()

    async def _in_turns(
        self, append: Append, progress: _Progress, ahead: set[asyncio.Task[None]]
    ) -> None:
        """Go on with a request behind those ``ahead`` of it, as far as a turn has time, and on."""
        if ahead:
            await asyncio.wait(ahead)
        while True:
            await self._check_elsewhere(append, progress)
            while progress.ready:
                await (progress.disk or asyncio.sleep(0))
                self._append(append, progress)
            if progress.checked == len(append.parts):
                return
            await asyncio.sleep(0)
            self._check(append, progress)

    def _done(self, append: Append, task: asyncio.Task[None]) -> None:
        for part in append.parts:
            if self._last.get(part.key) is task:
                del self._last[part.key]

    # --- check ---

    def _check(self, append: Append, progress: _Progress) -> None:
        """Find partitions and check their batches while there is time."""
        room = Room()
        now_ms = self._clock.now_ms()
        until = perf_counter() + _HALF_A_SLICE_S
        for part in islice(append.parts, progress.checked, None):
            try:
                check = self._found(append, part, now_ms)
                part.admitted = check(room=room)
            except TooMuchForATurnError:
                progress.left.append((part, check))
            except DomainError as error:
                append.refuse(part, error)
            progress.ready.append(part)
            progress.checked += 1
            if perf_counter() > until:
                return

    def _found(self, append: Append, part: Part, now_ms: int) -> partial[Admitted]:
        if part.topic is None:
            raise UnknownTopicIdError("no topic has this id")
        partition = self._logs.partition(part.topic, part.index)
        if part.topic in INTERNAL_TOPICS:
            raise append.refusal or InvalidTopicError(f"clients may not write to {part.topic}")
        part.partition = partition
        if not part.data:
            raise NotOneBatchError("a produce request must hold exactly one batch per partition")
        return partial(
            admit,
            part.data,
            partition.log.config,
            now_ms=now_ms,
            min_zstd_ok=append.version >= FIRST_WITH_ZSTD,
        )

    async def _check_elsewhere(self, append: Append, progress: _Progress) -> None:
        """Check in a thread what was too much for a turn."""
        left, progress.left = progress.left, []
        for part, check in left:
            try:
                part.admitted = await self._threads.run(check)
            except DomainError as error:
                append.refuse(part, error)

    # --- verify and append ---

    def _append(self, append: Append, progress: _Progress) -> None:
        """Verify and append what is ready, while there is time; the rest is verified once more.

        Nothing comes between an append and its verification. Nothing is appended if there is
        something to wait for first: ``progress.disk``.
        """
        verified = self._verify(append, progress.ready)
        if isinstance(verified, asyncio.Future):
            progress.disk = verified
            return
        progress.disk = None
        until = perf_counter() + _HALF_A_SLICE_S
        done: list[Part] = []
        while progress.ready:
            done.append(progress.ready.popleft())
            self._append_one(append, done[-1], verified)
            if perf_counter() > until:
                break
        if append.acks and not self._flusher.is_idle:
            self._wait_for_disk(append, progress, done)

    def _append_one(self, append: Append, part: Part, verified: Verdicts) -> None:
        partition = part.partition
        if partition is None:
            return
        try:
            if self._logs.find(*part.key) is not partition:
                raise _deleted()
            error = verified.get(part.key)
            if error is not None:
                partition.producers.refused_unread(part.data or b"")
                # The log was not asked to append, so the answer tells nothing of it.
                part.partition = None
                raise error
            if append.refusal is not None and not isinstance(part.error, NotOneBatchError):
                raise append.refusal
            if part.admitted is not None:
                part.appended = partition.append_admitted(
                    part.admitted,
                    transaction_verified=part.key in verified,
                    transaction_version=2 if append.version >= FIRST_ADDING_TO_TRANSACTION else 0,
                )
        except DomainError as error:
            append.refuse(part, error)

    def _verify(self, append: Append, parts: Iterable[Part]) -> Verdicts | asyncio.Future[None]:
        """Ask the transaction coordinator about every partition where a transaction would begin.

        Returns an error or None for each of them; partitions with an open transaction of this
        producer are not asked about, and not in the answer, and where a newer epoch of it has
        written that is the error. A future: the request has to wait for it, and to ask anew.
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
        asked: list[TopicPartition] = []
        for key, partition in batches:
            try:
                partition.producers.check_epoch(producer_id, epoch)
            except InvalidProducerEpochError as error:
                verdicts[key] = error
                continue
            if not partition.producers.has_open_transaction(producer_id, epoch):
                asked.append(key)
        if not asked:
            return verdicts
        tid, origin = append.transactional_id, append.origin
        found = self._ask("Produce", append.version, tid, producer_id, epoch, asked, origin)
        return found if isinstance(found, asyncio.Future) else {**verdicts, **found}

    # --- flush ---

    def _wait_for_disk(self, append: Append, progress: _Progress, parts: Iterable[Part]) -> None:
        """Have the answer wait for the disk where what was appended, now or before, is held.

        What does not get there is refused then: nobody may take it for stored.
        """
        held = [
            (part, part.partition, part.appended)
            for part in parts
            if part.appended is not None
            and part.partition is not None
            and part.partition.flushes.is_awaited
        ]
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def settle() -> None:
            for part, partition, appended in held:
                if partition.recovery_point <= appended.base_offset:
                    append.refuse(part, partition.offline or _deleted())
            if not future.done():
                future.set_result(None)

        if self._flusher.after((partition for _, partition, _ in held), settle):
            progress.flushes.append(future)


def _deleted() -> UnknownTopicOrPartitionError:
    return UnknownTopicOrPartitionError("the topic was deleted meanwhile")
