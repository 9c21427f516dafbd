"""Samples as text, produced in slices, in Prometheus' format or in OpenMetrics'."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import field
from itertools import accumulate
from typing import Final

from fencepost.coordinator.metrics.families import Family, Number, Series
from fencepost.coordinator.runtime.background import Pace
from fencepost.coordinator.runtime.histogram import Histogram
from fencepost.logcore.values import dataclass

PROMETHEUS: Final = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"

LINES_PER_LOOK: Final = 10
"""The number of samples between two checks of the time. The number is low, because some samples
require a walk over a group's members."""

LINES_PER_PIECE: Final = 200
"""The number of lines in one part of the text, about 16 KiB."""

SLICE_MS: Final = 1
"""The time in milliseconds for which a scrape may occupy the event loop before it yields. It is
short, because a scrape is never urgent."""


@dataclass(slots=True)
class ScrapePage:
    """The response to a scrape while its samples, at most ``max_series``, are collected."""

    content_type: str
    max_series: int
    pieces: list[bytes] = field(default_factory=list)
    """The text, in order."""
    series: int = 0
    """The number of samples in the text."""
    dropped: int = 0
    """The number of samples left out because of the limit."""
    _lines: list[str] = field(default_factory=list)

    async def add(self, all_series: Iterable[Series], pace: Pace) -> None:
        """Write families with all their samples, yielding to other tasks in between."""
        for family, samples in all_series:
            self._lines += self._head(family)
            for number, (written, value) in enumerate(samples):
                if isinstance(value, Histogram):
                    self._histogram(family.name, written, value)
                else:
                    self._sample(family.name, written, value)
                if number % LINES_PER_LOOK == 0:
                    if len(self._lines) >= LINES_PER_PIECE:
                        self._cut()
                    await pace()
            await pace()
        self._cut()

    def end(self) -> None:
        """Write the end of the text."""
        if self.content_type == OPENMETRICS:
            self.pieces.append(b"# EOF\n")

    def _head(self, family: Family) -> list[str]:
        name, kind = family.name, family.kind
        if self.content_type == OPENMETRICS:
            # In OpenMetrics the name of a counter has no suffix, unlike its samples.
            name = name.removesuffix("_total") if kind == "counter" else name
            kind = "unknown" if kind == "untyped" else kind
        text = family.help.replace("\\", r"\\").replace("\n", r"\n")
        return [f"# HELP {name} {text}\n", f"# TYPE {name} {kind}\n"]

    def _sample(self, name: str, written: str, value: Number) -> None:
        if self.series >= self.max_series:
            self.dropped += 1
            return
        self.series += 1
        shown = value if isinstance(value, int) else _float(value)
        self._lines.append(f"{name}{{{written}}} {shown}\n" if written else f"{name} {shown}\n")

    def _histogram(self, name: str, written: str, value: Histogram) -> None:
        """Write a histogram completely or not at all: without some buckets it would be wrong."""
        if self.series + len(value.counts) + 2 > self.max_series:
            self.dropped += len(value.counts) + 2
            return
        before = f"{written}," if written else ""
        ends = [*map(_float, value.bounds), "+Inf"]
        for end, count in zip(ends, accumulate(value.counts), strict=True):
            self._sample(f"{name}_bucket", f'{before}le="{end}"', count)
        self._sample(f"{name}_sum", written, value.sum)
        self._sample(f"{name}_count", written, value.count)

    def _cut(self) -> None:
        if self._lines:
            self.pieces.append("".join(self._lines).encode())
            self._lines.clear()


def _float(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
