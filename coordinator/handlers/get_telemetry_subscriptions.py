"""GetTelemetrySubscriptions (71): tell a client which metrics to push, and how often (KIP-714).

Source: ``KafkaApis.handleGetTelemetrySubscriptionsRequest``.
"""

from __future__ import annotations

from datetime import timedelta

from kio.schema.errors import ErrorCode

from fencepost.coordinator.broker_services import connection_id
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.telemetry.manager import ACCEPTED_CODECS
from fencepost.coordinator.telemetry.subscriptions import UNKNOWN_SOFTWARE, Client
from fencepost.protocol import ApiKey, Entity
from fencepost.protocol.steps import Steps


@handles(ApiKey.GET_TELEMETRY_SUBSCRIPTIONS, versions=(0, 0), permission="NONE")
def run(ctx: Context) -> Steps[Entity]:
    """Respond with a client instance's subscription; an instance without an id gets one."""
    telemetry = ctx.broker.telemetry
    instance = yield from telemetry.subscribe(
        client_of(ctx), connection_id(ctx.connection), ctx.body.client_instance_id
    )
    return ctx.respond.GetTelemetrySubscriptionsResponse(
        error_code=ErrorCode.none,
        client_instance_id=instance.instance_id,
        subscription_id=instance.subscription_id,
        accepted_compression_types=tuple(map(int, ACCEPTED_CODECS)),
        push_interval=timedelta(milliseconds=instance.interval_ms),
        telemetry_max_bytes=telemetry.max_bytes,
        delta_temporality=True,
        requested_metrics=instance.metrics,
    )


def client_of(ctx: Context) -> Client:
    """Return the client behind a request."""
    software = ctx.connection.client_software or UNKNOWN_SOFTWARE
    return Client(ctx.client_id, *software, ctx.peer_host, ctx.connection.peer_port)
