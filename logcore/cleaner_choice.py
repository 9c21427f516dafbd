"""Which partition is compacted next, and how far each one has come.

Of the compacted partitions of a data directory the one with the largest share of dirty bytes is
taken, if that is above its ``min_cleanable_dirty_ratio`` or its oldest dirty data has waited beyond
``max_compaction_lag_ms``. A partition that could not be cleaned is left alone until the next start:
the same damage would fail every round, and the rest of the log still serves.

Everything here runs on the thread that owns the partitions.

Source: ``LogCleanerManager``.
"""

from __future__ import annotations

from collections.abc import Iterable

from logcore.checkpoints import CLEANER_CHECKPOINT, CheckpointError, read_offsets, write_offsets
from logcore.compaction import DEDUPE_BUFFER_BYTES, CompactionRound, DirtyRange
from logcore.errors import StorageError
from logcore.fs import FileSystem
from logcore.partition import Partition

Key = tuple[str, int]


class CleanerChoice:
    """The cleaner's checkpoint of one data directory and the choice by it.

    A checkpoint that does not parse is no loss: the logs are cleaned from their start once more.
    """

    def __init__(self, fs: FileSystem, directory: str) -> None:
        self._fs = fs
        self._directory = directory
        try:
            self._offsets = read_offsets(fs, directory, CLEANER_CHECKPOINT)
        except CheckpointError:
            self._offsets = {}
        self.uncleanable: dict[Key, str] = {}
        """Partitions whose cleaning failed, with the reason."""

    def checkpoint(self, topic: str, index: int) -> int | None:
        """Where the last round on a partition ended, None before the first."""
        return self._offsets.get((topic, index))

    def choose(
        self, partitions: Iterable[Partition], now_ms: int
    ) -> tuple[Partition, DirtyRange] | None:
        """Return the partition to clean next and its range, None if none needs it.

        A partition whose files fail while it is looked at goes off line and is passed over.
        """
        best: tuple[Partition, DirtyRange] | None = None
        for partition in partitions:
            key = (partition.topic, partition.index)
            if not partition.config.is_compacted or key in self.uncleanable:
                continue
            try:
                dirty = partition.dirty_range(self._offsets.get(key), now_ms)
            except StorageError:
                continue
            ratio = dirty.dirty_ratio
            due = ratio > partition.config.min_cleanable_dirty_ratio or dirty.overdue_ms > 0
            if dirty.dirty_bytes and due and (best is None or ratio > best[1].dirty_ratio):
                best = partition, dirty
        return best

    def next_round(
        self,
        partitions: Iterable[Partition],
        now_ms: int,
        *,
        budget_bytes: int = DEDUPE_BUFFER_BYTES,
    ) -> tuple[Partition, CompactionRound] | None:
        """Plan a round on the partition that :meth:`choose` names.

        Raises StorageError if its files fail.
        """
        chosen = self.choose(partitions, now_ms)
        if chosen is None:
            return None
        partition, dirty = chosen
        compaction = partition.plan_compaction(dirty, now_ms=now_ms, budget_bytes=budget_bytes)
        return None if compaction is None else (partition, compaction)

    def finished(self, partition: Partition, compaction: CompactionRound) -> None:
        """Checkpoint a round whose every group is installed. Raises OSError."""
        self._offsets[partition.topic, partition.index] = compaction.next_dirty_offset
        self._write()

    def failed(self, partition: Partition, error: Exception) -> None:
        """Leave a partition alone from now on."""
        self.uncleanable[partition.topic, partition.index] = f"{type(error).__name__}: {error}"

    def truncated(self, partition: Partition) -> None:
        """Lower the checkpoint of a partition that now ends before it. Raises OSError."""
        key = (partition.topic, partition.index)
        offset = self._offsets.get(key)
        if offset is not None and offset > partition.log_end_offset:
            self._offsets[key] = partition.log_end_offset
            self._write()

    def forget(self, topic: str, index: int) -> None:
        """Drop a partition that was deleted; another of its name begins anew. Raises OSError."""
        self.uncleanable.pop((topic, index), None)
        if self._offsets.pop((topic, index), None) is not None:
            self._write()

    def _write(self) -> None:
        write_offsets(self._fs, self._directory, CLEANER_CHECKPOINT, self._offsets, copied=True)
