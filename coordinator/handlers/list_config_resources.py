"""ListConfigResources (74): list resources that have or may have settings (KIP-1142).

Version 0 lists only client metrics subscriptions. Brokers are listed if they are alive and
have the client's listener.

Source: ``KafkaApis.handleListConfigResources``.
"""

from __future__ import annotations

from collections.abc import Iterable

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.endpoints import Endpoints
from fencepost.coordinator.handlers.resources import ConfigResourceType
from fencepost.protocol import ApiKey, Entity
from fencepost.protocol.steps import Steps


@handles(ApiKey.LIST_CONFIG_RESOURCES, versions=(0, 1), permission="DESCRIBE_CONFIGS Cluster")
def run(ctx: Context) -> Steps[Entity]:
    """List the resources of the requested types; of all types if the request names none."""
    make = ctx.respond
    ctx.require_on_cluster(Operation.DESCRIBE_CONFIGS)
    types = set()
    for number in getattr(ctx.body, "resource_types", (ConfigResourceType.CLIENT_METRICS,)):
        try:
            types.add(ConfigResourceType(number))
        except ValueError:
            return make.error(ErrorCode.unsupported_version)
        yield
    resources = []
    for kind in sorted(types or set(ConfigResourceType), reverse=True):
        for name in _names(ctx, kind):
            resources.append(make.ConfigResource(resource_name=name, resource_type=kind))
            yield
    return make.ListConfigResourcesResponse(
        error_code=ErrorCode.none, config_resources=tuple(resources)
    )


def _names(ctx: Context, kind: ConfigResourceType) -> Iterable[str]:
    if kind is ConfigResourceType.TOPIC:
        return list(ctx.broker.metadata.topics)
    if kind in {ConfigResourceType.GROUP, ConfigResourceType.CLIENT_METRICS}:
        return ctx.broker.metadata.configured(kind)
    return [str(broker.node_id) for broker in Endpoints(ctx).alive]
