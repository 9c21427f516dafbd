"""A replica's log in memory, and the disk that keeps it when its process is killed.

The log has everything that replication uses: batches with leader epochs, the leader epoch cache and
the producer state (both from ``fencepost.logcore``), a high watermark, a log start offset, and the
offset up to which it was flushed. A ``kill -9`` loses nothing that was written.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple, cast
from uuid import UUID

from fencepost.logcore.batch import BatchHeader
from fencepost.logcore.epochs import LeaderEpochs
from fencepost.logcore.errors import UnexpectedAppendOffsetError
from fencepost.logcore.fs import FileSystem
from fencepost.logcore.machine import EndMarker, ProducerStamp
from fencepost.logcore.producers import ProducerStateManager

Key = tuple[UUID, int]
"""A partition: topic id and index."""

_NO_FILES = cast("FileSystem", None)
_MAGIC, _TRANSACTIONAL, _CONTROL = 2, 0x10, 0x20


class Batch(NamedTuple):
    """Records that were appended together; each value occurs once in a history."""

    header: BatchHeader
    values: tuple[Hashable, ...]
    marker: EndMarker | None = None

    @property
    def base_offset(self) -> int:
        """The offset of its first record."""
        return self.header.base_offset

    @property
    def next_offset(self) -> int:
        """The offset after its last record."""
        return self.header.base_offset + len(self.values)

    @property
    def leader_epoch(self) -> int:
        """The leader epoch in which it was appended."""
        return self.header.leader_epoch

    def at(self, offset: int, leader_epoch: int) -> Batch:
        """Return the batch as appended at ``offset`` in ``leader_epoch``."""
        header = self.header._replace(base_offset=offset, leader_epoch=leader_epoch)
        return Batch(header, self.values, self.marker)


def data(
    values: tuple[Hashable, ...],
    stamp: ProducerStamp | None = None,
    sequence: int = -1,
    *,
    is_transactional: bool = False,
) -> Batch:
    """Return a batch that has not been appended yet."""
    header = BatchHeader(
        base_offset=-1,
        size=61 + 10 * len(values),
        leader_epoch=-1,
        magic=_MAGIC,
        crc=0,
        attributes=_TRANSACTIONAL if is_transactional else 0,
        last_offset_delta=len(values) - 1,
        base_timestamp=0,
        max_timestamp=0,
        producer_id=-1 if stamp is None else stamp.producer_id,
        producer_epoch=-1 if stamp is None else stamp.producer_epoch,
        base_sequence=sequence,
        record_count=len(values),
    )
    return Batch(header, values)


def end_of_transaction(marker: EndMarker) -> Batch:
    """Return an end marker's batch that has not been appended yet."""
    stamp = marker.stamp
    value = ("marker", stamp.producer_id, stamp.producer_epoch, marker.commit)
    plain = data((value,), stamp, is_transactional=True)
    header = plain.header._replace(attributes=_TRANSACTIONAL | _CONTROL)
    return Batch(header, plain.values, marker)


class ModelLog:
    """One replica's log."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.records: list[tuple[int, Hashable]] = []
        """Leader epoch and value of every record from ``first`` on."""
        self.first = 0
        """The offset of the first batch."""
        self.start = 0
        """The log start offset."""
        self.high_watermark = 0
        self.forced = 0
        """The offset up to which the log was flushed."""
        self.epochs = LeaderEpochs(_NO_FILES, "")
        self.producers = ProducerStateManager(_NO_FILES, "")
        self._bases: list[int] = []
        self._forced_epochs: list[tuple[int, int]] = []

    @property
    def end(self) -> int:
        """The log end offset."""
        return self.first + len(self.records)

    @property
    def log_start_offset(self) -> int:
        """The log start offset, by the name that the follower's state machine uses."""
        return self.start

    @property
    def log_end_offset(self) -> int:
        """The log end offset, by the name that the follower's state machine uses."""
        return self.first + len(self.records)

    @property
    def latest_epoch(self) -> int:
        """The newest leader epoch in the cache."""
        return self.epochs.latest

    def end_of_epoch(self, epoch: int) -> tuple[int, int]:
        """Return the largest cached epoch up to ``epoch``, and its end offset."""
        return self.epochs.end_offset_for(epoch, self.end)

    @property
    def stable(self) -> int:
        """The last stable offset."""
        return self.producers.last_stable_offset(self.high_watermark)

    def part(self, low: int, high: int) -> list[tuple[int, Hashable]]:
        """Return the epochs and values of the records in [low, high)."""
        return self.records[max(low - self.first, 0) : max(high - self.first, 0)]

    # --- appending ---

    def lead(self, leader_epoch: int) -> None:
        """Begin a leader epoch at the log end."""
        self.epochs.assign(leader_epoch, self.end)

    def append(self, batch: Batch, leader_epoch: int) -> Batch:
        """Append a batch as the leader; return it with its offset and leader epoch."""
        placed = batch.at(self.end, leader_epoch)
        self._take(placed)
        return placed

    def append_as_follower(self, batches: list[Batch], up_to_epoch: int) -> None:
        """Append the leader's batches unchanged, up to the first one of a later epoch."""
        for batch in batches:
            if batch.leader_epoch > up_to_epoch:
                return
            if not self.batches and batch.base_offset != self.end:
                # The log start is inside a batch, or deleted records have left a gap.
                start = max(self.start, batch.base_offset)
                self.restart_at(batch.base_offset)
                self.start = self.high_watermark = start
            if batch.base_offset < self.end:
                raise UnexpectedAppendOffsetError(f"{batch} where the log ends at {self.end}")
            if batch.base_offset > self.end:
                raise AssertionError(f"{batch} leaves a gap behind {self.end}")
            self._take(batch)

    def _take(self, batch: Batch) -> None:
        epoch = batch.leader_epoch
        self.epochs.assign(epoch, batch.base_offset)
        self.batches.append(batch)
        self._bases.append(batch.base_offset)
        self.records.extend([(epoch, value) for value in batch.values])
        self._replay(batch)

    def _replay(self, batch: Batch) -> None:
        header, marker = batch.header, batch.marker
        self.producers.map_end_offset = batch.next_offset
        if marker is not None:
            self.producers.apply_marker(
                header.producer_id,
                header.producer_epoch,
                marker.coordinator_epoch,
                header.base_offset,
                0,
                commit=marker.commit,
            )
        elif header.producer_id >= 0:
            self.producers.apply_batch(header, header.base_offset)

    # --- reading ---

    def read(self, offset: int, limit: int, most: int = 8) -> list[Batch]:
        """Return up to ``most`` whole batches below ``limit``, from the one with ``offset`` on."""
        at = max(bisect_right(self._bases, offset) - 1, 0)
        if at < len(self.batches) and self.batches[at].next_offset <= offset:
            at += 1
        return [one for one in self.batches[at : at + most] if one.next_offset <= limit]

    # --- truncation ---

    def truncate_to(self, offset: int) -> None:
        """Remove the batch that contains ``offset`` and all later ones."""
        if offset < self.first:
            self.restart_at(offset)
            return
        keep = bisect_right(self._bases, offset)
        if keep and self.batches[keep - 1].next_offset > offset:
            keep -= 1
        if keep < len(self.batches):
            offset = self._bases[keep]
            del self.batches[keep:], self._bases[keep:], self.records[offset - self.first :]
            unanswered = self.producers.unanswered(self.high_watermark)
            self._rebuild_producers()
            self.producers.expect(unanswered)
        self.epochs.truncate_from_end(offset)
        self.high_watermark = min(self.high_watermark, self.end)
        self.forced = min(self.forced, self.end)
        self.start = min(self.start, self.end)

    def restart_at(self, offset: int) -> None:
        """Drop all batches, and let the log begin at ``offset``."""
        self.batches, self.records, self._bases = [], [], []
        self.first = self.start = self.high_watermark = offset
        self.forced = 0
        self.epochs.clear()
        self.producers.clear(offset)

    def move_start(self, offset: int) -> None:
        """Set the log start offset, and drop the batches that end below it."""
        self.start = offset
        keep = bisect_right(self._bases, offset) - 1
        if keep > 0:
            first = self._bases[keep]
            del self.batches[:keep], self._bases[:keep], self.records[: first - self.first]
            self.first = first
        self.epochs.truncate_from_start(offset)

    def _rebuild_producers(self) -> None:
        self.producers.clear(self.first)
        for batch in self.batches:
            self._replay(batch)
        self.producers.high_watermark_moved(self.high_watermark)

    def move_high_watermark(self, offset: int) -> None:
        """Set the high watermark, here and in the producer state."""
        self.high_watermark = offset
        self.producers.high_watermark_moved(offset)

    # --- the disk ---

    def force(self) -> None:
        """Flush the log and its leader epochs."""
        self.forced = self.end
        self._forced_epochs = self.epochs.entries

    def reopen(self, end: int, high_watermark: int) -> None:
        """Recover the log up to ``end``, as a broker does when it starts after a crash."""
        self.truncate_to(end)
        self.epochs.clear()
        for epoch, start in self._forced_epochs:
            if start <= self.end:
                self.epochs.assign(epoch, start)
        for batch in self.batches:
            if batch.base_offset >= self.forced:
                self.epochs.assign(batch.leader_epoch, batch.base_offset)
        self.high_watermark = max(min(high_watermark, self.end), self.start)
        self._rebuild_producers()


@dataclass
class Disk:
    """The state that a node finds when its next process starts."""

    logs: dict[Key, ModelLog] = field(default_factory=dict)
    checkpoint: dict[Key, int] = field(default_factory=dict)
    """The high watermarks of the last checkpoint."""

    def write_checkpoint(self) -> None:
        """Write the current high watermarks."""
        self.checkpoint = {key: log.high_watermark for key, log in self.logs.items()}

    def end(self) -> None:
        """End the process, which loses nothing that it has written."""
        for key, log in self.logs.items():
            log.reopen(log.end, self.checkpoint.get(key, log.start))
