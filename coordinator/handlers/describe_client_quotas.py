"""DescribeClientQuotas (48): how much users, clients and addresses may take. Nobody is limited.

A filter that contradicts itself is refused as if there were quotas.

Source: ``ClientQuotasImage.describe``; KIP-546.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.wire import ApiKey, Entity

USER, CLIENT_ID, IP = "user", "client-id", "ip"
ENTITY_TYPES: Final = frozenset({USER, CLIENT_ID, IP})
EXACT, DEFAULT, ANY = 0, 1, 2
"""How a component of the filter matches names; only an exact one has a name."""


@handles(ApiKey.DESCRIBE_CLIENT_QUOTAS, versions=(0, 1), permission="DESCRIBE_CONFIGS Cluster")
def run(ctx: Context) -> Entity:
    """Answer with no quota."""
    make, seen = ctx.respond, set[str]()
    # What goes on after the third is a type for the second time.
    for component in ctx.body.components[: len(ENTITY_TYPES) + 1]:
        code, message = _against(component, seen)
        if code is not ErrorCode.none:
            return make.DescribeClientQuotasResponse(
                error_code=code, error_message=message, entries=None
            )
        seen.add(component.entity_type)
    return make.DescribeClientQuotasResponse(
        error_code=ErrorCode.none, error_message=None, entries=()
    )


def _against(component: Any, seen: set[str]) -> tuple[ErrorCode, str | None]:
    kind, how = component.entity_type, component.match_type
    if not kind:
        return ErrorCode.invalid_request, "the entity type is empty"
    if kind in seen:
        return ErrorCode.invalid_request, f"the filter has entity type {kind} twice"
    if kind not in ENTITY_TYPES:
        return ErrorCode.unsupported_version, f"there is no entity type {kind}"
    if IP in {kind, *seen} and seen:
        return ErrorCode.invalid_request, "addresses have no quotas with users or clients"
    if how not in {EXACT, DEFAULT, ANY}:
        return ErrorCode.invalid_request, f"there is no match type {how}"
    if (component.match is None) is (how == EXACT):
        return ErrorCode.invalid_request, "an exact match has a name, and no other has one"
    return ErrorCode.none, None
