"""WriteTxnMarkers (27): append the end markers of transactions to partitions of this broker.

Sent by transaction coordinators of other brokers, and by tools that abort a hanging transaction.
Version 2 carries the transaction version of each marker. The sender knows few errors and takes any
other for a bug of ours, so only those are answered (``TransactionMarkerRequestCompletionHandler``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kio.schema.errors import ErrorCode

from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.runtime.errors import ShardError
from fencepost.coordinator.runtime.turns import Work
from fencepost.coordinator.security.acl import Operation
from fencepost.coordinator.wire import ApiKey, Entity
from fencepost.coordinator.wire.steps import Steps
from fencepost.logcore.errors import LogError
from fencepost.logcore.machine import EndMarker, ProducerStamp
from fencepost.logcore.partition import Partition

ANSWERS = frozenset(
    {
        ErrorCode.invalid_producer_epoch,
        ErrorCode.transaction_coordinator_fenced,
        ErrorCode.unknown_topic_or_partition,
        ErrorCode.not_leader_or_follower,
        ErrorCode.kafka_storage_error,
    }
)

Write = Callable[[Context, Any, str, int], ErrorCode]
"""What becomes of one marker in one partition."""


@handles(
    ApiKey.WRITE_TXN_MARKERS, versions=(1, 2), permission="ALTER Cluster or CLUSTER_ACTION Cluster"
)
def run(ctx: Context) -> Work[Entity]:
    """Write marker by marker, partition by partition; answer when they are on disk."""
    if not (
        ctx.may_on_cluster(Operation.ALTER, audited=False)
        or ctx.may_on_cluster(Operation.CLUSTER_ACTION)
    ):
        return (yield from _write_all(ctx, _refuse))
    answer = yield from _write_all(ctx, _write)
    find = ctx.broker.logs.find_open
    held: dict[Partition, None] = {}
    for marker in answer.markers:
        for topic in marker.topics:
            for part in topic.partitions:
                if part.error_code is ErrorCode.none:
                    partition = find((topic.name, part.partition_index))
                    if partition is not None:
                        held[partition] = None
                yield None
    disk = ctx.broker.flusher.flushed(held)
    if disk is not None:
        yield disk
    # A marker may be written twice. A partition that is off line by now refuses the second one.
    return (yield from _write_all(ctx, _write)) if any(one.offline for one in held) else answer


def _write_all(ctx: Context, write: Write) -> Steps[Entity]:
    # The reader of the answer looks for one row of each producer, topic and partition.
    codes: dict[int, dict[str, dict[int, ErrorCode]]] = {}
    for marker in ctx.body.markers:
        for topic in marker.topics:
            for index in topic.partition_indexes:
                of_topics = codes.setdefault(marker.producer_id, {})
                of_topics.setdefault(topic.name, {})[index] = write(ctx, marker, topic.name, index)
                yield
    respond = ctx.respond
    markers = []
    for producer_id, of_topics in codes.items():
        topics = []
        for name, of_partitions in of_topics.items():
            parts = []
            for index, code in of_partitions.items():
                parts.append(
                    respond.WritableTxnMarkerPartitionResult(partition_index=index, error_code=code)
                )
                yield
            topics.append(respond.WritableTxnMarkerTopicResult(name=name, partitions=tuple(parts)))
        markers.append(
            respond.WritableTxnMarkerResult(producer_id=producer_id, topics=tuple(topics))
        )
    return respond.WriteTxnMarkersResponse(markers=tuple(markers))


def _refuse(_ctx: Context, _marker: Any, _topic: str, _index: int) -> ErrorCode:
    return ErrorCode.cluster_authorization_failed


def _write(ctx: Context, marker: Any, topic: str, index: int) -> ErrorCode:
    if marker.producer_id < 0 or marker.producer_epoch < 0:
        return ErrorCode.invalid_request
    try:
        end = EndMarker(
            ProducerStamp(marker.producer_id, marker.producer_epoch),
            marker.transaction_result,
            marker.coordinator_epoch,
            getattr(marker, "transaction_version", 0),
        )
        written = ctx.broker.txns.markers.write_one((topic, index), end)
    except ShardError:
        return ErrorCode.not_leader_or_follower
    except LogError as error:
        code = error_code(error)
        return code if code in ANSWERS else ErrorCode.kafka_storage_error
    return ErrorCode.none if written else ErrorCode.unknown_topic_or_partition
