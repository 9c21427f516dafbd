"""The chart at the end: mean delay of each carrier's flights over the hours of the day."""

from __future__ import annotations

import datetime as dt
import json
from collections import defaultdict
from collections.abc import Iterable
from zoneinfo import ZoneInfo

from rich.style import Style
from rich.table import Table
from rich.text import Text

NEW_YORK = ZoneInfo("America/New_York")
WORST_MINUTES = 45.0
"""The mean delay in the hottest colour."""


def chart(hours: Iterable[tuple[str, bytes]], airlines: dict[str, str]) -> Table:
    """Return a heat map of the windows in the pipeline's output topic."""
    minutes: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0])
    for name, value in hours:
        carrier, time = name.split("|")
        local = dt.datetime.fromisoformat(time).astimezone(NEW_YORK).hour
        window = json.loads(value)
        cell = minutes[carrier, local]
        cell[0] += window["delay_minutes"]
        cell[1] += window["flights"] - window["cancelled"]
    columns = sorted({hour for _, hour in minutes})
    table = Table(
        title="mean minutes late by carrier and scheduled hour of departure",
        box=None,
        padding=(0, 0, 0, 1),
    )
    table.add_column("carrier", no_wrap=True)
    for hour in columns:
        table.add_column(f"{hour:02}", justify="right")
    for carrier in sorted({carrier for carrier, _ in minutes}):
        cells = [_cell(*minutes.get((carrier, hour), (0, 0))) for hour in columns]
        table.add_row(airlines.get(carrier, carrier)[:24], *cells)
    return table


def _cell(minutes: int, flights: int) -> Text:
    if not flights:
        return Text("·", style="dim")
    mean = minutes / flights
    heat = min(1.0, mean / WORST_MINUTES)
    red, green = round(60 + 180 * heat), round(150 - 110 * heat)
    return Text(f"{mean:3.0f}", style=Style(color="white", bgcolor=f"#{red:02x}{green:02x}30"))
