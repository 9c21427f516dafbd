"""UnregisterBroker (64): forget a broker that is gone for good.

This one is not gone, so it refuses; Apache Kafka forgets a running broker until it registers anew.

Source: ``ReplicationControlManager.unregisterBroker``; KIP-631.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.security.acl import Operation
from fencepost.coordinator.wire import ApiKey, Entity


@handles(ApiKey.UNREGISTER_BROKER, versions=(0, 0), permission="ALTER Cluster")
def run(ctx: Context) -> Entity:
    """Refuse, each broker for its own reason."""
    ctx.require_on_cluster(Operation.ALTER)
    asked = ctx.body.broker_id
    if asked == ctx.broker.node_id:
        return ctx.respond.error(
            ErrorCode.invalid_request, f"broker {asked} is the only one, and is running"
        )
    return ctx.respond.error(
        ErrorCode.broker_id_not_registered, f"Broker ID {asked} is not currently registered"
    )
