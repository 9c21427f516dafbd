"""The state of one shard, and decisions that several handlers share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import field

from fencepost.logcore.budget import Account
from fencepost.logcore.fields import MAX_STRING_BYTES
from fencepost.logcore.machine import (
    DecisionBuilder,
    Event,
    InvariantViolation,
    ProducerStamp,
    Record,
    Token,
)
from fencepost.logcore.values import dataclass
from fencepost.txn import records, state
from fencepost.txn.commands import InitProducerId, WriteMarkers
from fencepost.txn.epochs import ProducerIdentity
from fencepost.txn.errors import InvalidTxnRequestError, ProducerFencedError
from fencepost.txn.events import EventKind
from fencepost.txn.ids import ProducerIds
from fencepost.txn.limits import TWO_PHASE_COMMIT_TIMEOUT_MS, TxnLimits
from fencepost.txn.markers import MarkerTable
from fencepost.txn.state import TransactionMetadata, TransactionState

TIMEOUT_TIMER = "txn-timeout"
"""First element of the timer keys ``(TIMEOUT_TIMER, transactional_id)``."""


PARK_TIMER = "txn-park"
"""First element of the timer keys ``(PARK_TIMER, transactional_id)``."""


@dataclass(frozen=True, slots=True)
class ParkedInit:
    """An InitProducerId that waits for the markers of the transaction that it aborted."""

    token: Token
    command: InitProducerId


@dataclass(slots=True)
class TxnShardState:
    """One shard's state. ``transactions`` and ``offsets`` are durable, all other fields are soft.

    ``offsets`` has the offset of each id's last record. ``last_producer_identity`` has an id's
    current identity and the previous identity, whose epoch is Kafka's ``lastProducerEpoch``. As in
    Kafka, the previous identity is lost when the broker restarts, and a repeated InitProducerId is
    then fenced. ``to_sweep`` has the ids that the current expiry sweep has yet to examine.
    """

    limits: TxnLimits
    ids: ProducerIds
    coordinator_epoch: int
    transaction_version: Callable[[], int]
    memory: Account = field(default_factory=Account)
    """The memory of all ids in bytes; see :func:`state.memory_bytes`."""
    transactions: dict[str, TransactionMetadata] = field(default_factory=dict)
    offsets: dict[str, int] = field(default_factory=dict)
    last_offset: int = -1
    markers: MarkerTable = field(default_factory=MarkerTable)
    parked: dict[str, ParkedInit] = field(default_factory=dict)
    last_producer_identity: dict[str, tuple[ProducerIdentity, ProducerIdentity]] = field(
        default_factory=dict
    )
    to_sweep: deque[str] = field(default_factory=deque)
    skipped_records: int = 0
    serving: bool = False

    def is_pending(self, transactional_id: str) -> bool:
        """Whether the id has a *pending* transaction, whose markers are being written."""
        return transactional_id in self.markers

    def last_identity(
        self, transactional_id: str, stored: ProducerIdentity
    ) -> ProducerIdentity | None:
        """Return the identity that ``stored`` replaced, None if it is unknown."""
        successor, last = self.last_producer_identity.get(transactional_id, (None, None))
        return last if successor == stored else None

    def record(self, transactional_id: str, txn: TransactionMetadata) -> Record:
        """Build the record of ``txn``; transaction.version selects its value version."""
        return records.encode(transactional_id, txn, self.transaction_version())

    def prepare(
        self, decision: DecisionBuilder, transactional_id: str, txn: TransactionMetadata
    ) -> None:
        """Record the outcome of a transaction, disarm its timeout and request its markers."""
        decision.append(self.record(transactional_id, txn))
        decision.disarm((TIMEOUT_TIMER, transactional_id))
        # The Prepare record has no offset yet. The next offset of the log identifies the
        # transaction as well, because it is higher than the offset of every earlier Prepare record,
        # and at most the offset of this one.
        self.request_markers(decision, transactional_id, txn, self.last_offset + 1)

    def request_markers(
        self,
        decision: DecisionBuilder,
        transactional_id: str,
        txn: TransactionMetadata,
        transaction_number: int,
    ) -> None:
        """Request the markers of a transaction in PREPARE_COMMIT or PREPARE_ABORT."""
        if txn.state not in state.PREPARED:
            raise InvariantViolation(f"{transactional_id}: no markers in {txn.state.name}")
        request = WriteMarkers(
            transactional_id=transactional_id,
            stamp=ProducerStamp(txn.producer_id, txn.producer_epoch),
            commit=txn.state is TransactionState.PREPARE_COMMIT,
            coordinator_epoch=self.coordinator_epoch,
            transaction_version=txn.client_transaction_version,
            partitions=tuple(sorted(txn.partitions)),
            transaction_number=transaction_number,
        )
        self.markers.expect(request)
        decision.effect(request)


def timeout_deadline_ms(txn: TransactionMetadata) -> int | None:
    """Return the time at which an open transaction exceeds its timeout; None without a deadline."""
    if txn.state is not TransactionState.ONGOING or txn.timeout_ms == TWO_PHASE_COMMIT_TIMEOUT_MS:
        return None
    return txn.start_ms + txn.timeout_ms + 1


def arm_timeout(decision: DecisionBuilder, transactional_id: str, txn: TransactionMetadata) -> None:
    """Set the timer of an open transaction, unless it has no timeout."""
    deadline_ms = timeout_deadline_ms(txn)
    if deadline_ms is not None:
        decision.arm((TIMEOUT_TIMER, transactional_id), deadline_ms - decision.now_ms)


def require_id(transactional_id: str) -> None:
    """Raise InvalidTxnRequestError for an id that cannot be a key of the log."""
    if not transactional_id:
        raise InvalidTxnRequestError("the transactional id is empty")
    if len(transactional_id.encode()) > MAX_STRING_BYTES:
        raise InvalidTxnRequestError("the transactional id is too long")


def refuse_fenced(
    decision: DecisionBuilder,
    token: Token,
    transactional_id: str,
    request: ProducerIdentity | None,
    stored: ProducerIdentity,
    during: str,
) -> None:
    """Answer PRODUCER_FENCED, and record the fenced producer's request in the event history."""
    decision.event(
        EventKind.PRODUCER_REFUSED,
        transactional_id,
        during=during,
        given_producer_id=None if request is None else request.producer_id,
        given_producer_epoch=None if request is None else request.epoch,
        producer_id=stored.producer_id,
        producer_epoch=stored.epoch,
    )
    error = ProducerFencedError(
        f"{transactional_id} belongs to producer {stored.producer_id} at epoch {stored.epoch}"
    )
    decision.reply(token, error)


def report_identity(
    decision: DecisionBuilder,
    transactional_id: str,
    before: ProducerIdentity,
    after: ProducerIdentity,
    cause: str,
) -> None:
    """Record in the event history that ``after`` has replaced ``before``, unless they are equal."""
    if after == before:
        return
    detail: dict[str, object] = {
        "cause": cause,
        "producer_id": after.producer_id,
        "producer_epoch": after.epoch,
    }
    if after.producer_id != before.producer_id:
        kind, detail["former_producer_id"] = EventKind.PRODUCER_ID_ROTATED, before.producer_id
    else:
        kind = EventKind.EPOCH_BUMPED
    detail["former_producer_epoch"] = before.epoch
    # Every transaction of a TV2 client ends with a new epoch.
    is_routine = kind is EventKind.EPOCH_BUMPED and cause == "EndTxn"
    # A new id had no identity before. Its event is not logged, because 10,000 new ids would log
    # 10,000 lines.
    is_first = before.epoch < 0
    decision.add_event(
        Event(str(kind), transactional_id, detail, routine=is_routine, quiet=is_first)
    )
