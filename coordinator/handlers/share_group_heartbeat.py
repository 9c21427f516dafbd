"""ShareGroupHeartbeat (76): join, stay in and leave a share group (KIP-932)."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable
from functools import lru_cache
from typing import Final

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation, ResourceType
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.answers import answer
from fencepost.coordinator.handlers.rights import refused_topics
from fencepost.coordinator.runtime.late_imports import SHARE_GROUP_MODULES, load
from fencepost.groups.consumer_commands import JOIN_EPOCH
from fencepost.groups.share_commands import ShareHeartbeat, ShareHeartbeatResult
from fencepost.protocol import ApiKey, Entity
from fencepost.protocol.messages import ResponseFactory
from fencepost.protocol.steps import Steps

MAX_MEMBER_ID_CHARACTERS: Final = 36
"""UTF-16 units of a member id, which is a UUID in text form (``KafkaApis.isMemberIdValid``)."""

MAX_KEPT_ANSWERS: Final = 1_024
"""The maximum number of cached responses without an assignment, of 200 bytes each."""


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

    return answer(future, lambda result: _response(ctx, result), refuse)


def _response(ctx: Context, result: ShareHeartbeatResult) -> Entity:
    make = ctx.respond
    said = result.member_id, result.member_epoch, result.heartbeat_interval_ms
    if result.assignment is None:
        return _unchanged(make, *said)
    assignment = make.Assignment(
        topic_partitions=tuple(
            make.TopicPartitions(topic_id=uuid.UUID(bytes=topic_id), partitions=partitions)
            for topic_id, partitions in result.assignment
        )
    )
    return _heartbeat_response(make, *said, assignment)


def _heartbeat_response(
    make: ResponseFactory, member_id: str, epoch: int, interval_ms: int, assignment: Entity | None
) -> Entity:
    return make.ShareGroupHeartbeatResponse(
        error_code=ErrorCode.none,
        member_id=member_id,
        member_epoch=epoch,
        heartbeat_interval_ms=interval_ms,
        assignment=assignment,
    )


@lru_cache(maxsize=MAX_KEPT_ANSWERS)
def _unchanged(make: ResponseFactory, member_id: str, epoch: int, interval_ms: int) -> Entity:
    """Return the response of nearly every heartbeat, without an assignment; cached."""
    return _heartbeat_response(make, member_id, epoch, interval_ms, None)


def _refused(ctx: Context, code: ErrorCode, message: str | None = None) -> Entity:
    return ctx.respond.ShareGroupHeartbeatResponse(error_code=code, error_message=message)
