"""Requests about share groups, sent to a single broker only.

In a cluster, the coordinator of a group may be on any broker.
"""

from __future__ import annotations

from typing import Final

from tests.answers.asking import OTHER, Asker
from tests.oracle import traces_share


def members(ask: Asker) -> None:
    """ShareGroupHeartbeat and ShareGroupDescribe."""
    if OTHER not in ask.places:
        traces_share.refused_heartbeats(ask)
        traces_share.members_of_share_groups(ask)


def offsets(ask: Asker) -> None:
    """DescribeShareGroupOffsets, AlterShareGroupOffsets and DeleteShareGroupOffsets."""
    if OTHER not in ask.places:
        traces_share.offsets_of_share_groups(ask)


SCRIPT: Final = (members, offsets)
