"""AddOffsetsToTxn (25): announce that a transaction will commit offsets of a group.

The request adds the group's partition of ``__consumer_offsets`` to the transaction. Only clients
without TV2 send it. Version 2 introduces PRODUCER_FENCED.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation, ResourceType
from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.answers import before_producer_fenced, result_of
from fencepost.coordinator.handlers.topic_creation import ask_for_topic
from fencepost.coordinator.metadata.names import CONSUMER_OFFSETS
from fencepost.coordinator.runtime.turns import Work
from fencepost.logcore.machine import DomainError
from fencepost.protocol import ApiKey, Entity
from fencepost.txn.commands import AddPartitions


@handles(ApiKey.ADD_OFFSETS_TO_TXN, versions=(0, 4), permission="WRITE TransactionalId, READ Group")
def run(ctx: Context) -> Work[Entity]:
    """Add the group's offsets partition to the transaction."""
    body, respond = ctx.body, ctx.respond

    def refuse(code: ErrorCode) -> Entity:
        return respond.AddOffsetsToTxnResponse(
            error_code=before_producer_fenced(code, known=ctx.version >= 2)
        )

    if not ctx.may(Operation.WRITE, ResourceType.TRANSACTIONAL_ID, body.transactional_id):
        return refuse(ErrorCode.transactional_id_authorization_failed)
    if not ctx.may(Operation.READ, ResourceType.GROUP, body.group_id):
        return refuse(ErrorCode.group_authorization_failed)
    try:
        # A producer may send this request before any consumer has looked up a group coordinator.
        if ctx.broker.metadata.topic(CONSUMER_OFFSETS) is None:
            ask_for_topic(ctx, CONSUMER_OFFSETS)
        yield from ctx.broker.groups.open_in_steps()
        partition = CONSUMER_OFFSETS, ctx.broker.groups.partition_for(body.group_id)
    except DomainError as error:
        return refuse(error_code(error))
    command = AddPartitions(
        body.transactional_id, body.producer_id, body.producer_epoch, (partition,)
    )
    submitted = ctx.broker.txns.submit(body.transactional_id, command, ctx.origin)
    result = yield from result_of(submitted)
    if isinstance(result, DomainError):
        return refuse(error_code(result))
    return respond.AddOffsetsToTxnResponse(error_code=ErrorCode.none)
