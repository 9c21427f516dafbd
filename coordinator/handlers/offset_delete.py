"""OffsetDelete (47): an administrator lets a group forget offsets."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from kio.schema.errors import ErrorCode

from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.answers import answer, code_of
from fencepost.coordinator.wire import ApiKey, Entity
from fencepost.groups.commands import DeleteOffsets, DeleteOffsetsResult


@handles(ApiKey.OFFSET_DELETE, versions=(0, 0), permission="DELETE Group, READ Topic")
def run(ctx: Context) -> Entity | Awaitable[Entity]:
    """Delete the offsets of partitions that exist; the others are refused one by one."""
    body, respond = ctx.body, ctx.respond
    known = [_known(ctx, topic) for topic in body.topics]
    command = DeleteOffsets(
        body.group_id,
        tuple(
            (topic.name, indexes)
            for topic, exists in zip(body.topics, known, strict=True)
            if (indexes := tuple(index for index, there in exists if there))
        ),
    )

    def build(result: DeleteOffsetsResult) -> Entity:
        errors = iter(result.partitions)
        return respond.OffsetDeleteResponse(
            error_code=ErrorCode.none,
            topics=tuple(
                respond.OffsetDeleteResponseTopic(
                    name=topic.name,
                    partitions=tuple(
                        respond.OffsetDeleteResponsePartition(
                            partition_index=index,
                            error_code=(
                                code_of(next(errors)[2])
                                if there
                                else ErrorCode.unknown_topic_or_partition
                            ),
                        )
                        for index, there in exists
                    ),
                )
                for topic, exists in zip(body.topics, known, strict=True)
            ),
        )

    # Without any partition that exists the group is still looked at, as in Kafka.
    return answer(
        ctx.broker.groups.submit(body.group_id, command, ctx.origin),
        build,
        lambda code: respond.OffsetDeleteResponse(error_code=code),
    )


def _known(ctx: Context, asked: Any) -> list[tuple[int, bool]]:
    """The partition indexes asked for, each with whether it exists."""
    topic = ctx.broker.metadata.topic(asked.name)
    count = 0 if topic is None else topic.partitions
    indexes = [entry.partition_index for entry in asked.partitions]
    return [(index, 0 <= index < count) for index in indexes]
