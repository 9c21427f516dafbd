"""A replica's log without files, and the disk of a node that holds it over a crash.

The log has what replication looks at: batches with their leader epochs, the cache of epochs and the
producers' state of the real log (both are ``fencepost.logcore``'s), a high watermark, a log start,
and how much of it was forced. A ``kill -9`` takes nothing that was written; a power loss takes what
was not forced, or a part of it from the end.
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
    """Records that were appended together; each value is there once in a whole history."""

    header: BatchHeader
    values: tuple[Hashable, ...]
    marker: EndMarker | None = None

    @property
    def base_offset(self) -> int:
        """Where it begins."""
        return self.header.base_offset

    @property
    def next_offset(self) -> int:
        """The offset behind it."""
        return self.header.base_offset + len(self.values)

    @property
    def leader_epoch(self) -> int:
        """The epoch under which it was appended."""
        return self.header.leader_epoch

    def at(self, offset: int, leader_epoch: int) -> Batch:
        """The same, appended there."""
        header = self.header._replace(base_offset=offset, leader_epoch=leader_epoch)
        return Batch(header, self.values, self.marker)


def data(
    values: tuple[Hashable, ...],
    stamp: ProducerStamp | None = None,
    sequence: int = -1,
    *,
    is_transactional: bool = False,
) -> Batch:
    """A batch of records that is not appended yet."""
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
    """The batch of an end marker that is not appended yet."""
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
        """The first offset that can be read."""
        self.high_watermark = 0
        self.forced = 0
        """The offset below which a power loss takes nothing."""
        self.epochs = LeaderEpochs(_NO_FILES, "")
        self.producers = ProducerStateManager(_NO_FILES, "")
        self._bases: list[int] = []
        self._forced_epochs: list[tuple[int, int]] = []

    @property
    def end(self) -> int:
        """The offset of what comes next."""
        return self.first + len(self.records)

    @property
    def log_start_offset(self) -> int:
        """The first offset that can be read, as a follower's machine calls it."""
        return self.start

    @property
    def log_end_offset(self) -> int:
        """The end, as a follower's machine calls it."""
        return self.first + len(self.records)

    @property
    def latest_epoch(self) -> int:
        """The newest leader epoch that is known."""
        return self.epochs.latest

    def end_of_epoch(self, epoch: int) -> tuple[int, int]:
        """The largest known epoch up to this one, and where it ends."""
        return self.epochs.end_offset_for(epoch, self.end)

    @property
    def stable(self) -> int:
        """The last stable offset."""
        return self.producers.last_stable_offset(self.high_watermark)

    def part(self, low: int, high: int) -> list[tuple[int, Hashable]]:
        """Epochs and values of the records in [low, high)."""
        return self.records[max(low - self.first, 0) : max(high - self.first, 0)]

    # --- appending ---

    def lead(self, leader_epoch: int) -> None:
        """Note that an epoch begins at the end."""
        self.epochs.assign(leader_epoch, self.end)

    def append(self, batch: Batch, leader_epoch: int) -> Batch:
        """Append as the leader of an epoch."""
        placed = batch.at(self.end, leader_epoch)
        self._take(placed)
        return placed

    def append_as_follower(self, batches: list[Batch], up_to_epoch: int) -> None:
        """Append what the leader has sent, as it is, but for what is of a later epoch."""
        for batch in batches:
            if batch.leader_epoch > up_to_epoch:
                return
            if not self.batches and batch.base_offset != self.end:
                # A log start inside of a batch, or a gap that deleted records have left.
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
        """Whole batches from the one that holds ``offset`` on, below ``limit``."""
        at = max(bisect_right(self._bases, offset) - 1, 0)
        if at < len(self.batches) and self.batches[at].next_offset <= offset:
            at += 1
        return [one for one in self.batches[at : at + most] if one.next_offset <= limit]

    # --- cutting ---

    def truncate_to(self, offset: int) -> None:
        """Remove the batch that holds ``offset`` and all behind it."""
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
        """Drop everything and begin there."""
        self.batches, self.records, self._bases = [], [], []
        self.first = self.start = self.high_watermark = offset
        self.forced = 0
        self.epochs.clear()
        self.producers.clear(offset)

    def move_start(self, offset: int) -> None:
        """Drop the batches that end below an offset, which can be read no longer."""
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
        """Show readers the log up to there."""
        self.high_watermark = offset
        self.producers.high_watermark_moved(offset)

    # --- the disk ---

    def force(self) -> None:
        """Have everything survive a power loss."""
        self.forced = self.end
        self._forced_epochs = self.epochs.entries

    def reopen(self, end: int, high_watermark: int) -> None:
        """What a start finds after a process that is gone: the log up to ``end``."""
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
    """What a node finds again at its next start."""

    logs: dict[Key, ModelLog] = field(default_factory=dict)
    checkpoint: dict[Key, int] = field(default_factory=dict)
    """High watermarks, as of the last time that they were written."""

    def write_checkpoint(self) -> None:
        """Write the high watermarks of now."""
        self.checkpoint = {key: log.high_watermark for key, log in self.logs.items()}

    def end(self) -> None:
        """End the process: all that was written stays."""
        for key, log in self.logs.items():
            log.reopen(log.end, self.checkpoint.get(key, log.start))
