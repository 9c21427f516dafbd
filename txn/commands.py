"""The commands of the transaction coordinator, and their results.

Commands and results are plain data: request handlers build the commands and read the results. A
refused command is answered with an instance of a class of :mod:`fencepost.txn.errors` in place of
the result.

Times are milliseconds since the epoch, durations milliseconds. As in Kafka, -1 means "none"
(:data:`NO_PRODUCER_ID`, :data:`NO_PRODUCER_EPOCH`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field

from fencepost.logcore.machine import DomainError, EndMarker, ProducerStamp
from fencepost.logcore.values import dataclass, fast_init

NO_PRODUCER_ID = -1
"""No producer id."""

NO_PRODUCER_EPOCH = -1
"""No producer epoch."""

TopicPartition = tuple[str, int]
"""Topic name and partition index."""


def by_topic(partitions: Iterable[TopicPartition]) -> dict[str, list[int]]:
    """Return partition indexes by topic, as requests group them."""
    topics: dict[str, list[int]] = {}
    for topic, index in partitions:
        topics.setdefault(topic, []).append(index)
    return topics


@fast_init
@dataclass(frozen=True, slots=True)
class InitProducerId:
    """Claim a transactional id: fence its previous owner, and end its open transaction.

    A producer that continues after an error gives both ``producer_id`` and ``producer_epoch``
    (KIP-360); a new producer sends -1 for both. A null transactional id does not reach this
    package; the runtime answers it from its :class:`fencepost.txn.ids.ProducerIds`.

    If the claim must abort an ongoing transaction first, the reply waits for the markers.

    With ``enable_2pc`` the transactions of the id have no timeout (KIP-939). ``keep_prepared``
    leaves an ongoing transaction open, for a producer that was restarted between the two phases; it
    has no effect without an ongoing transaction, and cannot be combined with ``producer_id``.

    Errors: InvalidTxnRequest, TwoPhaseCommitDisabled, KeepPreparedUnsupported,
    InvalidTransactionTimeout, ConcurrentTransactions, ProducerFenced, ProducerIdsUnavailable,
    TooManyTransactionalIds.
    """

    transactional_id: str
    transaction_timeout_ms: int
    producer_id: int = NO_PRODUCER_ID
    producer_epoch: int = NO_PRODUCER_EPOCH
    enable_2pc: bool = False
    keep_prepared: bool = False


@fast_init
@dataclass(frozen=True, slots=True)
class InitProducerIdResult:
    """The identity that the client must use.

    The ``ongoing`` fields contain the identity of the transaction that ``keep_prepared`` left open,
    or -1. The client must end that transaction with ``producer_id`` and ``producer_epoch``, never
    with the ``ongoing`` identity.
    """

    producer_id: int
    producer_epoch: int
    ongoing_producer_id: int = NO_PRODUCER_ID
    ongoing_producer_epoch: int = NO_PRODUCER_EPOCH


@fast_init
@dataclass(frozen=True, slots=True)
class AddPartitions:
    """Add all of ``partitions`` to the transaction, or none.

    The first addition begins the transaction.

    With ``verify_only`` nothing is added: the result names the partitions that are not in the
    transaction. AddOffsetsToTxn is this command with ``("__consumer_offsets", n)``.

    ``client_transaction_version`` is 2 for the implicit add of a TV2 client (Produce v12 and above,
    TxnOffsetCommit v5 and above), 0 otherwise.

    Errors: InvalidTxnRequest, ConcurrentTransactions, InvalidProducerIdMapping, ProducerFenced,
    InvalidTransactionState (a kept transaction can only be ended), TooManyPartitions.
    """

    transactional_id: str
    producer_id: int
    producer_epoch: int
    partitions: tuple[TopicPartition, ...]
    verify_only: bool = False
    client_transaction_version: int = 0


@dataclass(frozen=True, slots=True)
class AddPartitionsResult:
    """``errors`` maps partitions that are not in the transaction to TransactionAbortable."""

    errors: Mapping[TopicPartition, DomainError] = field(default_factory=dict)


@fast_init
@dataclass(frozen=True, slots=True)
class EndTxn:
    """Commit or abort. ``client_transaction_version`` is 2 for EndTxn v5 and above, otherwise 0.

    ``by_operator`` says that an operator chose the outcome; the event history records this.

    Errors: InvalidTxnRequest, ConcurrentTransactions, InvalidProducerIdMapping, ProducerFenced,
    InvalidTransactionState, ProducerIdsUnavailable.
    """

    transactional_id: str
    producer_id: int
    producer_epoch: int
    commit: bool
    client_transaction_version: int = 0
    by_operator: bool = False


@fast_init
@dataclass(frozen=True, slots=True)
class EndTxnResult:
    """The identity for the next transaction. Only a TV2 request changes it."""

    producer_id: int
    producer_epoch: int
    open_ms: int = field(default=0, compare=False)
    """How long the transaction was open; 0 for a repeated request."""
    timeout_ms: int = field(default=0, compare=False)
    """The transaction's timeout."""


@fast_init
@dataclass(frozen=True, slots=True)
class MarkersWritten:
    """The runtime's report on :class:`WriteMarkers`; ``WriteMarkers.written`` builds it.

    ``partitions`` have the marker now, or no longer exist; None means all partitions of the
    request. Repeated and stale reports are harmless.
    """

    transactional_id: str
    producer_id: int
    producer_epoch: int
    transaction_number: int
    partitions: tuple[TopicPartition, ...] | None = None


@dataclass(frozen=True, slots=True)
class MarkersWrittenResult:
    """``completed`` says whether every marker is now written.

    If so, the same decision appends the Complete record.
    """

    completed: bool


@fast_init
@dataclass(frozen=True, slots=True)
class WriteMarkers:
    """An *effect*: append the end marker of ``stamp`` to every partition, then report back.

    ``partitions`` may be empty (a TV2 abort without partitions); the report is required all the
    same. Writing a marker twice must be harmless.

    ``transaction_number`` identifies the transaction. ``stamp`` does not: under TV1 consecutive
    transactions have the same identity.
    """

    transactional_id: str
    stamp: ProducerStamp
    commit: bool
    coordinator_epoch: int
    transaction_version: int
    partitions: tuple[TopicPartition, ...]
    transaction_number: int

    @property
    def marker(self) -> EndMarker:
        """The marker for every partition."""
        return EndMarker(self.stamp, self.commit, self.coordinator_epoch, self.transaction_version)

    def written(self, partitions: tuple[TopicPartition, ...] | None = None) -> MarkersWritten:
        """Build the report that ``partitions`` (None: all) have the marker."""
        return MarkersWritten(
            self.transactional_id,
            self.stamp.producer_id,
            self.stamp.producer_epoch,
            self.transaction_number,
            partitions,
        )


@dataclass(frozen=True, slots=True)
class ReserveProducerIds:
    """An *effect*: reserve producer ids, so that an abort by timeout can be retried."""


@dataclass(frozen=True, slots=True)
class ListTransactions:
    """List this shard's transactions; an empty filter matches every transaction.

    ``states`` are Kafka's names (``"CompleteCommit"``). ``min_duration_ms`` of -1 is no filter.
    """

    states: tuple[str, ...] = ()
    producer_ids: tuple[int, ...] = ()
    min_duration_ms: int = -1


@dataclass(frozen=True, slots=True)
class ListedTransaction:
    """One entry of a listing; ``state`` is Kafka's name."""

    transactional_id: str
    producer_id: int
    state: str


@dataclass(frozen=True, slots=True)
class ListTransactionsResult:
    """``unknown_states`` are names in the filter that are not states; they match nothing."""

    transactions: Iterator[ListedTransaction | None]
    """The transactions at the time of the decision. They are filtered one by one while the caller
    iterates, because there may be many; None stands for a transaction that is filtered out."""
    unknown_states: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DescribeTransaction:
    """Describe one transaction. Errors: InvalidTxnRequest, TransactionalIdNotFound."""

    transactional_id: str


@dataclass(frozen=True, slots=True)
class DescribeTransactionResult:
    """The state of one transactional id; ``start_time_ms`` is -1 without a transaction."""

    transactional_id: str
    state: str
    producer_id: int
    producer_epoch: int
    transaction_timeout_ms: int
    start_time_ms: int
    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class ExpireTransactionalIds:
    """Expire ids that were at rest for longer than ``transactional_id_expiration_ms``."""


@dataclass(frozen=True, slots=True)
class ExpireTransactionalIdsResult:
    """The expired ids; ``more`` says that the sweep stopped at its limit and must be repeated."""

    expired: tuple[str, ...]
    more: bool
