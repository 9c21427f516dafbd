"""The steps of a consumer group's member from its current assignment to its target (KIP-848).

One pure function. A member gives up first and takes second: it keeps its epoch until it reports
that it no longer owns the partitions it must revoke, and it takes a partition only when no other
member holds it. A partition that waits for revocation counts as held as well. The safety of the
protocol depends on this rule alone.

Source: Kafka's ``CurrentAssignmentBuilder`` (4.3) and ``MemberState``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import field, replace
from enum import IntEnum
from typing import Final

from fencepost.groups.errors import FencedMemberEpochError
from fencepost.logcore.values import dataclass

TopicIdPartition = tuple[bytes, int]
"""A topic id (16 bytes) and a partition index."""


class MemberState(IntEnum):
    """A member's state; the number is the one in the record."""

    STABLE = 0
    """The member has the partitions of its epoch's target."""
    UNREVOKED_PARTITIONS = 1
    """The member keeps its epoch until it reports that it no longer owns some partitions."""
    UNRELEASED_PARTITIONS = 2
    """The member has the target's epoch; others still hold partitions of its target."""
    UNKNOWN = 127
    """A state of a newer coordinator."""


_STABLE, _UNKNOWN = MemberState.STABLE, MemberState.UNKNOWN
_UNREVOKED, _UNRELEASED = MemberState.UNREVOKED_PARTITIONS, MemberState.UNRELEASED_PARTITIONS

TRANSITIONS: Final[Mapping[tuple[MemberState, MemberState], str]] = {
    (_STABLE, _STABLE): "target changed, nothing to wait for",
    (_STABLE, _UNREVOKED): "target lost partitions it owns",
    (_STABLE, _UNRELEASED): "target has partitions of others",
    (_UNREVOKED, _STABLE): "revoked, nothing to wait for",
    (_UNREVOKED, _UNREVOKED): "revoked, but a newer target or subscription lost more",
    (_UNREVOKED, _UNRELEASED): "revoked, target has partitions of others",
    (_UNRELEASED, _STABLE): "the last partition became free",
    (_UNRELEASED, _UNREVOKED): "a newer target lost partitions it owns",
    (_UNRELEASED, _UNRELEASED): "some partitions became free, or the target changed",
    (_UNKNOWN, _STABLE): "it owns nothing, nothing to wait for",
    (_UNKNOWN, _UNRELEASED): "target has partitions of others",
}
"""The cause of each transition (from, to)."""


@dataclass(frozen=True, slots=True)
class CurrentAssignment:
    """A member's partitions. Both mappings give the epoch at which a partition was assigned."""

    member_epoch: int = 0
    previous_member_epoch: int = 0
    state: MemberState = MemberState.STABLE
    assigned: Mapping[TopicIdPartition, int] = field(default_factory=dict)
    pending_revocation: Mapping[TopicIdPartition, int] = field(default_factory=dict)

    def is_reconciled_to(self, epoch: int) -> bool:
        """Whether the member has reached the target of ``epoch``."""
        return self.state is MemberState.STABLE and self.member_epoch == epoch

    @property
    def held(self) -> set[TopicIdPartition]:
        """The partitions that must not be assigned to any other member."""
        return {*self.assigned, *self.pending_revocation}


@dataclass(frozen=True, slots=True)
class Target:
    """The target partitions of a member, and the assignment epoch of the target."""

    epoch: int
    partitions: frozenset[TopicIdPartition]


def reconcile(
    member: CurrentAssignment,
    target: Target,
    is_held_by_other: Callable[[TopicIdPartition], bool],
    owned: AbstractSet[TopicIdPartition] | None,
    is_subscribed: Callable[[bytes], bool] = lambda _topic_id: True,
) -> CurrentAssignment:
    """Return the member one step nearer to its target; the same object if nothing changes.

    ``owned`` are the partitions that the member reports to own, None without a report.
    ``is_subscribed`` takes a topic id. The target may be older than the member's subscription, so
    topics that the member no longer subscribes to count as absent from the target. Raises
    :class:`fencepost.groups.errors.FencedMemberEpochError` for a member in state UNKNOWN that may
    own partitions.
    """
    match member.state:
        case MemberState.STABLE:
            settled = member.member_epoch == target.epoch
            if settled and all(is_subscribed(topic_id) for topic_id, _ in member.assigned):
                return member
        case MemberState.UNREVOKED_PARTITIONS:
            if _owns(owned, member.pending_revocation):
                return _give_up_unsubscribed(member, is_subscribed)
        case MemberState.UNKNOWN:
            if owned is None or owned:
                raise FencedMemberEpochError("the member's state is unknown; it must rejoin")
    return _next(member, target, is_held_by_other, owned, is_subscribed)


def _owns(
    owned: AbstractSet[TopicIdPartition] | None, revoked: Mapping[TopicIdPartition, int]
) -> bool:
    """Whether the member may still own some of ``revoked``; ``owned`` is None without a report."""
    return bool(revoked) and (owned is None or not owned.isdisjoint(revoked.keys()))


def _give_up_unsubscribed(
    member: CurrentAssignment, is_subscribed: Callable[[bytes], bool]
) -> CurrentAssignment:
    lost = {tp: epoch for tp, epoch in member.assigned.items() if not is_subscribed(tp[0])}
    if not lost:
        return member
    return replace(
        member,
        assigned={tp: epoch for tp, epoch in member.assigned.items() if tp not in lost},
        pending_revocation={**member.pending_revocation, **lost},
    )


def _next(
    member: CurrentAssignment,
    target: Target,
    is_held_by_other: Callable[[TopicIdPartition], bool],
    owned: AbstractSet[TopicIdPartition] | None,
    is_subscribed: Callable[[bytes], bool],
) -> CurrentAssignment:
    targeted = {tp for tp in target.partitions if is_subscribed(tp[0])}
    retained = {tp: epoch for tp, epoch in member.assigned.items() if tp in targeted}
    revoked = {tp: epoch for tp, epoch in member.assigned.items() if tp not in targeted}
    if _owns(owned, revoked):
        return replace(
            member,
            state=MemberState.UNREVOKED_PARTITIONS,
            assigned=retained,
            pending_revocation=revoked,
        )
    missing = {tp for tp in targeted if tp not in retained}
    free = {tp: target.epoch for tp in missing if not is_held_by_other(tp)}
    waits = len(free) < len(missing)
    moves = member.member_epoch != target.epoch
    return CurrentAssignment(
        member_epoch=target.epoch,
        # If the response with the new epoch is lost, the client sends the previous epoch again.
        previous_member_epoch=member.member_epoch if moves else member.previous_member_epoch,
        state=MemberState.UNRELEASED_PARTITIONS if waits else MemberState.STABLE,
        assigned={**retained, **free},
    )
