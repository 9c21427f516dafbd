"""Compare the output topics with the expected output, computed directly from the input file."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import msgpack

from examples.broker import everything
from examples.flights.data import Event, Reference, Totals, enrich, flights, no_totals

Seen = list[tuple[bytes, bytes, str]]
"""Records in the order of their partition: key, value, transaction label."""


@dataclass
class Verdict:
    """The comparison of a consumer's records with the truth. All counts of errors must be zero."""

    records: int = 0
    missing: int = 0
    duplicated: int = 0
    wrong: int = 0
    out_of_order: int = 0
    wrong_totals: int = 0
    torn: int = 0
    transactions: set[str] = field(default_factory=set)

    @property
    def exact(self) -> bool:
        """Whether every flight is there once, right, in order, and all totals agree."""
        faults = (self.missing, self.duplicated, self.wrong, self.out_of_order)
        return not any((*faults, self.wrong_totals, self.torn))


async def read(bootstrap: str, topic: str, isolation_level: str) -> Seen:
    """Read a topic from its beginning to its end."""
    return [
        (record.key, record.value, dict(record.headers)["txn"].decode())
        async for record in everything(bootstrap, topic, isolation_level)
    ]


class Truth:
    """All events and totals, from one pass over the file."""

    def __init__(self, directory: Path) -> None:
        reference = Reference.load(directory)
        self.totals: dict[str, Totals] = defaultdict(no_totals)
        self.events: list[Event] = [
            enrich(flight_id, row, reference, self.totals[row["carrier"]])
            for flight_id, row in enumerate(flights(directory))
        ]

    def judge(self, delays: Seen, totals: Seen) -> Verdict:
        """Compare a consumer's records of both output topics with the truth."""
        verdict = Verdict(records=len(delays))
        counts = [0] * len(self.events)
        last: dict[bytes, int] = {}
        for key, value, label in delays:
            event = msgpack.unpackb(value)
            flight_id = event["id"]
            counts[flight_id] += 1
            verdict.wrong += event != self.events[flight_id]
            verdict.out_of_order += flight_id <= last.get(key, -1)
            last[key] = flight_id
            verdict.transactions.add(label)
        verdict.missing = counts.count(0)
        verdict.duplicated = sum(count - 1 for count in counts if count > 1)
        final = {key.decode(): msgpack.unpackb(value) for key, value, _ in totals}
        verdict.wrong_totals = sum(final.get(name) != right for name, right in self.totals.items())
        # A transaction writes to both topics: if only one has its label, it was torn.
        verdict.torn = len(verdict.transactions ^ {label for _, _, label in totals})
        return verdict
