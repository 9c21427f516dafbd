"""ControllerRegistration (70): record the listeners of a controller (KIP-919).

This node is the only voter and the only controller of the quorum.

Source: ``ControllerApis.handleControllerRegistration``.
"""

from __future__ import annotations

from uuid import UUID

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation
from fencepost.cluster.controller.brokers import ControllerRegistrationRequest
from fencepost.cluster.records import ControllerEndpoint, ControllerFeature
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.broker_registration import MAX_LISTENERS
from fencepost.coordinator.handlers.controller_decisions import decided
from fencepost.coordinator.runtime.turns import Work
from fencepost.protocol import ApiKey, Entity


@handles(ApiKey.CONTROLLER_REGISTRATION, versions=(0, 0), permission="CLUSTER_ACTION Cluster")
def run(ctx: Context) -> Work[Entity]:
    """Register the controller if it is this node."""
    ctx.require_on_cluster(Operation.CLUSTER_ACTION)
    body = ctx.body
    if body.controller_id != ctx.broker.node_id:
        return ctx.respond.error(
            ErrorCode.invalid_request,
            f"node {body.controller_id} is not a voter of this quorum, which has one",
        )
    if max(len(body.listeners), len(body.features)) > MAX_LISTENERS:
        return ctx.respond.error(ErrorCode.invalid_request, "too many listeners or features")
    request = ControllerRegistrationRequest(
        body.controller_id,
        body.incarnation_id or UUID(int=0),
        body.zk_migration_ready,
        tuple(
            ControllerEndpoint(
                listener.name, listener.host, listener.port, listener.security_protocol
            )
            for listener in body.listeners
        ),
        tuple(
            ControllerFeature(
                feature.name, feature.min_supported_version, feature.max_supported_version
            )
            for feature in body.features
        ),
    )
    yield from decided(ctx, lambda controller: controller.register_controller(request))
    return ctx.respond.message(error_code=ErrorCode.none, error_message=None)
