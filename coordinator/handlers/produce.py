"""Produce (0): append what a client sends, one record batch per partition (``appends.py``).

Versions: 7 allows zstd; 8 has RecordErrors; 11 knows TRANSACTION_ABORTABLE; from 12 on partitions
are added to the transaction by the broker; 13 names topics by id.

Differences from Kafka: acks=1 and acks=-1 mean the same on one node. The internal topics are closed
to every client, also to ``__admin_client``: their only writers are the coordinators.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any, Final, cast

import structlog
from kio.schema.errors import ErrorCode

from fencepost.coordinator.data.appends import Append, Part
from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.errors import InvalidRequiredAcksError, TransactionalIdMissingError
from fencepost.coordinator.handlers import CloseConnection, Context, handles
from fencepost.coordinator.wire import ApiKey, Entity
from fencepost.logcore.errors import (
    CorruptRecordError,
    LogError,
    NotOneBatchError,
    RecordListTooLargeError,
    RecordTooLargeError,
    StorageError,
)
from fencepost.logcore.machine import DomainError
from fencepost.logcore.partition import Appended

FIRST_BY_ID: Final = 13
ANSWERS_PER_TURN: Final = 1_000
"""Partitions whose answers are built in one turn of the event loop, 2 to 4 ms."""

_VALID_ACKS: Final = frozenset({-1, 0, 1})

_WITHOUT_LOG_START: Final = (
    CorruptRecordError,
    NotOneBatchError,
    RecordTooLargeError,
    RecordListTooLargeError,
    StorageError,
)
"""Errors whose answer tells no log start offset (``ReplicaManager.appendToLocalLog``)."""

_log = structlog.get_logger(__name__)


@handles(ApiKey.PRODUCE, versions=(3, 13), permission="WRITE Topic, WRITE TransactionalId")
def run(ctx: Context) -> Entity | Awaitable[Entity | None] | None:
    """Append and answer; None for acks=0, where an error closes the connection instead."""
    body = ctx.body
    append = Append(
        [
            Part(name, part.index, part.records)
            for topic in body.topic_data
            for name in (_name(ctx, topic),)
            for part in topic.partition_data
        ],
        version=ctx.version,
        transactional_id=body.transactional_id,
        origin=ctx.origin,
        acks=body.acks != 0,
    )
    if body.acks not in _VALID_ACKS:
        append.refusal = InvalidRequiredAcksError(f"acks={body.acks}")
    waiting = None
    if append.producers and body.transactional_id is None:
        # Without its id nobody could say whether the transaction is the producer's own.
        missing = TransactionalIdMissingError("a transactional batch without a transactional id")
        for part in append.parts:
            part.error = missing
    else:
        waiting = ctx.broker.appends.run(append)
    if waiting is None and len(append.parts) <= ANSWERS_PER_TURN:
        return _answer(ctx, append, [_partition_answer(ctx, part) for part in append.parts])
    return _later(ctx, append, waiting)


def _name(ctx: Context, topic: Any) -> str | None:
    if ctx.version < FIRST_BY_ID:
        name: str = topic.name
        return name
    known = ctx.broker.metadata.topic_by_id(topic.topic_id)
    return None if known is None else known.name


async def _later(ctx: Context, append: Append, waiting: Awaitable[object] | None) -> Entity | None:
    if waiting is not None:
        await waiting
    built: list[Entity] = []
    for part in append.parts:
        built.append(_partition_answer(ctx, part))
        if not len(built) % ANSWERS_PER_TURN:
            await asyncio.sleep(0)
    return _answer(ctx, append, built)


def _answer(ctx: Context, append: Append, built: Iterable[Entity]) -> Entity | None:
    if not append.acks:
        failed = next((part.error for part in append.parts if part.error is not None), None)
        if failed is not None:
            raise CloseConnection(f"a produce request without acks failed: {failed}")
        return None
    make, parts = ctx.respond, iter(built)
    return make.ProduceResponse(
        responses=tuple(
            make.TopicProduceResponse(
                # Up to version 12 a topic is named, from then on it is its id that tells it.
                name=getattr(topic, "name", ""),
                topic_id=getattr(topic, "topic_id", None),
                partition_responses=tuple(next(parts) for _ in topic.partition_data),
            )
            for topic in ctx.body.topic_data
        ),
        throttle_time_ms=0,
    )


def _partition_answer(ctx: Context, part: Part) -> Entity:
    if part.error is not None:
        return _refused(ctx, part, part.error)
    appended = cast("Appended", part.appended)
    return ctx.respond.PartitionProduceResponse(
        index=part.index,
        error_code=ErrorCode.none,
        base_offset=appended.base_offset,
        log_append_time_ms=appended.log_append_time_ms,
        log_start_offset=appended.log_start_offset,
        record_errors=(),
    )


def _refused(ctx: Context, part: Part, error: DomainError) -> Entity:
    make, code, message = ctx.respond, error_code(error), str(error)
    if code is ErrorCode.kafka_storage_error or code is ErrorCode.unknown_server_error:
        _log.error("append failed", topic=part.topic, partition=part.index, cause=message)
    tells_start = isinstance(error, LogError) and not isinstance(error, _WITHOUT_LOG_START)
    start = part.partition.log_start_offset if tells_start and part.partition is not None else -1
    return make.PartitionProduceResponse(
        index=part.index,
        error_code=code,
        base_offset=-1,
        log_append_time_ms=-1,
        log_start_offset=start,
        record_errors=tuple(
            make.BatchIndexAndErrorMessage(batch_index=at, batch_index_error_message=text)
            for at, text in getattr(error, "record_errors", ())
        ),
        error_message=message,
    )
