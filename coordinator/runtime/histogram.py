"""Histograms of durations for the metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

LATENCY_BOUNDS: Final = (
    *(0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1),
    *(0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
"""Bounds in seconds, from the time of a small request to a client's timeout."""


class Histogram:
    """Counts durations in buckets with the upper ``bounds``, in seconds. Not thread-safe."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float] = LATENCY_BOUNDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """By bucket, not cumulative; the last is for durations above all bounds."""
        self.sum = 0.0
        """The sum of all durations."""

    def note(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds

    @property
    def count(self) -> int:
        """Return the number of durations."""
        return sum(self.counts)

    def quantile(self, share: float) -> float:
        """Return the ``share`` quantile, interpolated within a bucket; 0 without any durations.

        Above the last bound the result is the last bound.
        """
        rank, below = share * self.count, 0
        for at, bound in enumerate(self.bounds):
            count = self.counts[at]
            if count and below + count >= rank:
                low = self.bounds[at - 1] if at else 0.0
                return low + (bound - low) * (rank - below) / count
            below += count
        return self.bounds[-1] if below < self.count else 0.0
