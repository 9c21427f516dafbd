"""A pipeline's metrics."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field


@dataclass(slots=True)
class Metrics:
    """Counters since the start. Records count when their transaction is committed."""

    records_in: int = 0
    records_out: int = 0
    refused: int = 0
    transactions: int = 0
    aborts: int = 0
    reopened: int = 0
    """Producers closed after a fence or a failure."""
    fences: int = 0
    rebalances: int = 0
    lag: int = 0
    """The lag of the assigned partitions in records, as of the last check."""
    began: float = field(default_factory=time.monotonic)

    def snapshot(self) -> dict[str, float]:
        """Return all counters, with the seconds and records per second since the start."""
        seconds = time.monotonic() - self.began
        values: dict[str, float] = asdict(self)
        del values["began"]
        rate = self.records_in / seconds if seconds > 0 else 0.0
        return {**values, "seconds": round(seconds, 3), "records_per_s": round(rate, 1)}
