"""StopReplica (5): stop or delete replicas of this broker for a ZooKeeper controller.

Source: ``KafkaApis.handleStopReplicaRequest``.
"""

from __future__ import annotations

from fencepost.cluster.acl import Operation
from fencepost.coordinator.handlers import Context, handles
from fencepost.protocol import ApiKey, Entity


@handles(ApiKey.STOP_REPLICA, versions=(4, 4), permission="CLUSTER_ACTION Cluster")
async def run(ctx: Context) -> Entity:
    """Respond once the request has been applied."""
    ctx.require_on_cluster(Operation.CLUSTER_ACTION)
    make = ctx.respond
    error, errors = await ctx.broker.on_zookeeper.stop_replica(
        ctx.body, ctx.connection.session.connected_s
    )
    return make.StopReplicaResponse(
        error_code=error,
        partition_errors=tuple(
            make.StopReplicaPartitionError(topic_name=name, partition_index=index, error_code=code)
            for name, index, code in errors
        ),
    )
