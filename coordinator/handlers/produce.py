"""Produce (0): append what a client sends, one record batch per partition.

No record is looked at here; only the first bytes of a transactional batch are, to learn whose it
is. All partitions are answered from one pass, in one turn of the event loop: a transactional batch
is verified by the transaction coordinator and appended with nothing in between, so that no end of
the transaction can slip in (KIP-890).

Versions: 7 allows zstd; 8 has RecordErrors; 11 knows TRANSACTION_ABORTABLE; from 12 on partitions
are added to the transaction by the broker; 13 names topics by id.

Differences from Kafka: acks=1 and acks=-1 mean the same on one node. The internal topics are closed
to every client, also to ``__admin_client``: their only writers are the coordinators.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Mapping
from functools import partial
from typing import Any

import structlog
from kio.schema.errors import ErrorCode

from coordinator.data_errors import (
    InvalidTopicError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
)
from coordinator.errors import error_code
from coordinator.handlers import CloseConnection, Context, handles
from coordinator.handlers.answers import Wait
from coordinator.metadata import INTERNAL_TOPICS
from coordinator.wire import ApiKey, Entity
from logcore.errors import (
    CorruptRecordError,
    InvalidRecordError,
    LogError,
    NotOneBatchError,
    RecordListTooLargeError,
    RecordTooLargeError,
    StorageError,
)
from logcore.machine import DomainError
from logcore.partition import Partition
from txn.errors import InvalidProducerIdMappingError

FIRST_WITH_ZSTD = 7
FIRST_ADDING_TO_TRANSACTION = 12
FIRST_BY_ID = 13
_VALID_ACKS = frozenset({-1, 0, 1})

_ATTRIBUTES_AT = 21
_TRANSACTIONAL = 0x10
_PRODUCER_AT = 43
_PRODUCER = struct.Struct(">qh")
_HEADER_SIZE = 61

_WITHOUT_LOG_START = (
    CorruptRecordError,
    NotOneBatchError,
    RecordTooLargeError,
    RecordListTooLargeError,
    StorageError,
)
"""Errors whose answer tells no log start offset (``ReplicaManager.appendToLocalLog``)."""

TopicPartition = tuple[str, int]

_log = structlog.get_logger(__name__)


@handles(ApiKey.PRODUCE, versions=(3, 13), permission="WRITE Topic, WRITE TransactionalId")
def run(ctx: Context) -> Entity | Awaitable[Entity | None] | None:
    """Append and answer; None for acks=0, where an error closes the connection instead."""
    body = ctx.body
    valid_acks = body.acks in _VALID_ACKS
    version = ctx.version
    answers = []
    failed: DomainError | None = None
    # Without its id nobody could say whether the transaction is the producer's own.
    nameless = body.transactional_id is None and _has_transactional(body)
    verified = None
    if body.transactional_id is not None and valid_acks:
        wait = Wait()
        verified = _verify(ctx, wait)
        if verified is None:
            return wait.then(partial(run, ctx))
    make = ctx.respond
    for topic in body.topic_data:
        name: str | None = None if version >= FIRST_BY_ID else topic.name
        topic_id = None
        if name is None:
            topic_id = topic.topic_id
            known = ctx.broker.metadata.topic_by_id(topic_id)
            name = None if known is None else known.name
        parts = []
        for part in topic.partition_data:
            if not valid_acks:
                parts.append(_refused(ctx, part.index, ErrorCode.invalid_required_acks, None))
                continue
            if nameless:
                code = ErrorCode.transactional_id_authorization_failed
                parts.append(_refused(ctx, part.index, code, None))
                continue
            try:
                parts.append(_append(ctx, name, part, verified))
            except DomainError as error:
                failed = error
                parts.append(_refused(ctx, part.index, error_code(error), str(error)))
        answers.append(
            make.TopicProduceResponse(
                name=name, topic_id=topic_id, partition_responses=tuple(parts)
            )
        )
    if body.acks == 0:
        if failed is not None:
            raise CloseConnection(f"a produce request without acks failed: {failed}")
        return None
    if not ctx.broker.commit.is_idle:
        return _on_disk(ctx, answers)
    return make.ProduceResponse(responses=tuple(answers), throttle_time_ms=0)


def _on_disk(ctx: Context, answers: list[Entity]) -> Entity | Awaitable[Entity]:
    """Answer once what the request appended, or found to be there already, is on disk."""
    held: dict[tuple[int, int], Partition] = {}
    for place, topic in enumerate(ctx.body.topic_data):
        name = _name(ctx, topic)
        for part in answers[place].partition_responses:
            if part.error_code is ErrorCode.none and name is not None:
                partition = ctx.broker.replicas.partition(name, part.index)
                if partition.is_held:
                    held[place, part.index] = partition
    future: asyncio.Future[Entity] = asyncio.get_running_loop().create_future()

    def flushed() -> None:
        if not future.done():
            future.set_result(_after_flush(ctx, answers, held))

    if ctx.broker.commit.after(held.values(), flushed):
        return future
    return ctx.respond.ProduceResponse(responses=tuple(answers), throttle_time_ms=0)


def _after_flush(
    ctx: Context, answers: list[Entity], held: Mapping[tuple[int, int], Partition]
) -> Entity:
    """The answers; what did not get to disk is refused, nobody may take it for stored."""

    def settled(place: int, part: Any) -> Entity:
        partition = held.get((place, part.index))
        if partition is None or partition.recovery_point > part.base_offset:
            entity: Entity = part
            return entity
        if partition.offline is None:
            gone = ErrorCode.unknown_topic_or_partition
            return _refused(ctx, part.index, gone, "the topic was deleted meanwhile")
        return _refused(ctx, part.index, ErrorCode.kafka_storage_error, str(partition.offline))

    make = ctx.respond
    return make.ProduceResponse(
        responses=tuple(
            make.TopicProduceResponse(
                # Up to version 12 a topic is named, from then on it is its id that tells it.
                name=getattr(answer, "name", ""),
                topic_id=getattr(answer, "topic_id", None),
                partition_responses=tuple(
                    settled(place, part) for part in answer.partition_responses
                ),
            )
            for place, answer in enumerate(answers)
        ),
        throttle_time_ms=0,
    )


def _has_transactional(body: Any) -> bool:
    """Whether any batch of the request says that it belongs to a transaction."""
    return any(
        part.records is not None
        and len(part.records) >= _HEADER_SIZE
        and part.records[_ATTRIBUTES_AT + 1] & _TRANSACTIONAL
        for topic in body.topic_data
        for part in topic.partition_data
    )


def _append(
    ctx: Context,
    topic: str | None,
    part: Any,
    verified: Mapping[TopicPartition, DomainError | None] | None,
) -> Entity:
    """Append one batch; returns the partition's answer. Raises DomainError."""
    index, data = part.index, part.records
    partition = _partition(ctx, topic, index)
    if not data:
        raise InvalidRecordError("a produce request must hold exactly one batch per partition")
    is_verified = False
    if verified is not None:
        key = partition.topic, index
        is_verified = key in verified
        error = verified.get(key)
        if error is not None:
            partition.refuse_unverified(data)
            raise error
    now_ms = ctx.broker.clock.now_ms()
    try:
        appended = partition.append(
            data,
            now_ms=now_ms,
            transaction_verified=is_verified,
            transaction_version=2 if ctx.version >= FIRST_ADDING_TO_TRANSACTION else 0,
            min_zstd_ok=ctx.version >= FIRST_WITH_ZSTD,
        )
    except _WITHOUT_LOG_START:
        raise
    except LogError as error:
        return _refused(
            ctx,
            index,
            error_code(error),
            str(error),
            getattr(error, "record_errors", ()),
            partition.log_start_offset,
        )
    return ctx.respond.PartitionProduceResponse(
        index=index,
        error_code=ErrorCode.none,
        base_offset=appended.base_offset,
        log_append_time_ms=appended.log_append_time_ms,
        log_start_offset=appended.log_start_offset,
        record_errors=(),
    )


def _partition(ctx: Context, topic: str | None, index: int) -> Partition:
    if topic is None:
        raise UnknownTopicIdError("no topic has this id")
    if topic in INTERNAL_TOPICS:
        raise InvalidTopicError(f"clients may not write to {topic}")
    partition: Partition = ctx.broker.replicas.partition(topic, index)
    return partition


def _refused(
    ctx: Context,
    index: int,
    code: ErrorCode,
    message: str | None,
    record_errors: tuple[tuple[int, str], ...] = (),
    log_start_offset: int = -1,
) -> Entity:
    make = ctx.respond
    if code is ErrorCode.kafka_storage_error or code is ErrorCode.unknown_server_error:
        _log.error("append failed", partition=index, cause=message)
    return make.PartitionProduceResponse(
        index=index,
        error_code=code,
        base_offset=-1,
        log_append_time_ms=-1,
        log_start_offset=log_start_offset,
        record_errors=tuple(
            make.BatchIndexAndErrorMessage(batch_index=at, batch_index_error_message=text)
            for at, text in record_errors
        ),
        error_message=message,
    )


# --- transactions --------------------------------------------------------------------------------


def _verify(ctx: Context, wait: Wait) -> Mapping[TopicPartition, DomainError | None] | None:
    """Ask the transaction coordinator about every partition where a transaction would begin.

    Returns an error or None for each of them; partitions with an open transaction of this producer
    are not asked about, and not in the answer. None: the request has to ``wait``.
    """
    broker, body = ctx.broker, ctx.body
    producers: set[tuple[int, int]] = set()
    batches: list[tuple[TopicPartition, Partition]] = []
    for topic in body.topic_data:
        name = _name(ctx, topic)
        for part in topic.partition_data:
            data = part.records
            if data is None or len(data) < _HEADER_SIZE:
                continue
            if not data[_ATTRIBUTES_AT + 1] & _TRANSACTIONAL:
                continue
            producers.add(_PRODUCER.unpack_from(data, _PRODUCER_AT))
            try:
                batches.append(((name or "", part.index), _partition(ctx, name, part.index)))
            except (InvalidTopicError, UnknownTopicIdError, UnknownTopicOrPartitionError):
                continue
            except StorageError:
                continue
    if len(producers) > 1:
        mixed = InvalidProducerIdMappingError(
            "transactional batches of more than one producer id and epoch in a request"
        )
        return {key: mixed for key, _ in batches}
    if not batches:
        return {}
    ((producer_id, epoch),) = producers
    asked = [
        key for key, partition in batches if not partition.has_open_transaction(producer_id, epoch)
    ]
    if not asked:
        return {}
    verified: dict[TopicPartition, DomainError | None] | None = broker.txns.verify(
        "Produce", ctx.version, body.transactional_id, producer_id, epoch, asked, ctx.origin, wait
    )
    return verified


def _name(ctx: Context, topic: Any) -> str | None:
    if ctx.version < FIRST_BY_ID:
        name: str = topic.name
        return name
    known = ctx.broker.metadata.topic_by_id(topic.topic_id)
    return None if known is None else known.name
