"""The metadata log of the controller: batches, and a snapshot in the place of the oldest.

Snapshots are the daemon's files, on a disk in memory: written, read in pieces, and loaded again by
its code. The rules of reading are those of ``QuorumLog``.
"""

from __future__ import annotations

from typing import Final

from fencepost.cluster.image import MetadataImage
from fencepost.cluster.image_loader import ImageLoader
from fencepost.cluster.observer import MetadataBatch, OffsetAndEpoch
from fencepost.coordinator.metadata.snapshots import (
    SnapshotId,
    load_snapshot,
    snapshots,
    write_snapshot,
)
from tests.support.memory_disk import MemoryDisk

_HERE: Final = ""


class MetadataLog:
    """What is on the controller's disk."""

    def __init__(self) -> None:
        self.batches: list[MetadataBatch] = []
        self.snapshot: SnapshotId | None = None
        self.records = 0
        """Behind the snapshot."""
        self.disk = MemoryDisk()

    @property
    def start(self) -> int:
        """The first offset that the log still has."""
        return 0 if self.snapshot is None else self.snapshot.end_offset

    @property
    def end(self) -> int:
        """The offset of the next record."""
        return self.batches[-1].last_offset + 1 if self.batches else self.start

    def append(self, batch: MetadataBatch) -> None:
        """Put a batch behind the others."""
        self.batches.append(batch)
        self.records += len(batch.records)

    def read(
        self, offset: int, last_fetched_epoch: int, most: int
    ) -> list[MetadataBatch] | OffsetAndEpoch:
        """Batches from an offset on, or the snapshot that has to be fetched before."""
        snapshot = self.snapshot
        if snapshot is not None and (
            offset == 0
            or offset < snapshot.end_offset
            or last_fetched_epoch < snapshot.epoch
            or (offset == snapshot.end_offset and last_fetched_epoch != snapshot.epoch)
        ):
            return OffsetAndEpoch(*snapshot)
        return [one for one in self.batches if one.last_offset >= offset][:most]

    def content(self, asked: OffsetAndEpoch) -> bytes | None:
        """The bytes of a snapshot; None if it is not there."""
        if SnapshotId(*asked) not in snapshots(self.disk, _HERE):
            return None
        return self.disk.read_file(f"{_HERE}/{SnapshotId(*asked).file_name}")

    def compact(self, image: MetadataImage, now_ms: int) -> None:
        """Let a snapshot take the place of all that there is."""
        self.snapshot = write_snapshot(self.disk, _HERE, image, now_ms, now_ms)
        self.batches = [one for one in self.batches if one.base_offset >= self.start]
        self.records = 0

    def load(self) -> MetadataImage:
        """What a start makes of it (``MetadataLog._load``)."""
        loader = ImageLoader()
        if self.snapshot is not None:
            load_snapshot(self.disk, _HERE, self.snapshot, loader)
        for batch in self.batches:
            loader.replay(batch.records, batch.last_offset, batch.epoch)
        return loader.publish()
