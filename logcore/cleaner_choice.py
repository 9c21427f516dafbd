"""Which partition is compacted next, and how far each one has come.

Of the compacted partitions of a data directory the one with the largest share of dirty bytes is
taken, if that is above its ``min_cleanable_dirty_ratio`` or its oldest dirty data has waited beyond
``max_compaction_lag_ms``. A partition that could not be cleaned is left alone until the next start:
the same damage would fail every round, and the rest of the log still serves.

Everything here runs on the thread that owns the partitions.

Source: ``LogCleanerManager``.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping

from fencepost.logcore.compaction import DEDUPE_BUFFER_BYTES, CompactionRound, DirtyRange
from fencepost.logcore.errors import StorageError
from fencepost.logcore.partition import Partition

Key = tuple[str, int]

Failed = Callable[[Partition, Exception], None]


class CleanerChoice:
    """The best of the partitions that it is shown, by where the last round on each has ended.

    ``offsets`` is that, by topic and index; whoever owns it sees to it that nothing stands there of
    a partition that is gone, nor beyond a log's end. ``on_failed`` hears of each partition that is
    left alone from now on.
    """

    def __init__(self, offsets: MutableMapping[Key, int], on_failed: Failed | None = None) -> None:
        self._offsets = offsets
        self._on_failed = on_failed
        self._best: tuple[Partition, DirtyRange] | None = None
        self.uncleanable: dict[Key, str] = {}
        """Partitions whose cleaning failed, with the reason."""

    def look_at(self, partition: Partition, now_ms: int) -> None:
        """Remember the partition if it needs cleaning more than those before it.

        One whose files fail while it is looked at goes off line and is passed over.
        """
        key = (partition.topic, partition.index)
        if not partition.log.config.is_compacted or key in self.uncleanable:
            return
        try:
            dirty = partition.cleanup.dirty_range(self._offsets.get(key), now_ms)
        except StorageError:
            return
        except Exception as error:  # noqa: BLE001 - the others have to be looked at as well
            self.failed(partition, error)
            return
        ratio = dirty.dirty_ratio
        due = ratio > partition.log.config.min_cleanable_dirty_ratio or dirty.overdue_ms > 0
        if dirty.dirty_bytes and due and (self._best is None or ratio > self._best[1].dirty_ratio):
            self._best = partition, dirty

    def next_round(
        self, now_ms: int, *, budget_bytes: int = DEDUPE_BUFFER_BYTES
    ) -> tuple[Partition, CompactionRound] | None:
        """Plan a round on the best of those that :meth:`look_at` has seen; None if none needs it.

        The next call begins with none. A partition that fails is passed over.
        """
        best, self._best = self._best, None
        if best is None:
            return None
        partition, dirty = best
        try:
            planned = partition.cleanup.plan_compaction(
                dirty, now_ms=now_ms, budget_bytes=budget_bytes
            )
        except StorageError:
            return None
        except Exception as error:  # noqa: BLE001 - as above
            self.failed(partition, error)
            return None
        return None if planned is None else (partition, planned)

    def finished(self, partition: Partition, compaction: CompactionRound) -> None:
        """Note a round whose every group is installed; it has to be written down."""
        self._offsets[partition.topic, partition.index] = compaction.next_dirty_offset

    def failed(self, partition: Partition, error: Exception) -> None:
        """Leave a partition alone from now on."""
        self.uncleanable[partition.topic, partition.index] = f"{type(error).__name__}: {error}"
        if self._on_failed is not None:
            self._on_failed(partition, error)

    def forget(self, topic: str, index: int) -> None:
        """Another partition of this name begins anew."""
        self.uncleanable.pop((topic, index), None)
