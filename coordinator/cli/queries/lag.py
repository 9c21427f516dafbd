"""How far readers are behind: in records that they can really still get.

High watermark minus committed offset, which others show, counts what nobody will ever read: the
markers of transactions, the records of aborted ones, what retention has removed, and what an open
transaction holds back. Here those are left out, and what is held back is told apart.

The protocol tells offsets, not records. A small gap is looked at batch by batch; a large one is
counted in offsets, which are at least as many as the records.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode

from fencepost.coordinator.cli.queries.reader import aborted_of, headers, readable
from fencepost.coordinator.wire.client.client import ApiError
from fencepost.coordinator.wire.client.requests import EARLIEST, LATEST
from fencepost.logcore.batch import BatchHeader, iter_records
from fencepost.logcore.values import dataclass

if TYPE_CHECKING:
    from fencepost.coordinator.cli.queries.session import Session
    from fencepost.coordinator.wire.client.requests import Partition

EXACT_OFFSETS = 10_000
"""A gap of no more offsets than this is looked at batch by batch."""

EXACT_BYTES = 16 << 20
"""Bytes of batches that are looked at for all partitions of one question."""

FETCH_BYTES = 1 << 20
"""Of one look."""

_GONE = frozenset(
    {
        ErrorCode.offset_out_of_range,
        ErrorCode.kafka_storage_error,
        ErrorCode.leader_not_available,
        ErrorCode.not_leader_or_follower,
    }
)
"""Retention was quicker, or the partition went off line."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The offsets of a partition: its first, the last stable one, and the high watermark."""

    first: int
    stable: int
    end: int


@dataclass(frozen=True, slots=True)
class Lag:
    """How far a reader of one partition is behind. All are records, and never below 0."""

    readable: int
    """What a read_committed reader can still get."""
    held_back: int
    """What lies behind the first record of an open transaction: nobody knows yet whether a
    read_committed reader will get it."""
    uncommitted: int
    """What a read_uncommitted reader can still get."""
    is_exact: bool
    """False where offsets were counted: there may be fewer records."""


class Lags:
    """Answers for many readers of the same partitions, all at one moment.

    Ask for the committed offsets first: they only grow, so that no reader looks nearer than it is.
    """

    def __init__(self, session: Session, partitions: Iterable[Partition]) -> None:
        """Ask for the bounds of those of ``partitions`` that there are. Raises ApiError.

        A partition without a leader has none, and stands in ``failed``.
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
        known = sorted(
            tp for tp, leader in leaders.items() if leader is not None and tp not in self.failed
        )
        # In this order each can only be above the one before.
        first = session.offsets(known, EARLIEST)
        stable = session.offsets(known, LATEST, committed=True)
        end = session.offsets(known, LATEST)
        self.bounds = {tp: Bounds(first[tp], stable[tp], end[tp]) for tp in known}

    def of(self, partition: Partition, committed: int | None) -> Lag | None:
        """The lag of a reader that has committed so far; None if it has not, or nothing is there.

        Raises ApiError.
        """
        bounds = self.bounds.get(partition)
        if bounds is None or committed is None:
            return None
        # What retention has removed can not be read any more.
        position = max(committed, bounds.first)
        asked = partition, position
        if asked not in self._counted:
            self._counted[asked] = self._count(partition, position, bounds)
        return self._counted[asked]

    def from_start(self, partition: Partition) -> Lag | None:
        """The lag from the log start: the most that a group without a commit may be behind.

        Its reset policy, which only its members know, decides where it begins. Raises ApiError.
        """
        bounds = self.bounds.get(partition)
        return None if bounds is None else self.of(partition, bounds.first)

    def held_since(self, partition: Partition) -> int | None:
        """When the transaction began that holds the last stable offset back: ms, or None."""
        bounds = self.bounds[partition]
        if bounds.stable >= bounds.end:
            return None
        row = self._fetch(partition, bounds.stable, committed=False, max_bytes=1)
        if row is None:
            return None
        return next((header.base_timestamp for _, header in headers(row.records or b"")), None)

    def _count(self, partition: Partition, position: int, bounds: Bounds) -> Lag:
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
        """Count to ``end``: records to read, the same with aborted ones, whether that is exact.

        What was not looked at is counted in offsets.
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
            position = ends[-1] if ends else end  # compaction may have left nothing
        left = max(0, end - position)
        return shown + left, everything + left, left == 0

    def _fetch(self, partition: Partition, offset: int, **how: Any) -> Any | None:
        """What :meth:`Session.fetch` says; None if it can not be read any more."""
        try:
            return self._session.fetch(*partition, offset, **how)
        except ApiError as error:
            if error.code in _GONE:
                return None
            raise


def _records(data: bytes, at: int, header: BatchHeader, first: int, end: int) -> int:
    """How many records of a batch lie from ``first`` to ``end``."""
    if header.base_offset >= first and header.next_offset <= end:
        return header.record_count
    return sum(first <= record.offset < end for record in iter_records(data, at, header))
