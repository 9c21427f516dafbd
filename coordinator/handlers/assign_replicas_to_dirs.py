"""AssignReplicasToDirs (73): record the log directories of a broker's replicas (KIP-858).

Source: ``ReplicationControlManager.handleAssignReplicasToDirs``.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation
from fencepost.cluster.controller.isr import DirectoryAssignment
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.answers import code_of
from fencepost.coordinator.handlers.broker_registration import ZERO
from fencepost.coordinator.handlers.controller_decisions import MAX_ITEMS, decided
from fencepost.coordinator.runtime.turns import Work
from fencepost.protocol import ApiKey, Entity


@handles(ApiKey.ASSIGN_REPLICAS_TO_DIRS, versions=(0, 0), permission="CLUSTER_ACTION Cluster")
def run(ctx: Context) -> Work[Entity]:
    """Respond with the result of each partition."""
    ctx.require_on_cluster(Operation.CLUSTER_ACTION)
    body, make = ctx.body, ctx.respond
    items = [
        DirectoryAssignment(directory.id_ or ZERO, topic.topic_id or ZERO, part.partition_index)
        for directory in body.directories
        for topic in directory.topics
        for part in topic.partitions
    ]
    if len(items) > MAX_ITEMS:
        return make.error(ErrorCode.invalid_request)
    decision = yield from decided(
        ctx,
        lambda controller: controller.assign_replicas_to_dirs(
            body.broker_id, body.broker_epoch, items
        ),
    )
    answers = iter(decision)
    directories = []
    for directory in body.directories:
        topics = []
        for topic in directory.topics:
            parts = []
            for part in topic.partitions:
                code = code_of(next(answers))
                parts.append(
                    make.PartitionData(partition_index=part.partition_index, error_code=code)
                )
                yield None
            topics.append(make.TopicData(topic_id=topic.topic_id, partitions=tuple(parts)))
        directories.append(make.DirectoryData(id_=directory.id_, topics=tuple(topics)))
    return make.AssignReplicasToDirsResponse(
        error_code=ErrorCode.none, directories=tuple(directories)
    )
