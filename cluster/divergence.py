"""Where the logs of a leader and of its follower part: what the leader answers, where to cut.

Source: ``Partition.readRecords``, ``AbstractFetcherThread.getOffsetTruncationState``; KIP-101,
KIP-279, KIP-595.
"""

from __future__ import annotations

from typing import Final, Protocol

from fencepost.logcore.errors import OffsetOutOfRangeError

NO_EPOCH: Final = -1
UNKNOWN_OFFSET: Final = -1


class EpochEnds(Protocol):
    """A log, as far as its leader epochs go."""

    @property
    def log_end_offset(self) -> int:
        """The offset of the next record."""

    def end_of_epoch(self, epoch: int) -> tuple[int, int]:
        """(largest known epoch ≤ ``epoch``, where it ends), (−1, −1) if nothing is known.

        As ``LeaderEpochFileCache.endOffsetFor``; the latest epoch ends at the log's end, and of one
        below all known it is (``epoch``, where the first known begins).
        """


def diverging_epoch(
    end_of_epoch: tuple[int, int], last_fetched_epoch: int, fetch_offset: int, log_start_offset: int
) -> tuple[int, int] | None:
    """Return what a leader answers a fetch after a record of that epoch; None if the logs agree.

    ``end_of_epoch`` is the leader's of ``last_fetched_epoch``. The answer is (epoch, where it ends
    in the leader's log): the reader has to cut its own. Such an answer has no records, and the
    fetch does not count for the follower's state. Raises OffsetOutOfRangeError for an epoch above
    all that the leader knows, and below the start of its log, whether the epochs part or not.
    """
    if last_fetched_epoch == NO_EPOCH:
        return None
    epoch, end = end_of_epoch
    if epoch == NO_EPOCH or end == UNKNOWN_OFFSET:
        raise OffsetOutOfRangeError(
            f"nothing is known of leader epoch {last_fetched_epoch}, asked for at {fetch_offset}"
        )
    if fetch_offset < log_start_offset:
        raise OffsetOutOfRangeError(
            f"offset {fetch_offset} is below {log_start_offset}, where the log begins"
        )
    return end_of_epoch if epoch < last_fetched_epoch or end < fetch_offset else None


def truncation_offset(log: EpochEnds, epoch: int, end: int, start: int) -> int:
    """Where a follower cuts its log, given where the leader says that ``epoch`` ends.

    ``start`` counts if the leader knows nothing. Where the own log does not know that very epoch,
    it is cut to the end of the largest one below, and the next fetch asks again.
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
