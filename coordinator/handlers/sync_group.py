"""SyncGroup (14): submit and fetch the assignments of a classic group.

Version 3 adds instance ids, version 5 the protocol type and name, which are then mandatory.
"""

from __future__ import annotations

from collections.abc import Awaitable

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation, ResourceType
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.answers import answer
from fencepost.groups.commands import SyncGroup, SyncGroupResult
from fencepost.protocol import ApiKey, Entity


@handles(ApiKey.SYNC_GROUP, versions=(0, 5), permission="READ Group")
def run(ctx: Context) -> Entity | Awaitable[Entity]:
    """Wait for the leader's assignment, or submit it."""
    body, respond = ctx.body, ctx.respond
    protocol_type = getattr(body, "protocol_type", None)
    protocol_name = getattr(body, "protocol_name", None)

    def refuse(code: ErrorCode) -> Entity:
        return respond.SyncGroupResponse(error_code=code)

    def build(result: SyncGroupResult) -> Entity:
        return respond.SyncGroupResponse(
            protocol_type=result.protocol_type,
            protocol_name=result.protocol_name,
            assignment=result.assignment,
        )

    if ctx.version >= 5 and (protocol_type is None or protocol_name is None):
        return refuse(ErrorCode.inconsistent_group_protocol)
    if not ctx.may(Operation.READ, ResourceType.GROUP, body.group_id):
        return refuse(ErrorCode.group_authorization_failed)
    command = SyncGroup(
        group_id=body.group_id,
        generation_id=body.generation_id,
        member_id=body.member_id,
        group_instance_id=getattr(body, "group_instance_id", None),
        protocol_type=protocol_type,
        protocol_name=protocol_name,
        assignments=tuple((entry.member_id, entry.assignment) for entry in body.assignments),
    )
    return answer(ctx.broker.groups.submit(body.group_id, command, ctx.origin), build, refuse)
