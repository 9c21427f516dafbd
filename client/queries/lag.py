"""Consumer lag, in records that a consumer can still receive.

The usual lag, high watermark minus committed offset, also counts offsets at which the consumer
receives no record: transaction markers, aborted records, records that retention has removed, and
records that an open transaction holds back. This lag leaves out the first three, and counts
held-back records separately.

The protocol reports offsets, not records. If the lag is small, the batches are fetched and their
records counted; a large lag is given in offsets, an upper bound of the records.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode

from fencepost.client.client import ApiError
from fencepost.client.queries.reader import aborted_of, headers, readable
from fencepost.client.requests import EARLIEST, LATEST
from fencepost.logcore.batch import BatchHeader, iter_records
from fencepost.logcore.values import dataclass

if TYPE_CHECKING:
    from fencepost.client.queries.session import ClusterSession
    from fencepost.client.requests import Partition

EXACT_OFFSETS = 10_000
"""The largest lag, in offsets, for which the batches are fetched and their records counted."""

EXACT_BYTES = 16 << 20
"""The maximum number of bytes to fetch for all partitions of one query."""

FETCH_BYTES = 1 << 20
"""The maximum number of bytes in one fetch."""

_GONE = frozenset(
    {
        ErrorCode.offset_out_of_range,
        ErrorCode.kafka_storage_error,
        ErrorCode.leader_not_available,
        ErrorCode.not_leader_or_follower,
    }
)
"""Errors of a fetch after retention has deleted the offset, or the partition went offline."""


@dataclass(frozen=True, slots=True)
class PartitionOffsets:
    """The offsets of a partition: log start, last stable offset, and high watermark."""

    first: int
    stable: int
    end: int


@dataclass(frozen=True, slots=True)
class Lag:
    """The lag of a consumer on one partition. All figures are records, and never below 0."""

    readable: int
    """Records that a read_committed consumer can receive now."""
    held_back: int
    """Records from the last stable offset on, which a read_committed consumer cannot receive before
    the open transaction ends."""
    uncommitted: int
    """Records that a read_uncommitted consumer can receive now."""
    is_exact: bool
    """False if offsets were counted: there may be fewer records."""


def bounds_of(
    session: ClusterSession, partitions: Collection[Partition]
) -> dict[Partition, PartitionOffsets]:
    """Return the offsets of partitions, which must have leaders. Raises ApiError."""
    # Offsets only grow, so that in this order first <= stable <= end.
    first = session.offsets(partitions, EARLIEST)
    stable = session.offsets(partitions, LATEST, committed=True)
    end = session.offsets(partitions, LATEST)
    return {tp: PartitionOffsets(first[tp], stable[tp], end[tp]) for tp in partitions}


class ConsumerLags:
    """Lags of many consumers of the same partitions, all at one moment.

    Fetch the committed offsets before creating this: as committed offsets grow, a lag may then be
    reported too large, but not too small.
    """

    def __init__(self, session: ClusterSession, partitions: Iterable[Partition]) -> None:
        """Look up the bounds of the partitions that exist. Raises ApiError.

        A partition without a leader has no bounds, and is in ``failed``.
        """
        self._session = session
        self._bytes_left = EXACT_BYTES
        self._counted: dict[tuple[Partition, int], Lag] = {}
        cluster = session.client.metadata(refresh=True)
        leaders = {tp: cluster.leader(*tp) for tp in partitions}
        self.failed = {
            tp: ErrorCode.leader_not_available
            for tp, leader in leaders.items()
            if leader is not None and leader not in cluster.brokers
        }
        starts = sorted(
            tp for tp, leader in leaders.items() if leader is not None and tp not in self.failed
        )
        self.bounds = bounds_of(session, starts)

    def of(self, partition: Partition, committed: int | None) -> Lag | None:
        """Return the lag of a consumer with this committed offset.

        None if there is no commit, or no such partition. Raises ApiError.
        """
        bounds = self.bounds.get(partition)
        if bounds is None or committed is None:
            return None
        # Records below the log start offset can no longer be read.
        position = max(committed, bounds.first)
        key = partition, position
        if key not in self._counted:
            self._counted[key] = self._count(partition, position, bounds)
        return self._counted[key]

    def from_start(self, partition: Partition) -> Lag | None:
        """Return the lag from the log start: the largest that a group without a commit can have.

        Where such a group starts depends on the reset policy, which only the members know. Raises
        ApiError.
        """
        bounds = self.bounds.get(partition)
        return None if bounds is None else self.of(partition, bounds.first)

    def held_since(self, partition: Partition) -> int | None:
        """Return the start time, in ms, of the transaction that holds back the last stable offset.

        None if the last stable offset is the high watermark, or the transaction's first record is
        gone.
        """
        bounds = self.bounds[partition]
        if bounds.stable >= bounds.end:
            return None
        row = self._fetch(partition, bounds.stable, committed=False, max_bytes=1)
        if row is None:
            return None
        return next((header.base_timestamp for _, header in headers(row.records or b"")), None)

    def _count(self, partition: Partition, position: int, bounds: PartitionOffsets) -> Lag:
        stable = self._between(partition, position, bounds.stable, committed=True)
        open_from = max(position, bounds.stable)
        behind = self._between(partition, open_from, bounds.end, committed=False)
        return Lag(
            readable=stable[0],
            held_back=behind[1],
            uncommitted=stable[1] + behind[1],
            is_exact=stable[2] and behind[2],
        )

    def _between(
        self, partition: Partition, position: int, end: int, *, committed: bool
    ) -> tuple[int, int, bool]:
        """Return two counts of the records before ``end``: without and with aborted records.

        The third value is whether both counts are exact; offsets that were not fetched are counted
        as records.
        """
        shown = everything = 0
        is_small = end - position <= EXACT_OFFSETS
        while position < end and is_small and self._bytes_left > 0:
            row = self._fetch(partition, position, committed=committed, max_bytes=FETCH_BYTES)
            if row is None:
                break
            data = row.records or b""
            self._bytes_left -= len(data)
            aborted = aborted_of(row) if committed else ()
            shown += sum(_records(data, *batch, position, end) for batch in readable(data, aborted))
            everything += sum(_records(data, *batch, position, end) for batch in readable(data))
            ends = [header.next_offset for _, header in headers(data)]
            position = ends[-1] if ends else end  # compaction may have removed all records
        left = max(0, end - position)
        return shown + left, everything + left, left == 0

    def _fetch(self, partition: Partition, offset: int, **how: Any) -> Any | None:
        """Fetch by ``ClusterSession.fetch``; return None if the offset is not readable."""
        try:
            return self._session.fetch(*partition, offset, **how)
        except ApiError as error:
            if error.code in _GONE:
                return None
            raise


def _records(data: bytes, at: int, header: BatchHeader, first: int, end: int) -> int:
    """Return the number of records of a batch from ``first`` to ``end``, exclusive."""
    if header.base_offset >= first and header.next_offset <= end:
        return header.record_count
    return sum(first <= record.offset < end for record in iter_records(data, at, header))
