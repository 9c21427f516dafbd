"""BrokerRegistration (62): register a broker with the controller (KIP-631).

Source: ``ControllerApis.handleBrokerRegistration``, ``ClusterControlManager.registerBroker``.
"""

from __future__ import annotations

from uuid import UUID

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation
from fencepost.cluster.controller.brokers import BrokerRegistrationRequest
from fencepost.cluster.records import BrokerEndpoint, BrokerFeature
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.controller_decisions import decide_until_done
from fencepost.coordinator.runtime.turns import Work
from fencepost.protocol import ApiKey, Entity

MAX_LISTENERS = MAX_FEATURES = MAX_LOG_DIRS = 100
"""The maximum number of listeners, of features and of log directories of one broker. Its
registration record contains all of them."""

ZERO = UUID(int=0)


@handles(ApiKey.BROKER_REGISTRATION, versions=(0, 4), permission="CLUSTER_ACTION Cluster")
def run(ctx: Context) -> Work[Entity]:
    """Respond with the broker's epoch."""
    ctx.require_on_cluster(Operation.CLUSTER_ACTION)
    body = ctx.body
    log_dirs = getattr(body, "log_dirs", ())
    if max(len(body.listeners), len(body.features), len(log_dirs)) > MAX_LISTENERS:
        return ctx.respond.error(ErrorCode.invalid_registration)
    request = BrokerRegistrationRequest(
        broker_id=body.broker_id,
        cluster_id=body.cluster_id,
        incarnation_id=body.incarnation_id or ZERO,
        end_points=tuple(
            BrokerEndpoint(listener.name, listener.host, listener.port, listener.security_protocol)
            for listener in body.listeners
        ),
        features=tuple(
            BrokerFeature(
                feature.name, feature.min_supported_version, feature.max_supported_version
            )
            for feature in body.features
        ),
        log_dirs=tuple(log_dir or ZERO for log_dir in log_dirs),
        rack=body.rack,
        previous_broker_epoch=getattr(body, "previous_broker_epoch", -1),
        is_migrating_zk_broker=getattr(body, "is_migrating_zk_broker", False),
    )

    epoch = yield from decide_until_done(
        ctx,
        ctx.controller.register_broker(request),
        lambda epoch: epoch is None,
    )
    return ctx.respond.message(error_code=ErrorCode.none, broker_epoch=epoch)
