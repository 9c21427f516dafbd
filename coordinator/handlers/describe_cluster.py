"""DescribeCluster (60): the brokers, without any topic. Version 1 asks for a kind of endpoint.

Source: ``KafkaApis.handleDescribeCluster``, KIP-700, KIP-919.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from fencepost.coordinator.handlers import Context, authorized, handles
from fencepost.coordinator.wire import ApiKey, Entity

BROKERS, CONTROLLERS = 1, 2


@handles(ApiKey.DESCRIBE_CLUSTER, versions=(0, 2), permission="DESCRIBE Cluster")
def run(ctx: Context) -> Entity:
    """Answer with this one broker, which is the controller too."""
    broker, make = ctx.broker, ctx.respond
    endpoint_type = getattr(ctx.body, "endpoint_type", BROKERS)
    if endpoint_type != BROKERS:
        known = endpoint_type == CONTROLLERS
        return make.error(
            ErrorCode.mismatched_endpoint_type if known else ErrorCode.unsupported_endpoint_type,
            "this is an endpoint of brokers",
        )
    host, port = ctx.advertised
    asked = ctx.body.include_cluster_authorized_operations
    return make.DescribeClusterResponse(
        error_code=ErrorCode.none,
        endpoint_type=BROKERS,
        cluster_id=broker.cluster_id,
        controller_id=broker.node_id,
        brokers=(
            make.DescribeClusterBroker(
                broker_id=broker.node_id, host=host, port=port, rack=broker.rack
            ),
        ),
        cluster_authorized_operations=(
            authorized.of_cluster(ctx) if asked else authorized.NOT_ASKED
        ),
    )
