"""The choice of the partition to compact next, and the cleaner's progress on each partition.

A compacted partition needs cleaning if its share of dirty bytes is above
``min_cleanable_dirty_ratio``, or if its oldest dirty data exceeds ``max_compaction_lag_ms``. Of
these partitions in a data directory, the cleaner takes the one with the largest share of dirty
bytes. After a failed round a partition is skipped until the next start: the same damage would fail
every round, and the log can be used without compaction.

All methods run on the thread that owns the partitions.

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
    """Selects, of the partitions passed to :meth:`consider`, the one that needs cleaning most.

    ``offsets`` maps (topic, index) to the end of the partition's last round. The owner of the
    mapping removes deleted partitions, and offsets beyond a log's end. ``on_failed`` is called for
    each partition that is skipped from now on.
    """

    def __init__(self, offsets: MutableMapping[Key, int], on_failed: Failed | None = None) -> None:
        self._offsets = offsets
        self._on_failed = on_failed
        self._best: tuple[Partition, DirtyRange] | None = None
        self.uncleanable: dict[Key, str] = {}
        """Partitions whose cleaning failed, with the reason."""

    def consider(self, partition: Partition, now_ms: int) -> None:
        """Remember the partition if it needs cleaning more than the previous ones.

        A partition whose files fail during the check goes off line and is skipped.
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
        """Plan a round on the best partition considered since the last call; None if there is none.

        A partition that fails is skipped.
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
        """Record the end of a round whose outputs are all installed; the caller checkpoints it."""
        self._offsets[partition.topic, partition.index] = compaction.next_dirty_offset

    def failed(self, partition: Partition, error: Exception) -> None:
        """Skip the partition from now on."""
        self.uncleanable[partition.topic, partition.index] = f"{type(error).__name__}: {error}"
        if self._on_failed is not None:
            self._on_failed(partition, error)

    def forget(self, topic: str, index: int) -> None:
        """Forget that cleaning a partition failed, because a new partition has its name."""
        self.uncleanable.pop((topic, index), None)
