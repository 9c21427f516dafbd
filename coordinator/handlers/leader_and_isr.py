"""LeaderAndIsr (4): apply leaders and followers from a ZooKeeper controller.

Source: ``KafkaApis.handleLeaderAndIsrRequest``.
"""

from __future__ import annotations

from fencepost.cluster.acl import Operation
from fencepost.coordinator.handlers import Context, handles
from fencepost.protocol import ApiKey, Entity


@handles(ApiKey.LEADER_AND_ISR, versions=(7, 7), permission="CLUSTER_ACTION Cluster")
async def run(ctx: Context) -> Entity:
    """Respond once the request has been applied."""
    ctx.require_on_cluster(Operation.CLUSTER_ACTION)
    make = ctx.respond
    error, errors = await ctx.broker.on_zookeeper.leader_and_isr(
        ctx.body, ctx.connection.session.connected_s
    )
    return make.LeaderAndIsrResponse(
        error_code=error,
        topics=tuple(
            make.LeaderAndIsrTopicError(
                topic_id=topic_id,
                partition_errors=tuple(
                    make.LeaderAndIsrPartitionError(partition_index=index, error_code=code)
                    for index, code in each.items()
                ),
            )
            for topic_id, each in errors.items()
        ),
    )
