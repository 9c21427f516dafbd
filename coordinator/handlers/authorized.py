"""The bit fields of "authorised operations": all that the client may do with something.

A bit's position is the operation's code in ``AclOperation``. Source: ``AclEntry``'s operations per
resource type, ``AuthHelper.authorizedOperations`` (KIP-430).
"""

from __future__ import annotations

from typing import Final

from fencepost.cluster.acl import CLUSTER_NAME, OPERATIONS, Operation, ResourceType
from fencepost.coordinator.handlers import Context

NOT_ASKED: Final = -(2**31)
"""The request did not ask."""


def _all(kind: ResourceType) -> int:
    return sum(1 << operation for operation in OPERATIONS[kind])


TOPIC: Final = _all(ResourceType.TOPIC)
"""What can be done with a topic."""

GROUP: Final = _all(ResourceType.GROUP)
"""What can be done with a group."""

CLUSTER: Final = _all(ResourceType.CLUSTER)
"""What can be done with the cluster."""


def of_topic(ctx: Context, name: str) -> int:
    """What the client may do with a topic; whether it exists does not matter."""
    return TOPIC & _allowed(ctx, ResourceType.TOPIC, name)


def of_group(ctx: Context, group_id: str) -> int:
    """What the client may do with a group."""
    return GROUP & _allowed(ctx, ResourceType.GROUP, group_id)


def of_cluster(ctx: Context) -> int:
    """What the client may do with the cluster; nothing is told to who may not describe it."""
    if not ctx.may_on_cluster(Operation.DESCRIBE):
        return 0
    return CLUSTER & _allowed(ctx, ResourceType.CLUSTER, CLUSTER_NAME)


def _allowed(ctx: Context, kind: ResourceType, name: str) -> int:
    authorizer = ctx.broker.authorizer
    if authorizer is None:
        return -1
    return authorizer.operations(ctx.connection.session, kind, name)
