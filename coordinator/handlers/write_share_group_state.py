"""WriteShareGroupState (85): store state changes of share partitions for the partition leaders.

Version 1 adds the delivery-complete count (KIP-1226).

Source: ``ShareCoordinatorShard.writeState``.
"""

from __future__ import annotations

from typing import Any

from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.share_state import answers, refused
from fencepost.coordinator.runtime.turns import Work
from fencepost.groups.share.batches import UNKNOWN_COUNT, StateBatch
from fencepost.groups.share.commands import SharePartitionKey
from fencepost.groups.share.errors import InvalidShareRequestError
from fencepost.groups.share.state import MAX_STATE_BATCHES, TOO_MANY_BATCHES, WriteShareState
from fencepost.protocol import ApiKey, Entity


@handles(
    ApiKey.WRITE_SHARE_GROUP_STATE,
    versions=(0, 1),
    permission="CLUSTER_ACTION Cluster",
    refused=refused,
)
def run(ctx: Context) -> Work[Entity]:
    """Respond with the result of each share partition."""
    return answers(ctx, _command)


def _command(key: SharePartitionKey, part: Any) -> WriteShareState:
    if len(part.state_batches) > MAX_STATE_BATCHES:
        raise InvalidShareRequestError(TOO_MANY_BATCHES)
    return WriteShareState(
        key,
        part.state_epoch,
        part.leader_epoch,
        part.start_offset,
        getattr(part, "delivery_complete_count", UNKNOWN_COUNT),
        tuple(
            [
                StateBatch(
                    batch.first_offset,
                    batch.last_offset,
                    batch.delivery_state,
                    batch.delivery_count,
                )
                for batch in part.state_batches
            ]
        ),
    )
