"""CreateAcls (30): give somebody a right, or deny it.

Source: ``AclApis.handleCreateAcls``, ``AclControlManager.createAcls``; KIP-140, KIP-290.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation
from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.acl_messages import NO_AUTHORIZER, rule_of
from fencepost.coordinator.handlers.answers import code_of, forced
from fencepost.coordinator.runtime.turns import Work
from fencepost.coordinator.wire import ApiKey, Entity
from fencepost.logcore.machine import DomainError


@handles(ApiKey.CREATE_ACLS, versions=(1, 3), permission="ALTER Cluster")
def run(ctx: Context) -> Work[Entity]:
    """Answer each rule by itself, once all of them that can be made are on disk."""
    acls, creations = ctx.broker.acls, ctx.body.creations
    try:
        ctx.require_on_cluster(Operation.ALTER)
        if acls is None:
            return _all(ctx, _result(ctx, ErrorCode.security_disabled, f"{NO_AUTHORIZER}."))
        wanted = []
        for creation in creations:
            wanted.append(rule_of(creation))
            yield None
        made = yield from forced(ctx, acls.create(wanted))
    except DomainError as error:
        return _all(ctx, _result(ctx, error_code(error), str(error)))
    results = []
    for wrong in made:
        results.append(_result(ctx, code_of(wrong), None if wrong is None else str(wrong)))
        yield None
    return ctx.respond.CreateAclsResponse(results=tuple(results))


def _all(ctx: Context, result: Entity) -> Entity:
    return ctx.respond.CreateAclsResponse(results=(result,) * len(ctx.body.creations))


def _result(ctx: Context, code: ErrorCode, message: str | None) -> Entity:
    return ctx.respond.AclCreationResult(error_code=code, error_message=message)
