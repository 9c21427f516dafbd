"""DescribeConfigs (32): list the settings of topics, brokers and loggers, with their sources.

Version 3 adds types and descriptions.
"""

from __future__ import annotations

from typing import Any

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation
from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.handlers import Context, handles, share_views, telemetry_views
from fencepost.coordinator.handlers.config_changes import check_right
from fencepost.coordinator.handlers.resources import ConfigResourceType, Described, describe
from fencepost.logcore.machine import DomainError
from fencepost.protocol import ApiKey, Entity
from fencepost.protocol.steps import Steps


@handles(
    ApiKey.DESCRIBE_CONFIGS,
    versions=(1, 4),
    permission="DESCRIBE_CONFIGS Topic, Group or Cluster",
)
def run(ctx: Context) -> Steps[Entity]:
    """Describe each distinct resource."""
    results = []
    seen: set[tuple[int, str]] = set()
    for resource in ctx.body.resources:
        key = resource.resource_type, resource.resource_name
        if key not in seen:
            seen.add(key)
            results.append((yield from _resource(ctx, resource)))
        yield
    return ctx.respond.DescribeConfigsResponse(results=tuple(results))


def _resource(ctx: Context, resource: Any) -> Steps[Entity]:
    kind, name = resource.resource_type, resource.resource_name
    code, message = ErrorCode.none, None
    configs: tuple[Entity, ...] = ()
    try:
        check_right(ctx, Operation.DESCRIBE_CONFIGS, kind, name)
        names = set(resource.configuration_keys or ())
        configs = tuple(
            _entry(ctx, config)
            for config in describe(ctx.broker, kind, name)
            if not names or config.key.name in names
        )
        if kind == ConfigResourceType.GROUP and names:
            configs += yield from share_views.entries(ctx, name, sorted(names))
            configs += yield from telemetry_views.pause_entries(ctx, name, names)
        elif kind == ConfigResourceType.BROKER and names:
            configs += yield from telemetry_views.entries(ctx, sorted(names))
    except DomainError as error:
        code, message = error_code(error), str(error)
    return ctx.respond.DescribeConfigsResult(
        error_code=code,
        error_message=message,
        resource_type=kind,
        resource_name=name,
        configs=configs,
    )


def _shown(config: Described, value: str | None) -> str | None:
    return None if config.key.is_sensitive else value


def _entry(ctx: Context, config: Described) -> Entity:
    make, body = ctx.respond, ctx.body
    synonyms: tuple[Entity, ...] = ()
    if body.include_synonyms:
        synonyms = tuple(
            make.DescribeConfigsSynonym(name=name, value=_shown(config, value), source=source)
            for name, value, source in config.synonyms
        )
    return make.DescribeConfigsResourceResult(
        name=config.key.name,
        value=_shown(config, config.value),
        read_only=config.read_only,
        is_sensitive=config.key.is_sensitive,
        config_source=config.source,
        synonyms=synonyms,
        config_type=config.key.type,
        documentation=config.key.doc if getattr(body, "include_documentation", False) else None,
    )
