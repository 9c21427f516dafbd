"""DescribeShareGroupOffsets (90): start offsets and lags of share groups (KIP-932).

Version 1 adds the lag. Any broker answers a request that names partitions, even of a group that
does not exist. Only the group's coordinator can list all partitions of a group.

A partition without state has the start offset -1 and no error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final
from uuid import UUID

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation, ResourceType
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.answers import result_of
from fencepost.coordinator.handlers.rights import refused_topics
from fencepost.coordinator.handlers.share_offsets import TOPIC_REFUSED, Refusal, refusal_of
from fencepost.coordinator.runtime.late_imports import SHARE_GROUP_MODULES, load
from fencepost.coordinator.runtime.turns import Work
from fencepost.groups.consumer_commands import NamedPartitions
from fencepost.groups.share.commands import SharePartitionKey
from fencepost.groups.share.state import StateSummary
from fencepost.groups.share_commands import ListShareState
from fencepost.logcore.machine import DomainError
from fencepost.protocol import ApiKey, Entity

UNKNOWN_OFFSET: Final = -1
UNKNOWN_LAG: Final = -1

Summaries = Mapping[SharePartitionKey, StateSummary | DomainError]
Ends = Mapping[tuple[str, int], int | DomainError]


@handles(
    ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS,
    versions=(0, 1),
    permission="DESCRIBE Group, DESCRIBE Topic",
)
def run(ctx: Context) -> Work[Entity]:
    """Describe each group; errors are reported per group, or per partition."""
    serves = ctx.broker.groups.serves_share_groups
    yield from load(SHARE_GROUP_MODULES)
    described = []
    for group in ctx.body.groups:
        group_id = group.group_id
        if not serves:
            described.append(_group(ctx, group_id, code=ErrorCode.unsupported_version))
        elif not ctx.may(Operation.DESCRIBE, ResourceType.GROUP, group_id):
            described.append(_group(ctx, group_id, code=ErrorCode.group_authorization_failed))
        elif group.topics is None:
            described.append((yield from _all(ctx, group_id)))
        else:
            described.append((yield from _named(ctx, group_id, group.topics)))
        yield None
    return ctx.respond.DescribeShareGroupOffsetsResponse(groups=tuple(described))


def _all(ctx: Context, group_id: str) -> Work[Entity]:
    """Describe all partitions with state, without topics that the client may not describe."""
    groups = ctx.broker.groups
    result = yield from result_of(groups.submit(group_id, ListShareState(group_id)))
    if isinstance(result, DomainError):
        code, message = refusal_of(result)
        return _group(ctx, group_id, code=code, message=message)
    names = [topic.topic for topic in result.partitions]
    hidden = yield from refused_topics(ctx, Operation.DESCRIBE, names, audited=False)
    visible = [topic for topic in result.partitions if topic.topic not in hidden]
    return _group(ctx, group_id, (yield from _topics(ctx, group_id, visible)))


def _named(ctx: Context, group_id: str, requested: Sequence[Any]) -> Work[Entity]:
    """Describe the named partitions: known topics first, then unknown and refused ones."""
    names = [topic.topic_name for topic in requested]
    closed = yield from refused_topics(ctx, Operation.DESCRIBE, names)
    described_topics: list[NamedPartitions] = []
    unknown: list[Entity] = []
    refused: list[Entity] = []
    for topic in requested:
        name, rows = topic.topic_name, []
        image = ctx.broker.metadata.topic(name)
        if name not in closed and image is not None:
            described_topics.append(
                NamedPartitions(image.topic_id.bytes, name, tuple(topic.partitions))
            )
            yield None
            continue
        for index in topic.partitions:
            if name in closed:
                rows.append(_refused(ctx, index, TOPIC_REFUSED, UNKNOWN_OFFSET))
            else:
                rows.append(_partition(ctx, index, StateSummary(), UNKNOWN_LAG))
            yield None
        (refused if name in closed else unknown).append(_topic(ctx, name, None, rows))
    topics = yield from _topics(ctx, group_id, described_topics)
    return _group(ctx, group_id, (*topics, *unknown, *refused))


def _topics(
    ctx: Context, group_id: str, topics: Sequence[NamedPartitions]
) -> Work[tuple[Entity, ...]]:
    """Read the summaries of partitions of known topics, and compute the lags.

    A partition that does not exist has no state. For such a partition, Kafka asks the share
    coordinator repeatedly for half a minute.
    """
    metadata = ctx.broker.metadata
    keys: dict[SharePartitionKey, None] = {}
    for topic in topics:
        image = metadata.topic(topic.topic)
        count = 0 if image is None else len(image.partitions)
        for index in topic.partitions:
            if 0 <= index < count:
                keys[SharePartitionKey(group_id, topic.topic_id, index)] = None
            yield None
    summaries: Summaries = {}
    if keys:
        summaries = yield from result_of(ctx.broker.share_groups.summaries(keys))
    names = {topic.topic_id: topic.topic for topic in topics}
    described = []
    for key, result in summaries.items():
        if isinstance(result, StateSummary) and _has_lag(result):
            described.append((names[key.topic_id], key.partition))
        yield None
    ends: Ends = {}
    if described:
        ends = yield from result_of(ctx.broker.share_groups.end_offsets(described))
    rows = []
    for topic in topics:
        parts = []
        for index in topic.partitions:
            summary = summaries.get(SharePartitionKey(group_id, topic.topic_id, index))
            parts.append(_described(ctx, index, summary, ends.get((topic.topic, index))))
            yield None
        rows.append(_topic(ctx, topic.topic, topic.topic_id, parts))
    return tuple(rows)


def _has_lag(summary: StateSummary) -> bool:
    return UNKNOWN_OFFSET not in {summary.start_offset, summary.delivery_complete_count}


def _described(
    ctx: Context,
    index: int,
    summary: StateSummary | DomainError | None,
    end: int | DomainError | None,
) -> Entity:
    """Describe one partition; an error of the share coordinator is shown as no state."""
    if not isinstance(summary, StateSummary):
        return _partition(ctx, index, StateSummary(), UNKNOWN_LAG)
    if end is None:
        return _partition(ctx, index, summary, UNKNOWN_LAG)
    if isinstance(end, DomainError):
        return _refused(ctx, index, refusal_of(end))
    lag = end - summary.start_offset - summary.delivery_complete_count
    return _partition(ctx, index, summary, lag)


def _partition(ctx: Context, index: int, summary: StateSummary, lag: int) -> Entity:
    return ctx.respond.DescribeShareGroupOffsetsResponsePartition(
        partition_index=index,
        start_offset=summary.start_offset,
        leader_epoch=summary.leader_epoch,
        lag=lag,
        error_code=ErrorCode.none,
    )


def _refused(ctx: Context, index: int, refusal: Refusal, start_offset: int = 0) -> Entity:
    code, message = refusal
    return ctx.respond.DescribeShareGroupOffsetsResponsePartition(
        partition_index=index,
        start_offset=start_offset,
        lag=UNKNOWN_LAG,
        error_code=code,
        error_message=message,
    )


def _topic(ctx: Context, name: str, topic_id: bytes | None, rows: list[Entity]) -> Entity:
    return ctx.respond.DescribeShareGroupOffsetsResponseTopic(
        topic_name=name,
        topic_id=None if topic_id is None else UUID(bytes=topic_id),
        partitions=tuple(rows),
    )


def _group(
    ctx: Context,
    group_id: str,
    topics: tuple[Entity, ...] = (),
    *,
    code: ErrorCode = ErrorCode.none,
    message: str | None = None,
) -> Entity:
    return ctx.respond.DescribeShareGroupOffsetsResponseGroup(
        group_id=group_id, topics=topics, error_code=code, error_message=message
    )
