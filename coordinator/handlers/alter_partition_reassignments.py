"""AlterPartitionReassignments (45): put partitions on other brokers, or call that off.

There is one broker, so each partition stays where it is (success) or can not go where it is sent
(INVALID_REPLICA_ASSIGNMENT), and nothing is under way to be called off. Version 1 can forbid a
change of the replication factor (KIP-860), which is always 1.

Source: ``ReplicationControlManager.alterPartitionReassignments``; KIP-455.
"""

from __future__ import annotations

from typing import Any

from kio.schema.errors import ErrorCode

from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.security.acl import Operation
from fencepost.coordinator.wire import ApiKey, Entity
from fencepost.coordinator.wire.steps import Steps
from fencepost.logcore.machine import DomainError


@handles(ApiKey.ALTER_PARTITION_REASSIGNMENTS, versions=(0, 1), permission="ALTER Cluster")
def run(ctx: Context) -> Steps[Entity]:
    """Answer each partition by itself."""
    make, code, message = ctx.respond, ErrorCode.none, None
    if not ctx.may_on_cluster(Operation.ALTER):
        code, message = ErrorCode.cluster_authorization_failed, "Cluster authorization failed."
    topics = []
    for topic in ctx.body.topics:
        parts = []
        for part in topic.partitions:
            if code is ErrorCode.none:
                parts.append(_partition(ctx, topic.name, part))
            else:
                parts.append(_answer(ctx, part, code, message))
            yield
        topics.append(make.ReassignableTopicResponse(name=topic.name, partitions=tuple(parts)))
        yield
    return make.AlterPartitionReassignmentsResponse(
        allow_replication_factor_change=getattr(ctx.body, "allow_replication_factor_change", True),
        error_code=code,
        error_message=message,
        responses=tuple(topics),
    )


def _partition(ctx: Context, topic: str, part: Any) -> Entity:
    code, message = ErrorCode.none, None
    try:
        ctx.broker.metadata.having(topic, part.partition_index)
        if part.replicas is None:
            code, message = ErrorCode.no_reassignment_in_progress, "nothing is under way"
        else:
            ctx.broker.topics.check_replicas(part.partition_index, part.replicas)
    except DomainError as error:
        code, message = error_code(error), str(error)
    return _answer(ctx, part, code, message)


def _answer(ctx: Context, part: Any, code: ErrorCode, message: str | None) -> Entity:
    return ctx.respond.ReassignablePartitionResponse(
        partition_index=part.partition_index, error_code=code, error_message=message
    )
