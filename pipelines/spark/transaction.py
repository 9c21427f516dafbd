"""One transaction shared by several processes, and their operations in it.

A transaction belongs to a transactional id, a producer id and an epoch, not to a connection: the
driver begins it, tasks write in it, the driver ends it. Two protocols are implemented: KIP-890's
for brokers with ``transaction.version`` 2, and the older one.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from kio.schema.errors import ErrorCode

from fencepost.client.client import ApiError
from fencepost.client.requests import (
    NAMED,
    add_partitions,
    added,
    produce,
    rows_of,
    txn_offset_commit,
)
from fencepost.logcore.batch import batch_of_payload
from fencepost.logcore.compression import Codec, compress
from fencepost.pipelines.spark.broker import (
    LATEST,
    READ_UNCOMMITTED,
    RETRY_PAUSE_S,
    ClusterConnection,
    check_right,
)
from fencepost.pipelines.spark.columns import Piece
from fencepost.pipelines.spark.errors import BrokerError, SharedTransactionError
from fencepost.pipelines.spark.offsets import Offsets, Partition

MAX_REQUEST_BYTES = 4 * 1024 * 1024
"""The size of encoded records in one Produce request."""

_SEQUENCES = 1 << 31

_OVER = frozenset(
    {
        ErrorCode.invalid_txn_state,
        ErrorCode.invalid_producer_epoch,
        ErrorCode.producer_fenced,
        ErrorCode.invalid_producer_id_mapping,
        ErrorCode.transactional_id_not_found,
    }
)
"""Errors after which the transaction cannot be ended: it is over, or another producer's."""


class TransactionOverError(BrokerError):
    """The transaction has ended, or its producer was fenced; the outcome must be looked up."""


@dataclass(frozen=True, slots=True)
class TransactionHandle:
    """The identity by which a process takes part in a transaction. Small, and safe to pickle."""

    transactional_id: str
    producer_id: int
    epoch: int
    implicit: bool
    """Whether writing to a partition adds it to the transaction (KIP-890)."""

    @property
    def claim(self) -> dict[str, Any]:
        """The fields of a request that identify the transaction."""
        return {
            "transactional_id": self.transactional_id,
            "producer_id": self.producer_id,
            "producer_epoch": self.epoch,
        }


def begin(link: ClusterConnection, transactional_id: str, timeout_ms: int) -> TransactionHandle:
    """Fence earlier producers of the id, wait until their transaction is over, and get an epoch.

    After that, the outcome of every earlier transaction of the id is final. Raises BrokerError if
    a downgrade has locked the id, ``ApiError`` for other refusals.
    """
    try:
        answer = link.call_until_answered(
            "InitProducerId",
            lambda f: f.message(
                transactional_id=transactional_id,
                transaction_timeout_ms=timeout_ms,
                producer_id=-1,
                producer_epoch=-1,
            ),
            to_transaction=transactional_id,
        )
    except ApiError as error:
        if error.code is not ErrorCode.unsupported_version:
            raise
        # TransactionLog.valueToBytes: no version 0 of a value has a ClientTransactionVersion.
        raise BrokerError(
            f"InitProducerId: UNSUPPORTED_VERSION. Transactional id {transactional_id!r} was used"
            " under transaction.version 2; after a downgrade to 0 Apache Kafka can't write it down."
            " Raise transaction.version again, restart the id's coordinator, then the query;"
            " another id would not know which batches are committed"
        ) from error
    implicit = link.transaction_version() >= 2 and link.produce_version() >= 12
    return TransactionHandle(transactional_id, answer.producer_id, answer.producer_epoch, implicit)


class Sent(NamedTuple):
    """The acknowledged records of a sender in one partition."""

    records: int
    end: int
    """The sequence number after the last of these records."""


def compressed(piece: Piece, codec: Codec, level: int | None) -> Piece:
    """Return the piece with its payload compressed."""
    if codec is Codec.NONE:
        return piece
    return piece._replace(payload=compress(codec, piece.payload, level))


class Numbers(Protocol):
    """A source of a sender's sequence numbers; the numbers do not wrap at 2^31."""

    def turn(
        self, parts: Collection[Partition]
    ) -> contextlib.AbstractContextManager[dict[Partition, int]]:
        """Yield each partition's next number; the caller adds the count of acknowledged records."""


class LocalSequences:
    """Numbers of a sender that shares no partition with another, starting at ``first`` (or 0)."""

    def __init__(self, first: Mapping[Partition, int] | None = None) -> None:
        self._next = dict(first or {})

    @contextlib.contextmanager
    def turn(self, parts: Collection[Partition]) -> Iterator[dict[Partition, int]]:
        """See :class:`Numbers`."""
        numbers = {part: self._next.get(part, 0) for part in parts}
        yield numbers
        self._next |= numbers


class Sender:
    """Writes batches in a transaction.

    Two senders for one partition must share ``numbers``. With ``guarded``, a write fails if an
    earlier sender of the same transaction has written to the partition. The broker would take this
    sender's batch for a retry, and answer with the offset of the earlier batch. The sender detects
    that, because this offset is below the log end offset before its own first write. Senders that
    run at the same time are not detected.
    """

    def __init__(
        self,
        link: ClusterConnection,
        ticket: TransactionHandle,
        codec: Codec,
        level: int | None,
        *,
        numbers: Numbers | None = None,
        guarded: bool = False,
    ) -> None:
        self._link = link
        self._ticket = ticket
        self._codec = codec
        self._level = level
        self._numbers = LocalSequences() if numbers is None else numbers
        self._joined: set[Partition] = set()
        self._guarded = guarded
        self._ends: Offsets = {}
        self._waiting: dict[Partition, Piece] = {}
        self._waiting_bytes = 0
        self.sent: dict[Partition, Sent] = {}

    def add(self, piece: Piece) -> None:
        """Compress a batch, and queue it for the next Produce request."""
        self.add_compressed(compressed(piece, self._codec, self._level))

    def add_compressed(self, piece: Piece) -> None:
        """Queue a compressed batch; send the queued batches first if there is no room for it."""
        part = piece.topic, piece.partition
        # A Produce request holds one batch per partition.
        if part in self._waiting or self._waiting_bytes >= MAX_REQUEST_BYTES:
            self.flush()
        self._waiting[part] = piece
        self._waiting_bytes += len(piece.payload)

    def _sealed(self, piece: Piece, number: int) -> bytes:
        return batch_of_payload(
            piece.payload,
            piece.records,
            codec=self._codec,
            base_timestamp_ms=piece.base_timestamp_ms,
            max_timestamp_ms=piece.max_timestamp_ms,
            producer_id=self._ticket.producer_id,
            producer_epoch=self._ticket.epoch,
            base_sequence=number % _SEQUENCES,
            transactional=True,
        )

    def flush(self) -> None:
        """Send waiting batches, and return once all of them are acknowledged.

        Raises BrokerError, and :class:`SharedTransactionError` if another sender has written.
        """
        waiting, self._waiting, self._waiting_bytes = self._waiting, {}, 0
        if not waiting:
            return
        if not self._ticket.implicit:
            self._join(set(waiting) - self._joined)
        if self._guarded:
            self._note_ends(set(waiting) - self._ends.keys())
        with self._numbers.turn(waiting) as numbers:
            self._deliver({part: self._sealed(waiting[part], numbers[part]) for part in waiting})
            for part, piece in waiting.items():
                numbers[part] += piece.records
                before = self.sent.get(part)
                records = piece.records + (before.records if before else 0)
                self.sent[part] = Sent(records, numbers[part])

    def _deliver(self, waiting: Mapping[Partition, bytes]) -> None:
        """Send sealed batches until all are acknowledged."""
        deadline = time.monotonic() + self._link.timeout_ms / 1000
        while waiting:
            waiting = self._attempt(waiting)
            if waiting:
                if time.monotonic() > deadline:
                    raise BrokerError(f"no acknowledgement of {sorted(waiting)} in time")
                time.sleep(RETRY_PAUSE_S)
                self._link.topics(refresh=True)

    def _attempt(self, waiting: Mapping[Partition, bytes]) -> dict[Partition, bytes]:
        """Send each batch once, and return the ones to send again.

        A batch that is sent again keeps its sequence number, by which the broker recognises it.
        """
        by_node: dict[int, dict[Partition, bytes]] = defaultdict(dict)
        for part, batch in waiting.items():
            by_node[self._link.leader(part)][part] = batch
        again: dict[Partition, bytes] = {}
        for node, group in by_node.items():
            if node < 0:
                again |= group
                continue
            try:
                answer = self._link.call(
                    "Produce",
                    partial(
                        produce,
                        batches=group,
                        timeout_ms=self._link.timeout_ms,
                        transactional_id=self._ticket.transactional_id,
                    ),
                    # From version 12 on, Produce adds partitions to the transaction.
                    at_most=12 if self._ticket.implicit else 11,
                    to_node=node,
                    check=False,
                )
            except BrokerError:
                again |= group
                continue
            for topic in answer.responses:
                for row in topic.partition_responses:
                    part = topic.name, row.index
                    code = ErrorCode(row.error_code)
                    if code in {ErrorCode.none, ErrorCode.duplicate_sequence_number}:
                        self._check_new(part, row.base_offset)
                        continue
                    if not code.retriable:
                        check_right("Produce", code, topic.name)
                        message = getattr(row, "error_message", None)
                        raise _refused(f"Produce to {part[0]}-{part[1]}", code, message)
                    again[part] = group[part]
        return again

    def _note_ends(self, parts: Collection[Partition]) -> None:
        """Remember the log end offsets of partitions before the first write to them."""
        self._ends |= self._link.list_offsets(dict.fromkeys(parts, LATEST), READ_UNCOMMITTED)

    def _check_new(self, part: Partition, offset: int) -> None:
        end = self._ends.get(part, -1)
        if offset < end:
            raise SharedTransactionError(
                f"{part[0]}-{part[1]} took a batch for a repetition of that at offset {offset},"
                f" which was there before this task began at {end}: another attempt has written"
                " into the transaction; the whole batch has to run again"
            )

    def _join(self, parts: Collection[Partition]) -> None:
        """Add partitions to the transaction before the first write to them."""
        if not parts:
            return
        answer = self._link.call_until_answered(
            "AddPartitionsToTxn",
            lambda f: add_partitions(f, parts, **self._ticket.claim),
            at_most=3,
            to_transaction=self._ticket.transactional_id,
        )
        codes = [ErrorCode(code) for code in added(answer) if code]
        # If one of several topics is not authorized, the others get OPERATION_NOT_ATTEMPTED.
        for code in sorted(codes, key=lambda code: code is ErrorCode.operation_not_attempted):
            check_right("AddPartitionsToTxn", code)
            raise _refused("AddPartitionsToTxn", code)
        self._joined |= set(parts)


def commit_offsets(
    link: ClusterConnection, ticket: TransactionHandle, group: str, offsets: Offsets, metadata: str
) -> None:
    """Add offsets of ``group``, which must have no members, to the transaction.

    Raises :class:`TransactionOverError` if the transaction is over, BrokerError for other refusals.
    """
    try:
        if not ticket.implicit:
            link.call_until_answered(
                "AddOffsetsToTxn",
                lambda f: f.message(**ticket.claim, group_id=group),
                to_transaction=ticket.transactional_id,
            )
        answer = link.call_until_answered(
            "TxnOffsetCommit",
            lambda f: txn_offset_commit(
                f, offsets, metadata=metadata, **ticket.claim, group_id=group
            ),
            at_most=NAMED["TxnOffsetCommit"] if ticket.implicit else 4,
            to_group=group,
        )
    except ApiError as error:
        raise _refused(error.api, error.code) from error
    for (topic, _), row in rows_of(answer):
        if row.error_code:
            check_right("TxnOffsetCommit", row.error_code, topic)
            raise _refused("TxnOffsetCommit", ErrorCode(row.error_code))


def end(link: ClusterConnection, ticket: TransactionHandle, *, commit: bool) -> None:
    """Commit or abort. After a lost answer the request is repeated: a commit is idempotent.

    Raises :class:`TransactionOverError` if only the progress can tell how the transaction ended.
    """
    try:
        link.call_until_answered(
            "EndTxn",
            lambda f: f.message(**ticket.claim, committed=commit),
            at_most=5 if ticket.implicit else 4,
            to_transaction=ticket.transactional_id,
        )
    except ApiError as error:
        raise _refused("EndTxn", error.code) from error


def _refused(api: str, code: ErrorCode, message: str | None = None) -> BrokerError:
    text = f"{api}: {code.name.upper()} {message or ''}".rstrip()
    if code not in _OVER:
        return BrokerError(text)
    return TransactionOverError(
        f"{text}. The batch took longer than kafka.transaction.timeout.ms, or another driver has"
        " begun it. One that is always too long is written with mode=staged, whose transaction"
        " begins when all rows are there, or is made smaller by maxOffsetsPerTrigger, after its"
        " entry in the checkpoint's folder offsets was removed"
    )
