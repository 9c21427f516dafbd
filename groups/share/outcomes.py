"""The outcomes of deliveries in one step, merged into few events for the event history.

One acknowledgement may cover thousands of records with different outcomes. Records with the same
outcome share an event, which has up to :data:`RANGES_PER_EVENT` ranges.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from fencepost.groups.share.events import EventKind
from fencepost.groups.share.in_flight import Run
from fencepost.groups.share.states import Cause, RecordState

RANGES_PER_EVENT: Final = 50
"""The maximum number of ranges in an event; the event history truncates longer lists."""

AT_LIMIT: Final = frozenset(
    {Cause.RELEASED, Cause.LOCK_EXPIRED, Cause.SESSION_CLOSED, Cause.CONNECTION_CLOSED}
)
"""Causes that make a record available again, unless its delivery count has reached the limit."""


class _End(NamedTuple):
    state: RecordState
    cause: Cause
    member_id: str
    delivery_count: int


class Outcomes:
    """Records that one step makes available again, archives or sends to the dead-letter queue."""

    def __init__(self) -> None:
        self._ranges: dict[_End, list[list[int]]] = {}

    def add(self, run: Run, cause: Cause, member_id: str) -> None:
        """Add the offsets of a run in its new state. Runs come in ascending order."""
        if cause is Cause.ACKNOWLEDGED:
            return
        ranges = self._ranges.setdefault(_End(run.state, cause, member_id, run.count), [])
        if ranges and ranges[-1][1] + 1 == run.first:
            ranges[-1][1] = run.last
        else:
            ranges.append([run.first, run.last])

    def events(self, delivery_count_limit: int) -> Iterator[tuple[EventKind, dict[str, object]]]:
        """Yield the kinds and the details of the events."""
        for end, ranges in self._ranges.items():
            detail: dict[str, object] = {
                "cause": end.cause.value,
                "member": end.member_id,
                "delivery_count": end.delivery_count,
                "dead_letter_queue": end.state is RecordState.ARCHIVING,
            }
            kind = EventKind.SHARE_RECORDS_GIVEN_UP
            if end.state is RecordState.AVAILABLE:
                kind = EventKind.SHARE_RECORDS_RETURNED
            elif end.cause in AT_LIMIT:
                detail["reason"] = f"{end.cause.value}, delivery limit {delivery_count_limit}"
            for part in in_portions(ranges):
                yield kind, {**part, **detail}


def in_portions(ranges: list[list[int]]) -> Iterator[dict[str, object]]:
    """Divide ``ranges``, which are in ascending order, among events; yield each event's fields.

    The fields ``first`` and ``last`` are the lowest and the highest offset. An event with a single
    range has no field ``ranges``.
    """
    for begin in range(0, len(ranges), RANGES_PER_EVENT):
        part = ranges[begin : begin + RANGES_PER_EVENT]
        fields: dict[str, object] = {"first": part[0][0], "last": part[-1][1]}
        yield {**fields, "ranges": part} if len(part) > 1 else fields
