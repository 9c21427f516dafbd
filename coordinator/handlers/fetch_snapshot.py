"""FetchSnapshot (59): return a chunk of a snapshot of the metadata log (KIP-630).

Source: ``KafkaRaftClient.handleFetchSnapshotRequest``.
"""

from __future__ import annotations

from typing import Any

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation
from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.errors import UnknownTopicOrPartitionError
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.metadata.names import METADATA_TOPIC
from fencepost.coordinator.metadata.snapshots import SnapshotId
from fencepost.logcore.epochs import check_leader_epoch
from fencepost.logcore.machine import DomainError
from fencepost.protocol import ApiKey, Entity


@handles(ApiKey.FETCH_SNAPSHOT, versions=(0, 1), permission="CLUSTER_ACTION Cluster")
def run(ctx: Context) -> Entity:
    """Respond with the snapshot's bytes from the requested position, not aligned to batches."""
    ctx.require_on_cluster(Operation.CLUSTER_ACTION)
    make, body, node_id = ctx.respond, ctx.body, ctx.broker.node_id
    if body.cluster_id is not None and body.cluster_id != ctx.broker.cluster_id:
        return make.error(ErrorCode.inconsistent_cluster_id)
    if len(body.topics) != 1 or len(body.topics[0].partitions) != 1:
        return make.error(ErrorCode.invalid_request)
    (topic,), (part,) = body.topics, body.topics[0].partitions
    code, size, piece = ErrorCode.none, 0, b""
    try:
        size, piece = _slice(ctx, topic.name, part)
    except DomainError as error:
        code = error_code(error)
    host, port = ctx.advertised
    snapshot = part.snapshot_id
    answer = make.PartitionSnapshot(
        index=part.partition,
        error_code=code,
        snapshot_id=make.SnapshotId(end_offset=snapshot.end_offset, epoch=snapshot.epoch),
        current_leader=make.LeaderIdAndEpoch(
            leader_id=node_id, leader_epoch=ctx.controller.log.epoch
        ),
        size=size,
        position=0 if code else part.position,
        unaligned_records=piece,
    )
    return make.FetchSnapshotResponse(
        error_code=ErrorCode.none,
        topics=(make.TopicSnapshot(name=topic.name, partitions=(answer,)),),
        node_endpoints=(make.NodeEndpoint(node_id=node_id, host=host, port=port),),
    )


def _slice(ctx: Context, topic: str, part: Any) -> tuple[int, bytes]:
    log = ctx.controller.log
    if (topic, part.partition) != (METADATA_TOPIC, 0):
        raise UnknownTopicOrPartitionError(f"only {METADATA_TOPIC}-0 has snapshots")
    # The epoch is not optional: −1 counts as an old epoch.
    check_leader_epoch(max(part.current_leader_epoch, 0), log.epoch)
    snapshot_id = SnapshotId(part.snapshot_id.end_offset, part.snapshot_id.epoch)
    return log.snapshot_slice(snapshot_id, part.position, ctx.body.max_bytes)
