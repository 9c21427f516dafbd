"""Records that read_committed consumers do not receive yet, because a transaction is open."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from fencepost.client.queries.lag import ConsumerLags
from fencepost.client.queries.open_transactions import (
    Producer,
    Transaction,
    producers,
    transactions_of,
)
from fencepost.logcore.values import dataclass
from fencepost.protocol.errors import WireError

if TYPE_CHECKING:
    from fencepost.client.queries.session import ClusterSession
    from fencepost.client.requests import Partition


@dataclass(frozen=True, slots=True)
class HeldBack:
    """One partition: its records from ``stable`` on, and the oldest open transaction.

    If ``is_exact`` is false, ``records`` counts offsets. ``producer`` is None if the broker does
    not report it, or the transaction has just ended.
    """

    place: Partition
    stable: int
    records: int
    is_exact: bool
    producer: Producer | None
    transaction: Transaction | None
    since_ms: int | None


def held_back(session: ClusterSession, places: Iterable[Partition]) -> list[HeldBack]:
    """Return the partitions with records beyond the last stable offset."""
    lags = ConsumerLags(session, places)
    pinned = [place for place, bounds in lags.bounds.items() if bounds.stable < bounds.end]
    if not pinned:
        return []
    pins = _pins(session, pinned)
    transactions = _transactions(session, pins)
    held = []
    for place in pinned:
        pin, stable = pins.get(place), lags.bounds[place].stable
        transaction = transactions.get(pin.producer_id) if pin is not None else None
        since = transaction.started_ms if transaction is not None else lags.held_since(place)
        lag = lags.of(place, stable)
        if lag is not None:
            held.append(
                HeldBack(place, stable, lag.held_back, lag.is_exact, pin, transaction, since)
            )
    return held


def _pins(session: ClusterSession, places: list[Partition]) -> Mapping[Partition, Producer]:
    """Return the oldest open transaction of each partition, if the broker reports it."""
    try:
        rows = [row for row in producers(session, places) if row.is_open]
    except WireError:  # an older broker, or this user may not describe producers
        return {}
    rows.sort(key=lambda row: row.start_offset, reverse=True)
    return {row.place: row for row in rows}


def _transactions(
    session: ClusterSession, pins: Mapping[Partition, Producer]
) -> dict[int, Transaction]:
    try:
        return transactions_of(session, (pin.producer_id for pin in pins.values()))
    except WireError:
        return {}
