"""CreateAcls (30): give somebody a right, or deny it.

Source: ``AclApis.handleCreateAcls``, ``AclControlManager.createAcls``; KIP-140, KIP-290.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.acl_messages import NO_AUTHORIZER, rule_of
from fencepost.coordinator.handlers.answers import code_of, each_row, forced
from fencepost.coordinator.runtime.turns import Work
from fencepost.coordinator.wire import ApiKey, Entity


def refused(ctx: Context, code: int, message: str | None) -> Entity:
    """Refuse each rule for the same reason."""
    results = (_result(ctx, code, message),) * len(ctx.body.creations)
    return ctx.respond.CreateAclsResponse(results=results)


def _result(ctx: Context, code: int, message: str | None) -> Entity:
    return ctx.respond.AclCreationResult(error_code=code, error_message=message)


@handles(ApiKey.CREATE_ACLS, versions=(1, 3), permission="ALTER Cluster", refused=refused)
def run(ctx: Context) -> Work[Entity]:
    """Answer each rule by itself, once all of them that can be made are on disk."""
    acls, creations = ctx.broker.acls, ctx.body.creations
    ctx.require_on_cluster(Operation.ALTER)
    if acls is None:
        return refused(ctx, ErrorCode.security_disabled, f"{NO_AUTHORIZER}.")
    wanted = yield from each_row(creations, rule_of)
    made = yield from forced(ctx, acls.create(wanted))
    results = []
    for wrong in made:
        results.append(_result(ctx, code_of(wrong), None if wrong is None else str(wrong)))
        yield None
    return ctx.respond.CreateAclsResponse(results=tuple(results))
