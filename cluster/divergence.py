"""The divergence of a leader's and a follower's log: the leader's answer, and where to truncate.

Source: ``Partition.readRecords``, ``AbstractFetcherThread.getOffsetTruncationState``; KIP-101,
KIP-279, KIP-595.
"""

from __future__ import annotations

from typing import Final, Protocol

from fencepost.logcore.errors import OffsetOutOfRangeError

NO_EPOCH: Final = -1
UNKNOWN_OFFSET: Final = -1


class EpochEnds(Protocol):
    """The leader epochs of a log."""

    @property
    def log_end_offset(self) -> int:
        """The offset of the next record."""

    def end_of_epoch(self, epoch: int) -> tuple[int, int]:
        """Return (the largest known epoch ≤ ``epoch``, its end offset).

        Like ``LeaderEpochFileCache.endOffsetFor``: the latest epoch ends at the log end offset. For
        an epoch below all known ones the result is (``epoch``, the start offset of the first known
        epoch). For an epoch above all known ones it is (−1, −1).
        """


def diverging_epoch(
    end_of_epoch: tuple[int, int], last_fetched_epoch: int, fetch_offset: int, log_start_offset: int
) -> tuple[int, int] | None:
    """Return the diverging epoch in a leader's answer to a fetch; None if the logs agree.

    ``last_fetched_epoch`` is the epoch of the follower's last record. ``end_of_epoch`` is the
    result of :meth:`EpochEnds.end_of_epoch` for this epoch in the leader's log. The diverging epoch
    is returned with its end offset in the leader's log, to which the follower must truncate. An
    answer with a diverging epoch has no records, and the leader does not count the fetch as
    progress of the follower. Raises OffsetOutOfRangeError for an epoch above all epochs of the
    leader, and for an offset below the start of the leader's log, whether the logs diverge or not.
    """
    if last_fetched_epoch == NO_EPOCH:
        return None
    epoch, end = end_of_epoch
    if epoch == NO_EPOCH or end == UNKNOWN_OFFSET:
        raise OffsetOutOfRangeError(
            f"leader epoch {last_fetched_epoch}, requested at {fetch_offset}, is unknown"
        )
    if fetch_offset < log_start_offset:
        raise OffsetOutOfRangeError(
            f"offset {fetch_offset} is below {log_start_offset}, where the log begins"
        )
    return end_of_epoch if epoch < last_fetched_epoch or end < fetch_offset else None


def truncation_offset(log: EpochEnds, epoch: int, end: int, start: int) -> int:
    """Return the offset to truncate a follower's log to, if the leader's ``epoch`` ends at ``end``.

    The result is ``start`` if the leader knows no end. If the follower's log lacks that epoch, the
    log is truncated to the end of its largest smaller epoch, and the next fetch compares again.
    """
    own_end = log.log_end_offset
    if end == UNKNOWN_OFFSET:
        return min(start, own_end)
    if epoch == NO_EPOCH:
        return min(end, own_end)
    own_epoch, own_epoch_end = log.end_of_epoch(epoch)
    if own_epoch == NO_EPOCH:
        return min(end, own_end)
    if own_epoch != epoch:
        return min(own_epoch_end, own_end)
    return min(own_epoch_end, end, own_end)
