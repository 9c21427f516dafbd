"""OffsetDelete (47): an administrator lets a group forget offsets."""

from __future__ import annotations

from collections.abc import Awaitable

from kio.schema.errors import ErrorCode

from coordinator.handlers import Context, handles
from coordinator.handlers.answers import answer, code_of
from coordinator.wire import ApiKey, Entity
from groups.commands import DeleteOffsets, DeleteOffsetsResult


@handles(ApiKey.OFFSET_DELETE, versions=(0, 0), permission="DELETE Group, READ Topic")
def run(ctx: Context) -> Entity | Awaitable[Entity]:
    """Delete the offsets of topics that exist; the others are refused one by one."""
    body, respond = ctx.body, ctx.respond
    known = [ctx.broker.metadata.topic(topic.name) is not None for topic in body.topics]
    command = DeleteOffsets(
        body.group_id,
        tuple(
            (topic.name, tuple(entry.partition_index for entry in topic.partitions))
            for topic, exists in zip(body.topics, known, strict=True)
            if exists
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
                            partition_index=entry.partition_index,
                            error_code=(
                                code_of(next(errors)[2])
                                if exists
                                else ErrorCode.unknown_topic_or_partition
                            ),
                        )
                        for entry in topic.partitions
                    ),
                )
                for topic, exists in zip(body.topics, known, strict=True)
            ),
        )

    if not command.topics:
        return build(DeleteOffsetsResult(()))
    return answer(
        ctx.broker.groups.submit(body.group_id, command),
        build,
        lambda code: respond.OffsetDeleteResponse(error_code=code),
    )
