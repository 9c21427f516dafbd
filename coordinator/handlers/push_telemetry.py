"""PushTelemetry (72): receive the metrics that a client pushes (KIP-714).

Source: ``KafkaApis.handlePushTelemetryRequest``.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation, ResourceType
from fencepost.coordinator.broker_services import connection_id
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.get_telemetry_subscriptions import client_of
from fencepost.coordinator.telemetry.manager import Push
from fencepost.protocol import ApiKey, Entity
from fencepost.protocol.steps import Steps


@handles(ApiKey.PUSH_TELEMETRY, versions=(0, 0), permission="NONE")
def run(ctx: Context) -> Steps[Entity]:
    """Keep the values; add them to a group's history only if the client has READ on the group."""
    body = ctx.body
    yield from ctx.broker.telemetry.push(
        client_of(ctx),
        connection_id(ctx.connection),
        Push(
            body.client_instance_id,
            body.subscription_id,
            body.terminating,
            body.compression_type,
            body.metrics,
        ),
        lambda group: ctx.may(Operation.READ, ResourceType.GROUP, group, audited=False),
    )
    return ctx.respond.PushTelemetryResponse(error_code=ErrorCode.none)
