"""What can be asked of the transaction coordinator, and what it answers.

Requests and results are plain data: handlers build the one and read the other. A refused request
is answered with an instance of a class of :mod:`fencepost.txn.errors` in place of the result.

Times are milliseconds since the epoch, durations milliseconds. -1 stands for "none" wherever Kafka
has it so (:data:`NO_PRODUCER_ID`, :data:`NO_PRODUCER_EPOCH`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field

from fencepost.logcore.machine import DomainError, EndMarker, ProducerStamp
from fencepost.logcore.values import dataclass, made_often

NO_PRODUCER_ID = -1
"""No producer id."""

NO_PRODUCER_EPOCH = -1
"""No producer epoch."""

TopicPartition = tuple[str, int]
"""Topic name and partition index."""


def by_topic(partitions: Iterable[TopicPartition]) -> dict[str, list[int]]:
    """Indexes by topic, as requests name them."""
    topics: dict[str, list[int]] = {}
    for topic, index in partitions:
        topics.setdefault(topic, []).append(index)
    return topics


@made_often
@dataclass(frozen=True, slots=True)
class InitProducerId:
    """Claim a transactional id: fence its former owner, end what that left open.

    ``producer_id`` and ``producer_epoch`` are both given by a producer that continues after an
    error (KIP-360), both -1 by one that starts. The null transactional id does not come here; the
    runtime answers it from its :class:`fencepost.txn.ids.ProducerIds`.

    Where the claim has to abort an ongoing transaction first, the reply waits for the markers.

    ``enable_2pc`` makes the transactions of the id have no timeout (KIP-939). ``keep_prepared``
    leaves an ongoing one as it is, for a producer that was restarted between the two phases; it
    goes with no identity, and where nothing is ongoing it changes nothing.

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


@made_often
@dataclass(frozen=True, slots=True)
class InitProducerIdResult:
    """The identity to send with.

    The ``ongoing`` fields name the transaction that ``keep_prepared`` left open, by the identity
    it was prepared under; -1 where there is none. EndTxn is sent with the identity to send with,
    never with this one.
    """

    producer_id: int
    producer_epoch: int
    ongoing_producer_id: int = NO_PRODUCER_ID
    ongoing_producer_epoch: int = NO_PRODUCER_EPOCH


@made_often
@dataclass(frozen=True, slots=True)
class AddPartitions:
    """Add ``partitions`` to the transaction, beginning it if need be; all or none.

    With ``verify_only`` nothing is added: the result names the partitions that are not in.
    AddOffsetsToTxn is this command with ``("__consumer_offsets", n)``.

    ``client_transaction_version`` is 2 for the implicit add of a TV2 client (Produce v12 and
    above, TxnOffsetCommit v5 and above), 0 otherwise.

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
    """``errors`` holds the refused partitions (TransactionAbortable); empty means all are in."""

    errors: Mapping[TopicPartition, DomainError] = field(default_factory=dict)


@made_often
@dataclass(frozen=True, slots=True)
class EndTxn:
    """Commit or abort. ``client_transaction_version`` is 2 exactly for EndTxn v5 and above.

    Errors: InvalidTxnRequest, ConcurrentTransactions, InvalidProducerIdMapping, ProducerFenced,
    InvalidTransactionState, ProducerIdsUnavailable.
    """

    transactional_id: str
    producer_id: int
    producer_epoch: int
    commit: bool
    client_transaction_version: int = 0


@made_often
@dataclass(frozen=True, slots=True)
class EndTxnResult:
    """The identity for the next transaction; the old one unless the request was TV2."""

    producer_id: int
    producer_epoch: int


@made_often
@dataclass(frozen=True, slots=True)
class MarkersWritten:
    """The runtime's answer to :class:`WriteMarkers`; build it with ``WriteMarkers.written``.

    ``partitions`` are those that hold the marker now (or no longer exist); None means all that were
    asked for. Repeated and stale answers are harmless.
    """

    transactional_id: str
    producer_id: int
    producer_epoch: int
    transaction_number: int
    partitions: tuple[TopicPartition, ...] | None = None


@dataclass(frozen=True, slots=True)
class MarkersWrittenResult:
    """``completed`` says that this was the last answer awaited, and that Complete was recorded."""

    completed: bool


@made_often
@dataclass(frozen=True, slots=True)
class WriteMarkers:
    """An *effect*: append the end marker of ``stamp`` to every partition, then report back.

    ``partitions`` may be empty (a TV2 abort of nothing); the report is due all the same.
    Writing a marker again must be harmless.

    ``transaction_number`` names the transaction, which ``stamp`` does not under TV1: the same
    identity ends one transaction after another.
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
        """What every partition gets."""
        return EndMarker(self.stamp, self.commit, self.coordinator_epoch, self.transaction_version)

    def written(self, partitions: tuple[TopicPartition, ...] | None = None) -> MarkersWritten:
        """Build the report that ``partitions`` (None: all) hold the marker."""
        return MarkersWritten(
            self.transactional_id,
            self.stamp.producer_id,
            self.stamp.producer_epoch,
            self.transaction_number,
            partitions,
        )


@dataclass(frozen=True, slots=True)
class ReserveProducerIds:
    """An *effect*: a timer's decision found no producer id to draw, and is tried again soon."""


@dataclass(frozen=True, slots=True)
class ListTransactions:
    """List this shard's transactions; empty filters let everything through.

    ``states`` are Kafka's names (``"CompleteCommit"``). ``min_duration_ms`` -1 is off.
    """

    states: tuple[str, ...] = ()
    producer_ids: tuple[int, ...] = ()
    min_duration_ms: int = -1


@dataclass(frozen=True, slots=True)
class ListedTransaction:
    """One line of a listing; ``state`` is Kafka's name."""

    transactional_id: str
    producer_id: int
    state: str


@dataclass(frozen=True, slots=True)
class ListTransactionsResult:
    """``unknown_states`` are the filter's names that are no state; they match nothing."""

    transactions: Iterator[ListedTransaction | None]
    """As they were when the command was decided, filtered one by one while a reader takes them:
    there may be many. None stands for one that is filtered out."""
    unknown_states: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DescribeTransaction:
    """Show one transaction. Errors: InvalidTxnRequest, TransactionalIdNotFound."""

    transactional_id: str


@dataclass(frozen=True, slots=True)
class DescribeTransactionResult:
    """One transaction as it stands; ``start_time_ms`` is -1 where none has begun."""

    transactional_id: str
    state: str
    producer_id: int
    producer_epoch: int
    transaction_timeout_ms: int
    start_time_ms: int
    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class ExpireTransactionalIds:
    """Forget ids that rested longer than ``transactional_id_expiration_ms``."""


@dataclass(frozen=True, slots=True)
class ExpireTransactionalIdsResult:
    """The ids forgotten; ``more`` says that the sweep stopped at its limit: repeat it."""

    expired: tuple[str, ...]
    more: bool
