"""Fetch (1) on a controller's listener: read the metadata log.

The listener serves only that log, and only requests with topic ids: version 13 and later.

Source: ``KafkaRaftClient.handleFetchRequest``; KIP-595, KIP-630, KIP-1166.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation
from fencepost.coordinator.controller.metadata_log_reader import MetadataLogReader, MetadataRead
from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.handlers import Context, handles, replica_id_of, request_ms
from fencepost.coordinator.metadata.names import METADATA_TOPIC_ID
from fencepost.coordinator.runtime.turns import Work
from fencepost.logcore.epochs import check_leader_epoch
from fencepost.logcore.machine import DomainError
from fencepost.protocol import ApiKey, Entity

FIRST_WITH_TOPIC_IDS: Final = 13
NOT_ASKED: Final = (1 << 63) - 1
"""The default for clients that do not wait for high watermark changes."""


@handles(ApiKey.FETCH, versions=(4, 18), permission="CLUSTER_ACTION Cluster")
def run(ctx: Context) -> Work[Entity]:
    """Respond with records, a snapshot id or a diverging epoch; wait if none of them exists yet."""
    ctx.require_on_cluster(Operation.CLUSTER_ACTION)
    body, log = ctx.body, ctx.controller.log
    if ctx.version < FIRST_WITH_TOPIC_IDS:
        return ctx.respond.error(ErrorCode.invalid_request)
    if body.cluster_id is not None and body.cluster_id != ctx.broker.cluster_id:
        return ctx.respond.error(ErrorCode.inconsistent_cluster_id)
    part = _only_partition(body)
    if part is None:
        return ctx.respond.error(ErrorCode.invalid_request)
    numbers = (part.fetch_offset, part.last_fetched_epoch, part.current_leader_epoch)
    if request_ms(body.max_wait) < 0 or min(numbers) < 0:
        return _answer(ctx, log, MetadataRead(), ErrorCode.invalid_request)
    try:
        check_leader_epoch(part.current_leader_epoch, log.epoch)
        read = yield from _read(ctx, log, part, request_ms(body.max_wait))
    except DomainError as error:
        return _answer(ctx, log, MetadataRead(), error_code(error))
    return _answer(ctx, log, read, ErrorCode.none)


def _only_partition(body: Any) -> Any | None:
    if len(body.topics) != 1 or body.topics[0].topic_id != METADATA_TOPIC_ID:
        return None
    (topic,) = body.topics
    if len(topic.partitions) != 1 or topic.partitions[0].partition != 0:
        return None
    return topic.partitions[0]


def _read(ctx: Context, log: MetadataLogReader, part: Any, max_wait_ms: int) -> Work[MetadataRead]:
    replica_id = replica_id_of(ctx.body)
    high_watermark = getattr(part, "high_watermark", NOT_ASKED)

    def read() -> MetadataRead:
        records = log.read(part.fetch_offset, part.last_fetched_epoch, ctx.body.max_bytes)
        if replica_id >= 0 and records.diverging is None and records.snapshot is None:
            directory_id = getattr(part, "replica_directory_id", None)
            log.fetched(replica_id, directory_id, part.fetch_offset)
            ctx.controller.observed()
        return records

    records = read()
    if log.has_news(records, high_watermark):
        return records
    yield from log.wait(part.fetch_offset, high_watermark, max_wait_ms)
    return read()


def _answer(ctx: Context, log: MetadataLogReader, read: MetadataRead, code: ErrorCode) -> Entity:
    make, node_id = ctx.respond, ctx.broker.node_id
    further: dict[str, Entity] = {}
    if read.diverging is not None:
        epoch, end_offset = read.diverging
        further["diverging_epoch"] = make.EpochEndOffset(epoch=epoch, end_offset=end_offset)
    if read.snapshot is not None:
        end_offset, epoch = read.snapshot
        further["snapshot_id"] = make.SnapshotId(end_offset=end_offset, epoch=epoch)
    part = make.PartitionData(
        partition_index=0,
        error_code=code,
        high_watermark=log.high_watermark,
        last_stable_offset=log.high_watermark,
        log_start_offset=log.partition.log_start_offset,
        current_leader=make.LeaderIdAndEpoch(leader_id=node_id, leader_epoch=log.epoch),
        aborted_transactions=(),
        records=read.records,
        **further,
    )
    host, port = ctx.advertised
    return make.FetchResponse(
        error_code=ErrorCode.none,
        session_id=0,
        responses=(make.FetchableTopicResponse(topic_id=METADATA_TOPIC_ID, partitions=(part,)),),
        node_endpoints=(make.NodeEndpoint(node_id=node_id, host=host, port=port, rack=None),),
    )
