"""The transaction coordinator of one partition of ``__transaction_state`` (KIP-98, KIP-890).

The state machine passes each request to its handler, replays the log, and loads and unloads the
coordinator. ``state.py`` has the states of a transaction, ``epochs.py`` the rules by which producer
epochs fence. ``end_txn.py`` ends transactions under both protocols: TV1 (KIP-98), and TV2 (KIP-890,
part 2), where every end bumps the epoch. ``add_partitions.py`` also verifies partitions for their
leaders (KIP-890, part 1).

Sources: ``TransactionCoordinator``, ``TransactionStateManager``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping
from types import MappingProxyType
from typing import Any, cast

from fencepost.logcore.budget import Account
from fencepost.logcore.machine import (
    Decision,
    DecisionBuilder,
    DomainError,
    InvariantViolation,
    ProducerStamp,
    Record,
    Reply,
    Token,
    Written,
)
from fencepost.txn import add_partitions, admin, completion, end_txn, init_producer, records, state
from fencepost.txn.commands import (
    AddPartitions,
    DescribeTransaction,
    EndTxn,
    ExpireTransactionalIds,
    InitProducerId,
    ListTransactions,
    MarkersWritten,
)
from fencepost.txn.errors import CoordinatorUnloadedError
from fencepost.txn.events import EventKind
from fencepost.txn.ids import ProducerIds
from fencepost.txn.limits import TxnLimits
from fencepost.txn.shard import (
    PARK_TIMER,
    TIMEOUT_TIMER,
    TxnShardState,
    arm_timeout,
)
from fencepost.txn.state import TransactionMetadata, TransactionState

Handler = Callable[[TxnShardState, DecisionBuilder, Token, Any], None]
"""Handles the commands of one class. It may raise :class:`DomainError` before it changes state."""

HANDLERS: Mapping[type, Handler] = MappingProxyType(
    {
        AddPartitions: add_partitions.decide,
        EndTxn: end_txn.decide,
        MarkersWritten: completion.decide,
        InitProducerId: init_producer.decide,
        ListTransactions: admin.list_transactions,
        DescribeTransaction: admin.describe_transaction,
        ExpireTransactionalIds: admin.expire_transactional_ids,
    }
)
"""The handler of each command."""


class TxnMachine:
    """One shard's transactions (see ``fencepost.logcore.machine.Machine``).

    ``coordinator_epoch`` is the leader epoch of the shard's partition and is written to every
    marker. ``transaction_version`` returns the cluster's finalized transaction.version. It selects
    the value version of records, and the rules (TV1 or TV2) by which a timeout or an InitProducerId
    aborts a transaction. ``memory`` counts the shard's bytes against the broker's budget.

    A :class:`fencepost.txn.commands.WriteMarkers` effect asks the runtime to write end markers.
    Once they are written, the runtime must pass the effect's ``written()`` command to
    :meth:`decide`, which completes the transaction.
    """

    def __init__(
        self,
        limits: TxnLimits,
        ids: ProducerIds,
        coordinator_epoch: int,
        transaction_version: Callable[[], int],
        memory: Account | None = None,
    ) -> None:
        self._shard = TxnShardState(
            limits, ids, coordinator_epoch, transaction_version, memory=memory or Account()
        )

    def __len__(self) -> int:
        return len(self._shard.transactions)

    @property
    def transactions(self) -> Mapping[str, TransactionMetadata]:
        """The durable state of each transactional id; read-only."""
        return self._shard.transactions

    def transaction(self, transactional_id: str) -> TransactionMetadata | None:
        """Return the durable state of an id, None if it is unknown."""
        return self._shard.transactions.get(transactional_id)

    def last_offset(self, transactional_id: str) -> int | None:
        """Return the log offset of the id's last record, None if there is none."""
        return self._shard.offsets.get(transactional_id)

    def is_pending(self, transactional_id: str) -> bool:
        """Whether the id has a *pending* transaction, whose markers are being written."""
        return self._shard.is_pending(transactional_id)

    def decide(self, token: Token, command: object, now_ms: int) -> Decision:
        """Return the records, replies, timers, events and effects of a command.

        Raises ``TxnError`` for a refused request without any other effect, and InvariantViolation
        for a command of a class that :data:`HANDLERS` lacks.
        """
        shard = self._shard
        if not shard.serving:
            raise CoordinatorUnloadedError("the shard does not serve")
        handler = HANDLERS.get(type(command))
        if handler is None:
            raise InvariantViolation(f"not a transaction command: {command!r}")
        decision = DecisionBuilder(now_ms)
        handler(shard, decision, token, command)
        return decision.build()

    def fire(self, key: Hashable, now_ms: int) -> Decision:
        """Handle an expired timer; an outdated timer has no effect.

        ``(TIMEOUT_TIMER, transactional_id)`` aborts a transaction that has exceeded
        transaction.timeout.ms. ``(PARK_TIMER, transactional_id)`` answers CONCURRENT_TRANSACTIONS
        to an InitProducerId that has waited too long for the abort of an ongoing transaction.
        """
        decision = DecisionBuilder(now_ms)
        match key:
            case (kind, str(transactional_id)) if kind == TIMEOUT_TIMER:
                admin.time_out(self._shard, decision, transactional_id)
            case (kind, str(transactional_id)) if kind == PARK_TIMER:
                init_producer.refuse_parked(self._shard, decision, transactional_id)
        return decision.build()

    def replay(
        self,
        record: Record,
        offset: int,
        timestamp_ms: int,  # noqa: ARG002 - Machine requires it; the records contain their times
        stamp: ProducerStamp | None,  # noqa: ARG002 - Machine requires it; these batches have none
    ) -> None:
        """Apply one record; only replay changes durable state.

        Raises CorruptRecordError, and InvariantViolation for an illegal transition.
        """
        shard = self._shard
        shard.last_offset = offset
        content = record.decoded if type(record) is Written else records.decode(record)
        decoded = cast("records.DecodedRecord | None", content)
        if decoded is None:
            shard.skipped_records += 1
            return
        transactional_id, txn = decoded
        old = shard.transactions.get(transactional_id)
        held = state.memory_bytes(transactional_id, txn) if txn is not None else 0
        shard.memory.add(held - (state.memory_bytes(transactional_id, old) if old else 0))
        if txn is None:
            if shard.serving and old is not None:
                state.require_legal(old.state, TransactionState.DEAD)
            shard.transactions.pop(transactional_id, None)
            shard.offsets.pop(transactional_id, None)
            shard.last_producer_identity.pop(transactional_id, None)
            return
        # Not checked during loading: compaction may have removed the record of the previous state.
        if shard.serving:
            state.check_step(old, txn)
        shard.transactions[transactional_id] = txn
        shard.offsets[transactional_id] = offset

    def replay_marker(
        self,
        stamp: ProducerStamp,  # noqa: ARG002 - Machine requires it
        offset: int,
        *,
        commit: bool,  # noqa: ARG002 - Machine requires it
    ) -> None:
        """Ignore an end marker: ``__transaction_state`` has no transactional batches."""
        self._shard.last_offset = offset

    def on_loaded(self, now_ms: int) -> Decision:
        """Start serving: request the markers of prepared transactions, and arm timeouts.

        The log does not say which markers were written, so all of them are written again.
        """
        shard = self._shard
        shard.serving = True
        decision = DecisionBuilder(now_ms)
        for transactional_id, txn in shard.transactions.items():
            if txn.state in state.PREPARED:
                number = shard.offsets[transactional_id]  # of the Prepare record
                shard.request_markers(decision, transactional_id, txn, number)
                decision.event(
                    EventKind.TRANSACTION_RESUMED,
                    transactional_id,
                    state=txn.state.kafka_name,
                    prepared_ms_ago=now_ms - txn.last_update_ms,
                    partitions=len(txn.partitions),
                )
            elif txn.state is TransactionState.ONGOING:
                arm_timeout(decision, transactional_id, txn)
        if shard.skipped_records:
            decision.event(EventKind.RECORDS_PASSED_OVER, "", count=shard.skipped_records)
        return decision.build()

    def on_unloaded(self) -> Decision:
        """Stop serving; answer NOT_COORDINATOR to each waiting InitProducerId."""
        shard = self._shard
        error: DomainError = CoordinatorUnloadedError("the shard stopped serving")
        replies = tuple(Reply(parked.token, error) for parked in shard.parked.values())
        shard.parked.clear()
        shard.markers.clear()
        shard.serving = False
        return Decision(replies=replies)

    def digest(self) -> str:
        """Return a hash of the durable state of all ids, whatever value version the log has."""
        total = hashlib.sha256()
        for transactional_id, txn in sorted(self._shard.transactions.items()):
            for part in (
                records.encode_key(transactional_id),
                records.encode_value(txn, records.FLEXIBLE_VERSION),
            ):
                total.update(len(part).to_bytes(4, "big"))
                total.update(part)
        return total.hexdigest()

    def check(self) -> None:
        """Raise InvariantViolation unless all durable and soft state is consistent."""
        shard = self._shard
        owners: dict[int, str] = {}
        for transactional_id, txn in shard.transactions.items():
            state.check_shape(transactional_id, txn)
            for producer_id in {txn.producer_id, txn.next_identity.producer_id}:
                if owners.setdefault(producer_id, transactional_id) != transactional_id:
                    raise InvariantViolation(
                        f"{transactional_id} and {owners[producer_id]} share producer {producer_id}"
                    )
            if shard.serving and (txn.state in state.PREPARED) != shard.is_pending(
                transactional_id
            ):
                raise InvariantViolation(f"{transactional_id}: {txn.state.name} and its markers")
        if shard.offsets.keys() != shard.transactions.keys():
            raise InvariantViolation("offsets and transactions name different ids")
        for request in shard.markers.requests():
            pending = shard.transactions.get(request.transactional_id)
            if pending is None or pending.state not in state.PREPARED:
                raise InvariantViolation(f"nothing to complete in {pending} by {request}")
            if request.stamp != ProducerStamp(*pending.identity):
                raise InvariantViolation(f"{request} does not end {pending}")
        if not all(shard.is_pending(transactional_id) for transactional_id in shard.parked):
            raise InvariantViolation("a request waits for markers that nobody writes")
        if len(shard.parked) > shard.limits.max_parked_requests:
            raise InvariantViolation(f"{len(shard.parked)} requests wait")
