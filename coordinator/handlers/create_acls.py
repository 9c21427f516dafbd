"""CreateAcls (30): create ACLs that allow or deny operations.

Source: ``AclApis.handleCreateAcls``, ``AclControlManager.createAcls``; KIP-140, KIP-290.
"""

from __future__ import annotations

from functools import partial
from uuid import uuid4

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation
from fencepost.cluster.controller.machine import Controller
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.acl_messages import (
    NO_AUTHORIZER,
    decided_in_batches,
    existing_acls,
    in_turn,
    rule_of,
)
from fencepost.coordinator.handlers.answers import code_and_message, each_row
from fencepost.coordinator.runtime.turns import Work
from fencepost.coordinator.security.authorizer import Authorizer
from fencepost.protocol import ApiKey, Entity


def refused(ctx: Context, code: int, message: str | None) -> Entity:
    """Refuse each ACL for the same reason."""
    results = (_result(ctx, code, message),) * len(ctx.body.creations)
    return ctx.respond.CreateAclsResponse(results=results)


def _result(ctx: Context, code: int, message: str | None) -> Entity:
    return ctx.respond.AclCreationResult(error_code=code, error_message=message)


@handles(ApiKey.CREATE_ACLS, versions=(1, 3), permission="ALTER Cluster", refused=refused)
def run(ctx: Context) -> Work[Entity]:
    """Respond with the result of each ACL, once all valid ones are on disk."""
    authorizer = ctx.broker.authorizer
    ctx.require_on_cluster(Operation.ALTER)
    if authorizer is None:
        return refused(ctx, ErrorCode.security_disabled, f"{NO_AUTHORIZER}.")
    return (yield from in_turn(ctx, _create_all(ctx, authorizer)))


def _create_all(ctx: Context, authorizer: Authorizer) -> Work[Entity]:
    acls = yield from each_row(ctx.body.creations, rule_of)
    errors, created = yield from ctx.controller.current_machine().check_acl_creation(
        acls, existing_acls(ctx, authorizer), ctx.metadata.reason_against
    )
    create = partial(Controller.create_acls, draw_id=uuid4)
    yield from decided_in_batches(ctx, authorizer, created, create)
    results = yield from each_row(errors, lambda error: _result(ctx, *code_and_message(error)))
    return ctx.respond.CreateAclsResponse(results=results)
