"""DescribeCluster (60) on a controller's listener: the only controller is this node (KIP-919).

Source: ``ControllerApis.handleDescribeCluster``.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.describe_cluster import BROKERS, CONTROLLERS, described
from fencepost.protocol import ApiKey, Entity


@handles(ApiKey.DESCRIBE_CLUSTER, versions=(0, 2), permission="DESCRIBE Cluster")
def run(ctx: Context) -> Entity:
    """Respond with this node."""
    make = ctx.respond
    endpoint_type = getattr(ctx.body, "endpoint_type", BROKERS)
    if endpoint_type != CONTROLLERS:
        is_supported = endpoint_type == BROKERS
        return make.error(
            ErrorCode.mismatched_endpoint_type
            if is_supported
            else ErrorCode.unsupported_endpoint_type,
            "The request was sent to an endpoint of the wrong type.",
        )
    host, port = ctx.advertised
    node_id = ctx.broker.node_id
    this = make.DescribeClusterBroker(broker_id=node_id, host=host, port=port, rack=None)
    return described(ctx, CONTROLLERS, node_id, (this,))
