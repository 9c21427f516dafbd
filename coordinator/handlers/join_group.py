"""JoinGroup (11): join or rejoin a classic group.

The response waits until the join phase ends. Until then the connection handles no other request, as
in Kafka.

Version 1 adds a separate rebalance timeout, version 4 MEMBER_ID_REQUIRED, version 5 instance ids,
version 7 the protocol type in the response and a null protocol name in errors, version 8 the
reason, version 9 SkipAssignment.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation, ResourceType
from fencepost.coordinator.handlers import Context, handles, request_ms
from fencepost.coordinator.handlers.answers import answer
from fencepost.coordinator.handlers.rights import visibility_of
from fencepost.groups.commands import JoinGroup, JoinGroupResult
from fencepost.groups.errors import MemberIdRequiredError
from fencepost.protocol import ApiKey, Entity

TO_MEMBERS = frozenset({ErrorCode.rebalance_in_progress, ErrorCode.fenced_instance_id})
"""Errors that may end a waiting JoinGroup. Their responses contain the new member id: the client is
a member by then."""


@handles(ApiKey.JOIN_GROUP, versions=(0, 9), permission="READ Group")
def run(ctx: Context) -> Entity | Awaitable[Entity]:
    """Join the group."""
    body = ctx.body
    if not ctx.may(Operation.READ, ResourceType.GROUP, body.group_id):
        return _refusal(ctx, ErrorCode.group_authorization_failed, "")
    if ctx.broker.observations is not None:
        ctx.broker.observations.joined(ctx.origin, body.group_id, "JoinGroup")
    command = _command(ctx)
    future = ctx.broker.groups.submit(body.group_id, command, ctx.origin)

    def refuse(code: ErrorCode) -> Entity:
        member_id = body.member_id
        error = future.exception()
        if code in TO_MEMBERS:
            member_id = member_id or command.new_member_id
        if isinstance(error, MemberIdRequiredError):
            member_id = error.member_id
        elif code is ErrorCode.group_max_size_reached:
            member_id = ""
        return _refusal(ctx, code, member_id)

    return answer(future, lambda result: _response(ctx, result), refuse)


def _command(ctx: Context) -> JoinGroup:
    body, version = ctx.body, ctx.version
    session_timeout_ms = request_ms(body.session_timeout)
    client_id = ctx.client_id or ""
    group_instance_id = getattr(body, "group_instance_id", None)
    new_member_id = ""
    if not body.member_id:
        new_member_id = (
            f"{client_id if group_instance_id is None else group_instance_id}-{uuid.uuid4()}"
        )
    return JoinGroup(
        group_id=body.group_id,
        member_id=body.member_id,
        group_instance_id=group_instance_id,
        client_id=client_id,
        client_host=f"/{ctx.peer_host}",
        session_timeout_ms=session_timeout_ms,
        rebalance_timeout_ms=(
            request_ms(body.rebalance_timeout) if version >= 1 else session_timeout_ms
        ),
        protocol_type=body.protocol_type,
        protocols=tuple((protocol.name, protocol.metadata) for protocol in body.protocols),
        require_known_member_id=version >= 4,
        supports_skip_assignment=version >= 9,
        new_member_id=new_member_id,
        reason=getattr(body, "reason", None) or "",
        visibility=visibility_of(ctx),
    )


def _response(ctx: Context, result: JoinGroupResult) -> Entity:
    respond = ctx.respond
    member = respond.JoinGroupResponseMember
    return respond.JoinGroupResponse(
        generation_id=result.generation_id,
        protocol_type=result.protocol_type,
        protocol_name=_nullable_from_7(ctx, result.protocol_name),
        leader=result.leader,
        skip_assignment=result.skip_assignment,
        member_id=result.member_id,
        members=tuple(
            member(
                member_id=other.member_id,
                group_instance_id=other.group_instance_id,
                metadata=other.metadata,
            )
            for other in result.members
        ),
    )


def _refusal(ctx: Context, code: ErrorCode, member_id: str) -> Entity:
    return ctx.respond.JoinGroupResponse(
        error_code=code,
        generation_id=-1,
        protocol_name=_nullable_from_7(ctx, None),
        member_id=member_id,
    )


def _nullable_from_7(ctx: Context, protocol_name: str | None) -> str | None:
    """Return the name; without a name, None from version 7 on, else "" (``JoinGroupResponse``)."""
    return (protocol_name or None) if ctx.version >= 7 else protocol_name or ""
