"""LeaveGroup (13): remove members from a group, on their own or an administrator's request.

Below version 3 one member leaves, and its error is the top-level error. From version 3 on several
members may leave, each with its own error; a member may be named by its instance id. Version 5 adds
a reason for each member.
"""

from __future__ import annotations

from collections.abc import Awaitable

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation, ResourceType
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.answers import answer, code_of
from fencepost.groups.commands import LeaveGroup, LeaveGroupResult, LeavingMember
from fencepost.protocol import ApiKey, Entity


@handles(ApiKey.LEAVE_GROUP, versions=(0, 5), permission="READ Group")
def run(ctx: Context) -> Entity | Awaitable[Entity]:
    """Remove the members."""
    body, respond = ctx.body, ctx.respond
    members: tuple[LeavingMember, ...]
    if ctx.version < 3:
        members = (LeavingMember(body.member_id),)
    else:
        members = tuple(
            LeavingMember(
                member.member_id, member.group_instance_id, getattr(member, "reason", None) or ""
            )
            for member in body.members
        )

    def refuse(code: ErrorCode) -> Entity:
        return respond.LeaveGroupResponse(error_code=code)

    def build(result: LeaveGroupResult) -> Entity:
        if ctx.version < 3:
            return refuse(code_of(result.members[0][2]))
        return respond.LeaveGroupResponse(
            error_code=ErrorCode.none,
            members=tuple(
                respond.MemberResponse(
                    member_id=member_id,
                    group_instance_id=group_instance_id,
                    error_code=code_of(error),
                )
                for member_id, group_instance_id, error in result.members
            ),
        )

    if not ctx.may(Operation.READ, ResourceType.GROUP, body.group_id):
        return refuse(ErrorCode.group_authorization_failed)
    command = LeaveGroup(body.group_id, members)
    return answer(ctx.broker.groups.submit(body.group_id, command, ctx.origin), build, refuse)
