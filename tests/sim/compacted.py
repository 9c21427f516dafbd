"""Committed records of a compacted topic, whose replicas are compacted at different times."""

from __future__ import annotations

from collections.abc import Iterable

from fencepost.logcore.batch import BatchHeader, LogRecord
from tests.sim.invariants import BrokenInvariantError


class CompactedRecords:
    """The records that any replica has had below its high watermark.

    A replica may lack a record if the record's key has a later one. Transactional records and
    markers are not tracked, because compaction also removes aborted records and old markers.
    """

    def __init__(self) -> None:
        self._records: dict[int, LogRecord] = {}
        self._newest: dict[bytes | None, int] = {}
        """The last offset of each key."""
        self._missing: dict[int, None] = {}
        """Offsets that the replica being checked lacks."""

    def take(self, where: str, header: BatchHeader, records: Iterable[LogRecord]) -> None:
        """Add a replica's batch; raise BrokenInvariantError if other replicas' records differ."""
        if header.is_control or header.is_transactional:
            return
        there = {one.offset: one for one in records}
        for offset, one in there.items():
            self._newest[one.key] = max(self._newest.get(one.key, -1), offset)
            known = self._records.setdefault(offset, one)
            if known != one:
                raise BrokenInvariantError(f"{where}: {one} was committed as {known}")
        for offset in range(header.base_offset, header.next_offset):
            if offset in self._records and offset not in there:
                self._missing[offset] = None

    def check_missing(self, where: str) -> None:
        """Raise BrokenInvariantError if a missing record is the last one of its key."""
        for offset in self._missing:
            one = self._records[offset]
            if self._newest[one.key] == offset:
                raise BrokenInvariantError(f"{where}: the last record of its key is gone: {one}")
        self._missing.clear()
