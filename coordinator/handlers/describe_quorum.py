"""DescribeQuorum (55): describe the metadata quorum, whose only voter and leader is this node.

Version 1 adds the times of the last fetch, version 2 directory ids, error messages and the nodes'
listeners. The epoch increases whenever the node starts. Voters have no directory ids, as under
kraft.version 0, because no other node can become a voter.

Source: ``KafkaRaftClient.handleDescribeQuorumRequest``; KIP-595, KIP-836, KIP-853.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.metadata.names import METADATA_TOPIC
from fencepost.protocol import ApiKey, Entity
from fencepost.protocol.steps import Steps

OWN = (METADATA_TOPIC, [0])
"""The metadata partition, the only one that a quorum replicates."""

NO_ERROR = ""
"""The error message of a success: Kafka sends an empty string here, not null."""


@handles(ApiKey.DESCRIBE_QUORUM, versions=(0, 2), permission="DESCRIBE Cluster")
def run(ctx: Context) -> Steps[Entity]:
    """Describe the metadata partition if the request names exactly that one."""
    broker, make = ctx.broker, ctx.respond
    ctx.require_on_cluster(Operation.DESCRIBE)
    topics = [(topic.topic_name, topic.partitions) for topic in ctx.body.topics[:2]]
    if [(name, [part.partition_index for part in parts[:2]]) for name, parts in topics] != [OWN]:
        return (yield from _unknown(ctx))
    host, port = ctx.advertised
    # The client's listener also serves the metadata log.
    listener = make.Listener(name=ctx.connection.session.listener, host=host, port=port)
    return make.DescribeQuorumResponse(
        error_code=ErrorCode.none,
        error_message=NO_ERROR,
        topics=(make.TopicData(topic_name=METADATA_TOPIC, partitions=(_own_partition(ctx),)),),
        nodes=(make.Node(node_id=broker.node_id, listeners=(listener,)),),
    )


def _own_partition(ctx: Context) -> Entity:
    make, metadata = ctx.respond, ctx.broker.storage.metadata_log
    now_ms, end = ctx.broker.clock.now_ms(), metadata.next_offset
    voter = make.ReplicaState(
        replica_id=ctx.broker.node_id,
        replica_directory_id=None,
        log_end_offset=end,
        last_fetch_timestamp=now_ms,
        last_caught_up_timestamp=now_ms,
    )
    return make.PartitionData(
        partition_index=0,
        error_code=ErrorCode.none,
        error_message=NO_ERROR,
        leader_id=ctx.broker.node_id,
        leader_epoch=metadata.epoch,
        high_watermark=end,
        current_voters=(voter,),
        observers=tuple(
            make.ReplicaState(
                replica_id=observer.replica_id,
                replica_directory_id=observer.directory_id,
                log_end_offset=observer.log_end_offset,
                last_fetch_timestamp=observer.last_fetch_ms,
                last_caught_up_timestamp=observer.last_caught_up_ms,
            )
            for observer in ctx.broker.observers()
        ),
    )


def _unknown(ctx: Context) -> Steps[Entity]:
    make = ctx.respond
    topics = []
    for topic in ctx.body.topics:
        parts = []
        for part in topic.partitions:
            parts.append(
                make.PartitionData(
                    partition_index=part.partition_index,
                    error_code=ErrorCode.unknown_topic_or_partition,
                    error_message=None,
                    leader_id=0,
                    leader_epoch=0,
                    high_watermark=0,
                    current_voters=(),
                    observers=(),
                )
            )
            yield
        topics.append(make.TopicData(topic_name=topic.topic_name, partitions=tuple(parts)))
        yield
    return make.DescribeQuorumResponse(
        error_code=ErrorCode.none, error_message=None, topics=tuple(topics), nodes=()
    )
