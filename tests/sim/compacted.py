"""Committed records of a compacted topic, whose replicas are compacted at different times."""

from __future__ import annotations

from collections.abc import Iterable

from fencepost.logcore.batch import BatchHeader, LogRecord
from tests.sim.invariants import BrokenInvariantError


class CompactedRecords:
    """The records that any replica has had below its high watermark.

    A replica may lack a record if a later record has the same key. Transactional records and
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
        there = {record.offset: record for record in records}
        for offset, record in there.items():
            self._newest[record.key] = max(self._newest.get(record.key, -1), offset)
            known = self._records.setdefault(offset, record)
            if known != record:
                raise BrokenInvariantError(f"{where}: {record} was committed as {known}")
        for offset in range(header.base_offset, header.next_offset):
            if offset in self._records and offset not in there:
                self._missing[offset] = None

    def check_missing(self, where: str) -> None:
        """Raise BrokenInvariantError if a missing record is the last record of its key."""
        for offset in self._missing:
            record = self._records[offset]
            if self._newest[record.key] == offset:
                raise BrokenInvariantError(f"{where}: the last record of its key is gone: {record}")
        self._missing.clear()
