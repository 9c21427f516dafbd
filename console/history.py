"""The newest entries of the broker's history, read incrementally.

Fencepost records the causes of events; Apache Kafka does not, and with its brokers these views are
empty and say so.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fencepost.cli.history_view import row_of
from fencepost.client.queries.reader import visible
from fencepost.client.queries.session import ClusterSession
from fencepost.client.requests import EARLIEST, LATEST, Partition
from fencepost.console.limits import HISTORY_ENTRIES, TIMELINE_ENTRIES
from fencepost.console.sessions import topic_exists
from fencepost.coordinator.history.entries import REQUEST_SCOPES, Entry, decode_value
from fencepost.coordinator.history.repeats import Repeats
from fencepost.coordinator.metadata.names import HISTORY_TOPIC

Row = dict[str, Any]


class HistoryCache:
    """The history entries that the console has read. It is thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: deque[Entry] = deque(maxlen=HISTORY_ENTRIES)
        self._repeats = Repeats()
        self._next: dict[int, int] = {}
        """The next offset to read of each partition; every broker of a cluster has a partition."""

    def read_on(self, session: ClusterSession) -> bool:
        """Read new entries; return False if the cluster keeps no history, or has none yet."""
        if not topic_exists(session, HISTORY_TOPIC):
            return False
        (topic,) = session.topics([HISTORY_TOPIC])
        places = [
            (HISTORY_TOPIC, index) for index, row in topic.partitions.items() if row.leader >= 0
        ]
        with self._lock:
            first, end = session.offsets(places, EARLIEST), session.offsets(places, LATEST)
            entries: list[Entry] = []
            for place in places:
                entries += self._read(session, place, first[place], end[place])
            # Merge the entries of several brokers by time.
            entries.sort(key=lambda entry: entry.at_ms)
            self._entries.extend(filter(self._repeats.is_new, entries))
        return True

    def _read(
        self, session: ClusterSession, place: Partition, first: int, end: int
    ) -> Iterator[Entry]:
        at = self._next.get(place[1])
        if at is None or at > end:
            # An offset holds at most one entry, so earlier offsets cannot be among the newest.
            if at is not None:
                self._entries.clear()
                self._repeats = Repeats()
            at = end - HISTORY_ENTRIES
        at = max(at, first)
        while at < end:
            row = session.fetch(*place, at, committed=False)
            records, behind = visible(row.records or b"", at, [])
            if behind <= at:
                break
            at = behind
            for record in records:
                entry = None if record.value is None else decode_value(record.value)
                if entry is not None and entry.scope not in REQUEST_SCOPES:
                    yield entry
        self._next[place[1]] = at

    def entries(self, scope: str, subject: str) -> list[Entry]:
        """Return the entries of one subject, oldest first."""
        return [
            entry for entry in self.newest() if entry.scope == scope and entry.subject == subject
        ]

    def newest(self) -> list[Entry]:
        """Return all entries that have been read, oldest first."""
        with self._lock:
            return list(self._entries)

    def rows(self, keep: Callable[[Entry], bool], limit: int = TIMELINE_ENTRIES) -> list[Row]:
        """Return the newest ``limit`` entries for which ``keep`` is true, newest first."""
        rows: list[Row] = []
        for entry in reversed(self.newest()):
            if keep(entry):
                rows.append({**row_of(entry), "at_ms": entry.at_ms, "scope": entry.scope})
                if len(rows) == limit:
                    break
        return rows

    def of(self, session: ClusterSession, scope: str, subject: str) -> Mapping[str, Any]:
        """Return the timeline of a group or transactional id, and whether a history is kept."""
        kept = self.read_on(session)
        rows = self.rows(lambda entry: entry.scope == scope and entry.subject == subject)
        return {"kept": kept, "rows": rows}
