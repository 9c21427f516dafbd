"""UnregisterController (94): remove the registration of a controller that was decommissioned.

A voter remains a voter without its registration. The active controller refuses to remove its
own registration, and any other running controller registers again.

Source: ``QuorumController.unregisterController``, ``ClusterControlManager``; KIP-1312.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.controller_decisions import decided
from fencepost.coordinator.runtime.turns import Work
from fencepost.protocol import ApiKey, Entity


@handles(ApiKey.UNREGISTER_CONTROLLER, versions=(0, 0), permission="ALTER Cluster")
def run(ctx: Context) -> Work[Entity]:
    """Remove the controller's registration."""
    ctx.require_on_cluster(Operation.ALTER)
    controller_id = ctx.body.controller_id
    yield from decided(ctx, lambda controller: controller.unregister_controller(controller_id))
    return ctx.respond.message(error_code=ErrorCode.none, error_message=None)
