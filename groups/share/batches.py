"""State batches: ranges of offsets with one delivery state and count, as they are persisted.

Source: Kafka's ``PersisterStateBatch`` and ``PersisterStateBatchCombiner``.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Final, NamedTuple

UNKNOWN_OFFSET: Final = -1
"""The start offset of a share partition that no member has read yet."""

UNKNOWN_COUNT: Final = -1
"""The delivery-complete count of a share partition that no member has read yet."""


class StateBatch(NamedTuple):
    """The state of the offsets from ``first`` to ``last``."""

    first: int
    last: int
    state: int
    delivery_count: int


def combine(
    old: Iterable[StateBatch], new: Iterable[StateBatch], start_offset: int
) -> tuple[StateBatch, ...]:
    """Merge two lists of batches into one without overlaps, in ascending order.

    Offsets below ``start_offset`` are dropped. Where batches overlap, the higher delivery count
    wins, then the higher state: a write that arrives late cannot undo a later one. Neighbours with
    equal state and count are joined.
    """
    clipped = [
        batch if batch.first >= start_offset else batch._replace(first=start_offset)
        for batches in (old, new)
        for batch in batches
        if batch.last >= start_offset
    ]
    combined: list[StateBatch] = []
    for batch in sorted(clipped, key=attrgetter("first")):
        _overlay(combined, batch)
    return tuple(_joined(combined))


def _overlay(combined: list[StateBatch], batch: StateBatch) -> None:
    """Add a batch that begins at or after the first offset of the last added batch."""
    tail: list[StateBatch] = []
    while combined and combined[-1].last >= batch.first:
        tail.append(combined.pop())
    rest: StateBatch | None = batch
    for older in reversed(tail):
        if rest is None:
            combined.append(older)
            continue
        if older.first < rest.first:
            combined.append(older._replace(last=rest.first - 1))
        first, last = rest.first, min(older.last, rest.last)
        winner = max(older, rest, key=attrgetter("delivery_count", "state"))
        combined.append(winner._replace(first=first, last=last))
        if older.last > last:
            combined.append(older._replace(first=last + 1))
        rest = rest._replace(first=last + 1) if rest.last > last else None
    if rest is not None:
        combined.append(rest)


def _joined(batches: Iterable[StateBatch]) -> Iterable[StateBatch]:
    open_batch: StateBatch | None = None
    for batch in batches:
        if open_batch is None:
            open_batch = batch
        elif open_batch.last + 1 == batch.first and open_batch[2:] == batch[2:]:
            open_batch = open_batch._replace(last=batch.last)
        else:
            yield open_batch
            open_batch = batch
    if open_batch is not None:
        yield open_batch
