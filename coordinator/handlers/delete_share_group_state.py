"""DeleteShareGroupState (86): delete the state of share partitions.

The group coordinator sends this request.

Source: ``ShareCoordinatorShard.deleteState``.
"""

from __future__ import annotations

from typing import Any

from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.share_state import answers, refused
from fencepost.coordinator.runtime.turns import Work
from fencepost.groups.share.commands import SharePartitionKey
from fencepost.groups.share.state import DeleteState
from fencepost.protocol import ApiKey, Entity


@handles(
    ApiKey.DELETE_SHARE_GROUP_STATE,
    versions=(0, 0),
    permission="CLUSTER_ACTION Cluster",
    refused=refused,
)
def run(ctx: Context) -> Work[Entity]:
    """Respond with the result of each share partition."""
    return answers(ctx, _command)


def _command(key: SharePartitionKey, _part: Any) -> DeleteState:
    return DeleteState(key)
