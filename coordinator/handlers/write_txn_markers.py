"""WriteTxnMarkers (27): append transaction markers to partitions that this broker leads.

The transaction coordinators of other brokers send this request, and so do tools that abort a
hanging transaction. Version 2 carries the transaction version of each marker.
``services/marker_appends.py`` determines the error codes.
"""

from __future__ import annotations

from collections.abc import Iterator

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.runtime.turns import Work
from fencepost.logcore.machine import EndMarker, ProducerStamp
from fencepost.protocol import ApiKey, Entity
from fencepost.protocol.steps import Steps
from fencepost.txn.commands import TopicPartition

Codes = dict[int, dict[TopicPartition, ErrorCode]]
"""The error codes by producer id and partition. The response has one row per producer id."""


@handles(
    ApiKey.WRITE_TXN_MARKERS, versions=(1, 2), permission="ALTER Cluster or CLUSTER_ACTION Cluster"
)
def run(ctx: Context) -> Work[Entity]:
    """Append the marker of each partition; respond once all markers are committed."""
    if not (
        ctx.may_on_cluster(Operation.ALTER, audited=False)
        or ctx.may_on_cluster(Operation.CLUSTER_ACTION)
    ):
        refused: Codes = {}
        for marker, partition in _requested_markers(ctx):
            of_producer = refused.setdefault(marker.stamp.producer_id, {})
            of_producer[partition] = ErrorCode.cluster_authorization_failed
            yield None
        return (yield from _response(ctx, refused))
    appends = ctx.broker.txns.markers.appends()
    for marker, partition in _requested_markers(ctx):
        appends.write(marker, partition)
        yield None
    committed = appends.committed()
    if committed is not None:
        yield committed
    appends.settle()
    return (yield from _response(ctx, appends.codes))


def _requested_markers(ctx: Context) -> Iterator[tuple[EndMarker, TopicPartition]]:
    for marker in ctx.body.markers:
        end = EndMarker(
            ProducerStamp(marker.producer_id, marker.producer_epoch),
            marker.transaction_result,
            marker.coordinator_epoch,
            getattr(marker, "transaction_version", 0),
        )
        for topic in marker.topics:
            for index in topic.partition_indexes:
                yield end, (topic.name, index)


def _response(ctx: Context, codes: Codes) -> Steps[Entity]:
    respond = ctx.respond
    markers = []
    for producer_id, of_partitions in codes.items():
        of_topics: dict[str, list[Entity]] = {}
        for (name, index), code in of_partitions.items():
            of_topics.setdefault(name, []).append(
                respond.WritableTxnMarkerPartitionResult(partition_index=index, error_code=code)
            )
            yield
        topics = tuple(
            respond.WritableTxnMarkerTopicResult(name=name, partitions=tuple(parts))
            for name, parts in of_topics.items()
        )
        markers.append(respond.WritableTxnMarkerResult(producer_id=producer_id, topics=topics))
    return respond.WriteTxnMarkersResponse(markers=tuple(markers))
