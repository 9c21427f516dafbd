"""The newest entries of the broker's history, read on from where the last look ended.

Fencepost writes down why things happened; Apache Kafka does not, and there all of this is empty and
says so.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from fencepost.console.limits import HISTORY_ENTRIES, TIMELINE_ENTRIES
from fencepost.console.sessions import knows
from fencepost.coordinator.cli.history import row_of
from fencepost.coordinator.cli.queries.reader import visible
from fencepost.coordinator.cli.queries.session import Session
from fencepost.coordinator.history.entries import Entry, decode_value
from fencepost.coordinator.metadata.names import HISTORY_TOPIC
from fencepost.coordinator.wire.client.requests import EARLIEST, LATEST

PLACE = (HISTORY_TOPIC, 0)

Row = dict[str, Any]


class History:
    """What the console knows of the history. Several threads may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: deque[Entry] = deque(maxlen=HISTORY_ENTRIES)
        self._next: int | None = None

    def read_on(self, session: Session) -> bool:
        """Read what is new; False if the cluster keeps no history, or has none yet."""
        if not knows(session, HISTORY_TOPIC):
            return False
        with self._lock:
            first = session.offsets([PLACE], EARLIEST)[PLACE]
            end = session.offsets([PLACE], LATEST)[PLACE]
            if self._next is None or self._next > end:
                # More than one entry may be in one batch, but never in one offset.
                self._entries.clear()
                self._next = max(first, end - HISTORY_ENTRIES)
            self._next = max(self._next, first)
            while self._next < end:
                row = session.fetch(*PLACE, self._next, committed=False)
                records, behind = visible(row.records or b"", self._next, [])
                if behind <= self._next:
                    break
                self._next = behind
                for record in records:
                    entry = None if record.value is None else decode_value(record.value)
                    if entry is not None:
                        self._entries.append(entry)
        return True

    def rows(self, keep: Callable[[Entry], bool], limit: int = TIMELINE_ENTRIES) -> list[Row]:
        """The newest ``limit`` entries that ``keep`` wants, newest first."""
        found: list[Row] = []
        with self._lock:
            entries = list(self._entries)
        for entry in reversed(entries):
            if keep(entry):
                found.append({**row_of(entry), "at_ms": entry.at_ms, "scope": entry.scope})
                if len(found) == limit:
                    break
        return found

    def of(self, session: Session, scope: str, subject: str) -> Mapping[str, Any]:
        """The timeline of one group or transactional id, and whether there is a history at all."""
        kept = self.read_on(session)
        rows = self.rows(lambda entry: entry.scope == scope and entry.subject == subject)
        return {"kept": kept, "rows": rows}
