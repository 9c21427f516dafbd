"""OffsetForLeaderEpoch (23): where a leader epoch ended, by which a log's reader sees truncation.

Source: ``Partition.lastOffsetForLeaderEpoch``, KIP-320.
"""

from __future__ import annotations

from typing import Any

from kio.schema.errors import ErrorCode

from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.wire import ApiKey, Entity
from fencepost.coordinator.wire.steps import Steps
from fencepost.logcore.machine import DomainError


@handles(ApiKey.OFFSET_FOR_LEADER_EPOCH, versions=(2, 4), permission="DESCRIBE Topic")
def run(ctx: Context) -> Steps[Entity]:
    """Answer epoch and end offset per partition."""
    make = ctx.respond
    topics = []
    for topic in ctx.body.topics:
        parts = []
        for part in topic.partitions:
            parts.append(_partition(ctx, topic.topic, part))
            yield
        topics.append(make.OffsetForLeaderTopicResult(topic=topic.topic, partitions=tuple(parts)))
    return make.OffsetForLeaderEpochResponse(topics=tuple(topics))


def _partition(ctx: Context, topic: str, part: Any) -> Entity:
    code, epoch, end_offset = ErrorCode.none, -1, -1
    try:
        partition = ctx.broker.logs.partition(topic, part.partition)
        partition.reader.check_leader_epoch(part.current_leader_epoch)
        epoch, end_offset = partition.reader.end_of_epoch(part.leader_epoch)
    except DomainError as error:
        code = error_code(error)
    return ctx.respond.EpochEndOffset(
        error_code=code, partition=part.partition, leader_epoch=epoch, end_offset=end_offset
    )
