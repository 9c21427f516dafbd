"""DeleteAcls (31): delete the ACLs that match filters.

Source: ``AclApis.handleDeleteAcls``, ``AclControlManager.deleteAcls``; KIP-140, KIP-290.
"""

from __future__ import annotations

from functools import partial

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Acl, Operation
from fencepost.cluster.controller.machine import Controller
from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.acl_messages import (
    NO_AUTHORIZER,
    decided_in_batches,
    existing_acls,
    filter_of,
    in_turn,
)
from fencepost.coordinator.handlers.answers import each_row
from fencepost.coordinator.runtime.turns import Work
from fencepost.coordinator.security.authorizer import Authorizer
from fencepost.logcore.machine import DomainError
from fencepost.protocol import ApiKey, Entity


def refused(ctx: Context, code: int, message: str | None) -> Entity:
    """Refuse each filter for the same reason."""
    results = (_result(ctx, code, message),) * len(ctx.body.filters)
    return ctx.respond.DeleteAclsResponse(filter_results=results)


def _result(
    ctx: Context, code: int, message: str | None, matching_acls: tuple[Entity, ...] = ()
) -> Entity:
    return ctx.respond.DeleteAclsFilterResult(
        error_code=code, error_message=message, matching_acls=matching_acls
    )


@handles(ApiKey.DELETE_ACLS, versions=(1, 3), permission="ALTER Cluster", refused=refused)
def run(ctx: Context) -> Work[Entity]:
    """Respond with the deleted ACLs of each filter, once the deletion is on disk."""
    authorizer = ctx.broker.authorizer
    ctx.require_on_cluster(Operation.ALTER)
    if authorizer is None:
        return refused(ctx, ErrorCode.security_disabled, f"{NO_AUTHORIZER}.")
    return (yield from in_turn(ctx, _delete_all(ctx, authorizer)))


def _delete_all(ctx: Context, authorizer: Authorizer) -> Work[Entity]:
    filters = yield from each_row(ctx.body.filters, filter_of)
    existing = existing_acls(ctx, authorizer)
    answers, deleted = yield from ctx.controller.current_machine().check_acl_deletion(
        filters, existing
    )
    yield from decided_in_batches(ctx, authorizer, deleted, Controller.delete_acls)
    results = []
    for matched in answers:
        if isinstance(matched, DomainError):
            results.append(_result(ctx, error_code(matched), str(matched)))
            continue
        gone = yield from each_row(matched, partial(_gone, ctx))
        results.append(_result(ctx, ErrorCode.none, None, gone))
        yield None
    return ctx.respond.DeleteAclsResponse(filter_results=tuple(results))


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
