"""DeleteShareGroupOffsets (92): delete the state of topics in a share group (KIP-932).

The group must not have members.
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation, ResourceType
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.answers import result_of
from fencepost.coordinator.handlers.rights import refused_topics
from fencepost.coordinator.handlers.share_offsets import (
    GROUP_INVALID,
    GROUP_REFUSED,
    TOPIC_REFUSED,
    UNKNOWN,
    UNSUPPORTED,
    Refusal,
    refusal_of,
)
from fencepost.coordinator.runtime.late_imports import SHARE_GROUP_MODULES, load
from fencepost.coordinator.runtime.turns import Work
from fencepost.groups.share_commands import DeleteShareOffsets
from fencepost.logcore.machine import DomainError
from fencepost.protocol import ApiKey, Entity

WITHOUT_STATE: Final = (
    ErrorCode.unknown_topic_or_partition,
    "There is no offset information to delete.",
)


@handles(ApiKey.DELETE_SHARE_GROUP_OFFSETS, versions=(0, 0), permission="DELETE Group, READ Topic")
def run(ctx: Context) -> Work[Entity]:
    """Delete the state of topics that have state; refuse each of the others.

    The response has the refused topics first, then the deleted ones, then the failed ones.
    """
    body = ctx.body
    if not ctx.broker.groups.serves_share_groups:
        return _refused(ctx, UNSUPPORTED)
    if not ctx.may(Operation.DELETE, ResourceType.GROUP, body.group_id):
        return _refused(ctx, GROUP_REFUSED)
    names = [topic.topic_name for topic in body.topics]
    closed = yield from refused_topics(ctx, Operation.READ, names)
    if not body.group_id:
        return _refused(ctx, GROUP_INVALID)
    yield from load(SHARE_GROUP_MODULES)
    command = DeleteShareOffsets(body.group_id, tuple(name for name in names if name not in closed))
    result = yield from result_of(ctx.broker.share_groups.delete_offsets(command, ctx.origin))
    if isinstance(result, DomainError):
        return _refused(ctx, refusal_of(result))
    rows: list[Entity] = []
    failed: list[Entity] = []
    for name in names:
        if name in closed:
            rows.append(_topic(ctx, name, None, TOPIC_REFUSED))
        yield None
    for topic in result.begun.partitions:
        error = result.failed.get(topic.topic_id)
        refusal = None if error is None else refusal_of(error)
        row = _topic(ctx, topic.topic, topic.topic_id, refusal)
        (rows if error is None else failed).append(row)
        yield None
    missing = dict.fromkeys(result.begun.unknown, UNKNOWN)
    missing |= dict.fromkeys(result.begun.without_state, WITHOUT_STATE)
    for name in names:
        if name in missing:
            rows.append(_topic(ctx, name, None, missing[name]))
        yield None
    return ctx.respond.DeleteShareGroupOffsetsResponse(
        error_code=ErrorCode.none, responses=(*rows, *failed)
    )


def _topic(ctx: Context, name: str, topic_id: bytes | None, refusal: Refusal | None) -> Entity:
    code, message = refusal or (ErrorCode.none, None)
    return ctx.respond.DeleteShareGroupOffsetsResponseTopic(
        topic_name=name,
        topic_id=None if topic_id is None else UUID(bytes=topic_id),
        error_code=code,
        error_message=message,
    )


def _refused(ctx: Context, refusal: Refusal) -> Entity:
    code, message = refusal
    return ctx.respond.DeleteShareGroupOffsetsResponse(error_code=code, error_message=message)
