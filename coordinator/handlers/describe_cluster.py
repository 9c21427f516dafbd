"""DescribeCluster (60): list the brokers, but no topics. Version 1 adds the endpoint type.

Source: ``KafkaApis.handleDescribeCluster``, KIP-700, KIP-919.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from fencepost.coordinator.handlers import Context, authorized, handles
from fencepost.coordinator.handlers.endpoints import Endpoints
from fencepost.protocol import ApiKey, Entity

BROKERS, CONTROLLERS = 1, 2


@handles(ApiKey.DESCRIBE_CLUSTER, versions=(0, 2), permission="DESCRIBE Cluster")
def run(ctx: Context) -> Entity:
    """Respond with the brokers on the client's listener, including fenced ones on request."""
    make = ctx.respond
    endpoint_type = getattr(ctx.body, "endpoint_type", BROKERS)
    if endpoint_type != BROKERS:
        is_supported = endpoint_type == CONTROLLERS
        return make.error(
            ErrorCode.mismatched_endpoint_type
            if is_supported
            else ErrorCode.unsupported_endpoint_type,
            "this is an endpoint of brokers",
        )
    endpoints = Endpoints(ctx)
    fenced = getattr(ctx.body, "include_fenced_brokers", False)
    nodes = sorted(endpoints.nodes.values()) if fenced else endpoints.alive
    return described(
        ctx,
        BROKERS,
        endpoints.controller_id,
        tuple(
            make.DescribeClusterBroker(
                broker_id=node.node_id,
                host=node.host,
                port=node.port,
                rack=node.rack,
                is_fenced=node.is_fenced,
            )
            for node in nodes
        ),
    )


def described(
    ctx: Context, endpoint_type: int, controller_id: int, nodes: tuple[Entity, ...]
) -> Entity:
    """Build the response that lists these nodes."""
    includes_operations = ctx.body.include_cluster_authorized_operations
    return ctx.respond.DescribeClusterResponse(
        error_code=ErrorCode.none,
        endpoint_type=endpoint_type,
        cluster_id=ctx.broker.cluster_id,
        controller_id=controller_id,
        brokers=nodes,
        cluster_authorized_operations=(
            authorized.of_cluster(ctx) if includes_operations else authorized.NOT_ASKED
        ),
    )
