"""DeleteAcls (31): take rules away, those that filters mean.

Source: ``AclApis.handleDeleteAcls``, ``AclControlManager.deleteAcls``; KIP-140, KIP-290.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Acl, Operation
from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.acl_messages import NO_AUTHORIZER, filter_of
from fencepost.coordinator.handlers.answers import forced
from fencepost.coordinator.runtime.turns import Work
from fencepost.coordinator.wire import ApiKey, Entity
from fencepost.logcore.machine import DomainError


@handles(ApiKey.DELETE_ACLS, versions=(1, 3), permission="ALTER Cluster")
def run(ctx: Context) -> Work[Entity]:
    """Answer each filter with the rules that it meant, once they are gone from the disk."""
    acls = ctx.broker.acls
    try:
        ctx.require_on_cluster(Operation.ALTER)
        if acls is None:
            return _all(ctx, _refused(ctx, ErrorCode.security_disabled, f"{NO_AUTHORIZER}."))
        wanted = []
        for one in ctx.body.filters:
            wanted.append(filter_of(one))
            yield None
        deleted = yield from forced(ctx, acls.delete(wanted))
    except DomainError as error:
        return _all(ctx, _refused(ctx, error_code(error), str(error)))
    results = []
    for found in deleted:
        if isinstance(found, DomainError):
            results.append(_refused(ctx, error_code(found), str(found)))
            continue
        gone = []
        for acl in found:
            gone.append(_gone(ctx, acl))
            yield None
        results.append(
            ctx.respond.DeleteAclsFilterResult(
                error_code=ErrorCode.none, error_message=None, matching_acls=tuple(gone)
            )
        )
        yield None
    return ctx.respond.DeleteAclsResponse(filter_results=tuple(results))


def _all(ctx: Context, result: Entity) -> Entity:
    return ctx.respond.DeleteAclsResponse(filter_results=(result,) * len(ctx.body.filters))


def _refused(ctx: Context, code: ErrorCode, message: str) -> Entity:
    return ctx.respond.DeleteAclsFilterResult(
        error_code=code, error_message=message, matching_acls=()
    )


def _gone(ctx: Context, acl: Acl) -> Entity:
    return ctx.respond.DeleteAclsMatchingAcl(
        error_code=ErrorCode.none,
        error_message=None,
        resource_type=acl.resource_type,
        resource_name=acl.resource_name,
        pattern_type=acl.pattern_type,
        principal=acl.principal,
        host=acl.host,
        operation=acl.operation,
        permission_type=acl.permission,
    )
