"""ConsumerGroupHeartbeat (68): join, stay in and leave a consumer-protocol group (KIP-848).

With version 0 the broker may generate the member id; with version 1 the client generates it and may
subscribe with a regular expression.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation, ResourceType
from fencepost.coordinator.handlers import Context, handles, request_ms
from fencepost.coordinator.handlers.answers import answer
from fencepost.coordinator.handlers.group_responses import heartbeat_response
from fencepost.coordinator.handlers.rights import refused_topics, visibility_of
from fencepost.groups.consumer_commands import ConsumerHeartbeat
from fencepost.groups.regex import reason_against
from fencepost.protocol import ApiKey, Entity
from fencepost.protocol.steps import Steps

_ZERO_ID = bytes(16)


@handles(ApiKey.CONSUMER_GROUP_HEARTBEAT, versions=(0, 1), permission="READ Group, DESCRIBE Topic")
def run(ctx: Context) -> Entity | Awaitable[Entity] | Steps[Entity | Awaitable[Entity]]:
    """Submit the heartbeat; the response contains the assignment if the coordinator returns one."""
    if not ctx.broker.groups.serves_consumer_protocol:
        return _refused(ctx, ErrorCode.unsupported_version, None)
    regex = getattr(ctx.body, "subscribed_topic_regex", None)
    if ctx.broker.authorizer is None and not regex:
        return _passed_on(ctx, None)
    return _checked(ctx, regex)


def _checked(ctx: Context, regex: str | None) -> Steps[Entity | Awaitable[Entity]]:
    """Submit the heartbeat if the client may read the group and describe all subscribed topics."""
    if not ctx.may(Operation.READ, ResourceType.GROUP, ctx.body.group_id):
        return _refused(ctx, ErrorCode.group_authorization_failed, None)
    names = ctx.body.subscribed_topic_names or ()
    if (yield from refused_topics(ctx, Operation.DESCRIBE, names)):
        return _refused(ctx, ErrorCode.topic_authorization_failed, None)
    return _passed_on(ctx, (yield from reason_against(regex)) if regex else None)


def _passed_on(ctx: Context, reason_against_regex: str | None) -> Entity | Awaitable[Entity]:
    body, groups = ctx.body, ctx.broker.groups
    if body.member_epoch == 0 and ctx.broker.observations is not None:
        ctx.broker.observations.joined(ctx.origin, body.group_id, "ConsumerGroupHeartbeat")
    future = groups.submit(body.group_id, _command(ctx, reason_against_regex), ctx.origin)

    def refuse(code: ErrorCode) -> Entity:
        error = future.exception()
        return _refused(ctx, code, None if error is None else str(error))

    return answer(future, lambda result: heartbeat_response(ctx.respond, result), refuse)


def _command(ctx: Context, reason_against_regex: str | None) -> ConsumerHeartbeat:
    body = ctx.body
    names, owned = body.subscribed_topic_names, body.topic_partitions
    return ConsumerHeartbeat(
        body.group_id,
        body.member_id,
        body.member_epoch,
        ctx.client_id or "",
        f"/{ctx.peer_host}",
        body.instance_id,
        body.rack_id,
        request_ms(body.rebalance_timeout),
        None if names is None else tuple(names),
        getattr(body, "subscribed_topic_regex", None),
        reason_against_regex,
        body.server_assignor,
        None
        if owned is None
        else tuple((_id_bytes(topic.topic_id), tuple(topic.partitions)) for topic in owned),
        "" if body.member_id else str(uuid.uuid4()),
        ctx.version >= 1,
        visibility_of(ctx),
    )


def _id_bytes(topic_id: uuid.UUID | None) -> bytes:
    return _ZERO_ID if topic_id is None else topic_id.bytes


def _refused(ctx: Context, code: ErrorCode, message: str | None) -> Entity:
    return ctx.respond.ConsumerGroupHeartbeatResponse(error_code=code, error_message=message)
