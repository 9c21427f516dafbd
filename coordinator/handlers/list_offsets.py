"""ListOffsets (2): look up the offset for a timestamp, or an end of the log.

Version 2 adds isolation levels, version 4 leader epochs, version 7 the largest timestamp, version 8
the earliest local offset, version 9 the latest tiered offset, version 11 the earliest offset not
yet tiered.

Fencepost has no tiered storage: lookups of tiered offsets return no offset, as in Kafka for a topic
without tiered storage.

A follower gets the log end offset. A client gets the high watermark or the last stable offset, or
an error from a new leader whose high watermark is not yet valid.

Source: ``Partition.fetchOffsetForTimestamp``, ``UnifiedLog.fetchOffsetByTimestamp``,
``KafkaApis.handleListOffsetRequest``.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation
from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.rights import named_topics, refused_topics
from fencepost.coordinator.storage.end_offsets import is_settled, not_settled
from fencepost.coordinator.storage.fetches import CONSUMER, DEBUGGING_CONSUMER, isolation_of
from fencepost.logcore.machine import DomainError
from fencepost.logcore.partition import Partition
from fencepost.logcore.reading import Isolation
from fencepost.protocol import ApiKey, Entity
from fencepost.protocol.steps import Steps

LATEST, EARLIEST, MAX_TIMESTAMP, EARLIEST_LOCAL, LATEST_TIERED, EARLIEST_PENDING = range(-1, -7, -1)

FIRST_VERSION_WITH = {
    LATEST: 0,
    EARLIEST: 0,
    MAX_TIMESTAMP: 7,
    EARLIEST_LOCAL: 8,
    LATEST_TIERED: 9,
    EARLIEST_PENDING: 11,
}
"""The special timestamps, with the first version that supports each."""

FIRST_WITH_NOT_AVAILABLE = 5
"""Older versions get LEADER_NOT_AVAILABLE instead of OFFSET_NOT_AVAILABLE."""

NONE = -1
Found = tuple[int, int, int]
"""Offset, timestamp and leader epoch; −1 for each that does not exist."""


@handles(ApiKey.LIST_OFFSETS, versions=(1, 11), permission="DESCRIBE Topic")
def run(ctx: Context) -> Steps[Entity]:
    """Look up every partition; refuse one that is named twice.

    A topic that is named twice has one row, unless the client may not describe it.
    """
    make, body = ctx.respond, ctx.body
    named: dict[str, Counter[int]] = {}
    for topic in body.topics:
        indexes = (part.partition_index for part in topic.partitions)
        named.setdefault(topic.name, Counter()).update(indexes)
        yield
    rows: dict[str, list[Entity]] = {}
    refused = yield from refused_topics(ctx, Operation.DESCRIBE, named_topics(body.topics))
    topics = []
    for topic in body.topics:
        if topic.name in refused:
            topics.append((yield from _refused(ctx, topic)))
            continue
        parts = rows.setdefault(topic.name, [])
        counts = named[topic.name]
        for part in topic.partitions:
            count = counts[part.partition_index]
            if count:
                answer = yield from _partition(ctx, topic.name, part, count)
                parts.append(answer)
                # A partition gets only one response.
                counts[part.partition_index] = 0
            yield
    for name, parts in rows.items():
        topics.append(make.ListOffsetsTopicResponse(name=name, partitions=tuple(parts)))
        yield
    return make.ListOffsetsResponse(topics=tuple(topics))


def _refused(ctx: Context, topic: Any) -> Steps[Entity]:
    make, parts = ctx.respond, []
    for part in topic.partitions:
        parts.append(
            make.ListOffsetsPartitionResponse(
                partition_index=part.partition_index,
                error_code=ErrorCode.topic_authorization_failed,
            )
        )
        yield
    return make.ListOffsetsTopicResponse(name=topic.name, partitions=tuple(parts))


def _partition(ctx: Context, topic: str, part: Any, count: int) -> Steps[Entity]:
    """Build the response for a partition that the request names ``count`` times."""
    timestamp_offset: Found = (NONE, NONE, NONE)
    code = ErrorCode.none
    if count > 1:
        code = ErrorCode.invalid_request
    elif part.timestamp < 0 and ctx.version < FIRST_VERSION_WITH.get(part.timestamp, 2**15):
        code = ErrorCode.unsupported_version
    else:
        try:
            timestamp_offset = yield from _look_up(ctx, topic, part)
        except DomainError as error:
            code = error_code(error)
            if code is ErrorCode.offset_not_available and ctx.version < FIRST_WITH_NOT_AVAILABLE:
                code = ErrorCode.leader_not_available
    offset, timestamp, epoch = timestamp_offset
    return ctx.respond.ListOffsetsPartitionResponse(
        partition_index=part.partition_index,
        error_code=code,
        timestamp=timestamp,
        offset=offset,
        leader_epoch=epoch,
    )


def _look_up(ctx: Context, topic: str, part: Any) -> Steps[Found]:
    isolation = isolation_of(getattr(ctx.body, "isolation_level", 0))
    if ctx.body.replica_id != CONSUMER:
        isolation = Isolation.LOG_END
    replicas, index = ctx.broker.replicas, part.partition_index
    find = replicas.readable if ctx.body.replica_id == DEBUGGING_CONSUMER else replicas.leader
    partition: Partition = find(topic, index, getattr(part, "current_leader_epoch", NONE))
    is_valid = isolation is Isolation.LOG_END or is_settled(replicas, partition)
    timestamp = part.timestamp
    if timestamp == LATEST:
        if not is_valid:
            raise not_settled(partition)
        return partition.reader.end_of(isolation), NONE, partition.marks.leader_epoch
    if timestamp in {EARLIEST, EARLIEST_LOCAL}:
        start = partition.log_start_offset
        # The log has no record, and its next record will have the current epoch.
        if start == partition.log_end_offset:
            return start, NONE, partition.marks.leader_epoch
        return start, NONE, partition.reader.epoch_of(start)
    if timestamp in {LATEST_TIERED, EARLIEST_PENDING}:
        return NONE, NONE, NONE
    if timestamp == MAX_TIMESTAMP:
        timestamp_offset = yield from partition.reader.max_timestamp_offset(isolation)
    else:
        timestamp_offset = yield from partition.reader.offset_for_timestamp(timestamp, isolation)
    if timestamp_offset is None and not is_valid:
        raise not_settled(partition)
    if timestamp_offset is None:
        return NONE, NONE, NONE
    return timestamp_offset.offset, timestamp_offset.timestamp_ms, timestamp_offset.leader_epoch
