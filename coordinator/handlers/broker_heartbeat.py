"""BrokerHeartbeat (63): keep a broker registered and change its state (KIP-631, 858, 1066).

Source: ``ControllerApis.handleBrokerHeartBeatRequest``,
``ReplicationControlManager.processBrokerHeartbeat``.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation
from fencepost.cluster.controller.heartbeats import BrokerHeartbeatRequest
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.broker_registration import MAX_LOG_DIRS, ZERO
from fencepost.coordinator.handlers.controller_decisions import decide_until_done
from fencepost.coordinator.runtime.turns import Work
from fencepost.protocol import ApiKey, Entity


@handles(ApiKey.BROKER_HEARTBEAT, versions=(0, 2), permission="CLUSTER_ACTION Cluster")
def run(ctx: Context) -> Work[Entity]:
    """Respond with the broker's state as the controller has decided it."""
    ctx.require_on_cluster(Operation.CLUSTER_ACTION)
    body = ctx.body
    offline = getattr(body, "offline_log_dirs", ())
    cordoned = getattr(body, "cordoned_log_dirs", None)
    if max(len(offline), len(cordoned or ())) > MAX_LOG_DIRS:
        return ctx.respond.error(ErrorCode.invalid_request)
    request = BrokerHeartbeatRequest(
        broker_id=body.broker_id,
        broker_epoch=body.broker_epoch,
        current_metadata_offset=body.current_metadata_offset,
        want_fence=body.want_fence,
        want_shut_down=body.want_shut_down,
        offline_log_dirs=tuple(directory_id or ZERO for directory_id in offline),
        cordoned_log_dirs=None
        if cordoned is None
        else tuple(directory_id or ZERO for directory_id in cordoned),
    )
    now_ms = ctx.controller.now_ms()
    reply = yield from decide_until_done(
        ctx,
        lambda controller: controller.heartbeat(request, now_ms),
        lambda reply: reply.is_more,
    )
    return ctx.respond.message(
        error_code=ErrorCode.none,
        is_caught_up=reply.is_caught_up,
        is_fenced=reply.is_fenced,
        should_shut_down=reply.should_shut_down,
    )
