"""Refuse requests between the voters of a quorum: this node is the only voter.

Source: ``KafkaRaftClient.handleVoteRequest`` and its neighbours; KIP-595, KIP-853.
"""

from __future__ import annotations

from typing import Any

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation
from fencepost.coordinator.handlers import Context
from fencepost.coordinator.metadata.names import METADATA_TOPIC
from fencepost.protocol import Entity


def refused(ctx: Context) -> Entity:
    """Respond with the leader and INCONSISTENT_VOTER_SET."""
    ctx.require_on_cluster(Operation.CLUSTER_ACTION)
    make, node_id = ctx.respond, ctx.broker.node_id
    if ctx.body.cluster_id not in (None, ctx.broker.cluster_id):
        return make.error(ErrorCode.inconsistent_cluster_id)
    requested = [(topic.topic_name, [part.partition_index for part in topic.partitions[:2]])
             for topic in ctx.body.topics[:2]]  # fmt: skip
    if requested != [(METADATA_TOPIC, [0])]:
        return make.error(ErrorCode.invalid_request)
    fields: dict[str, Any] = {
        "partition_index": 0,
        "error_code": ErrorCode.inconsistent_voter_set,
        "leader_id": node_id,
        "leader_epoch": ctx.controller.log.epoch,
    }
    host, port = ctx.advertised
    part = make.PartitionData(**fields, **_EXTRA_FIELDS.get(ctx.api_key, {}))
    return make.message(
        error_code=ErrorCode.none,
        topics=(make.TopicData(topic_name=METADATA_TOPIC, partitions=(part,)),),
        node_endpoints=(make.NodeEndpoint(node_id=node_id, host=host, port=port),),
    )


_EXTRA_FIELDS: dict[int, dict[str, Any]] = {52: {"vote_granted": False}}
"""Fields, by API key, that only one of the responses has: ``vote_granted`` of Vote (52)."""
