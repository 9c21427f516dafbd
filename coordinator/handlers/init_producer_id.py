"""InitProducerId (22): assign a producer id and epoch, and fence the previous producer.

Version 3 adds the producer's current id and epoch (KIP-360), version 4 PRODUCER_FENCED instead of
INVALID_PRODUCER_EPOCH, version 6 two-phase commit (unstable, KIP-939).
"""

from __future__ import annotations

from collections.abc import Awaitable

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation, ResourceType
from fencepost.coordinator.handlers import Context, handles, request_ms
from fencepost.coordinator.handlers.answers import answer, before_producer_fenced
from fencepost.protocol import ApiKey, Entity
from fencepost.txn.commands import (
    NO_PRODUCER_EPOCH,
    NO_PRODUCER_ID,
    InitProducerId,
    InitProducerIdResult,
)


@handles(
    ApiKey.INIT_PRODUCER_ID,
    versions=(0, 6),
    permission="WRITE TransactionalId, or IDEMPOTENT_WRITE Cluster or WRITE of any Topic",
)
def run(ctx: Context) -> Entity | Awaitable[Entity]:
    """Assign a producer id and epoch."""
    body, respond = ctx.body, ctx.respond
    producer_id = getattr(body, "producer_id", NO_PRODUCER_ID)
    producer_epoch = getattr(body, "producer_epoch", NO_PRODUCER_EPOCH)

    def build(result: InitProducerIdResult) -> Entity:
        return respond.InitProducerIdResponse(
            error_code=ErrorCode.none,
            producer_id=result.producer_id,
            producer_epoch=result.producer_epoch,
            ongoing_txn_producer_id=result.ongoing_producer_id,
            ongoing_txn_producer_epoch=result.ongoing_producer_epoch,
        )

    def refuse(code: ErrorCode) -> Entity:
        observations = ctx.broker.observations
        if code is ErrorCode.invalid_transaction_timeout and observations is not None:
            timeout_ms = request_ms(body.transaction_timeout)
            observations.refused_timeout(ctx.origin, body.transactional_id, timeout_ms)
        return respond.InitProducerIdResponse(
            error_code=before_producer_fenced(code, known=ctx.version >= 4),
            producer_id=NO_PRODUCER_ID,
            producer_epoch=NO_PRODUCER_EPOCH,
        )

    denied = _denied(ctx)
    if denied is not None:
        return refuse(denied)
    if (producer_id == NO_PRODUCER_ID) != (producer_epoch == NO_PRODUCER_EPOCH):
        return refuse(ErrorCode.invalid_request)
    if body.transactional_id is None:
        return answer(ctx.broker.txns.new_producer(), build, refuse)
    if not body.transactional_id:
        return refuse(ErrorCode.invalid_request)
    command = InitProducerId(
        transactional_id=body.transactional_id,
        transaction_timeout_ms=request_ms(body.transaction_timeout),
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        enable_2pc=getattr(body, "enable2_pc", False),
        keep_prepared=getattr(body, "keep_prepared_txn", False),
    )
    return answer(ctx.broker.txns.submit(body.transactional_id, command, ctx.origin), build, refuse)


def _denied(ctx: Context) -> ErrorCode | None:
    """Return the authorization error for the client, or None."""
    transactional_id = ctx.body.transactional_id
    if transactional_id is not None:
        two_phases = (Operation.TWO_PHASE_COMMIT,) if getattr(ctx.body, "enable2_pc", False) else ()
        for operation in (Operation.WRITE, *two_phases):
            if not ctx.may(operation, ResourceType.TRANSACTIONAL_ID, transactional_id):
                return ErrorCode.transactional_id_authorization_failed
    elif not (
        ctx.may_on_cluster(Operation.IDEMPOTENT_WRITE, audited=False)
        or ctx.may_on_some(Operation.WRITE, ResourceType.TOPIC)
    ):
        return ErrorCode.cluster_authorization_failed
    return None
