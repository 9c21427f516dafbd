"""The tables of all metrics, from their definitions."""

from __future__ import annotations

from collections.abc import Iterable

from fencepost.coordinator.metrics import jmx, kafka_exporter, kminion, own
from fencepost.coordinator.metrics.families import Family


def own_series() -> str:
    """Return the table of Fencepost's own series."""
    return _table(own.FAMILIES.values())


def other_series() -> str:
    """Return the table of the series under the names of other exporters."""
    return _table(
        family for module in (kafka_exporter, kminion, jmx) for family in module.FAMILIES.values()
    )


def _table(families: Iterable[Family]) -> str:
    lines = ["| series | type | labels | what it says |", "|---|---|---|---|"]
    for family in families:
        labels = ", ".join(f"`{name}`" for name in family.labels)
        lines.append(f"| `{family.name}` | {family.kind} | {labels} | {family.help} |")
    return "\n".join(lines)
