"""UpdateMetadata (6): apply the list of brokers and topics from a ZooKeeper controller.

Source: ``KafkaApis.handleUpdateMetadataRequest``.
"""

from __future__ import annotations

from fencepost.cluster.acl import Operation
from fencepost.coordinator.handlers import Context, handles
from fencepost.protocol import ApiKey, Entity


@handles(ApiKey.UPDATE_METADATA, versions=(8, 8), permission="CLUSTER_ACTION Cluster")
async def run(ctx: Context) -> Entity:
    """Respond once the request has been applied."""
    ctx.require_on_cluster(Operation.CLUSTER_ACTION)
    error = await ctx.broker.on_zookeeper.update_metadata(
        ctx.body, ctx.connection.session.connected_s
    )
    return ctx.respond.UpdateMetadataResponse(error_code=error)
