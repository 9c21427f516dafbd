"""AllocateProducerIds (67): give a broker a block of producer ids (KIP-730).

Source: ``ProducerIdControlManager.generateNextProducerId``.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.controller_decisions import decided
from fencepost.coordinator.runtime.turns import Work
from fencepost.protocol import ApiKey, Entity


@handles(ApiKey.ALLOCATE_PRODUCER_IDS, versions=(0, 0), permission="CLUSTER_ACTION Cluster")
def run(ctx: Context) -> Work[Entity]:
    """Respond with the first id of the block and the block's size."""
    ctx.require_on_cluster(Operation.CLUSTER_ACTION)
    body = ctx.body
    block = yield from decided(
        ctx,
        lambda controller: controller.allocate_producer_ids(body.broker_id, body.broker_epoch),
    )
    return ctx.respond.message(
        error_code=ErrorCode.none, producer_id_start=block.first, producer_id_len=block.size
    )
