"""Which transactions a partition leader asks other brokers about, and what their answers mean.

Before a producer's first batch of a transaction is appended to a partition, its leader has the
transaction coordinator say that the partition is in the transaction (VerifyOnly), or put it there
(KIP-890). All that waits for a coordinator goes out with one request. At most one question of a
transactional id waits: a later one takes its place, for its producer is repeating itself.

Source: ``AddPartitionsToTxnManager``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from typing import Final

from fencepost.logcore.values import dataclass
from fencepost.txn.commands import AddPartitions, TopicPartition

Token = int
"""Names one question that waits for its answer."""

NETWORK_EXCEPTION: Final = "NETWORK_EXCEPTION"
INVALID_PRODUCER_EPOCH: Final = "INVALID_PRODUCER_EPOCH"
COORDINATOR_NOT_AVAILABLE: Final = "COORDINATOR_NOT_AVAILABLE"
CLUSTER_AUTHORIZATION_FAILED: Final = "CLUSTER_AUTHORIZATION_FAILED"
INVALID_TXN_STATE: Final = "INVALID_TXN_STATE"
NONE: Final = "NONE"

MAX_TRANSACTIONS_PER_REQUEST: Final = 1_000
"""The rest goes with the next request."""


@dataclass(frozen=True, slots=True)
class Verified:
    """The answer to a question: Kafka's name of the error of each partition that is refused."""

    token: Token
    errors: Mapping[TopicPartition, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ask:
    """A request to a coordinator; ``number`` names it to :meth:`Verifications.answered`."""

    broker_id: int
    number: int
    transactions: tuple[AddPartitions, ...]


CoordinatorOf = Callable[[str], int | None]
"""The broker that coordinates a transactional id; None where it is not known, or not there."""


@dataclass(slots=True)
class _Question:
    token: Token
    command: AddPartitions

    def refused(self, code: str) -> Verified:
        return Verified(self.token, dict.fromkeys(self.command.partitions, code))


@dataclass(slots=True)
class _Destination:
    waiting: dict[str, _Question] = field(default_factory=dict)
    sent: dict[str, _Question] | None = None
    number: int = -1


class Verifications:
    """The questions that one broker has for others."""

    def __init__(self, coordinator_of: CoordinatorOf) -> None:
        self._coordinator_of = coordinator_of
        self._destinations: dict[int, _Destination] = {}
        self._numbers = 0

    def ask(self, token: Token, command: AddPartitions) -> list[Verified]:
        """Have a question asked. Those that are answered by this alone are given back."""
        question, transactional_id = _Question(token, command), command.transactional_id
        broker_id = self._coordinator_of(transactional_id)
        if broker_id is None:
            return [question.refused(COORDINATOR_NOT_AVAILABLE)]
        waiting = self._destinations.setdefault(broker_id, _Destination()).waiting
        former = waiting.get(transactional_id)
        if former is None:
            waiting[transactional_id] = question
            return []
        known, epoch = former.command.producer_epoch, command.producer_epoch
        if epoch < known:
            return [question.refused(INVALID_PRODUCER_EPOCH)]
        waiting[transactional_id] = question
        return [former.refused(INVALID_PRODUCER_EPOCH if known < epoch else NETWORK_EXCEPTION)]

    def sends(self) -> Iterator[Ask]:
        """The requests to be sent now, one at most for each broker."""
        for broker_id, one in self._destinations.items():
            if one.sent is None and one.waiting:
                ids = list(one.waiting)[:MAX_TRANSACTIONS_PER_REQUEST]
                one.sent = {name: one.waiting.pop(name) for name in ids}
                self._numbers += 1
                one.number = self._numbers
                commands = tuple(question.command for question in one.sent.values())
                yield Ask(broker_id, one.number, commands)

    def answered(
        self, ask: Ask, error: str, results: Mapping[str, Mapping[TopicPartition, str]]
    ) -> list[Verified]:
        """Take the answer to a request: the error of the whole, or those of partitions by id.

        A transaction that the answer leaves out is not verified (NETWORK_EXCEPTION).
        """
        if error == CLUSTER_AUTHORIZATION_FAILED:
            error = INVALID_TXN_STATE  # that this broker may not ask is not the client's business
        found: list[Verified] = []
        for name, question in self._sent(ask).items():
            if error != NONE:
                found.append(question.refused(error))
                continue
            told = results.get(name, {})
            codes = {one: told.get(one, NETWORK_EXCEPTION) for one in question.command.partitions}
            refused = {one: code for one, code in codes.items() if code != NONE}
            found.append(Verified(question.token, refused))
        return found

    def failed(self, ask: Ask) -> list[Verified]:
        """Nobody has answered a request: it is not repeated, for the producers are."""
        return [one.refused(NETWORK_EXCEPTION) for one in self._sent(ask).values()]

    def not_supported(self, ask: Ask) -> list[Verified]:
        """The coordinator is too old to be asked: appends go on without its word."""
        return [Verified(one.token) for one in self._sent(ask).values()]

    def withdraw(self, broker_id: int) -> list[Verified]:
        """Nobody is at a broker any more: all that waits for it is answered, and what was sent."""
        gone = self._destinations.pop(broker_id, None)
        if gone is None:
            return []
        return [
            one.refused(NETWORK_EXCEPTION)
            for one in [*(gone.sent or {}).values(), *gone.waiting.values()]
        ]

    def _sent(self, ask: Ask) -> dict[str, _Question]:
        one = self._destinations.get(ask.broker_id)
        if one is None or one.sent is None or one.number != ask.number:
            return {}
        sent, one.sent = one.sent, None
        return sent
