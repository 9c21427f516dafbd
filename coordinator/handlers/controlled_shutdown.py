"""ControlledShutdown (7): move the leadership away from a broker of a ZooKeeper cluster.

Source: ``KafkaController.doControlledShutdown``.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.controller_decisions import decide_until_done
from fencepost.coordinator.runtime.turns import Work
from fencepost.protocol import ApiKey, Entity


@handles(ApiKey.CONTROLLED_SHUTDOWN, versions=(3, 3), permission="CLUSTER_ACTION Cluster")
def run(ctx: Context) -> Work[Entity]:
    """Respond with the partitions that the broker still leads: no other ISR member is alive."""
    ctx.require_on_cluster(Operation.CLUSTER_ACTION)
    body = ctx.body
    yield from decide_until_done(
        ctx,
        lambda controller: controller.begin_shutdown(body.broker_id, body.broker_epoch),
        lambda is_more: is_more,
    )
    remaining = ctx.controller.current_machine().led_by(body.broker_id)
    make = ctx.respond
    return make.ControlledShutdownResponse(
        error_code=ErrorCode.none,
        remaining_partitions=tuple(
            make.RemainingPartition(topic_name=name, partition_index=index)
            for name, index in remaining
        ),
    )
