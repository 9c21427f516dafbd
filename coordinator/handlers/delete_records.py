"""DeleteRecords (21): advance a log's start offset; the next retention run deletes the files.

The response waits for all replicas on live brokers: until then a new leader could still serve the
records.

Source: ``ReplicaManager.deleteRecords``, ``DelayedDeleteRecords``.
"""

from __future__ import annotations

import asyncio
from typing import Any

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation
from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.errors import (
    InvalidTopicError,
    PolicyViolationError,
    TopicAuthorizationError,
    UnknownTopicOrPartitionError,
)
from fencepost.coordinator.handlers import Context, handles, request_ms
from fencepost.coordinator.handlers.rights import named_topics, refused_topics
from fencepost.coordinator.metadata.names import INTERNAL_TOPICS
from fencepost.coordinator.runtime.background import spawn
from fencepost.coordinator.runtime.turns import Work
from fencepost.logcore.checkpoints import LOG_START_CHECKPOINT
from fencepost.logcore.errors import OffsetOutOfRangeError
from fencepost.logcore.machine import DomainError
from fencepost.logcore.partition import Partition
from fencepost.logcore.values import dataclass
from fencepost.protocol import ApiKey, Entity

HIGH_WATERMARK = -1
INVALID_LOW_WATERMARK = -1


@dataclass(slots=True)
class _Row:
    """One partition's result; ``partition`` is None if this broker could not delete the records."""

    index: int
    low_watermark: int = INVALID_LOW_WATERMARK
    code: ErrorCode = ErrorCode.none
    partition: Partition | None = None
    wanted: int = 0
    """The offset that the low watermark must reach."""


@handles(ApiKey.DELETE_RECORDS, versions=(0, 2), permission="DELETE Topic")
def run(ctx: Context) -> Work[Entity]:
    """Delete records, then checkpoint the log start offsets: a crash must not restore records."""
    refused = yield from refused_topics(ctx, Operation.DELETE, named_topics(ctx.body.topics))
    topics: list[tuple[str, list[_Row]]] = []
    for topic in ctx.body.topics:
        rows = []
        for part in topic.partitions:
            rows.append(_partition(ctx, topic.name, part, is_refused=topic.name in refused))
            yield None
        topics.append((topic.name, rows))
    yield asyncio.shield(spawn(_save(ctx), "save log starts"))
    yield from _reached(ctx, [row for _, rows in topics for row in rows if row.partition])
    make = ctx.respond
    results = []
    for name, rows in topics:
        parts = []
        for row in rows:
            parts.append(
                make.DeleteRecordsPartitionResult(
                    partition_index=row.index,
                    low_watermark=row.low_watermark,
                    error_code=row.code,
                )
            )
            yield None
        results.append(make.DeleteRecordsTopicResult(name=name, partitions=tuple(parts)))
    return make.DeleteRecordsResponse(topics=tuple(results))


async def _save(ctx: Context) -> None:
    await ctx.broker.logs.save(LOG_START_CHECKPOINT)


def _reached(ctx: Context, rows: list[_Row]) -> Work[None]:
    """Wait, up to the client's timeout, until the other replicas have deleted the same records.

    Followers learn the new log start offset from fetch responses and confirm it in their next
    fetches.
    """
    replicas = ctx.broker.replicas
    waits: list[asyncio.Future[None]] = []
    try:
        for row in rows:
            if row.partition is not None:
                wait = replicas.low_watermark_reaches(row.partition, row.wanted)
                waits += () if wait is None else (wait,)
            yield None
        if waits:
            yield spawn(_all_of(waits, request_ms(ctx.body.timeout)), "wait for replicas")
    finally:
        for wait in waits:
            wait.cancel()
    for row in rows:
        _settle(ctx, row)
        yield None


async def _all_of(waits: list[asyncio.Future[None]], timeout_ms: float) -> None:
    await asyncio.wait(waits, timeout=timeout_ms / 1000)


def _settle(ctx: Context, row: _Row) -> None:
    """Set the row's final low watermark or error."""
    replicas = ctx.broker.replicas
    if row.partition is None:
        return
    try:
        if replicas.leader(row.partition.topic, row.index) is not row.partition:
            raise UnknownTopicOrPartitionError("the topic was deleted meanwhile")
    except DomainError as error:
        row.code, row.low_watermark = error_code(error), INVALID_LOW_WATERMARK
        return
    low = replicas.low_watermark(row.partition)
    if low >= row.wanted:
        row.low_watermark = low
    else:
        row.code = ErrorCode.request_timed_out


def _partition(ctx: Context, topic: str, part: Any, *, is_refused: bool) -> _Row:
    row = _Row(part.partition_index)
    try:
        if is_refused:
            raise TopicAuthorizationError(topic)
        row.partition = _delete(ctx, topic, part.partition_index, part.offset)
        row.wanted = row.partition.high_watermark if part.offset == HIGH_WATERMARK else part.offset
        row.low_watermark = ctx.broker.replicas.low_watermark(row.partition)
    except DomainError as error:
        row.code = error_code(error)
    return row


def _delete(ctx: Context, topic: str, index: int, offset: int) -> Partition:
    """Delete the records below an offset; return the partition. Raises DomainError."""
    if topic in INTERNAL_TOPICS:
        raise InvalidTopicError(f"records of {topic} cannot be deleted")
    replicas = ctx.broker.replicas
    partition: Partition = replicas.leader(topic, index)
    policy = partition.log.config.cleanup_policy
    if policy and "delete" not in policy:
        raise PolicyViolationError(f"the cleanup.policy of {topic} is not delete")
    if offset < HIGH_WATERMARK:
        raise OffsetOutOfRangeError(f"{offset} is not an offset")
    partition.cleanup.delete_records_before(offset)
    replicas.log_start_moved(partition)
    return partition
