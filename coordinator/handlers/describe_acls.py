"""DescribeAcls (29): list the ACLs that match a filter.

Without an authorizer the response is Kafka's SECURITY_DISABLED, from which tools conclude that ACLs
are not supported. An empty list would claim that the broker supports ACLs.

Source: ``AclApis.handleDescribeAcls``; KIP-140, KIP-290.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Acl, Operation, PatternType, ResourceType
from fencepost.cluster.controller.acls import check_filter
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.acl_messages import NO_AUTHORIZER, filter_of, has_unknown_code
from fencepost.protocol import ApiKey, Entity
from fencepost.protocol.steps import Steps


@handles(ApiKey.DESCRIBE_ACLS, versions=(1, 3), permission="DESCRIBE Cluster")
def run(ctx: Context) -> Steps[Entity]:
    """Respond with the ACLs that match the filter, grouped by resource."""
    make, authorizer = ctx.respond, ctx.broker.authorizer
    ctx.require_on_cluster(Operation.DESCRIBE)
    if authorizer is None:
        return make.error(ErrorCode.security_disabled, f"{NO_AUTHORIZER} on the broker")
    acl_filter = filter_of(ctx.body)
    if has_unknown_code(ctx.body):
        check_filter(acl_filter)
    by_resource: dict[tuple[ResourceType, str, PatternType], list[Entity]] = {}
    for acl in (yield from authorizer.rules.find(acl_filter)):
        resource = acl.resource_type, acl.resource_name, acl.pattern_type
        by_resource.setdefault(resource, []).append(_described(ctx, acl))
        yield
    resources = []
    for (kind, name, pattern), described in by_resource.items():
        resources.append(
            make.DescribeAclsResource(
                resource_type=kind, resource_name=name, pattern_type=pattern, acls=tuple(described)
            )
        )
        yield
    return make.DescribeAclsResponse(
        error_code=ErrorCode.none, error_message=None, resources=tuple(resources)
    )


def _described(ctx: Context, acl: Acl) -> Entity:
    return ctx.respond.AclDescription(
        principal=acl.principal,
        host=acl.host,
        operation=acl.operation,
        permission_type=acl.permission,
    )
