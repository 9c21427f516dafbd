"""ListPartitionReassignments (46): which partitions are on their way to other brokers: none.

Source: ``ReplicationControlManager.listPartitionReassignments``; KIP-455.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.security.acl import Operation
from fencepost.coordinator.wire import ApiKey, Entity


@handles(ApiKey.LIST_PARTITION_REASSIGNMENTS, versions=(0, 0), permission="DESCRIBE Cluster")
def run(ctx: Context) -> Entity:
    """Answer with nothing, whatever was asked for: there is no other broker."""
    ctx.require_on_cluster(Operation.DESCRIBE)
    return ctx.respond.ListPartitionReassignmentsResponse(
        error_code=ErrorCode.none, error_message=None, topics=()
    )
