"""IncrementalAlterConfigs (44): set, delete, append to or subtract from settings (KIP-339)."""

from __future__ import annotations

from typing import Any

from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.config_changes import each_resource, permit, refused
from fencepost.coordinator.handlers.resource_changes import ConfigChange, change
from fencepost.coordinator.runtime.turns import Work
from fencepost.protocol import ApiKey, Entity


@handles(
    ApiKey.INCREMENTAL_ALTER_CONFIGS,
    versions=(0, 1),
    permission="ALTER_CONFIGS Topic, Group or Cluster",
    refused=refused,
)
def run(ctx: Context) -> Work[Entity]:
    """Change the named settings of each resource."""

    def apply(resource: Any) -> None:
        change(
            ctx,
            resource.resource_type,
            resource.resource_name,
            [
                ConfigChange(config.name, config.config_operation, config.value)
                for config in resource.configs
            ],
            validate_only=ctx.body.validate_only,
            permit=permit(ctx, resource),
        )

    responses = yield from each_resource(ctx, apply)
    return ctx.respond.IncrementalAlterConfigsResponse(responses=responses)
