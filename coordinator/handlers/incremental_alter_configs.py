"""IncrementalAlterConfigs (44): set and reset single settings, edit lists (KIP-339)."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kio.schema.errors import ErrorCode

from coordinator.config_admin import Change, change
from coordinator.data_errors import InvalidRequestError
from coordinator.errors import error_code
from coordinator.handlers import Context, handles
from coordinator.wire import ApiKey, Entity
from logcore.machine import DomainError


@handles(
    ApiKey.INCREMENTAL_ALTER_CONFIGS,
    versions=(0, 1),
    permission="ALTER_CONFIGS Topic or Cluster",
)
def run(ctx: Context) -> Entity:
    """Change each resource by itself; one that is named twice is refused."""
    named = Counter((one.resource_type, one.resource_name) for one in ctx.body.resources)
    return ctx.respond.IncrementalAlterConfigsResponse(
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
        change(
            ctx.broker,
            resource.resource_type,
            resource.resource_name,
            [Change(one.name, one.config_operation, one.value) for one in resource.configs],
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
