"""Open transactions of partitions, and the state that their coordinators have.

A partition leader stores, per producer, the start offset of its open transaction
(DescribeProducers); the coordinator stores the state of each transactional id and its partitions
(ListTransactions, DescribeTransactions). A transaction is hanging if it is open on the leader and
no coordinator will ever end it. Source: KIP-664, Kafka's ``TransactionsCommand``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import field
from typing import TYPE_CHECKING, Any

import click
from kio.schema.errors import ErrorCode

from fencepost.client.client import ApiError
from fencepost.client.queries.session import check
from fencepost.client.queries.unknown import unknown_transactional_id
from fencepost.client.requests import rows_of, topics
from fencepost.logcore.values import dataclass

if TYPE_CHECKING:
    from fencepost.client.queries.session import ClusterSession
    from fencepost.client.requests import Partition

NO_OFFSET = -1

TWO_PHASE_TIMEOUT_MS = 2**31 - 1
"""The timeout of a transaction in a two-phase commit, which never times out."""

MAX_CLAIM_TIMEOUT_MS = 60_000
"""The longest transaction timeout that ``terminate`` sends; it applies until the producer's next
InitProducerId."""

ONGOING = "Ongoing"

UNFINISHED = frozenset({ONGOING, "PrepareCommit", "PrepareAbort", "PrepareEpochFence"})
"""States of a transaction whose end markers are not all written."""


@dataclass(frozen=True, slots=True)
class Producer:
    """A producer's state on a partition leader; offsets and times are -1 if there are none."""

    topic: str
    partition: int
    producer_id: int
    epoch: int
    last_sequence: int
    last_timestamp_ms: int
    coordinator_epoch: int
    start_offset: int
    """The start offset of the producer's open transaction."""

    @property
    def is_open(self) -> bool:
        """Whether the producer has an open transaction on this partition."""
        return self.start_offset != NO_OFFSET

    @property
    def place(self) -> Partition:
        """The partition."""
        return self.topic, self.partition


@dataclass(frozen=True, slots=True)
class Transaction:
    """A transactional id's state on its coordinator."""

    transactional_id: str
    state: str
    producer_id: int
    epoch: int
    timeout_ms: int
    started_ms: int | None
    partitions: frozenset[Partition] = field(default_factory=frozenset)


def is_two_phase(transaction: Transaction | None) -> bool:
    """Return whether another system decides a transaction, which has no timeout then (KIP-939)."""
    return transaction is not None and transaction.timeout_ms == TWO_PHASE_TIMEOUT_MS


def partition_argument(text: str) -> tuple[str, int | None]:
    """Parse ``TOPIC`` or ``TOPIC:P``. Raises click.BadParameter."""
    topic, colon, index = text.partition(":")
    if not topic or (colon and not index.isdecimal()):
        raise click.BadParameter(f"{text!r} is neither TOPIC nor TOPIC:PARTITION")
    return topic, int(index) if colon else None


def partitions_of(session: ClusterSession, texts: Iterable[str]) -> list[Partition]:
    """Return the partitions that ``texts`` name; without ``texts``, all partitions.

    Raises ApiError for an unknown topic and click.ClickException for an unknown partition.
    """
    arguments = [partition_argument(text) for text in texts]
    chosen: dict[str, set[int]] = {}
    for name, index in arguments:
        chosen.setdefault(name, set()).update(() if index is None else (index,))
    whole = {name for name, index in arguments if index is None}
    partitions: list[Partition] = []
    for topic in session.topics(chosen or None):
        named = set() if topic.name in whole else chosen.get(topic.name)
        for index in sorted(named or topic.partitions):
            if index not in topic.partitions:
                raise click.ClickException(f"{topic.name} has no partition {index}")
            partitions.append((topic.name, index))
    return partitions


def producers(session: ClusterSession, partitions: Iterable[Partition]) -> list[Producer]:
    """Ask the leaders of ``partitions`` for their producers; sorted by partition and id."""
    rows: list[Producer] = []
    for node, places in session.by_leader(partitions).items():
        answer = session.client.call(
            "DescribeProducers",
            to_node=node,
            entity=lambda f, places=places: f.message(
                topics=topics(f.TopicRequest, ((tp, tp[1]) for tp in places), "partition_indexes")
            ),
        )
        for (topic, index), row in rows_of(answer):
            check(row.error_code, "DescribeProducers", f"{topic}-{index}", row.error_message)
            rows.extend(
                Producer(
                    topic=topic,
                    partition=index,
                    producer_id=producer.producer_id,
                    epoch=producer.producer_epoch,
                    last_sequence=producer.last_sequence,
                    last_timestamp_ms=producer.last_timestamp,
                    coordinator_epoch=producer.coordinator_epoch,
                    start_offset=producer.current_txn_start_offset,
                )
                for producer in row.active_producers
            )
    return sorted(rows, key=lambda row: (row.topic, row.partition, row.producer_id))


def transactions_of(session: ClusterSession, producer_ids: Iterable[int]) -> dict[int, Transaction]:
    """Return transactions by producer id, from the coordinators on all brokers."""
    ids = tuple(sorted(set(producer_ids)))
    if not ids:
        return {}
    transactions: dict[int, Transaction] = {}
    for node in sorted(session.client.metadata().brokers):
        listed = session.client.call("ListTransactions", to_node=node, producer_id_filters=ids)
        names = tuple(row.transactional_id for row in listed.transaction_states)
        if names:
            for transaction in _described(session, node, names):
                transactions[transaction.producer_id] = transaction
    return transactions


def unfinished(session: ClusterSession) -> list[Transaction]:
    """Return the unfinished transactions of all coordinators, by transactional id."""
    transactions: list[Transaction] = []
    for node in sorted(session.client.metadata().brokers):
        listed = session.client.call(
            "ListTransactions", to_node=node, state_filters=tuple(sorted(UNFINISHED))
        )
        check(listed.error_code, "ListTransactions")
        names = tuple(row.transactional_id for row in listed.transaction_states)
        if names:
            transactions += _described(session, node, names)
    unended = (txn for txn in transactions if txn.state in UNFINISHED)
    return sorted(unended, key=lambda txn: txn.transactional_id)


def _described(session: ClusterSession, node: int, names: tuple[str, ...]) -> list[Transaction]:
    answer = session.client.call(
        "DescribeTransactions", to_node=node, check=False, transactional_ids=names
    )
    transactions: list[Transaction] = []
    for state in answer.transaction_states:
        # The id has expired since it was listed, or moved to another broker, which lists it too.
        if state.error_code in {
            ErrorCode.transactional_id_not_found,
            ErrorCode.not_coordinator,
        }:
            continue
        transactions.append(_transaction_of(state))
    return transactions


def transaction(session: ClusterSession, transactional_id: str) -> Transaction:
    """Ask the coordinator of a transactional id for its state. Raises ApiError."""
    state = known_transaction(session, transactional_id)
    if state is None:
        raise unknown_transactional_id(transactional_id, lambda: transactional_ids(session))
    return state


def known_transaction(session: ClusterSession, transactional_id: str) -> Transaction | None:
    """Return the state of a transactional id; None if its coordinator does not know the id."""
    try:
        answer = session.client.call(
            "DescribeTransactions",
            to_transaction=transactional_id,
            transactional_ids=(transactional_id,),
        )
        return _transaction_of(answer.transaction_states[0])
    except ApiError as error:
        if error.code != ErrorCode.transactional_id_not_found:
            raise
        return None


def transactional_ids(session: ClusterSession) -> Iterator[str]:
    """Yield the transactional ids of all brokers."""
    for answer in session.call_all_brokers("ListTransactions"):
        yield from (row.transactional_id for row in answer.transaction_states)


def _transaction_of(state: Any) -> Transaction:
    check(state.error_code, "DescribeTransactions", state.transactional_id)
    started = state.transaction_start_time
    return Transaction(
        transactional_id=state.transactional_id,
        state=state.transaction_state,
        producer_id=state.producer_id,
        epoch=state.producer_epoch,
        timeout_ms=int(state.transaction_timeout.total_seconds() * 1000),
        started_ms=int(started.timestamp() * 1000) if started is not None else None,
        partitions=frozenset(
            (topic.topic, index) for topic in state.topics for index in topic.partitions
        ),
    )


def why_hanging(producer: Producer, transaction: Transaction | None) -> str | None:
    """Return why the producer's open transaction will never be ended; None if it will be.

    The end marker of a later epoch also ends the transactions of earlier ones, so epochs need not
    be equal.
    """
    if transaction is None:
        return "no coordinator knows this producer id"
    name = transaction.transactional_id
    if transaction.state not in UNFINISHED:
        return f"{name} is {transaction.state}"
    if producer.place not in transaction.partitions:
        return f"{name} is {transaction.state} without this partition"
    return None


def hanging(
    session: ClusterSession, partitions: list[Partition], *, older_than_ms: int, now_ms: int
) -> list[tuple[Producer, Transaction | None, str]]:
    """Return the hanging transactions on ``partitions``, each with the reason.

    A transaction counts only if its last record is more than ``older_than_ms`` before ``now_ms``: a
    younger one may just be starting or ending.
    """
    suspects = [
        row
        for row in producers(session, partitions)
        if row.is_open and now_ms - row.last_timestamp_ms > older_than_ms
    ]
    transactions = transactions_of(session, (row.producer_id for row in suspects))
    rows = []
    for row in suspects:
        transaction = transactions.get(row.producer_id)
        reason = why_hanging(row, transaction)
        if reason is not None:
            rows.append((row, transaction, reason))
    # The coordinator was asked after the leader: drop transactions that have ended meanwhile.
    places = sorted({row.place for row, _, _ in rows})
    still = {(row.place, row.producer_id, row.start_offset) for row in producers(session, places)}
    return [
        item for item in rows if (item[0].place, item[0].producer_id, item[0].start_offset) in still
    ]


def began(session: ClusterSession, producer: Producer) -> int | None:
    """Return the time of an open transaction's first record, in ms; None if the record is gone.

    The time is read from the record, because leaders do not report the time, and no coordinator
    reports it for a hanging transaction.
    """
    from fencepost.client.client import ApiError
    from fencepost.client.queries.reader import headers
    from fencepost.logcore.batch import iter_records

    try:
        row = session.fetch(*producer.place, producer.start_offset, committed=False, max_bytes=1)
    except ApiError as error:
        if error.code == ErrorCode.offset_out_of_range:
            return None
        raise
    data = row.records or b""
    at, header = next(headers(data), (0, None))
    if header is None or header.producer_id != producer.producer_id:
        return None
    first = next(iter_records(data, at, header), None)
    return None if first is None else first.timestamp_ms


def abort(session: ClusterSession, producer: Producer) -> None:
    """Write the abort marker of the producer's open transaction. Raises ApiError.

    The marker has the producer's current epoch on the leader. It is sent in WriteTxnMarkers version
    1, which predates KIP-890: in later versions leaders require a higher epoch.
    """
    answer = session.client.call(
        "WriteTxnMarkers",
        1,
        to_leader=producer.place,
        check=False,
        entity=lambda f: f.message(
            markers=[
                f.WritableTxnMarker(
                    producer_id=producer.producer_id,
                    producer_epoch=producer.epoch,
                    transaction_result=False,
                    topics=[
                        f.WritableTxnMarkerTopic(
                            name=producer.topic, partition_indexes=(producer.partition,)
                        )
                    ],
                    coordinator_epoch=max(producer.coordinator_epoch, 0),
                )
            ]
        ),
    )
    for marker in answer.markers:
        for (topic, index), row in rows_of(marker):
            check(row.error_code, "WriteTxnMarkers", f"{topic}-{index}")


def terminate(session: ClusterSession, transaction: Transaction) -> tuple[int, int]:
    """Send InitProducerId for a transactional id: fence its producer, abort its transaction.

    Returns the new producer id and epoch. No client uses them: the next producer sends
    InitProducerId itself. Raises ApiError; CONCURRENT_TRANSACTIONS if the abort has been decided
    but its markers are not written within the session's timeout.

    Source: ``Admin.forceTerminateTransaction`` (KIP-939).
    """
    answer = session.client.call(
        "InitProducerId",
        to_transaction=transaction.transactional_id,
        transactional_id=transaction.transactional_id,
        transaction_timeout=min(transaction.timeout_ms, MAX_CLAIM_TIMEOUT_MS),
    )
    return answer.producer_id, answer.producer_epoch
