"""DescribeGroups (15): state, protocol and members of classic groups.

Version 3 adds authorized operations, version 4 instance ids, version 6 GROUP_ID_NOT_FOUND with a
message; older versions report the state Dead without an error.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation, ResourceType
from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.handlers import Context, authorized, handles
from fencepost.coordinator.handlers.answers import result_of
from fencepost.coordinator.runtime.turns import Work
from fencepost.groups.commands import DescribeGroup, DescribeGroupResult
from fencepost.logcore.machine import DomainError
from fencepost.protocol import ApiKey, Entity

DEAD = "Dead"


@handles(ApiKey.DESCRIBE_GROUPS, versions=(0, 6), permission="DESCRIBE Group")
def run(ctx: Context) -> Work[Entity]:
    """Describe each distinct group; errors are reported per group."""
    submit = ctx.broker.groups.submit
    refused, groups = [], []
    for group_id in dict.fromkeys(ctx.body.groups):
        if ctx.may(Operation.DESCRIBE, ResourceType.GROUP, group_id):
            result = yield from result_of(submit(group_id, DescribeGroup(group_id)))
            groups.append((yield from _described(ctx, group_id, result)))
        else:
            code = ErrorCode.group_authorization_failed
            refused.append(ctx.respond.DescribedGroup(error_code=code, group_id=group_id))
        yield None
    return ctx.respond.DescribeGroupsResponse(groups=(*refused, *groups))


def _described(
    ctx: Context, group_id: str, result: DescribeGroupResult | DomainError
) -> Work[Entity]:
    respond = ctx.respond
    includes_operations = getattr(ctx.body, "include_authorized_operations", False)
    operations = authorized.of_group(ctx, group_id) if includes_operations else authorized.NOT_ASKED
    if isinstance(result, DomainError):
        return _refused(ctx, group_id, result, operations)
    members = []
    for member in result.members:
        members.append(
            respond.DescribedGroupMember(
                member_id=member.member_id,
                group_instance_id=member.group_instance_id,
                client_id=member.client_id,
                client_host=member.client_host,
                member_metadata=member.metadata,
                member_assignment=member.assignment,
            )
        )
        yield None
    return respond.DescribedGroup(
        error_code=ErrorCode.none,
        group_id=group_id,
        group_state=result.state,
        protocol_type=result.protocol_type,
        protocol_data=result.protocol_name,
        members=tuple(members),
        authorized_operations=operations,
    )


def _refused(ctx: Context, group_id: str, error: DomainError, operations: int) -> Entity:
    code = error_code(error)
    missing = code is ErrorCode.group_id_not_found
    if missing and ctx.version < 6:
        code = ErrorCode.none
    return ctx.respond.DescribedGroup(
        error_code=code,
        error_message=str(error),
        group_id=group_id,
        group_state=DEAD if missing else "",
        authorized_operations=operations if code is ErrorCode.none else authorized.NOT_ASKED,
    )
