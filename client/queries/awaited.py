"""The members that a group's rebalance waits for.

The protocol reports that a classic group is rebalancing, but not which members have rejoined; the
event history of Fencepost's brokers does.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from fencepost.client.queries.entries import entries_of
from fencepost.client.queries.where import OffsetPosition
from fencepost.coordinator.history.entries import GROUP, Entry
from fencepost.logcore.values import dataclass

if TYPE_CHECKING:
    from fencepost.client.queries.group_view import GroupView
    from fencepost.client.queries.session import ClusterSession

RECONCILING = frozenset({"Assigning", "Reconciling"})
"""States of a consumer group in which partitions move."""

REBALANCING = frozenset({"PreparingRebalance", "CompletingRebalance"})
"""States of a classic group in which no broker reports its members' subscriptions."""

LOOK_BACK_MS = 3_600_000
"""How far back, in milliseconds, the event history is searched for a rebalance."""

_WAITS, _ENDS = "rebalance-waits", frozenset({"generation-started", "group-deleted"})


@dataclass(frozen=True, slots=True)
class Awaited:
    """The members that a rebalance waits for.

    ``members`` are the members' ids. ``clients`` are the members that are not pending, as
    CLIENT_ID@HOST. ``missing`` is the number of all awaited members; the lists may be shorter.
    """

    members: tuple[str, ...]
    clients: tuple[str, ...]
    missing: int

    def __str__(self) -> str:
        names = self.clients or self.members
        more = self.missing - len(names)
        return ", ".join([*names, *([f"{more} more"] if more > 0 else [])])


def awaited_by(entries: Iterable[Entry]) -> Awaited | None:
    """Return the awaited members; None if unknown. ``entries`` are one group's, oldest first."""
    result = None
    for entry in entries:
        if entry.what == _WAITS:
            detail = entry.detail
            result = Awaited(
                tuple(detail["awaited"]), tuple(detail["clients"]), int(detail["missing"])
            )
        elif entry.what in _ENDS:
            result = None
    return result


def unreconciled(group: GroupView) -> Awaited | None:
    """Return a consumer group's members that still own partitions they must revoke.

    If there are none, return the members that lack partitions of their target assignment; None if
    the group has converged.
    """
    members = [member for member in group.members if member.target is not None]
    late = [member for member in members if set(member.assigned) - set(member.target or ())]
    late = late or [
        member for member in members if set(member.assigned) != set(member.target or ())
    ]
    names = tuple(member.member_id for member in late)
    clients = tuple(f"{member.client_id}@{member.host}" for member in late)
    return Awaited(names, clients, len(late)) if late else None


def awaited(session: ClusterSession, group: str) -> Awaited | None:
    """Return the awaited members from the event history; None on Apache Kafka, which has none."""
    begin = OffsetPosition(time=max(0, time.time_ns() // 1_000_000 - LOOK_BACK_MS))
    return awaited_by(entries_of(session, begin, subjects=[(GROUP, group)]))
