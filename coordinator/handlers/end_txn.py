"""EndTxn (26): commit or abort a transaction.

The response is sent once the Prepare record is committed and this broker has written markers to
the partitions that it leads. Markers on other brokers, and the Complete record after them, may
follow later.
Version 2 introduces PRODUCER_FENCED. Clients with TV2 use version 5, whose response contains the
producer id and epoch of the next transaction.
"""

from __future__ import annotations

from collections.abc import Awaitable

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation, ResourceType
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.answers import answer, before_producer_fenced
from fencepost.protocol import ApiKey, Entity
from fencepost.txn.commands import EndTxn, EndTxnResult
from fencepost.txn.events import RESOLVER_CLIENT_ID

FIRST_TV2_VERSION = 5


@handles(ApiKey.END_TXN, versions=(0, 5), permission="WRITE TransactionalId")
def run(ctx: Context) -> Entity | Awaitable[Entity]:
    """End the transaction."""
    body, respond = ctx.body, ctx.respond

    def build(result: EndTxnResult) -> Entity:
        observations = ctx.broker.observations
        if observations is not None:
            observations.ended(
                ctx.origin,
                body.transactional_id,
                ctx.version,
                open_ms=result.open_ms,
                timeout_ms=result.timeout_ms,
            )
        return respond.EndTxnResponse(
            error_code=ErrorCode.none,
            producer_id=result.producer_id,
            producer_epoch=result.producer_epoch,
        )

    def refuse(code: ErrorCode) -> Entity:
        return respond.EndTxnResponse(
            error_code=before_producer_fenced(code, known=ctx.version >= 2)
        )

    if not ctx.may(Operation.WRITE, ResourceType.TRANSACTIONAL_ID, body.transactional_id):
        return refuse(ErrorCode.transactional_id_authorization_failed)
    command = EndTxn(
        transactional_id=body.transactional_id,
        producer_id=body.producer_id,
        producer_epoch=body.producer_epoch,
        commit=body.committed,
        client_transaction_version=2 if ctx.version >= FIRST_TV2_VERSION else 0,
        by_operator=ctx.client_id == RESOLVER_CLIENT_ID,
    )
    return answer(ctx.broker.txns.submit(body.transactional_id, command, ctx.origin), build, refuse)
