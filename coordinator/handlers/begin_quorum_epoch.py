"""BeginQuorumEpoch (53): another node announces that it leads the quorum."""

from __future__ import annotations

from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.other_voters import refused
from fencepost.protocol import ApiKey, Entity


@handles(ApiKey.BEGIN_QUORUM_EPOCH, versions=(0, 1), permission="CLUSTER_ACTION Cluster")
def run(ctx: Context) -> Entity:
    """Refuse the request: the sender is not a voter of this quorum."""
    return refused(ctx)
