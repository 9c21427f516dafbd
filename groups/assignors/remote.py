"""Custom server-side assignors: they run in another process, have a timeout, and are not trusted.

The machine requests a target with the effect :class:`ComputeTarget` and continues with its current
target; :class:`TargetComputed` later brings the result or the problem. A result is used only if the
group has not changed since the request, and if the result passes the check that every assignor's
result must pass. The group keeps its last target until then, and after a failure.
"""

from __future__ import annotations

from typing import ClassVar, Final

from fencepost.groups.assignors.model import AssignorFault, GroupAssignment, GroupSpec
from fencepost.logcore.values import dataclass

RETRY_MS: Final = 30_000
"""The time after which the coordinator repeats its request to an assignor that failed or did not
answer, by a timer or at a heartbeat. It is short enough for an assignor that recovers, and causes
little work for one that does not."""


@dataclass(frozen=True, slots=True)
class ComputeTarget:
    """An effect: ``assignor`` computes a target, and :class:`TargetComputed` reports it."""

    group_id: str
    assignor: str
    group: GroupSpec


@dataclass(frozen=True, slots=True)
class TargetComputed:
    """The outcome of ComputeTarget: ``result``, or None and the ``problem``."""

    group_id: str
    assignor: str
    group: GroupSpec
    result: GroupAssignment | None
    problem: str = ""


class RemoteAssignor:
    """Represents an assignor that runs in another process."""

    is_remote: ClassVar = True

    def __init__(self, name: str) -> None:
        self.name = name

    def assign(self, group: GroupSpec) -> GroupAssignment:  # noqa: ARG002 - the protocol's shape
        """Raise AssignorFault: a remote assignor is asked by an effect."""
        raise AssignorFault(self.name, "it is computed elsewhere")


def valid_targets(group: GroupSpec) -> dict[str, frozenset[tuple[bytes, int]]]:
    """Return the current targets, without partitions that members may no longer have."""
    return {
        member_id: frozenset(
            (topic_id, index)
            for topic_id, index in spec.assigned
            if topic_id in spec.topic_ids and index < group.partition_counts[topic_id]
        )
        for member_id, spec in group.members.items()
    }
