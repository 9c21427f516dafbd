"""Verification of transactions by partition leaders: requests to coordinators, and their answers.

Before a partition leader appends the first batch of a producer's transaction, it has the
transaction coordinator verify that the partition is in the transaction (VerifyOnly), or add it
(KIP-890). All waiting verifications for one coordinator are sent in one request. At most one
verification of a transactional id waits. A later verification with a lower epoch is refused. Any
other replaces the waiting one, because the producer has repeated its request.

Source: ``AddPartitionsToTxnManager``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from typing import Final

from fencepost.logcore.values import dataclass
from fencepost.txn.commands import AddPartitions, TopicPartition

Token = int
"""Identifies one verification that waits for its answer."""

NETWORK_EXCEPTION: Final = "NETWORK_EXCEPTION"
INVALID_PRODUCER_EPOCH: Final = "INVALID_PRODUCER_EPOCH"
COORDINATOR_NOT_AVAILABLE: Final = "COORDINATOR_NOT_AVAILABLE"
CLUSTER_AUTHORIZATION_FAILED: Final = "CLUSTER_AUTHORIZATION_FAILED"
INVALID_TXN_STATE: Final = "INVALID_TXN_STATE"
NONE: Final = "NONE"

MAX_TRANSACTIONS_PER_REQUEST: Final = 1_000
"""The maximum number of transactions in a request. Further transactions go into the next one."""


@dataclass(frozen=True, slots=True)
class VerificationResult:
    """The result of a verification: Kafka's error name of each refused partition."""

    token: Token
    errors: Mapping[TopicPartition, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VerificationRequest:
    """A request to a coordinator; ``number`` identifies it in :meth:`Verifications.on_answer`."""

    broker_id: int
    number: int
    transactions: tuple[AddPartitions, ...]


CoordinatorOf = Callable[[str], int | None]
"""Returns the broker that coordinates a transactional id; None if it is unknown or unavailable."""


@dataclass(slots=True)
class _PendingVerification:
    token: Token
    command: AddPartitions

    def refused(self, code: str) -> VerificationResult:
        return VerificationResult(self.token, dict.fromkeys(self.command.partitions, code))


@dataclass(slots=True)
class _CoordinatorDestination:
    waiting: dict[str, _PendingVerification] = field(default_factory=dict)
    sent: dict[str, _PendingVerification] | None = None
    number: int = -1


class Verifications:
    """The verifications that one broker requests from transaction coordinators."""

    def __init__(self, coordinator_of: CoordinatorOf) -> None:
        self._coordinator_of = coordinator_of
        self._destinations: dict[int, _CoordinatorDestination] = {}
        self._numbers = 0

    def submit(self, token: Token, command: AddPartitions) -> list[VerificationResult]:
        """Queue a verification; return the verifications that this call refuses."""
        question, transactional_id = _PendingVerification(token, command), command.transactional_id
        broker_id = self._coordinator_of(transactional_id)
        if broker_id is None:
            return [question.refused(COORDINATOR_NOT_AVAILABLE)]
        waiting = self._destinations.setdefault(broker_id, _CoordinatorDestination()).waiting
        former = waiting.get(transactional_id)
        if former is None:
            waiting[transactional_id] = question
            return []
        former_epoch, epoch = former.command.producer_epoch, command.producer_epoch
        if epoch < former_epoch:
            return [question.refused(INVALID_PRODUCER_EPOCH)]
        waiting[transactional_id] = question
        return [
            former.refused(INVALID_PRODUCER_EPOCH if former_epoch < epoch else NETWORK_EXCEPTION)
        ]

    def next_requests(self) -> Iterator[VerificationRequest]:
        """Yield the requests to send now, at most one for each broker."""
        for broker_id, destination in self._destinations.items():
            if destination.sent is None and destination.waiting:
                ids = list(destination.waiting)[:MAX_TRANSACTIONS_PER_REQUEST]
                destination.sent = {name: destination.waiting.pop(name) for name in ids}
                self._numbers += 1
                destination.number = self._numbers
                commands = tuple(question.command for question in destination.sent.values())
                yield VerificationRequest(broker_id, destination.number, commands)

    def on_answer(
        self,
        request: VerificationRequest,
        error: str,
        results: Mapping[str, Mapping[TopicPartition, str]],
    ) -> list[VerificationResult]:
        """Handle the answer to a request: a top-level error, or the partitions' errors by id.

        A transaction that the answer omits is not verified (NETWORK_EXCEPTION).
        """
        if error == CLUSTER_AUTHORIZATION_FAILED:
            error = INVALID_TXN_STATE  # the client cannot act on this broker's lack of permission
        answers: list[VerificationResult] = []
        for name, question in self._sent(request).items():
            if error != NONE:
                answers.append(question.refused(error))
                continue
            error_codes = results.get(name, {})
            codes = {
                partition: error_codes.get(partition, NETWORK_EXCEPTION)
                for partition in question.command.partitions
            }
            refused = {partition: code for partition, code in codes.items() if code != NONE}
            answers.append(VerificationResult(question.token, refused))
        return answers

    def on_failure(self, request: VerificationRequest) -> list[VerificationResult]:
        """Refuse the verifications of a request that got no answer: the producers will retry."""
        return [sent.refused(NETWORK_EXCEPTION) for sent in self._sent(request).values()]

    def not_supported(self, request: VerificationRequest) -> list[VerificationResult]:
        """Accept the verifications: the coordinator is too old to verify them."""
        return [VerificationResult(sent.token) for sent in self._sent(request).values()]

    def withdraw(self, broker_id: int) -> list[VerificationResult]:
        """Refuse all verifications for a broker that has stopped, including those in flight."""
        destination = self._destinations.pop(broker_id, None)
        if destination is None:
            return []
        return [
            sent.refused(NETWORK_EXCEPTION)
            for sent in [*(destination.sent or {}).values(), *destination.waiting.values()]
        ]

    def _sent(self, request: VerificationRequest) -> dict[str, _PendingVerification]:
        destination = self._destinations.get(request.broker_id)
        if destination is None or destination.sent is None or destination.number != request.number:
            return {}
        sent, destination.sent = destination.sent, None
        return sent
