"""UnregisterBroker (64): remove the registration of a broker that was decommissioned.

The broker in the controller's own process is running, so its removal is refused. In Kafka, a
running broker whose registration was removed registers again.

Source: ``ReplicationControlManager.unregisterBroker``; KIP-631.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.controller_decisions import decide_until_done
from fencepost.coordinator.runtime.turns import Work
from fencepost.protocol import ApiKey, Entity


@handles(ApiKey.UNREGISTER_BROKER, versions=(0, 0), permission="ALTER Cluster")
def run(ctx: Context) -> Work[Entity]:
    """Remove the broker's registration, and the broker from all ISRs."""
    ctx.require_on_cluster(Operation.ALTER)
    broker_id = ctx.body.broker_id
    if broker_id == ctx.broker.node_id and ctx.controller.has_own_broker:
        return ctx.respond.error(
            ErrorCode.invalid_request,
            f"broker {broker_id} is the controller itself, and is running",
        )
    yield from decide_until_done(
        ctx, lambda controller: controller.unregister_broker(broker_id), bool
    )
    return ctx.respond.message(error_code=ErrorCode.none, error_message=None)
