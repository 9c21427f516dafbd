"""Consumer lag in records that a consumer can still receive, and in time.

The usual lag, high watermark minus committed offset, includes transaction markers, aborted records
and records that retention has removed. During an open transaction it grows although consumers can
read no new record.

The broker finds out from batch headers which offsets hold records. The scan of the headers is
bounded in time per scrape and in memory; until an offset is scanned, it counts as a record.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from fencepost.coordinator.metrics.snapshot import (
    OffsetRow,
    PartitionRow,
    Snapshot,
    TopicPartition,
    timestamp_at,
)
from fencepost.coordinator.metrics.tally import PartitionTally
from fencepost.coordinator.runtime.background import Pace
from fencepost.logcore.clock import monotonic_s

LOOK_MS: Final = 200
"""The maximum time that a scrape may spend on scanning batch headers, in milliseconds."""

MAX_RUNS: Final = 200_000
"""The maximum number of runs of offsets kept for all partitions together, at 32 bytes each."""


class LagTallies:
    """The tallies of all partitions with committed offsets, kept from scrape to scrape."""

    def __init__(self) -> None:
        self.unseen = 0
        """The number of offsets that the last scrape counted as records without scanning them."""
        self._decided: dict[TopicPartition, PartitionTally] = {}
        """Tallies up to the last stable offset."""
        self._unstable: dict[TopicPartition, PartitionTally] = {}
        """Tallies from the last stable offset to the high watermark."""

    async def fill(
        self, snapshot: Snapshot, cleaned: Mapping[TopicPartition, int], pace: Pace
    ) -> None:
        """Fill in the lags of all committed offsets."""
        readers: dict[TopicPartition, list[OffsetRow]] = {}
        for offset in snapshot.offsets():
            readers.setdefault((offset.at.topic, offset.at.index), []).append(offset)
            await pace()
        self._forget(readers)
        self.unseen = 0
        until = monotonic_s() + LOOK_MS / 1000
        for key, rows in readers.items():
            at = rows[0].at
            if at.partition is not None and at.is_in_sync:
                await self._scan(key, at, rows, cleaned.get(key, 0), until, pace)
            for row in rows:
                self._count(key, row, snapshot.now_ms)
                await pace()

    def _forget(self, readers: Mapping[TopicPartition, object]) -> None:
        for tallies in (self._decided, self._unstable):
            for key in tallies.keys() - readers.keys():
                del tallies[key]

    async def _scan(
        self,
        key: TopicPartition,
        at: PartitionRow,
        rows: list[OffsetRow],
        cleaned: int,
        until: float,
        pace: Pace,
    ) -> None:
        """Scan a partition from the lowest committed offset on."""
        partition = at.partition
        if partition is None:
            return
        low = min(at.stable, *(max(row.committed, at.start) for row in rows))
        decided, held = self._decided.get(key), self._unstable.get(key)
        if decided is None or not (
            decided.partition is partition and decided.cleaned == cleaned and decided.start <= low
        ):
            decided = self._decided[key] = PartitionTally(partition, low, cleaned, aborts=True)
        if held is None or held.partition is not partition or held.start != at.stable:
            held = self._unstable[key] = PartitionTally(partition, at.stable, cleaned, aborts=False)
        for tally, limit in ((decided, at.stable), (held, at.high)):
            for _ in _in_time(tally.learn(limit), until):
                await pace()
            self.unseen += max(0, limit - tally.end)
        most = MAX_RUNS // (len(self._decided) + len(self._unstable))
        decided.trim(low, most)
        held.trim(held.start, most)

    def _count(self, key: TopicPartition, row: OffsetRow, now_ms: int) -> None:
        at = row.at
        position = max(row.committed, at.start)
        decided, held = self._decided.get(key), self._unstable.get(key)
        if decided is None or held is None:
            return
        if position < at.stable:
            hidden, aborted = decided.between(position, at.stable)
            row.uncommitted = max(0, at.stable - position - hidden)
            row.records = max(0, row.uncommitted - aborted)
        behind = max(position, at.stable)
        if behind < at.high:
            row.held_back = max(0, at.high - behind - held.between(behind, at.high)[0])
            row.uncommitted += row.held_back
        if row.records:
            first = decided.next_record(position)
            written_ms = decided.times.get(first)
            if written_ms is None and at.partition is not None:
                if len(decided.times) >= MAX_TIMES:
                    decided.times.clear()
                written_ms = timestamp_at(at.partition, first)
                if written_ms is not None:
                    decided.times[first] = written_ms
            row.seconds = None if written_ms is None else max(0, now_ms - written_ms) / 1000


MAX_TIMES: Final = 64
"""The maximum number of timestamps kept per partition, usually enough for all its groups."""


def _in_time(steps: Iterator[None], until: float) -> Iterator[None]:
    for step in steps:
        yield step
        if monotonic_s() > until:
            return
