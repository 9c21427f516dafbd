"""Produce (0): append what a client sends, one record batch per partition (``appends.py``).

Versions: 7 allows zstd; 8 has RecordErrors; 11 knows TRANSACTION_ABORTABLE; from 12 on partitions
are added to the transaction by the broker; 13 names topics by id.

Difference from Kafka: the internal topics are closed to every client, also to ``__admin_client``.
Their only writers are the coordinators.
"""

from __future__ import annotations

from itertools import islice
from typing import Any, Final

from kio.schema.errors import ErrorCode

from fencepost.coordinator.data.appends import Append, Part
from fencepost.coordinator.handlers import CloseConnection, Context, handles
from fencepost.coordinator.handlers.answers import code_of
from fencepost.coordinator.runtime.turns import Work
from fencepost.coordinator.wire import ApiKey, Entity

FIRST_BY_ID: Final = 13


@handles(ApiKey.PRODUCE, versions=(3, 13), permission="WRITE Topic, WRITE TransactionalId")
def run(ctx: Context) -> Work[Entity | None]:
    """Append and answer; None for acks=0, where an error closes the connection instead."""
    body, make = ctx.body, ctx.respond
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
        acks=body.acks,
    )
    yield from ctx.broker.appends.run(append)
    if not append.acks:
        failed = next((part.error for part in append.parts if part.error is not None), None)
        if failed is not None:
            raise CloseConnection(f"a produce request without acks failed: {failed}")
        return None
    parts = iter(append.parts)
    topics = []
    for topic in body.topic_data:
        told = []
        for part in islice(parts, len(topic.partition_data)):
            told.append(_partition(ctx, part))
            yield None
        topics.append(
            make.TopicProduceResponse(
                # Up to version 12 a topic has its name here, from then on its id.
                name=getattr(topic, "name", ""),
                topic_id=getattr(topic, "topic_id", None),
                partition_responses=tuple(told),
            )
        )
    return make.ProduceResponse(responses=tuple(topics))


def _name(ctx: Context, topic: Any) -> str | None:
    if ctx.version < FIRST_BY_ID:
        name: str = topic.name
        return name
    known = ctx.broker.metadata.topic_by_id(topic.topic_id)
    return None if known is None else known.name


def _partition(ctx: Context, part: Part) -> Entity:
    make, error, appended = ctx.respond, part.error, part.appended
    if error is None and appended is not None:
        return make.PartitionProduceResponse(
            index=part.index,
            error_code=ErrorCode.none,
            base_offset=appended.base_offset,
            log_append_time_ms=appended.log_append_time_ms,
            log_start_offset=appended.log_start_offset,
            record_errors=(),
        )
    return make.PartitionProduceResponse(
        index=part.index,
        error_code=code_of(error),
        base_offset=-1,
        log_append_time_ms=-1,
        log_start_offset=part.log_start_offset,
        record_errors=tuple(
            make.BatchIndexAndErrorMessage(batch_index=at, batch_index_error_message=text)
            for at, text in getattr(error, "record_errors", ())
        ),
        error_message=str(error),
    )
