"""Samples of figures, and their output: Markdown for people, JSON for programs."""

from __future__ import annotations

import datetime as dt
import os
import platform
import statistics
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from bench.brokers import FENCEPOST, KAFKA
from bench.suite import BROKERS, Figures, label_and_unit, lower_is_better

KAFKA_VERSION = "4.4.0"

Samples = dict[str, dict[str, list[float]]]
"""Figure → side → values, one per round, or as many as a pair's run yields."""


def no_samples() -> Samples:
    return defaultdict(lambda: defaultdict(list))


STALL = "all workloads of the suite: slowest ping of another client (ms)"
"""The figure of :mod:`bench.ping`: per round, the maximum over all workloads of a suite."""


def take(samples: Samples, number: int, workload: str, side: str, figures: Figures) -> None:
    """Add the figures of a workload's run in round ``number``, which counts from 0."""
    for figure, value in figures.items():
        if figure != STALL:
            samples[f"{workload}: {figure}"][side].append(value)
            continue
        rounds = samples[STALL][side]
        if len(rounds) > number:
            rounds[number] = max(rounds[number], value)
        else:
            rounds.append(value)


def machine() -> dict[str, Any]:
    """Return the facts that figures depend on and that may be published: no names."""
    return {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "cores": os.cpu_count(),
        "architecture": platform.machine(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "kafka": KAFKA_VERSION,
    }


def as_json(rounds: int, suites: dict[str, Samples]) -> dict[str, Any]:
    """Return all samples of every round: suite → machine and samples."""
    told = machine() | {"rounds": rounds}
    return {name: {"machine": told, "figures": figures} for name, figures in suites.items()}


def ratio(figure: str, ours: float, theirs: float) -> float:
    """Return by what factor our figure is better; above 1 is in favour of Fencepost."""
    if ours == theirs:
        return 1.0
    better, worse = (theirs, ours) if lower_is_better(figure) else (ours, theirs)
    return better / worse if worse else float("inf")


def _number(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def plain(figures: Mapping[str, float]) -> str:
    """Return the figures of one run as a line."""
    named = ((*label_and_unit(name), value) for name, value in figures.items())
    return "; ".join(f"{label}: {_number(value)} {unit}" for label, unit, value in named)


def _spread(values: list[float]) -> str:
    middle = _number(statistics.median(values))
    if len(values) == 1:
        return middle
    return f"{middle} ({_number(min(values))} – {_number(max(values))})"


def heading(told: dict[str, Any]) -> str:
    """Return a line about the origin of the figures."""
    rounds = "1 round" if told["rounds"] == 1 else f"{told['rounds']} rounds"
    return (
        f"{told['date']}, {told['cores']} cores, {told['architecture']}, {told['python']}, "
        f"Apache Kafka {told['kafka']}; {rounds}."
    )


def detailed(measured: dict[str, Any], titles: Mapping[str, str] = BROKERS) -> str:
    """Return a suite's table with median and extremes; ``titles`` are the columns' titles."""
    samples, told = measured["figures"], measured["machine"]
    our, other = titles
    beside = any(sides.get(other) for sides in samples.values())
    lines = [heading(told), ""]
    if beside:
        lines += _table_head(titles[our], titles[other], "ratio")
    else:
        lines += _table_head("value")
    for figure in sorted(samples, key=lambda figure: figure == STALL):  # which comes last
        sides = samples[figure]
        ours, theirs = sides.get(our, []), sides.get(other, [])
        cells = [*label_and_unit(figure), _spread(ours) if ours else "–"]
        if beside:
            cells += [_spread(theirs), _ratio(figure, ours, theirs)] if theirs else ["–", "–"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _table_head(*values: str) -> list[str]:
    columns = ("measurement", "unit", *values)
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]


def _ratio(figure: str, ours: list[float], theirs: list[float]) -> str:
    if not ours or not theirs:
        return "–"
    return f"{ratio(figure, statistics.median(ours), statistics.median(theirs)):.2f}"


DETAILS = ("CPU time", "per transaction (ms)", "slowest of", "slowest ping")
"""Figures with one of these in their name explain others, and are only in the full tables."""


def summary(result: dict[str, Any]) -> str:
    """Return a table of the medians measured on both brokers, for `docs/figures.md`."""
    told = min(
        (measured["machine"] for measured in result.values()), key=lambda told: told["rounds"]
    )
    lines = [
        (
            f"{heading(told)} Medians of one run (`make bench`) that measures both brokers "
            "alternately; a ratio above 1 is in favour of Fencepost. "
            "All figures: [bench](../bench/README.md)."
        ),
        "",
        *_table_head("Fencepost", "Apache Kafka", "ratio"),
    ]
    for measured in result.values():
        for figure, sides in measured["figures"].items():
            ours, theirs = sides.get(FENCEPOST, []), sides.get(KAFKA, [])
            if ours and theirs and not any(detail in figure for detail in DETAILS):
                middle = statistics.median(ours), statistics.median(theirs)
                told_as = " | ".join(_number(value) for value in middle)
                label, unit = label_and_unit(figure)
                lines.append(f"| {label} | {unit} | {told_as} | {_ratio(figure, ours, theirs)} |")
    return "\n".join(lines)
