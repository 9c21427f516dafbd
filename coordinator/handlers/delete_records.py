"""DeleteRecords (21): move the start of a log up; the files go with the next retention.

Source: ``ReplicaManager.deleteRecordsOnLocalLog``.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from kio.schema.errors import ErrorCode

from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.errors import (
    InvalidTopicError,
    PolicyViolationError,
    TopicAuthorizationError,
)
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.rights import named_topics, refused_topics
from fencepost.coordinator.metadata.names import INTERNAL_TOPICS
from fencepost.coordinator.security.acl import Operation
from fencepost.coordinator.wire import ApiKey, Entity
from fencepost.coordinator.wire.steps import Steps
from fencepost.logcore.checkpoints import LOG_START_CHECKPOINT
from fencepost.logcore.errors import OffsetOutOfRangeError
from fencepost.logcore.machine import DomainError

HIGH_WATERMARK = -1
INVALID_LOW_WATERMARK = -1


@handles(ApiKey.DELETE_RECORDS, versions=(0, 2), permission="DELETE Topic")
def run(ctx: Context) -> Steps[Awaitable[Entity]]:
    """Delete, then write the new log starts down: a kill must not bring records back."""
    make = ctx.respond
    refused = yield from refused_topics(ctx, Operation.DELETE, named_topics(ctx.body.topics))
    topics = []
    for topic in ctx.body.topics:
        parts = []
        for part in topic.partitions:
            parts.append(_partition(ctx, topic.name, part, is_refused=topic.name in refused))
            yield
        topics.append(make.DeleteRecordsTopicResult(name=topic.name, partitions=tuple(parts)))
    return _saved(ctx, make.DeleteRecordsResponse(topics=tuple(topics)))


async def _saved(ctx: Context, answer: Entity) -> Entity:
    await ctx.broker.logs.save(LOG_START_CHECKPOINT)
    return answer


def _partition(ctx: Context, topic: str, part: Any, *, is_refused: bool) -> Entity:
    code, low_watermark = ErrorCode.none, INVALID_LOW_WATERMARK
    try:
        if is_refused:
            raise TopicAuthorizationError(topic)
        low_watermark = _delete(ctx, topic, part.partition_index, part.offset)
    except DomainError as error:
        code = error_code(error)
    return ctx.respond.DeleteRecordsPartitionResult(
        partition_index=part.partition_index, low_watermark=low_watermark, error_code=code
    )


def _delete(ctx: Context, topic: str, index: int, offset: int) -> int:
    """Returns the new log start offset. Raises DomainError."""
    if topic in INTERNAL_TOPICS:
        raise InvalidTopicError(f"records of {topic} can not be deleted")
    partition = ctx.broker.logs.partition(topic, index)
    policy = partition.log.config.cleanup_policy
    if policy and "delete" not in policy:
        raise PolicyViolationError(f"the cleanup.policy of {topic} is not delete")
    if offset < HIGH_WATERMARK:
        raise OffsetOutOfRangeError(f"{offset} is no offset")
    low_watermark: int = partition.cleanup.delete_records_before(offset)
    return low_watermark
