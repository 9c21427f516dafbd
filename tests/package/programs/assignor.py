"""A server-side assignor that a user installs: range in reverse order."""

from __future__ import annotations

from fencepost.groups.assignors.range import RangeAssignor


class Backwards(RangeAssignor):
    @property
    def name(self) -> str:
        return "backwards"

    def assign(self, group):
        given = list(super().assign(group).values())
        return dict(zip(group.members, reversed(given), strict=True))
