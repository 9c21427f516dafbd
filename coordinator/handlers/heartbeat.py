"""Heartbeat (12): keep a member of a classic group alive. Version 3 adds instance ids."""

from __future__ import annotations

from collections.abc import Awaitable
from functools import cache

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation, ResourceType
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.answers import answer
from fencepost.groups.commands import Heartbeat
from fencepost.protocol import ApiKey, Entity
from fencepost.protocol.messages import ResponseFactory


@handles(ApiKey.HEARTBEAT, versions=(0, 4), permission="READ Group")
def run(ctx: Context) -> Entity | Awaitable[Entity]:
    """Extend the member's session; the response reports a rebalance in progress."""
    body, respond = ctx.body, ctx.respond

    def refuse(code: ErrorCode) -> Entity:
        return _response(respond, code)

    if not ctx.may(Operation.READ, ResourceType.GROUP, body.group_id):
        return refuse(ErrorCode.group_authorization_failed)
    command = Heartbeat(
        body.group_id,
        body.generation_id,
        body.member_id,
        getattr(body, "group_instance_id", None),
    )
    return answer(
        ctx.broker.groups.submit(body.group_id, command, ctx.origin),
        lambda _: _response(respond, ErrorCode.none),
        refuse,
    )


@cache
def _response(respond: ResponseFactory, code: ErrorCode) -> Entity:
    return respond.HeartbeatResponse(error_code=code)
