"""Leader epochs and isolation levels as requests ask for them.

A partition notes an epoch with the first batch written under it; to a client the current epoch
exists from the moment we lead, and begins at the log end.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from fencepost.coordinator.errors import InvalidRequestError
from fencepost.logcore.partition import Isolation, Partition

UNKNOWN = -1


def isolation_of(body: Any) -> Isolation:
    """How far the sender of a request may see. InvalidRequestError where there is no such level."""
    level = getattr(body, "isolation_level", 0)
    try:
        return Isolation(level)
    except ValueError:
        raise InvalidRequestError(f"there is no isolation level {level}") from None


def end_of_epoch(partition: Partition, epoch: int) -> tuple[int, int]:
    """(epoch, end offset) of the largest epoch not above ``epoch``; (−1, −1) if none is known.

    Source: ``LeaderEpochFileCache.endOffsetFor``.
    """
    if epoch == partition.leader_epoch:
        return epoch, partition.log_end_offset
    return partition.offset_for_leader_epoch(epoch)


def epoch_of(partition: Partition, offset: int) -> int:
    """The epoch under which ``offset`` was written; −1 if it was not written yet."""
    if offset >= partition.log_end_offset:
        return UNKNOWN

    def end(epoch: int) -> int:
        known = partition.offset_for_leader_epoch(epoch)[1]
        return partition.log_end_offset if known < 0 else known

    # Epochs' end offsets grow with the epochs: the first that ends behind the offset holds it.
    epochs = range(partition.leader_epoch + 1)
    at = bisect_right(epochs, offset, key=end)
    return epochs[at] if at < len(epochs) else UNKNOWN
