"""Server-side assignors that are not ours: computed elsewhere, bounded in time, never trusted.

The machine asks for a target with the effect :class:`ComputeTarget` and goes on with the target it
has; :class:`TargetComputed` brings the answer, whenever it comes, or what went wrong. An answer
counts if the group is still as it was when it was asked, and only after the same check that every
assignor's result passes. Until then, and after a failure, the group keeps its last target.
"""

from __future__ import annotations

from typing import ClassVar, Final

from fencepost.groups.assignors.model import AssignorFault, GroupAssignment, GroupSpec
from fencepost.logcore.values import dataclass

ASK_AGAIN_MS: Final = 30_000
"""After this time an assignor that failed, or never answered, is asked again at a heartbeat: often
enough for one that recovers, and little work for one that does not."""


@dataclass(frozen=True, slots=True)
class ComputeTarget:
    """An effect: have ``assignor`` compute; report with :class:`TargetComputed`."""

    group_id: str
    assignor: str
    group: GroupSpec


@dataclass(frozen=True, slots=True)
class TargetComputed:
    """The report: ``result``, or None and the ``problem``."""

    group_id: str
    assignor: str
    group: GroupSpec
    result: GroupAssignment | None
    problem: str = ""


class RemoteAssignor:
    """Stands for an assignor that runs elsewhere."""

    is_remote: ClassVar = True

    def __init__(self, name: str) -> None:
        self.name = name

    def assign(self, group: GroupSpec) -> GroupAssignment:  # noqa: ARG002 - the protocol's shape
        """Never: such an assignor is asked by an effect."""
        raise AssignorFault(self.name, "it is computed elsewhere")


def kept(group: GroupSpec) -> dict[str, frozenset[tuple[bytes, int]]]:
    """Return what members have of what they still may have."""
    return {
        member_id: frozenset(
            (topic_id, index)
            for topic_id, index in spec.assigned
            if topic_id in spec.topic_ids and index < group.partition_counts[topic_id]
        )
        for member_id, spec in group.members.items()
    }
