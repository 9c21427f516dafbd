"""What is asked about transactions, and the sweeps over all of them.

Sources: ``TransactionStateManager.listTransactionStates`` and its expiry task,
``TransactionCoordinator.handleDescribeTransactions`` and ``abortTimedOutTransactions``.
"""

from __future__ import annotations

from collections.abc import Callable

from logcore.machine import Decision, Reply, Token
from txn import end_txn, id_pattern, records, state
from txn.commands import (
    AbortTimedOutResult,
    DescribeTransaction,
    DescribeTransactionResult,
    ExpireTransactionalIdsResult,
    ListedTransaction,
    ListTransactions,
    ListTransactionsResult,
)
from txn.errors import ProducerIdsUnavailableError, TransactionalIdNotFoundError
from txn.shard import TIMEOUT_TIMER, Draft, Shard, require_id, timeout_deadline_ms
from txn.state import TransactionState

_STATES_BY_NAME = {one.kafka_name: one for one in TransactionState}


def list_transactions(
    shard: Shard, token: Token, command: ListTransactions, now_ms: int
) -> Decision:
    """List what passes every filter, in the order of the ids.

    As in Kafka, the duration counts from the start of the last transaction even when that has
    ended, and an id that never began one passes.
    """
    unknown = tuple(name for name in command.states if name not in _STATES_BY_NAME)
    wanted = {_STATES_BY_NAME[name] for name in command.states if name in _STATES_BY_NAME}
    producer_ids = frozenset(command.producer_ids)
    matches = _matcher(command.id_pattern, shard.limits.max_id_pattern_length)
    listed = tuple(
        ListedTransaction(transactional_id, txn.producer_id, txn.state.kafka_name)
        for transactional_id, txn in sorted(shard.transactions.items())
        if (not command.states or txn.state in wanted)
        and (not producer_ids or txn.producer_id in producer_ids)
        and (command.min_duration_ms < 0 or now_ms - txn.start_ms > command.min_duration_ms)
        and matches(transactional_id)
    )
    return Decision(replies=(Reply(token, ListTransactionsResult(listed, unknown)),))


def describe_transaction(shard: Shard, token: Token, command: DescribeTransaction) -> Decision:
    """Show one transaction."""
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
    return Decision(replies=(Reply(token, described),))


def abort_timed_out(shard: Shard, token: Token, now_ms: int) -> Decision:
    """Abort every transaction past its timeout, up to the limit of a sweep."""
    overdue = [
        transactional_id
        for transactional_id, txn in shard.transactions.items()
        if not shard.is_pending(transactional_id)
        and (deadline_ms := timeout_deadline_ms(txn)) is not None
        and deadline_ms <= now_ms
    ]
    draft = Draft(shard)
    aborted = tuple(
        transactional_id
        for transactional_id in overdue[: shard.limits.max_sweep]
        if abort_overdue(shard, draft, transactional_id, now_ms)
    )
    more = len(overdue) > shard.limits.max_sweep
    draft.reply(token, AbortTimedOutResult(aborted, more=more))
    return draft.decision()


def abort_overdue(shard: Shard, draft: Draft, transactional_id: str, now_ms: int) -> bool:
    """Abort one transaction for its timeout; False if that has to be tried again later."""
    txn = shard.transactions[transactional_id]
    try:
        end_txn.abort_fenced(shard, draft, transactional_id, now_ms, cause="timeout")
    except ProducerIdsUnavailableError as error:
        draft.note("timeout-postponed", transactional_id, cause=str(error))
        draft.set_timer((TIMEOUT_TIMER, transactional_id), now_ms + shard.limits.retry_backoff_ms)
        return False
    draft.note(
        "transaction-timed-out",
        transactional_id,
        timeout_ms=txn.timeout_ms,
        open_ms=now_ms - txn.start_ms,
        partitions=len(txn.partitions),
    )
    return True


def expire_transactional_ids(shard: Shard, token: Token, now_ms: int) -> Decision:
    """Forget ids that rested for too long, up to the limit of a sweep."""
    oldest_ms = now_ms - shard.limits.transactional_id_expiration_ms
    overdue = [
        transactional_id
        for transactional_id, txn in shard.transactions.items()
        if txn.state in state.AT_REST and txn.last_update_ms <= oldest_ms
        if not shard.is_pending(transactional_id)
    ]
    draft = Draft(shard)
    expired = tuple(overdue[: shard.limits.max_sweep])
    for transactional_id in expired:
        txn = state.dead(shard.transactions[transactional_id])
        draft.records.append(records.tombstone(transactional_id))
        draft.note(
            "transactional-id-expired",
            transactional_id,
            producer_id=txn.producer_id,
            rested_ms=now_ms - txn.last_update_ms,
        )
    more = len(overdue) > len(expired)
    draft.reply(token, ExpireTransactionalIdsResult(expired, more=more))
    return draft.decision()


def _matcher(pattern: str | None, longest: int) -> Callable[[str], bool]:
    if not pattern:
        return lambda _: True
    return id_pattern.compile_pattern(pattern, longest)
