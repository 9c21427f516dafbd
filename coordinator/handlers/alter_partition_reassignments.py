"""AlterPartitionReassignments (45): put partitions on other brokers, or call that off.

Version 1 can forbid a change of the replication factor (KIP-860).

Source: ``ReplicationControlManager.alterPartitionReassignments``; KIP-455.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation
from fencepost.cluster.controller.reassignments import Reassign
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.answers import code_of
from fencepost.coordinator.handlers.deciding import MAX_ITEMS, decided
from fencepost.coordinator.runtime.turns import Work
from fencepost.coordinator.wire import ApiKey, Entity


@handles(ApiKey.ALTER_PARTITION_REASSIGNMENTS, versions=(0, 1), permission="ALTER Cluster")
def run(ctx: Context) -> Work[Entity]:
    """Answer each partition by itself."""
    make, body = ctx.respond, ctx.body
    may_change_factor = getattr(body, "allow_replication_factor_change", True)
    items = [
        Reassign(
            topic.name,
            part.partition_index,
            None if part.replicas is None else tuple(part.replicas),
        )
        for topic in body.topics
        for part in topic.partitions
    ]
    code: ErrorCode = ErrorCode.none
    message: str | None = None
    if not ctx.may_on_cluster(Operation.ALTER):
        code, message = ErrorCode.cluster_authorization_failed, "Cluster authorization failed."
    elif len(items) > MAX_ITEMS:
        code, message = ErrorCode.invalid_request, f"one request moves {MAX_ITEMS} partitions"
    if code is ErrorCode.none:
        decision = yield from decided(
            ctx,
            lambda controller: controller.alter_partition_reassignments(
                items, allow_replication_factor_change=may_change_factor
            ),
        )
        told = [(code_of(one), None if one is None else str(one)) for one in decision]
    else:
        told = [(code, message)] * len(items)
    outcomes = iter(told)
    topics = []
    for topic in body.topics:
        parts = []
        for part in topic.partitions:
            part_code, part_message = next(outcomes)
            parts.append(
                make.ReassignablePartitionResponse(
                    partition_index=part.partition_index,
                    error_code=part_code,
                    error_message=part_message,
                )
            )
            yield None
        topics.append(make.ReassignableTopicResponse(name=topic.name, partitions=tuple(parts)))
    return make.AlterPartitionReassignmentsResponse(
        allow_replication_factor_change=may_change_factor,
        error_code=code,
        error_message=message,
        responses=tuple(topics),
    )
