"""ShareGroupHeartbeat (76): join, stay in and leave a share group (KIP-932)."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Final

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation, ResourceType
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.answers import answer
from fencepost.coordinator.handlers.group_responses import heartbeat_response
from fencepost.coordinator.handlers.rights import refused_topics
from fencepost.coordinator.runtime.late_imports import SHARE_GROUP_MODULES, load
from fencepost.groups.consumer_commands import JOIN_EPOCH
from fencepost.groups.share_commands import ShareHeartbeat
from fencepost.protocol import ApiKey, Entity
from fencepost.protocol.steps import Steps

MAX_MEMBER_ID_CHARACTERS: Final = 36
"""The maximum length of a member id, a UUID in text form, in UTF-16 units
(``KafkaApis.isMemberIdValid``)."""


@handles(ApiKey.SHARE_GROUP_HEARTBEAT, versions=(1, 1), permission="READ Group, DESCRIBE Topic")
def run(ctx: Context) -> Entity | Awaitable[Entity] | Steps[Entity | Awaitable[Entity]]:
    """Submit the heartbeat; the response contains the assignment if the coordinator returns one."""
    if not ctx.broker.groups.serves_share_groups:
        return _refused(ctx, ErrorCode.unsupported_version)
    if not ctx.may(Operation.READ, ResourceType.GROUP, ctx.body.group_id):
        return _refused(ctx, ErrorCode.group_authorization_failed)
    if not is_member_id(ctx.body.member_id):
        return _refused(ctx, ErrorCode.invalid_request)
    if ctx.body.member_epoch == JOIN_EPOCH or ctx.body.subscribed_topic_names:
        return _checked(ctx)
    return _passed_on(ctx)


def is_member_id(text: str | None) -> bool:
    """Return whether a member of a share group may have this id."""
    return text is not None and 0 < len(text.encode("utf-16-le")) <= 2 * MAX_MEMBER_ID_CHARACTERS


def _checked(ctx: Context) -> Steps[Entity | Awaitable[Entity]]:
    """Submit the heartbeat if the client may describe all subscribed topics."""
    yield from load(SHARE_GROUP_MODULES)
    names = ctx.body.subscribed_topic_names or ()
    if (yield from refused_topics(ctx, Operation.DESCRIBE, names)):
        return _refused(ctx, ErrorCode.topic_authorization_failed)
    return _passed_on(ctx)


def _passed_on(ctx: Context) -> Entity | Awaitable[Entity]:
    body = ctx.body
    names = body.subscribed_topic_names
    command = ShareHeartbeat(
        body.group_id,
        body.member_id,
        body.member_epoch,
        ctx.client_id or "",
        f"/{ctx.peer_host}",
        body.rack_id,
        None if names is None else tuple(names),
    )
    future = ctx.broker.share_groups.heartbeat(command, ctx.origin)

    def refuse(code: ErrorCode) -> Entity:
        return _refused(ctx, code, str(future.exception()))

    return answer(future, lambda result: heartbeat_response(ctx.respond, result), refuse)


def _refused(ctx: Context, code: ErrorCode, message: str | None = None) -> Entity:
    return ctx.respond.ShareGroupHeartbeatResponse(error_code=code, error_message=message)
