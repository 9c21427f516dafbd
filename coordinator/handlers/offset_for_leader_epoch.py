"""OffsetForLeaderEpoch (23): return an epoch's end offset, so that readers detect truncation.

Source: ``Partition.lastOffsetForLeaderEpoch``, KIP-320.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation
from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.errors import TopicAuthorizationError
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.rights import NO_TOPICS, refused_topics
from fencepost.logcore.machine import DomainError
from fencepost.protocol import ApiKey, Entity
from fencepost.protocol.steps import Steps


@handles(
    ApiKey.OFFSET_FOR_LEADER_EPOCH,
    versions=(2, 4),
    permission="DESCRIBE Topic or CLUSTER_ACTION Cluster",
)
def run(ctx: Context) -> Steps[Entity]:
    """Respond with the epoch and end offset of each partition."""
    make, requested = ctx.respond, ctx.body.topics
    refused, topics = NO_TOPICS, []
    if not ctx.may_on_cluster(Operation.CLUSTER_ACTION, audited=False):
        names = (topic.topic for topic in requested)
        refused = yield from refused_topics(ctx, Operation.DESCRIBE, names)
    for topic in requested:
        parts = []
        for part in topic.partitions:
            parts.append(_partition(ctx, topic.topic, part, refused))
            yield
        topics.append(make.OffsetForLeaderTopicResult(topic=topic.topic, partitions=tuple(parts)))
    return make.OffsetForLeaderEpochResponse(topics=tuple(topics))


def _partition(ctx: Context, topic: str, part: Any, refused: Collection[str]) -> Entity:
    code, epoch, end_offset = ErrorCode.none, -1, -1
    try:
        if topic in refused:
            raise TopicAuthorizationError(f"the client may not describe {topic}")
        index, replicas = part.partition, ctx.broker.replicas
        partition = replicas.leader(topic, index, part.current_leader_epoch)
        epoch, end_offset = partition.reader.end_of_epoch(part.leader_epoch)
    except DomainError as error:
        code = error_code(error)
    return ctx.respond.EpochEndOffset(
        error_code=code, partition=part.partition, leader_epoch=epoch, end_offset=end_offset
    )
