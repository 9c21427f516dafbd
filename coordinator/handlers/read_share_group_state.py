"""ReadShareGroupState (84): return the state of share partitions to the partition leaders.

The request contains the leader's epoch, which fences former leaders.

Source: ``ShareCoordinatorShard.readStateAndMaybeUpdateLeaderEpoch``.
"""

from __future__ import annotations

from typing import Any

from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.share_state import answers, refused
from fencepost.coordinator.runtime.turns import Work
from fencepost.groups.share.commands import SharePartitionKey, StateRead
from fencepost.groups.share.state import ReadShareState
from fencepost.protocol import ApiKey, Entity


@handles(
    ApiKey.READ_SHARE_GROUP_STATE,
    versions=(0, 0),
    permission="CLUSTER_ACTION Cluster",
    refused=refused,
)
def run(ctx: Context) -> Work[Entity]:
    """Respond with the state of each share partition."""

    def result(reply: Any) -> dict[str, Any]:
        state: StateRead = reply
        return {
            "state_epoch": state.state_epoch,
            "start_offset": state.start_offset,
            "state_batches": tuple(
                [
                    ctx.respond.StateBatch(
                        first_offset=batch.first,
                        last_offset=batch.last,
                        delivery_state=batch.state,
                        delivery_count=batch.delivery_count,
                    )
                    for batch in state.batches
                ]
            ),
        }

    return answers(ctx, _command, result)


def _command(key: SharePartitionKey, part: Any) -> ReadShareState:
    return ReadShareState(key, part.leader_epoch)
