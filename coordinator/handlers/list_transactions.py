"""ListTransactions (66): list this broker's transactional ids and their states.

Version 1 filters by duration, version 2 by a pattern of the id (KIP-1152). The shards filter by
state, producer id and duration. Matching many ids against a pattern may take a long time, so the
handler does it in steps.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation, ResourceType
from fencepost.coordinator.handlers import Context, handles
from fencepost.logcore.regex import Regex, in_steps
from fencepost.protocol import ApiKey, Entity
from fencepost.protocol.steps import Steps
from fencepost.txn.commands import ListTransactions, ListTransactionsResult


@handles(ApiKey.LIST_TRANSACTIONS, versions=(0, 2), permission="DESCRIBE TransactionalId")
async def run(ctx: Context) -> Steps[Entity]:
    """List the ids that the client may describe; fail the request while a shard is loading."""
    body = ctx.body
    listed = await ctx.broker.txns.list_transactions(
        ListTransactions(
            states=tuple(body.state_filters),
            producer_ids=tuple(body.producer_id_filters),
            min_duration_ms=getattr(body, "duration_filter", -1),
        )
    )
    # An empty pattern matches everything, like a missing one.
    return _answer(ctx, listed, getattr(body, "transactional_id_pattern", None) or None)


def _answer(ctx: Context, listed: ListTransactionsResult, pattern: str | None) -> Steps[Entity]:
    respond = ctx.respond
    regex = None if pattern is None else Regex(pattern)
    if regex is not None:
        yield from in_steps(regex, regex.build())
    states = []
    for transaction in listed.transactions:
        yield
        if transaction is None:
            continue
        name = transaction.transactional_id
        if not ctx.may(Operation.DESCRIBE, ResourceType.TRANSACTIONAL_ID, name, audited=False):
            continue
        if regex is None or (yield from in_steps(regex, regex.walk(name))):
            states.append(
                respond.TransactionState(
                    transactional_id=name,
                    producer_id=transaction.producer_id,
                    transaction_state=transaction.state,
                )
            )
    return respond.ListTransactionsResponse(
        error_code=ErrorCode.none,
        unknown_state_filters=listed.unknown_states,
        transaction_states=tuple(states),
    )
