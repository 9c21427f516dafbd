"""Custom server-side assignors: they run in another process, have a timeout, and are not trusted.

The group coordinator requests a target with the effect :class:`ComputeTarget`, and the group keeps
its current target; :class:`TargetComputed` later brings the new target or the problem. A new target
is used only if the group has not changed since the request, and if the target passes the check that
the targets of all assignors must pass. After a failure, the group keeps its last target.
"""

from __future__ import annotations

from typing import ClassVar, Final

from fencepost.groups.assignors.model import AssignorFault, GroupAssignment, GroupSpec
from fencepost.logcore.values import dataclass

RETRY_MS: Final = 30_000
"""If an assignor fails or does not answer, the coordinator repeats the request after this time, at
a heartbeat or when a timer fires. The time is short enough for an assignor that recovers, and
causes little work for an assignor that does not."""


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
        """Raise AssignorFault: the coordinator asks a remote assignor by an effect instead."""
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
