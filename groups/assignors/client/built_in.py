"""The client-side assignors that a group may name without a plug-in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fencepost.groups.assignors.client.model import ClientAssignor
from fencepost.groups.assignors.client.range import RangeAssignor
from fencepost.groups.assignors.client.roundrobin import RoundRobinAssignor
from fencepost.groups.assignors.client.sticky import CooperativeStickyAssignor, StickyAssignor

BUILT_IN: Final[Mapping[str, ClientAssignor]] = {
    assignor.name: assignor
    for assignor in (
        RangeAssignor(),
        RoundRobinAssignor(),
        StickyAssignor(),
        CooperativeStickyAssignor(),
    )
}
"""The assignors by their names."""
