"""AlterShareGroupOffsets (91): set the start offsets of a share group without members (KIP-932).

The group is created if it does not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any
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
from fencepost.groups.share_commands import AlteredShareOffsets, AlterShareOffsets
from fencepost.logcore.machine import DomainError
from fencepost.protocol import ApiKey, Entity
from fencepost.protocol.steps import Steps


@handles(ApiKey.ALTER_SHARE_GROUP_OFFSETS, versions=(0, 0), permission="READ Group, READ Topic")
def run(ctx: Context) -> Work[Entity]:
    """Alter the offsets of existing partitions; refuse each of the others."""
    body = ctx.body
    if not ctx.broker.groups.serves_share_groups:
        return _refused(ctx, UNSUPPORTED)
    if not ctx.may(Operation.READ, ResourceType.GROUP, body.group_id):
        return _refused(ctx, GROUP_REFUSED)
    closed = yield from refused_topics(
        ctx, Operation.READ, (topic.topic_name for topic in body.topics)
    )
    if not body.group_id:
        return _refused(ctx, GROUP_INVALID)
    yield from load(SHARE_GROUP_MODULES)
    offsets = yield from _offsets(ctx, closed)
    command = AlterShareOffsets(body.group_id, offsets)
    result = yield from result_of(ctx.broker.share_groups.alter_offsets(command, ctx.origin))
    if isinstance(result, DomainError):
        return _refused(ctx, refusal_of(result))
    first: list[Entity] = []
    last: list[Entity] = []
    for topic in body.topics:
        topic_image = ctx.broker.metadata.topic(topic.topic_name)
        if topic.topic_name in closed:
            first.append((yield from _topic(ctx, topic, None, lambda _: TOPIC_REFUSED)))
        elif topic_image is None:
            first.append((yield from _topic(ctx, topic, None, lambda _: UNKNOWN)))
        else:
            refusal = partial(_refusal, result, topic.topic_name, topic_image.topic_id)
            last.append((yield from _topic(ctx, topic, topic_image.topic_id, refusal)))
    return ctx.respond.AlterShareGroupOffsetsResponse(
        error_code=ErrorCode.none, responses=(*first, *last)
    )


def _offsets(ctx: Context, closed: Collection[str]) -> Steps[tuple[tuple[str, int, int], ...]]:
    """Return (topic, partition, start offset) for the topics that are not in ``closed``."""
    offsets: list[tuple[str, int, int]] = []
    for topic in ctx.body.topics:
        name = topic.topic_name
        if name in closed or ctx.broker.metadata.topic(name) is None:
            continue
        for partition in topic.partitions:
            offsets.append((name, partition.partition_index, partition.start_offset))
            yield
    return tuple(offsets)


def _refusal(result: AlteredShareOffsets, topic: str, topic_id: UUID, index: int) -> Refusal | None:
    """Return why a partition of an existing topic was refused; None if it was altered."""
    if (topic, index) in result.unknown:
        return UNKNOWN
    error = result.failed.get((topic_id.bytes, index))
    return None if error is None else refusal_of(error)


def _topic(
    ctx: Context,
    topic: Any,
    topic_id: UUID | None,
    refusal: Callable[[int], Refusal | None],
) -> Steps[Entity]:
    rows = []
    for part in topic.partitions:
        code, message = refusal(part.partition_index) or (ErrorCode.none, None)
        rows.append(
            ctx.respond.AlterShareGroupOffsetsResponsePartition(
                partition_index=part.partition_index, error_code=code, error_message=message
            )
        )
        yield
    return ctx.respond.AlterShareGroupOffsetsResponseTopic(
        topic_name=topic.topic_name, topic_id=topic_id, partitions=tuple(rows)
    )


def _refused(ctx: Context, refusal: Refusal) -> Entity:
    code, message = refusal
    return ctx.respond.AlterShareGroupOffsetsResponse(error_code=code, error_message=message)
