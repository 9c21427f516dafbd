"""The leader-epoch cache of a partition: the start offset of each epoch.

It is the only input for truncation between replicas and for a consumer's truncation check, so all
code that changes a log (append, recovery, truncation, retention) updates it.

Source: ``LeaderEpochFileCache``.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Final

from fencepost.logcore.checkpoints import CheckpointError, read_epochs
from fencepost.logcore.errors import FencedLeaderEpochError, UnknownLeaderEpochError
from fencepost.logcore.fs import FileSystem

UNDEFINED_EPOCH: Final = -1
UNDEFINED_EPOCH_OFFSET: Final = -1


def check_leader_epoch(requested: int, current: int) -> None:
    """Compare a request's leader epoch with the partition's; −1 is not checked.

    Raises FencedLeaderEpochError, UnknownLeaderEpochError.
    """
    if requested not in {UNDEFINED_EPOCH, current}:
        error = FencedLeaderEpochError if requested < current else UnknownLeaderEpochError
        raise error(f"leader epoch {requested}, ours is {current}")


class LeaderEpochs:
    """Epochs and their start offsets, both strictly increasing, mirrored in a file.

    A flush of the log writes the file before the recovery point moves. If a kill or a power loss
    removes epochs, recovery restores them from the batch headers after the recovery point. The file
    is synced before it is renamed; otherwise power loss could remove the older epochs as well.
    """

    def __init__(self, fs: FileSystem, directory: str) -> None:
        self._fs = fs
        self._directory = directory
        self._epochs: list[int] = []
        self._starts: list[int] = []
        self.is_synced = True
        """Whether the file holds the current entries."""
        self.is_checked = True
        """Whether the entries from the file were compared with the log."""
        self.latest: int = UNDEFINED_EPOCH
        """The newest epoch, −1 without any."""

    def load(self) -> bool:
        """Read the file's entries; return False when there is no usable file.

        ``LogReader.check_epochs`` compares them with the log before their first use.
        """
        self.is_checked = False
        try:
            entries = read_epochs(self._fs, self._directory)
        except CheckpointError:
            return False
        if entries is None or not _is_rising(entries):
            return False
        for epoch, start in entries:
            self._insert(epoch, start)
        return True

    def replace(self, entries: Sequence[tuple[int, int]]) -> None:
        """Replace the file's entries, which contradict the log."""
        self.clear()
        for epoch, start in entries:
            self._insert(epoch, start)
        self.is_synced = False

    @property
    def entries(self) -> list[tuple[int, int]]:
        """The (epoch, start offset) pairs, oldest first."""
        return list(zip(self._epochs, self._starts, strict=True))

    def assign(self, epoch: int, start_offset: int) -> None:
        """Add the epoch that begins at ``start_offset``."""
        if self._insert(epoch, start_offset):
            self.is_synced = False

    def _insert(self, epoch: int, start_offset: int) -> bool:
        """Add an entry unless it has the latest epoch; remove contradicting later entries."""
        if epoch < 0 or epoch == self.latest:
            return False
        count = min(bisect_left(self._epochs, epoch), bisect_left(self._starts, start_offset))
        del self._epochs[count:], self._starts[count:]
        self._epochs.append(epoch)
        self._starts.append(start_offset)
        self.latest = epoch
        return True

    def end_offset_for(self, epoch: int, log_end_offset: int) -> tuple[int, int]:
        """Return (epoch, end offset) for an OffsetForLeaderEpoch response.

        (−1, −1) when the epoch is unknown; see ``LeaderEpochFileCache.endOffsetFor``.
        """
        if epoch == UNDEFINED_EPOCH or not self._epochs or epoch > self.latest:
            return UNDEFINED_EPOCH, UNDEFINED_EPOCH_OFFSET
        if epoch == self.latest:
            return epoch, log_end_offset
        above = bisect_right(self._epochs, epoch)
        if above == 0:
            return epoch, self._starts[0]
        return self._epochs[above - 1], self._starts[above]

    def epoch_at(self, offset: int) -> int:
        """Return the epoch under which ``offset`` was written, −1 if it is unknown."""
        above = bisect_right(self._starts, offset)
        return self._epochs[above - 1] if above else UNDEFINED_EPOCH

    def truncate_from_end(self, end_offset: int) -> None:
        """Remove epochs that begin at ``end_offset`` or later."""
        count = bisect_left(self._starts, end_offset)
        if count < len(self._starts):
            del self._epochs[count:], self._starts[count:]
            self.latest = self._epochs[-1] if self._epochs else UNDEFINED_EPOCH
            self.is_synced = False

    def truncate_from_start(self, start_offset: int) -> None:
        """Remove epochs that end at or before an offset, and let the offset's epoch begin there."""
        above = bisect_right(self._starts, start_offset)
        if above == 0 or (above == 1 and self._starts[0] == start_offset):
            return
        del self._epochs[: above - 1], self._starts[: above - 1]
        self._starts[0] = start_offset
        self.is_synced = False

    def clear(self) -> None:
        """Remove all entries."""
        if self._epochs:
            self._epochs.clear()
            self._starts.clear()
            self.latest = UNDEFINED_EPOCH
            self.is_synced = False

    def plan_flush(self) -> list[tuple[int, int]] | None:
        """Return the entries to write to the file, None if it is up to date.

        The caller must write them (``write_epochs``), in any thread, or stop the log.
        """
        if self.is_synced:
            return None
        self.is_synced = True
        return self.entries


def _is_rising(entries: Sequence[tuple[int, int]]) -> bool:
    """Return whether epochs and offsets strictly increase from 0 on, as in every valid file."""
    before = -1, -1
    for entry in entries:
        if entry[0] <= before[0] or entry[1] <= before[1]:
            return False
        before = entry
    return True
