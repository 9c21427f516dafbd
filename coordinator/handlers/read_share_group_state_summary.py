"""ReadShareGroupStateSummary (87): return the offsets of share partitions to the group coordinator.

Version 1 adds the delivery-complete count (KIP-1226).

Source: ``ShareCoordinatorShard.readStateSummary``.
"""

from __future__ import annotations

from typing import Any

from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.share_state import answers, refused
from fencepost.coordinator.runtime.turns import Work
from fencepost.groups.share.commands import SharePartitionKey
from fencepost.groups.share.state import ReadStateSummary, StateSummary
from fencepost.protocol import ApiKey, Entity


@handles(
    ApiKey.READ_SHARE_GROUP_STATE_SUMMARY,
    versions=(0, 1),
    permission="CLUSTER_ACTION Cluster",
    refused=refused,
)
def run(ctx: Context) -> Work[Entity]:
    """Respond with the offsets and epochs of each share partition."""
    return answers(ctx, _command, _result)


def _command(key: SharePartitionKey, _part: Any) -> ReadStateSummary:
    return ReadStateSummary(key)


def _result(reply: Any) -> dict[str, Any]:
    summary: StateSummary = reply
    return {
        "state_epoch": summary.state_epoch,
        "leader_epoch": summary.leader_epoch,
        "start_offset": summary.start_offset,
        "delivery_complete_count": summary.delivery_complete_count,
    }
