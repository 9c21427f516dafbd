"""AlterConfigs (33): replace all settings of a resource; what is not named falls back."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kio.schema.errors import ErrorCode

from coordinator.config_admin import replace
from coordinator.data_errors import InvalidRequestError
from coordinator.errors import error_code
from coordinator.handlers import Context, handles
from coordinator.wire import ApiKey, Entity
from logcore.machine import DomainError


@handles(ApiKey.ALTER_CONFIGS, versions=(0, 2), permission="ALTER_CONFIGS Topic or Cluster")
def run(ctx: Context) -> Entity:
    """Change each resource by itself; one that is named twice is refused."""
    named = Counter((one.resource_type, one.resource_name) for one in ctx.body.resources)
    return ctx.respond.AlterConfigsResponse(
        throttle_time_ms=0,
        responses=tuple(
            _resource(ctx, one, is_double=named[one.resource_type, one.resource_name] > 1)
            for one in ctx.body.resources
        ),
    )


def _resource(ctx: Context, resource: Any, *, is_double: bool) -> Entity:
    code, message = ErrorCode.none, None
    try:
        if is_double:
            raise InvalidRequestError("Each resource must appear at most once.")
        replace(
            ctx.broker,
            resource.resource_type,
            resource.resource_name,
            [(entry.name, entry.value) for entry in resource.configs],
            validate_only=ctx.body.validate_only,
        )
    except DomainError as error:
        code, message = error_code(error), str(error)
    return ctx.respond.AlterConfigsResourceResponse(
        error_code=code,
        error_message=message,
        resource_type=resource.resource_type,
        resource_name=resource.resource_name,
    )
