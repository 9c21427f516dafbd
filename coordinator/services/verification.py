"""Verification of transactions by partition leaders, and the state of requests that wait for it.

Source: ``ReplicaManager.handleProduceAppend``, ``maybeStartTransactionVerificationForPartitions``,
``VerificationGuard``; KIP-890.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from typing import Final

from fencepost.coordinator.runtime.background import call_later
from fencepost.coordinator.runtime.errors import (
    CoordinatorLoadInProgressError,
    ShardError,
    TransactionCoordinatorBusyError,
    VerificationLostError,
)
from fencepost.coordinator.storage.appends import RequestState, Verdicts
from fencepost.coordinator.storage.log_manager import LogManager
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

FIRST_ADDING_PARTITIONS: Final = {"Produce": 12, "TxnOffsetCommit": 5}
"""The first version of each API that adds partitions to the transaction implicitly (KIP-890, TV2).
"""

FIRST_WITH_ABORTABLE: Final = {"Produce": 11, "TxnOffsetCommit": 4}
"""The first version of each API whose clients handle TRANSACTION_ABORTABLE."""

MAX_TRANSACTION_ENDS: Final = 5
"""The maximum number of stale verdicts in one verification; above it, the producer must retry. A
verdict is stale if the transaction has ended or the leader has changed."""


VerificationErrors = Mapping[TopicPartition, DomainError]
"""The partitions that are not in a transaction, with the reason."""

VerifyRemotely = Callable[[AddPartitions], asyncio.Future[VerificationErrors]]
"""Asks the coordinator on another broker: ``RemoteVerifier.ask``."""


@dataclass(slots=True)
class _PartitionVerification:
    """A verification request for one partition, and the partition's state when it was sent."""

    partition: Partition
    leader_epoch: int
    guard: object
    answer: asyncio.Future[VerificationErrors]

    def is_current(self, producer_id: int) -> bool:
        """Return whether the leader epoch and the producer's transaction are still the same."""
        return (
            self.partition.marks.leader_epoch == self.leader_epoch
            and self.partition.producers.guard(producer_id) is self.guard
        )


@dataclass(slots=True)
class VerificationState:
    """The verification state of one request."""

    verifications: dict[TopicPartition, _PartitionVerification] = field(default_factory=dict)
    transaction_ends: int = 0
    retries_until: float | None = None
    """The end of retries for CONCURRENT_TRANSACTIONS, on the event loop's clock."""
    waits_until: float | None = None
    """The end of the wait for the replication of the coordinator's record, on the same clock."""


def verification_state(request_state: RequestState) -> VerificationState:
    """Return a request's verification state; create it if it is missing."""
    state = request_state.get("verification")
    if not isinstance(state, VerificationState):
        request_state["verification"] = state = VerificationState()
    return state


def retry_of_concurrent(
    state: VerificationState, verdicts: Verdicts, backoff_ms: int, most_ms: int
) -> asyncio.Future[None] | None:
    """Return a future that is done when the coordinator should be asked again, or None.

    While the coordinator completes the previous transaction, a retry after ``backoff_ms`` is faster
    than an error, after which the producer would resend its batch. Retries end after ``most_ms``.
    """
    if not any(isinstance(verdict, ConcurrentTransactionsError) for verdict in verdicts.values()):
        return None
    loop = asyncio.get_running_loop()
    if state.retries_until is None:
        state.retries_until = loop.time() + most_ms / 1000
    if loop.time() >= state.retries_until:
        return None
    state.verifications.clear()
    return completes_after(backoff_ms)


def completes_after(
    wait_ms: float, done: asyncio.Future[None] | None = None
) -> asyncio.Future[None]:
    """Return a future, by default a new one, that is done after ``wait_ms`` at the latest."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future() if done is None else done

    def over() -> None:
        if not future.done():
            future.set_result(None)

    timer = call_later(loop, wait_ms, "wait for a transaction", over)
    future.add_done_callback(lambda _: timer.cancel())
    return future


def remote_verdicts(
    state: VerificationState,
    command: AddPartitions,
    logs: LogManager,
    ask: VerifyRemotely,
    translate: Callable[[DomainError | None], DomainError | None],
) -> Verdicts | asyncio.Future[None]:
    """Return the verdicts of another broker's coordinator on the partitions of ``command``.

    A returned future means that verdicts are missing; call again when it is done. A verdict is
    valid for an append in the same turn of the event loop. If the transaction or the leadership of
    this broker has ended since the request for a verdict, the verdict is stale and requested again.
    ``translate`` converts errors for the client.
    """
    verifications, producer_id = state.verifications, command.producer_id
    unverified: list[TopicPartition] = []
    pending: list[asyncio.Future[VerificationErrors]] = []
    verdicts: dict[TopicPartition, DomainError | None] = {}
    for key in command.partitions:
        verification = verifications.get(key)
        if verification is None:
            unverified.append(key)
        elif not verification.answer.done():
            pending.append(verification.answer)
        elif not verification.is_current(producer_id):
            state.transaction_ends += 1
            unverified.append(key)
        elif verification.answer.cancelled():
            verdicts[key] = translate(VerificationLostError("the broker stops"))
        else:
            verdicts[key] = translate(verification.answer.result().get(key))
    if unverified and state.transaction_ends > MAX_TRANSACTION_ENDS:
        ended = translate(VerificationLostError("the transaction has ended meanwhile"))
        return verdicts | dict.fromkeys(unverified, ended)
    if unverified:
        now = AddPartitions(
            command.transactional_id,
            producer_id,
            command.producer_epoch,
            tuple(unverified),
            verify_only=command.verify_only,
            client_transaction_version=command.client_transaction_version,
        )
        answer = ask(now)
        for key in unverified:
            partition = logs.find_open(key)
            if partition is None:
                continue
            guard = partition.producers.guard(producer_id)
            verifications[key] = _PartitionVerification(
                partition, partition.marks.leader_epoch, guard, answer
            )
        pending.append(answer)
    return _all(pending) if pending else verdicts


def _all(
    pending: Iterable[asyncio.Future[VerificationErrors]],
) -> asyncio.Future[None]:
    """Return a future that is done when all of ``pending`` are."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    left = set(pending)

    def completed(future: asyncio.Future[VerificationErrors]) -> None:
        left.discard(future)
        if not left and not done.done():
            done.set_result(None)

    for future in list(left):
        future.add_done_callback(completed)
    return done


def verification_error(error: DomainError | None, api: str, version: int) -> DomainError | None:
    """Translate an error of the transaction coordinator into one of a partition leader.

    Partition leaders do not return PRODUCER_FENCED, nor TRANSACTION_ABORTABLE to clients that do
    not know it. A producer does not retry COORDINATOR_LOAD_IN_PROGRESS and similar errors, so for
    Produce they become NOT_ENOUGH_REPLICAS, which every producer retries. For clients before TV2,
    CONCURRENT_TRANSACTIONS becomes NOT_ENOUGH_REPLICAS as well. TxnOffsetCommit keeps these errors,
    but a lost verification becomes COORDINATOR_LOAD_IN_PROGRESS.
    """
    if isinstance(error, ProducerFencedError):
        return InvalidProducerEpochError(str(error))
    if isinstance(error, TransactionAbortableError) and version < FIRST_WITH_ABORTABLE[api]:
        return InvalidTxnStateError(str(error))
    if api == "Produce":
        retriable: tuple[type[DomainError], ...] = (ShardError, CoordinatorUnloadedError)
        if version < FIRST_ADDING_PARTITIONS[api]:
            retriable += (ConcurrentTransactionsError,)
        if isinstance(error, retriable):
            return TransactionCoordinatorBusyError(str(error))
    elif isinstance(error, VerificationLostError):
        return CoordinatorLoadInProgressError(str(error))
    return error
