"""DescribeClientQuotas (48): list the quotas of users, clients and addresses.

Source: ``ClientQuotasImage.describe``; KIP-546.
"""

from __future__ import annotations

from typing import Any

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation
from fencepost.cluster.quota_entities import ENTITY_TYPES, IP
from fencepost.coordinator.handlers import Context, handles
from fencepost.protocol import ApiKey, Entity
from fencepost.protocol.steps import Steps

EXACT, DEFAULT, ANY = 0, 1, 2
"""The match types of a filter component; only EXACT has a name."""


@handles(ApiKey.DESCRIBE_CLIENT_QUOTAS, versions=(0, 1), permission="DESCRIBE_CONFIGS Cluster")
def run(ctx: Context) -> Steps[Entity]:
    """Respond with the entities that match the filter."""
    make = ctx.respond
    if not ctx.may_on_cluster(Operation.DESCRIBE_CONFIGS):
        return make.DescribeClientQuotasResponse(
            error_code=ErrorCode.cluster_authorization_failed,
            error_message="Cluster authorization failed.",
            entries=None,
        )
    components: dict[str, Any] = {}
    # Each of the three entity types may appear once, so one of four components is invalid, and the
    # loop never needs a fifth.
    for component in ctx.body.components[: len(ENTITY_TYPES) + 1]:
        code, message = _against(component, components)
        if code is not ErrorCode.none:
            return make.DescribeClientQuotasResponse(
                error_code=code, error_message=message, entries=None
            )
        components[component.entity_type] = component
    entries = []
    for entity, values in list(ctx.broker.quotas.table.entities.items()):
        names = dict(entity)
        if _matches(names, components, is_strict=ctx.body.strict):
            entries.append(
                make.EntryData(
                    entity=tuple(
                        make.EntityData(entity_type=kind, entity_name=name)
                        for kind, name in sorted(entity, key=lambda component: component[0])
                    ),
                    values=tuple(
                        make.ValueData(key=key, value=value) for key, value in values.items()
                    ),
                )
            )
        yield
    return make.DescribeClientQuotasResponse(
        error_code=ErrorCode.none, error_message=None, entries=tuple(entries)
    )


def _matches(names: dict[str, str | None], components: dict[str, Any], *, is_strict: bool) -> bool:
    """Return whether an entity has the filter's types and names and, if strict, no other types."""
    if is_strict and len(names) != len(components):
        return False
    return all(
        kind in names and (component.match_type == ANY or names[kind] == component.match)
        for kind, component in components.items()
    )


def _against(component: Any, components: dict[str, Any]) -> tuple[ErrorCode, str | None]:
    kind, how = component.entity_type, component.match_type
    if not kind:
        return ErrorCode.invalid_request, "Invalid empty entity type."
    if kind in components:
        return (
            ErrorCode.invalid_request,
            f"Entity type {kind} cannot appear more than once in the filter.",
        )
    if kind not in ENTITY_TYPES:
        return ErrorCode.unsupported_version, f"Unsupported entity type {kind}"
    if IP in {kind, *components} and components:
        return (
            ErrorCode.invalid_request,
            "Invalid entity filter component combination. IP stands alone.",
        )
    if how not in {EXACT, DEFAULT, ANY}:
        return ErrorCode.invalid_request, f"Unknown match type {how}"
    if (component.match is None) is (how == EXACT):
        return ErrorCode.invalid_request, "an exact match has a name, and no other has one"
    return ErrorCode.none, None
