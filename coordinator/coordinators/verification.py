"""Verification of transactions by partition leaders, and the state of requests that wait for it.

Source: ``ReplicaManager.handleProduceAppend``, ``maybeStartTransactionVerificationForPartitions``,
``VerificationGuard``; KIP-890.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from typing import Final

from fencepost.coordinator.data.appends import Notes, Verdicts
from fencepost.coordinator.data.log_manager import LogManager
from fencepost.coordinator.runtime.background import call_later
from fencepost.coordinator.runtime.errors import (
    CoordinatorLoadInProgressError,
    ShardError,
    TransactionCoordinatorBusyError,
    VerificationLostError,
)
from fencepost.logcore.errors import InvalidProducerEpochError, InvalidTxnStateError
from fencepost.logcore.machine import DomainError
from fencepost.logcore.partition import Partition
from fencepost.logcore.values import dataclass
from fencepost.txn.commands import AddPartitions, TopicPartition
from fencepost.txn.errors import (
    ConcurrentTransactionsError,
    CoordinatorUnloadedError,
    ProducerFencedError,
    TransactionAbortableError,
)

ADDS_PARTITIONS: Final = {"Produce": 12, "TxnOffsetCommit": 5}
"""The first version of each API that adds partitions to the transaction implicitly (KIP-890, TV2).
"""

KNOWS_ABORTABLE: Final = {"Produce": 11, "TxnOffsetCommit": 4}
"""The first version of each API whose clients handle TRANSACTION_ABORTABLE."""

MAX_ENDS: Final = 5
"""The number of transaction ends during one verification before the producer must retry."""


Refused = Mapping[TopicPartition, DomainError]
"""The partitions that are not in a transaction, with the reason."""

AskElsewhere = Callable[[AddPartitions], asyncio.Future[Refused]]
"""Asks the coordinator on another broker: ``Verifier.ask``."""


@dataclass(slots=True)
class _Note:
    """A verification request for one partition, and the partition's state when it was sent."""

    partition: Partition
    leader_epoch: int
    guard: object
    answer: asyncio.Future[Refused]

    def still_stands(self, producer_id: int) -> bool:
        """Return whether the leader epoch and the producer's transaction are still the same."""
        return (
            self.partition.marks.leader_epoch == self.leader_epoch
            and self.partition.producers.guard(producer_id) is self.guard
        )


@dataclass(slots=True)
class Question:
    """The verification state of one request."""

    notes: dict[TopicPartition, _Note] = field(default_factory=dict)
    ends: int = 0
    retries_until: float | None = None
    """The end of retries for CONCURRENT_TRANSACTIONS, on the event loop's clock."""
    waits_until: float | None = None
    """The end of the wait for the replication of the coordinator's record, on the same clock."""


def question_of(notes: Notes) -> Question:
    """Return the verification state in a request's notes; create it if it is missing."""
    found = notes.get("question")
    if not isinstance(found, Question):
        notes["question"] = found = Question()
    return found


def retry_of_concurrent(
    question: Question, verdicts: Verdicts, backoff_ms: int, most_ms: int
) -> asyncio.Future[None] | None:
    """Return a future after which to ask the coordinator again, or None.

    A retry is useful while the previous transaction is being completed: without it the producer
    would resend its batch, after a longer delay (``add.partitions.to.txn.retry.backoff.ms``). There
    are no retries for longer than ``most_ms``.
    """
    if not any(isinstance(one, ConcurrentTransactionsError) for one in verdicts.values()):
        return None
    loop = asyncio.get_running_loop()
    if question.retries_until is None:
        question.retries_until = loop.time() + most_ms / 1000
    if loop.time() >= question.retries_until:
        return None
    question.notes.clear()
    return done_in(backoff_ms)


def done_in(wait_ms: float, done: asyncio.Future[None] | None = None) -> asyncio.Future[None]:
    """Return a future, by default a new one, that is done after ``wait_ms`` at the latest."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future() if done is None else done

    def over() -> None:
        if not future.done():
            future.set_result(None)

    timer = call_later(loop, wait_ms, "wait for a transaction", over)
    future.add_done_callback(lambda _: timer.cancel())
    return future


def verdicts_elsewhere(
    question: Question,
    command: AddPartitions,
    logs: LogManager,
    ask: AskElsewhere,
    told: Callable[[DomainError | None], DomainError | None],
) -> Verdicts | asyncio.Future[None]:
    """Return the verdicts of another broker's coordinator on the partitions of ``command``.

    A returned future means that verdicts are missing; call again when it is done. A verdict is
    valid for an append in the same turn of the event loop. If the transaction or the leadership of
    this broker has ended since the request for a verdict, the verdict is stale and requested again.
    ``told`` converts errors for the client.
    """
    notes, producer_id = question.notes, command.producer_id
    asked: list[TopicPartition] = []
    pending: list[asyncio.Future[Refused]] = []
    verdicts: dict[TopicPartition, DomainError | None] = {}
    for key in command.partitions:
        note = notes.get(key)
        if note is None:
            asked.append(key)
        elif not note.answer.done():
            pending.append(note.answer)
        elif not note.still_stands(producer_id):
            question.ends += 1
            asked.append(key)
        elif note.answer.cancelled():
            verdicts[key] = told(VerificationLostError("the broker stops"))
        else:
            verdicts[key] = told(note.answer.result().get(key))
    if asked and question.ends > MAX_ENDS:
        ended = told(VerificationLostError("the transaction has ended meanwhile"))
        return verdicts | dict.fromkeys(asked, ended)
    if asked:
        now = AddPartitions(
            command.transactional_id,
            producer_id,
            command.producer_epoch,
            tuple(asked),
            verify_only=command.verify_only,
            client_transaction_version=command.client_transaction_version,
        )
        answer = ask(now)
        for key in asked:
            partition = logs.find_open(key)
            if partition is None:
                continue
            guard = partition.producers.guard(producer_id)
            notes[key] = _Note(partition, partition.marks.leader_epoch, guard, answer)
        pending.append(answer)
    return _all(pending) if pending else verdicts


def _all(
    pending: Iterable[asyncio.Future[Refused]],
) -> asyncio.Future[None]:
    """Return a future that is done when all of ``pending`` are."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    left = set(pending)

    def one_less(future: asyncio.Future[Refused]) -> None:
        left.discard(future)
        if not left and not done.done():
            done.set_result(None)

    for future in list(left):
        future.add_done_callback(one_less)
    return done


def verification_error(error: DomainError | None, api: str, version: int) -> DomainError | None:
    """Translate an error of the transaction coordinator into one of a partition leader.

    Partition leaders do not return PRODUCER_FENCED, nor TRANSACTION_ABORTABLE to clients that do
    not know it. A producer does not retry COORDINATOR_LOAD_IN_PROGRESS and similar errors, so for
    Produce they become NOT_ENOUGH_REPLICAS, which every producer retries; so does
    CONCURRENT_TRANSACTIONS for clients before TV2. TxnOffsetCommit keeps these errors, but a lost
    verification becomes COORDINATOR_LOAD_IN_PROGRESS.
    """
    if isinstance(error, ProducerFencedError):
        return InvalidProducerEpochError(str(error))
    if isinstance(error, TransactionAbortableError) and version < KNOWS_ABORTABLE[api]:
        return InvalidTxnStateError(str(error))
    if api == "Produce":
        retriable: tuple[type[DomainError], ...] = (ShardError, CoordinatorUnloadedError)
        if version < ADDS_PARTITIONS[api]:
            retriable += (ConcurrentTransactionsError,)
        if isinstance(error, retriable):
            return TransactionCoordinatorBusyError(str(error))
    elif isinstance(error, VerificationLostError):
        return CoordinatorLoadInProgressError(str(error))
    return error
