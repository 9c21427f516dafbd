"""AlterConfigs (33): replace all settings of a resource; omitted settings return to defaults."""

from __future__ import annotations

from typing import Any

from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.config_changes import each_resource, permit, refused
from fencepost.coordinator.handlers.resource_changes import replace
from fencepost.coordinator.runtime.turns import Work
from fencepost.protocol import ApiKey, Entity


@handles(
    ApiKey.ALTER_CONFIGS,
    versions=(0, 2),
    permission="ALTER_CONFIGS Topic, Group or Cluster",
    refused=refused,
)
def run(ctx: Context) -> Work[Entity]:
    """Replace the settings of each resource."""

    def apply(resource: Any) -> None:
        replace(
            ctx,
            resource.resource_type,
            resource.resource_name,
            [(entry.name, entry.value) for entry in resource.configs],
            validate_only=ctx.body.validate_only,
            permit=permit(ctx, resource),
        )

    responses = yield from each_resource(ctx, apply)
    return ctx.respond.AlterConfigsResponse(responses=responses)
