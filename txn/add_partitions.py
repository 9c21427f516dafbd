"""AddPartitionsToTxn, AddOffsetsToTxn, and verification requests from partition leaders.

Sources: ``TransactionCoordinator.handleAddPartitionsToTransaction`` and
``handleVerifyPartitionsInTransaction``; KIP-890.
"""

from __future__ import annotations

from typing import Final

from fencepost.logcore.machine import DecisionBuilder, DomainError, Token
from fencepost.txn import epochs, state
from fencepost.txn.commands import AddPartitions, AddPartitionsResult, TopicPartition
from fencepost.txn.epochs import ProducerIdentity
from fencepost.txn.errors import (
    ConcurrentTransactionsError,
    InvalidProducerIdMappingError,
    InvalidTransactionStateError,
    TooManyPartitionsError,
    TransactionAbortableError,
)
from fencepost.txn.shard import TxnShardState, arm_timeout, refuse_fenced, require_id
from fencepost.txn.state import TransactionState

_ADDED: Final = AddPartitionsResult()
"""The most frequent result: no partition is refused."""


def decide(
    shard: TxnShardState, decision: DecisionBuilder, token: Token, command: AddPartitions
) -> None:
    """Add or verify partitions."""
    transactional_id = command.transactional_id
    require_id(transactional_id)
    # A pending id is refused before the identity is checked, because a TV2 client may already use
    # its next identity, which only the Complete record will store.
    if shard.is_pending(transactional_id):
        raise ConcurrentTransactionsError("the last transaction is being completed")
    txn = shard.transactions.get(transactional_id)
    if txn is None or command.producer_id not in {
        txn.producer_id,
        txn.client_identity.producer_id,
    }:
        raise InvalidProducerIdMappingError(
            f"{transactional_id} is not the id of producer {command.producer_id}"
        )
    request = ProducerIdentity(command.producer_id, command.producer_epoch)
    owner = txn.client_identity
    if request != owner or request.epoch > epochs.LAST_CLIENT_EPOCH:
        refuse_fenced(decision, token, transactional_id, request, owner, "AddPartitions")
        return
    if txn.is_kept_prepared:
        raise InvalidTransactionStateError("a prepared transaction can only be ended")
    if txn.state in state.PREPARED:
        raise ConcurrentTransactionsError("the last transaction is being completed")
    if command.verify_only:
        decision.reply(token, _verify(command.partitions, txn.partitions))
        return
    partitions = frozenset(command.partitions)
    begun = txn.state is TransactionState.ONGOING
    if begun and partitions <= txn.partitions:
        decision.reply(token, _ADDED)
        return
    extended = state.extended(
        txn,
        partitions,
        client_transaction_version=command.client_transaction_version,
        now_ms=decision.now_ms,
    )
    most = shard.limits.max_partitions_per_transaction
    if len(extended.partitions) > most:
        raise TooManyPartitionsError(f"a transaction may span {most} partitions")
    before, after = (
        state.memory_bytes(transactional_id, transaction) for transaction in (txn, extended)
    )
    if not shard.memory.has_room(after - before):
        raise TooManyPartitionsError(shard.memory.budget.exceeded)
    decision.append(shard.record(transactional_id, extended))
    if not begun:
        arm_timeout(decision, transactional_id, extended)
    decision.reply(token, _ADDED)


def _verify(
    partitions: tuple[TopicPartition, ...], present: frozenset[TopicPartition]
) -> AddPartitionsResult:
    errors: dict[TopicPartition, DomainError] = {
        partition: TransactionAbortableError(
            f"{partition[0]}-{partition[1]} is not in the transaction"
        )
        for partition in partitions
        if partition not in present
    }
    return AddPartitionsResult(errors)
