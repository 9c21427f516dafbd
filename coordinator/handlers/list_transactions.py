"""ListTransactions (66): the transactional ids of this broker and their states.

Version 1 filters by duration, 2 by a pattern of the id, which a shard is not asked about: there may
be many ids, and each may take the pattern a while.
"""

from __future__ import annotations

from collections.abc import Callable

from kio.schema.errors import ErrorCode

from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.security.acl import Operation, ResourceType
from fencepost.coordinator.wire import ApiKey, Entity
from fencepost.coordinator.wire.steps import Steps
from fencepost.txn.commands import ListTransactions, ListTransactionsResult
from fencepost.txn.id_pattern import compile_pattern


@handles(ApiKey.LIST_TRANSACTIONS, versions=(0, 2), permission="DESCRIBE TransactionalId")
async def run(ctx: Context) -> Steps[Entity]:
    """List what the client may see; an error of a loading shard is the error of the whole."""
    body = ctx.body
    # An empty pattern lets everything through, like none.
    pattern = getattr(body, "transactional_id_pattern", None)
    matches = compile_pattern(pattern) if pattern else None
    listed = await ctx.broker.txns.list_transactions(
        ListTransactions(
            states=tuple(body.state_filters),
            producer_ids=tuple(body.producer_id_filters),
            min_duration_ms=getattr(body, "duration_filter", -1),
        )
    )
    return _answer(ctx, listed, matches)


def _answer(
    ctx: Context, listed: ListTransactionsResult, matches: Callable[[str], bool] | None
) -> Steps[Entity]:
    respond = ctx.respond
    states = []
    for transaction in listed.transactions:
        name = transaction.transactional_id
        if (matches is None or matches(name)) and ctx.may(
            Operation.DESCRIBE, ResourceType.TRANSACTIONAL_ID, name, audited=False
        ):
            states.append(
                respond.TransactionState(
                    transactional_id=name,
                    producer_id=transaction.producer_id,
                    transaction_state=transaction.state,
                )
            )
        yield
    return respond.ListTransactionsResponse(
        error_code=ErrorCode.none,
        unknown_state_filters=listed.unknown_states,
        transaction_states=tuple(states),
    )
