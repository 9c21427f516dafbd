"""OffsetDelete (47): delete a group's offsets."""

from __future__ import annotations

from collections.abc import Awaitable, Collection
from typing import Any

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation, ResourceType
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.answers import answer, code_of
from fencepost.coordinator.handlers.rights import named_topics, refused_topics
from fencepost.groups.commands import DeleteOffsets, DeleteOffsetsResult
from fencepost.protocol import ApiKey, Entity
from fencepost.protocol.steps import Steps


@handles(ApiKey.OFFSET_DELETE, versions=(0, 0), permission="DELETE Group, READ Topic")
def run(ctx: Context) -> Steps[Entity | Awaitable[Entity]]:
    """Delete the offsets of existing partitions; refuse each of the others."""
    body, respond = ctx.body, ctx.respond

    def refuse(code: ErrorCode) -> Entity:
        return respond.OffsetDeleteResponse(error_code=code)

    if not ctx.may(Operation.DELETE, ResourceType.GROUP, body.group_id):
        return refuse(ErrorCode.group_authorization_failed)
    closed = yield from refused_topics(ctx, Operation.READ, named_topics(body.topics))
    existing = []
    for topic in body.topics:
        existing.append(_known(ctx, topic, closed))
        yield
    command = DeleteOffsets(
        body.group_id,
        tuple(
            (topic.name, indexes)
            for topic, exists in zip(body.topics, existing, strict=True)
            if (indexes := tuple(index for index, refused in exists if refused is None))
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
                            error_code=refused or code_of(next(errors)[2]),
                        )
                        for index, refused in exists
                    ),
                )
                for topic, exists in zip(body.topics, existing, strict=True)
            ),
        )

    # Even without an existing partition the group is checked, as in Kafka.
    return answer(
        ctx.broker.groups.submit(body.group_id, command, ctx.origin),
        build,
        refuse,
    )


def _known(
    ctx: Context, topic_request: Any, closed: Collection[str]
) -> list[tuple[int, ErrorCode | None]]:
    """Return the requested partition indexes, each with its error or None."""
    indexes = [entry.partition_index for entry in topic_request.partitions]
    if topic_request.name in closed:
        return [(index, ErrorCode.topic_authorization_failed) for index in indexes]
    topic = ctx.broker.metadata.topic(topic_request.name)
    count = 0 if topic is None else len(topic.partitions)
    missing = ErrorCode.unknown_topic_or_partition
    return [(index, None if 0 <= index < count else missing) for index in indexes]
