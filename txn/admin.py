"""Listing and describing transactions, their timeouts, and the expiry of transactional ids.

Sources: ``TransactionStateManager.listTransactionStates`` and its expiry task,
``TransactionCoordinator.handleDescribeTransactions`` and ``abortTimedOutTransactions``.
"""

from __future__ import annotations

from collections.abc import Iterator

from fencepost.logcore.machine import DecisionBuilder, Token
from fencepost.txn import end_txn, records, state
from fencepost.txn.commands import (
    DescribeTransaction,
    DescribeTransactionResult,
    ExpireTransactionalIds,
    ExpireTransactionalIdsResult,
    ListedTransaction,
    ListTransactions,
    ListTransactionsResult,
    ReserveProducerIds,
)
from fencepost.txn.errors import ProducerIdsUnavailableError, TransactionalIdNotFoundError
from fencepost.txn.events import EventKind
from fencepost.txn.shard import (
    TIMEOUT_TIMER,
    TxnShardState,
    arm_timeout,
    require_id,
    timeout_deadline_ms,
)
from fencepost.txn.state import TransactionMetadata, TransactionState

_STATES_BY_NAME = {txn_state.kafka_name: txn_state for txn_state in TransactionState}


def list_transactions(
    shard: TxnShardState, decision: DecisionBuilder, token: Token, command: ListTransactions
) -> None:
    """List the transactions that pass every filter.

    As in Kafka, the duration counts from the start of the last transaction, even if that
    transaction has ended. An id without a transaction so far has the start time -1, and passes
    every filter by duration.
    """
    unknown = tuple(name for name in command.states if name not in _STATES_BY_NAME)
    # A transaction's metadata is replaced, never changed, so this list is a snapshot.
    transactions = list(shard.transactions.items())
    listed = _filtered(transactions, command, decision.now_ms)
    decision.reply(token, ListTransactionsResult(listed, unknown))


def _filtered(
    transactions: list[tuple[str, TransactionMetadata]], command: ListTransactions, now_ms: int
) -> Iterator[ListedTransaction | None]:
    states = {_STATES_BY_NAME[name] for name in command.states if name in _STATES_BY_NAME}
    producer_ids = frozenset(command.producer_ids)
    for transactional_id, txn in transactions:
        if (
            (not command.states or txn.state in states)
            and (not producer_ids or txn.producer_id in producer_ids)
            and (command.min_duration_ms < 0 or now_ms - txn.start_ms > command.min_duration_ms)
        ):
            yield ListedTransaction(transactional_id, txn.producer_id, txn.state.kafka_name)
        else:
            yield None


def describe_transaction(
    shard: TxnShardState, decision: DecisionBuilder, token: Token, command: DescribeTransaction
) -> None:
    """Describe one transaction. Raises TransactionalIdNotFoundError."""
    require_id(command.transactional_id)
    txn = shard.transactions.get(command.transactional_id)
    if txn is None:
        raise TransactionalIdNotFoundError(f"{command.transactional_id} is not known")
    described = DescribeTransactionResult(
        transactional_id=command.transactional_id,
        state=txn.state.kafka_name,
        producer_id=txn.producer_id,
        producer_epoch=txn.producer_epoch,
        transaction_timeout_ms=txn.timeout_ms,
        start_time_ms=txn.start_ms,
        partitions=tuple(sorted(txn.partitions)),
    )
    decision.reply(token, described)


def time_out(shard: TxnShardState, decision: DecisionBuilder, transactional_id: str) -> None:
    """Abort a transaction whose timeout has passed; retry later if no producer id is reserved."""
    txn = shard.transactions.get(transactional_id)
    if txn is None or not shard.serving or shard.is_pending(transactional_id):
        return
    deadline_ms = timeout_deadline_ms(txn)
    if deadline_ms is None:
        return
    if decision.now_ms < deadline_ms:
        arm_timeout(decision, transactional_id, txn)
        return
    try:
        end_txn.abort_fenced(shard, decision, transactional_id, cause="timeout")
    except ProducerIdsUnavailableError as error:
        decision.effect(ReserveProducerIds())
        decision.event(EventKind.TIMEOUT_POSTPONED, transactional_id, cause=str(error))
        decision.arm((TIMEOUT_TIMER, transactional_id), shard.limits.retry_backoff_ms)
        return
    decision.event(
        EventKind.TRANSACTION_TIMED_OUT,
        transactional_id,
        timeout_ms=txn.timeout_ms,
        open_ms=decision.now_ms - txn.start_ms,
        partitions=len(txn.partitions),
    )


def expire_transactional_ids(
    shard: TxnShardState,
    decision: DecisionBuilder,
    token: Token,
    _command: ExpireTransactionalIds,
) -> None:
    """Expire some of the transactional ids that have been at rest for too long.

    The decision stops at the limits ``max_sweep`` and ``max_sweep_looks``. The next decision
    continues at the same position, which is soft state.
    """
    oldest_ms = decision.now_ms - shard.limits.transactional_id_expiration_ms
    to_sweep = shard.to_sweep
    if not to_sweep:
        to_sweep.extend(shard.transactions)
    expired: list[str] = []
    for _ in range(min(len(to_sweep), shard.limits.max_sweep_looks)):
        if len(expired) == shard.limits.max_sweep:
            break
        transactional_id = to_sweep.popleft()
        txn = shard.transactions.get(transactional_id)
        if (
            txn is None
            or txn.state not in state.AT_REST
            or txn.last_update_ms > oldest_ms
            or shard.is_pending(transactional_id)
        ):
            continue
        expired.append(transactional_id)
        state.dead(txn)
        decision.append(records.tombstone(transactional_id))
        decision.event(
            EventKind.TRANSACTIONAL_ID_EXPIRED,
            transactional_id,
            producer_id=txn.producer_id,
            rested_ms=decision.now_ms - txn.last_update_ms,
        )
    decision.reply(token, ExpireTransactionalIdsResult(tuple(expired), more=bool(to_sweep)))
