"""How often something took how long: numbers that are added up as it happens, and read later."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

LATENCY_BOUNDS: Final = (
    *(0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1),
    *(0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
"""Seconds, from what a small request takes to what a client gives up at."""


class Histogram:
    """Counts of durations up to each of ``bounds``, in seconds. One thread."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float] = LATENCY_BOUNDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """By bucket, each without those below it; the last is for what no bound covers."""
        self.sum = 0.0
        """Of all durations."""

    def note(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds

    @property
    def count(self) -> int:
        """How many there were."""
        return sum(self.counts)

    def quantile(self, share: float) -> float:
        """What ``share`` of them did not exceed, linear within a bucket; 0 without any.

        Where no bound covers it, it is the last bound.
        """
        rank, below = share * self.count, 0
        for at, bound in enumerate(self.bounds):
            count = self.counts[at]
            if count and below + count >= rank:
                low = self.bounds[at - 1] if at else 0.0
                return low + (bound - low) * (rank - below) / count
            below += count
        return self.bounds[-1] if below < self.count else 0.0
