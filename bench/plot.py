"""Draws the curves of the suite ``growth``, one picture per kind of item.

``python -m bench.plot FILE DIRECTORY`` reads what ``python -m bench growth --json FILE`` wrote.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.brokers import FENCEPOST

FIGURE = re.compile(
    r"[^:]+: (?P<what>.+), with (?P<count>[\d,]+) (?P<things>.+?)s? \((?P<unit>\S+)\)"
)
"""The name of a figure, as :func:`bench.suites.growth.at` makes it."""

Curves = dict[tuple[str, str], dict[str, list[tuple[int, float]]]]
"""Items and unit → measurement → points in order, each a count and a median."""


def curves(figures: Mapping[str, Mapping[str, list[float]]]) -> Curves:
    """Return the points of every curve in a suite's figures."""
    found: Curves = defaultdict(lambda: defaultdict(list))
    for name, sides in figures.items():
        if match := FIGURE.fullmatch(name):
            count = int(match["count"].replace(",", ""))
            line = found[f"{match['things']}s", match["unit"]][match["what"]]
            line.append((count, statistics.median(sides[FENCEPOST])))
    return found


def draw(found: Curves, target: Path) -> list[Path]:
    """Write the pictures, with counts and times on logarithmic axes; return their files."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    target.mkdir(parents=True, exist_ok=True)
    drawn = []
    for (things, unit), lines in found.items():
        figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
        for what, points in lines.items():
            counts, values = zip(*sorted(points), strict=True)
            axes.plot(counts, values, marker="o", label=what)
        axes.set(xscale="log", xlabel=things, ylabel=unit)
        if unit.endswith("s"):
            axes.set(yscale="log")
            low, high = axes.get_ylim()
            axes.set_ylim(low / 2, high * 2)  # noise must not look like a cliff
        axes.grid(visible=True, alpha=0.3)
        figure.legend(loc="outside upper center", ncols=2, fontsize="small", frameon=False)
        kind = "time" if unit.endswith("s") else "memory"
        drawn.append(target / f"{things.replace(' ', '-')}-{kind}.png")
        figure.savefig(drawn[-1], dpi=110)
        plt.close(figure)
    return drawn


def main() -> None:
    """Parse the command line, and draw."""
    parser = argparse.ArgumentParser(prog="bench.plot", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    told: dict[str, Any] = json.loads(arguments.file.read_text(encoding="utf-8"))
    for path in draw(curves(told["growth"]["figures"]), arguments.directory):
        print(path)


if __name__ == "__main__":
    main()
