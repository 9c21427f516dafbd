"""WriteTxnMarkers (27): append the end markers of transactions to partitions of this broker.

Sent by transaction coordinators of other brokers, and by tools that abort a hanging transaction.
Version 2 carries the transaction version of each marker. The sender knows few errors and takes any
other for a bug of ours, so only those are answered (``TransactionMarkerRequestCompletionHandler``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from kio.schema.errors import ErrorCode

from coordinator.background import Pace
from coordinator.errors import error_code
from coordinator.handlers import Context, handles
from coordinator.shard_errors import ShardError
from coordinator.wire import ApiKey, Entity
from logcore.errors import LogError
from logcore.machine import ProducerStamp
from txn.commands import TopicPartition

ANSWERS = frozenset(
    {
        ErrorCode.invalid_producer_epoch,
        ErrorCode.transaction_coordinator_fenced,
        ErrorCode.unknown_topic_or_partition,
        ErrorCode.not_leader_or_follower,
        ErrorCode.kafka_storage_error,
    }
)


@handles(
    ApiKey.WRITE_TXN_MARKERS, versions=(1, 2), permission="ALTER Cluster or CLUSTER_ACTION Cluster"
)
async def run(ctx: Context) -> Entity:
    """Write marker by marker, partition by partition; answer when they are on disk."""
    codes = await _write_all(ctx)
    replicas = ctx.broker.replicas
    written = {place for place, code in _places(ctx, codes) if code is ErrorCode.none}
    held = [one for one in map(replicas.find_open, written) if one is not None]
    on_disk = asyncio.Event()
    if ctx.broker.commit.after(held, on_disk.set):
        await on_disk.wait()
        if any(one.offline for one in held):
            # A marker may be written twice: what is off line by then says so at the second time.
            codes = await _write_all(ctx)
    return _response(ctx, codes)


async def _write_all(ctx: Context) -> list[ErrorCode]:
    """Write them in the order of the request; others get their turn where there are many."""
    pace = Pace()
    codes = []
    for marker in ctx.body.markers:
        for topic in marker.topics:
            for index in topic.partition_indexes:
                codes.append(_write(ctx, marker, topic.name, index))
                await pace()
    return codes


def _places(ctx: Context, codes: list[ErrorCode]) -> Iterator[tuple[TopicPartition, ErrorCode]]:
    """Each partition of the request with its code."""
    told = iter(codes)
    for marker in ctx.body.markers:
        for topic in marker.topics:
            for index in topic.partition_indexes:
                yield (topic.name, index), next(told)


def _response(ctx: Context, codes: list[ErrorCode]) -> Entity:
    respond, told = ctx.respond, iter(codes)
    return respond.WriteTxnMarkersResponse(
        markers=tuple(
            respond.WritableTxnMarkerResult(
                producer_id=marker.producer_id,
                topics=tuple(
                    respond.WritableTxnMarkerTopicResult(
                        name=topic.name,
                        partitions=tuple(
                            respond.WritableTxnMarkerPartitionResult(
                                partition_index=index, error_code=next(told)
                            )
                            for index in topic.partition_indexes
                        ),
                    )
                    for topic in marker.topics
                ),
            )
            for marker in ctx.body.markers
        )
    )


def _write(ctx: Context, marker: Any, topic: str, index: int) -> ErrorCode:
    if marker.producer_id < 0 or marker.producer_epoch < 0:
        return ErrorCode.invalid_request
    try:
        written = ctx.broker.txns.markers.write_one(
            (topic, index),
            ProducerStamp(marker.producer_id, marker.producer_epoch),
            commit=marker.transaction_result,
            coordinator_epoch=marker.coordinator_epoch,
            transaction_version=getattr(marker, "transaction_version", 0),
        )
    except ShardError:
        return ErrorCode.not_leader_or_follower
    except LogError as error:
        code = error_code(error)
        return code if code in ANSWERS else ErrorCode.kafka_storage_error
    return ErrorCode.none if written else ErrorCode.unknown_topic_or_partition
