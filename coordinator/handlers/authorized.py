"""Bit fields of authorized operations: everything that a client may do with a resource.

A bit's position is the operation's code in ``AclOperation``. Source: ``AclEntry``'s operations per
resource type, ``AuthHelper.authorizedOperations`` (KIP-430).
"""

from __future__ import annotations

from typing import Final

from fencepost.cluster.acl import CLUSTER_NAME, OPERATIONS, Operation, ResourceType
from fencepost.coordinator.handlers import Context

NOT_ASKED: Final = -(2**31)
"""The value for a request that did not ask for authorized operations."""


def _all(kind: ResourceType) -> int:
    return sum(1 << operation for operation in OPERATIONS[kind])


TOPIC: Final = _all(ResourceType.TOPIC)
"""All operations on a topic."""

GROUP: Final = _all(ResourceType.GROUP)
"""All operations on a group."""

CLUSTER: Final = _all(ResourceType.CLUSTER)
"""All operations on the cluster."""


def of_topic(ctx: Context, name: str) -> int:
    """Return the operations that the client may perform on a topic, whether or not it exists."""
    return TOPIC & _allowed(ctx, ResourceType.TOPIC, name)


def of_group(ctx: Context, group_id: str) -> int:
    """Return the operations that the client may perform on a group."""
    return GROUP & _allowed(ctx, ResourceType.GROUP, group_id)


def of_cluster(ctx: Context) -> int:
    """Return the client's operations on the cluster; 0 if it may not describe the cluster."""
    if not ctx.may_on_cluster(Operation.DESCRIBE):
        return 0
    return CLUSTER & _allowed(ctx, ResourceType.CLUSTER, CLUSTER_NAME)


def _allowed(ctx: Context, kind: ResourceType, name: str) -> int:
    authorizer = ctx.broker.authorizer
    if authorizer is None:
        return -1
    return authorizer.operations(ctx.connection.session, kind, name)
