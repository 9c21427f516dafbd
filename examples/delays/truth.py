"""The expected output of the pipeline, computed from the files in plain Python, and the comparison.

There are two outputs: every flight once with names in place of codes, and for each carrier and hour
the number of flights, of cancelled and late flights, and the minutes of delay.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from examples.flights.data import Reference, Row, flights, number
from examples.flights.verify import Verdict

LATE_MINUTES = 15
"""An arrival later than this counts as late."""

LIVE_FROM = "2013-12-01"
"""Flights from this day on come over MQTT, earlier ones are loaded directly."""

Record = dict[str, Any]


def records(directory: Path) -> Iterator[Record]:
    """Yield every flight as an input record, in order of time; the id is its line in the file."""
    rows = sorted(
        enumerate(flights(directory)), key=lambda numbered: (numbered[1]["time_hour"], numbered[0])
    )
    for flight_id, row in rows:
        yield _record(flight_id, row)


def _record(flight_id: int, row: Row) -> Record:
    return {
        "id": flight_id,
        "time": row["time_hour"],
        "carrier": row["carrier"],
        "flight": f"{row['carrier']}{row['flight']}",
        "origin": row["origin"],
        "dest": row["dest"],
        "departure_delay": number(row["dep_delay"]),
        "arrival_delay": number(row["arr_delay"]),
    }


def status(record: Record) -> str:
    """Return whether a flight was cancelled, late or on time."""
    departure, arrival = record["departure_delay"], record["arrival_delay"]
    if departure is None:
        return "cancelled"
    delay = departure if arrival is None else arrival
    return "late" if delay > LATE_MINUTES else "on time"


@dataclass
class Truth:
    """The two outputs, from one pass over the files."""

    flights: dict[int, Record] = field(default_factory=dict)
    hours: dict[str, Record] = field(default_factory=dict)

    @classmethod
    def of(cls, directory: Path) -> Truth:
        """Read the files in ``directory``."""
        reference, truth = Reference.load(directory), cls()
        for record in records(directory):
            truth._add(record, reference)
        return truth

    def _add(self, record: Record, reference: Reference) -> None:
        carrier, dest = str(record["carrier"]), str(record["dest"])
        flight_id, origin = record["id"], str(record["origin"])
        self.flights[flight_id] = {
            "id": flight_id,
            "flight": record["flight"],
            "airline": reference.airlines.get(carrier, carrier),
            "from": reference.airports.get(origin, origin),
            "to": reference.airports.get(dest, dest),
            "departure_delay": record["departure_delay"],
            "arrival_delay": record["arrival_delay"],
            "status": status(record),
        }
        hour = self.hours.setdefault(
            f"{carrier}|{record['time']}",
            {"flights": 0, "cancelled": 0, "late": 0, "delay_minutes": 0},
        )
        hour["flights"] += 1
        hour["cancelled"] += status(record) == "cancelled"
        hour["late"] += status(record) == "late"
        hour["delay_minutes"] += max(record["arrival_delay"] or 0, 0)


def judge(expected: dict[str, Record], seen: Iterable[tuple[str, bytes]]) -> Verdict:
    """Compare a consumer's records, as names and JSON, with the expected ones."""
    counts: Counter[str] = Counter()
    verdict = Verdict()
    for name, value in seen:
        counts[name] += 1
        verdict.wrong += json.loads(value) != expected.get(name)
    verdict.records = counts.total()
    verdict.missing = sum(name not in counts for name in expected)
    verdict.duplicated = sum(count - 1 for count in counts.values())
    return verdict
