"""ListPartitionReassignments (46): list partitions that are being reassigned.

Source: ``ReplicationControlManager.listPartitionReassignments``; KIP-455.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.answers import each_row
from fencepost.coordinator.runtime.turns import Work
from fencepost.protocol import ApiKey, Entity
from fencepost.protocol.steps import Steps


def refused(ctx: Context, code: int, message: str | None) -> Steps[Entity]:
    """Name the requested partitions, without replicas, next to the top-level error."""
    make = ctx.respond
    topics = []
    for topic in ctx.body.topics or ():
        parts = yield from each_row(
            topic.partition_indexes,
            lambda index: make.OngoingPartitionReassignment(partition_index=index),
        )
        topics.append(make.OngoingTopicReassignment(name=topic.name, partitions=parts))
    return make.ListPartitionReassignmentsResponse(
        error_code=code, error_message=message, topics=tuple(topics)
    )


@handles(
    ApiKey.LIST_PARTITION_REASSIGNMENTS,
    versions=(0, 0),
    permission="DESCRIBE Cluster",
    refused=refused,
)
def run(ctx: Context) -> Work[Entity]:
    """Respond with the reassignments in progress among the requested partitions, or all."""
    ctx.require_on_cluster(Operation.DESCRIBE)
    make, body = ctx.respond, ctx.body
    requested = None
    if body.topics is not None:
        requested = []
        for topic in body.topics:
            requested += [(topic.name, index) for index in topic.partition_indexes]
            yield None
    machine = ctx.controller.current_machine()
    by_topic: dict[str, list[Entity]] = {}
    for name, index, state in machine.list_partition_reassignments(requested):
        by_topic.setdefault(name, []).append(
            make.OngoingPartitionReassignment(
                partition_index=index,
                replicas=state.replicas,
                adding_replicas=state.adding_replicas,
                removing_replicas=state.removing_replicas,
            )
        )
        yield None
    return make.ListPartitionReassignmentsResponse(
        error_code=ErrorCode.none,
        error_message=None,
        topics=tuple(
            make.OngoingTopicReassignment(name=name, partitions=tuple(parts))
            for name, parts in by_topic.items()
        ),
    )
