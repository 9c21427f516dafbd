"""Vote (52): a candidate requests a vote in a quorum election."""

from __future__ import annotations

from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.other_voters import refused
from fencepost.protocol import ApiKey, Entity


@handles(ApiKey.VOTE, versions=(0, 2), permission="CLUSTER_ACTION Cluster")
def run(ctx: Context) -> Entity:
    """Refuse the request: the sender is not a voter of this quorum."""
    return refused(ctx)
