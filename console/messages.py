"""Records of a topic: a search that reports its progress, and a view of one record.

With read_uncommitted every record in the log is shown with its state: aborted records, records of
open transactions, transaction markers. A broker lists aborted transactions only in answers to
read_committed fetches, so offsets below the last stable offset are fetched with read_committed, and
the aborted records are kept.
"""

from __future__ import annotations

import base64
import codecs
import datetime as dt
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fencepost.client.queries.open_transactions import producers
from fencepost.client.queries.reader import headers
from fencepost.client.queries.session import ClusterSession
from fencepost.client.requests import EARLIEST, LATEST
from fencepost.console.limits import (
    BUDGET_BYTES,
    BUDGET_RECORDS,
    MAX_ROWS,
    RECORD_BYTES,
    SHOWN_BYTES,
    SHOWN_HEADERS,
    STEP_BYTES,
)
from fencepost.console.paging import Params, is_on, number, required
from fencepost.console.sessions import topic_exists
from fencepost.logcore.batch import (
    BatchHeader,
    ControlType,
    LogRecord,
    first_control,
    iter_records,
    parse_control,
)

PLAIN, COMMITTED, ABORTED, OPEN, UNDECIDED, CONTROL = (
    *("plain", "committed", "aborted", "open"),
    *("undecided", "control"),
)
"""The states of a record. A record is *undecided* if it is at or above the last stable offset,
belongs to no known open transaction, and its transaction marker is not in the fetched data."""

VISIBLE = frozenset({PLAIN, COMMITTED})
"""The states that a read_committed consumer receives."""

FOLLOW_WAIT_MS = 1_000
"""How long a broker may delay its answer while a search waits for new records."""

_AGO = re.compile(r"-(\d+)([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


class NoSuchRecordError(Exception):
    """No record has this offset."""


def bytes_shown(data: bytes | None, limit: int = SHOWN_BYTES) -> dict[str, Any] | None:
    """Return bytes for JSON: as text if they are UTF-8, otherwise as base64; None stays None."""
    if data is None:
        return None
    cut = data[:limit]
    shown: dict[str, Any] = {"size": len(data), "cut": len(data) > limit}
    try:
        # The limit may split the last character of a text.
        text = codecs.getincrementaldecoder("utf-8")().decode(cut, final=len(cut) == len(data))
    except UnicodeDecodeError:
        return {**shown, "base64": base64.b64encode(cut).decode()}
    return {**shown, "text": text}


def row_of(
    index: int, header: BatchHeader, record: LogRecord, state: str, limit: int = SHOWN_BYTES
) -> dict[str, Any]:
    """Return one record for JSON."""
    row: dict[str, Any] = {
        "partition": index,
        "offset": record.offset,
        "timestamp_ms": record.timestamp_ms,
        "timestamp_type": "LogAppendTime" if header.is_log_append_time else "CreateTime",
        "state": state,
        "codec": header.codec.name.lower(),
        "key": bytes_shown(record.key, limit),
        "value": bytes_shown(record.value, limit),
        "headers": [
            [name.encode("utf-8", "surrogateescape").decode("utf-8", "replace"), shown]
            for name, value in record.headers[:SHOWN_HEADERS]
            for shown in (bytes_shown(value, limit),)
        ],
        "header_count": len(record.headers),
    }
    if header.producer_id >= 0:
        row |= {"producer_id": header.producer_id, "producer_epoch": header.producer_epoch}
    if state == CONTROL:
        control = parse_control(record)
        row |= {"key": None, "value": None, "control": control.type.name}
        row["coordinator_epoch"] = control.coordinator_epoch
    return row


def batches_with_state(
    data: bytes, aborted: list[tuple[int, int]], stable: int, open_from: Mapping[int, int]
) -> Iterator[tuple[BatchHeader, Iterator[LogRecord], str]]:
    """Yield the batches of a Fetch response with their state; records are decompressed on demand.

    ``aborted`` contains (first offset, producer id) up to ``stable``; ``open_from`` maps a producer
    id to the first offset of its open transaction.
    """
    batches = list(headers(data))
    dead: set[int] = set()
    waiting = sorted(aborted)
    for number_, (at, header) in enumerate(batches):
        while waiting and waiting[0][0] <= header.last_offset:
            dead.add(waiting.pop(0)[1])
        if header.is_control:
            if _marker(data, at, header) == ControlType.ABORT:
                dead.discard(header.producer_id)
            state = CONTROL
        elif not header.is_transactional:
            state = PLAIN
        elif header.base_offset < stable:
            state = ABORTED if header.producer_id in dead else COMMITTED
        elif header.base_offset >= open_from.get(header.producer_id, 2**63):
            state = OPEN
        else:
            state = _end(header.producer_id, data, batches[number_ + 1 :])
        yield header, iter_records(data, at, header), state


def _marker(data: bytes, at: int, header: BatchHeader) -> ControlType:
    """Return the type of a control batch, UNKNOWN if compaction has removed its record."""
    marker = first_control(data, at, header)
    return ControlType.UNKNOWN if marker is None else marker.type


def _end(producer_id: int, data: bytes, later: Iterable[tuple[int, BatchHeader]]) -> str:
    """Return the outcome of a producer's transaction according to its next marker."""
    for at, header in later:
        if header.is_control and header.producer_id == producer_id:
            kind = _marker(data, at, header)
            return {ControlType.ABORT: ABORTED, ControlType.COMMIT: COMMITTED}.get(kind, UNDECIDED)
    return UNDECIDED


@dataclass(frozen=True, slots=True)
class TextFilter:
    """The text that a record must contain, ignoring case; an empty filter matches every record."""

    key: bytes = b""
    value: bytes = b""
    header: bytes = b""

    @classmethod
    def of(cls, params: Params) -> TextFilter:
        """Read the filter from a request."""
        return cls(*(params.get(name, "").casefold().encode() for name in cls.__slots__))

    def matches(self, record: LogRecord) -> bool:
        """Whether a record contains every text of the filter."""
        return (
            _within(self.key, record.key)
            and _within(self.value, record.value)
            and (
                not self.header
                or any(
                    _within(self.header, name.encode("utf-8", "surrogateescape"))
                    or _within(self.header, value)
                    for name, value in record.headers
                )
            )
        )


def _within(text: bytes, data: bytes | None) -> bool:
    if not text:
        return True
    if data is None:
        return False
    return text in data.decode("utf-8", "replace").casefold().encode()


@dataclass(slots=True)
class Search:
    """A search. Each :meth:`step` fetches once; the caller ends it by not calling again."""

    topic: str
    committed: bool
    wanted: TextFilter
    limit: int
    follow: bool
    at: dict[int, int] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    total: int = 0
    held_back: int = 0
    scanned: int = 0
    matched: int = 0
    fetched_bytes: int = 0
    hidden: dict[str, int] = field(default_factory=dict)
    _turn: int = 0
    _stable: dict[int, int] = field(default_factory=dict)
    _open: dict[int, dict[int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, params: Params) -> Search:
        """Read the search from a request. Raises ValueError for an invalid parameter."""
        isolation = params.get("isolation", "read_committed")
        if isolation not in {"read_committed", "read_uncommitted"}:
            raise ValueError(f"isolation={isolation!r} is not an isolation level")
        return cls(
            topic=required(params, "topic"),
            committed=isolation == "read_committed",
            wanted=TextFilter.of(params),
            limit=number(params, "limit", 100, 1, MAX_ROWS),
            follow=is_on(params, "follow"),
        )

    def begin(self, session: ClusterSession, params: Params) -> dict[str, Any]:
        """Look up the first and last offset of each partition; return the search's size."""
        (topic,) = session.topics([self.topic])
        indexes = _partitions(params, list(topic.partitions))
        places = [(self.topic, index) for index in indexes]
        first = session.offsets(places, EARLIEST)
        end = session.offsets(places, LATEST)
        stable = session.offsets(places, LATEST, committed=True)
        self._stable = {index: stable[self.topic, index] for index in indexes}
        self.held_back = sum(end[place] - stable[place] for place in places)
        last = stable if self.committed else end
        self.ends = {index: last[self.topic, index] for index in indexes}
        starts = self._starts(
            session, params, {index: first[self.topic, index] for index in indexes}
        )
        self.at = {index: min(starts[index], self.ends[index]) for index in indexes}
        self.total = self.remaining
        if not self.committed:
            for row in producers(session, places):
                if row.is_open:
                    self._open.setdefault(row.partition, {})[row.producer_id] = row.start_offset
        return {"partitions": indexes, "total": self.total, "held_back": self.held_back}

    def _starts(
        self, session: ClusterSession, params: Params, first: Mapping[int, int]
    ) -> Mapping[int, int]:
        """Return each partition's first offset, from ``resume`` or ``from`` of the request."""
        resume = params.get("resume")
        if resume:
            at = dict(first)
            for part in resume.split(","):
                index, _, offset = part.partition(":")
                at[int(index)] = int(offset)
            return {index: at[index] for index in first}
        begin = params.get("from") or "newest"
        if begin == "earliest":
            return first
        if begin == "latest":
            return self.ends
        if begin == "newest":
            # Show the newest records of each partition, because finding the newest records of all
            # partitions would require reading them.
            each = max(1, min(self.limit, MAX_ROWS // max(1, len(first))))
            self.limit = each * len(first)
            return {i: max(first[i], end - each) for i, end in self.ends.items()}
        if begin.isdigit():
            return {index: max(first[index], int(begin)) for index in first}
        places = [(self.topic, index) for index in first]
        offsets = session.offsets(places, _moment_ms(begin), committed=self.committed)
        return {
            i: offsets[self.topic, i] if offsets[self.topic, i] >= 0 else self.ends[i]
            for i in first
        }

    @property
    def remaining(self) -> int:
        """The number of offsets that have not been scanned."""
        return sum(max(0, end - self.at[index]) for index, end in self.ends.items())

    @property
    def end_reason(self) -> str | None:
        """Why the search has ended: ``limit``, ``budget`` or ``end``; None while it continues."""
        if self.matched >= self.limit:
            return "limit"
        if self.scanned >= BUDGET_RECORDS or self.fetched_bytes >= BUDGET_BYTES:
            return "budget"
        return "end" if not self.remaining and not self.follow else None

    def progress(self) -> dict[str, Any]:
        """Return the progress of the search, including the offsets to resume at."""
        return {
            "scanned": self.scanned,
            "matched": self.matched,
            "remaining": self.remaining,
            "total": self.total,
            "bytes": self.fetched_bytes,
            "hidden": dict(self.hidden),
            "resume": ",".join(f"{index}:{offset}" for index, offset in self.at.items()),
        }

    def step(self, session: ClusterSession) -> list[dict[str, Any]]:
        """Fetch once from the next partition with data, and return the matching records."""
        pending = [i for i, end in self.ends.items() if self.follow or self.at[i] < end]
        if not pending:
            return []
        self._turn += 1
        index = pending[self._turn % len(pending)]
        at, stable = self.at[index], self._stable[index]
        row = session.fetch(
            self.topic,
            index,
            at,
            # Only answers to read_committed fetches list aborted transactions.
            committed=self.committed or at < stable,
            max_wait_ms=FOLLOW_WAIT_MS // len(pending) if self.follow and not self.remaining else 0,
            max_bytes=STEP_BYTES,
        )
        data = row.records or b""
        self.fetched_bytes += len(data)
        aborted = [
            (aborted.first_offset, aborted.producer_id)
            for aborted in row.aborted_transactions or ()
        ]
        if self.follow:
            self._stable[index] = max(stable, row.last_stable_offset)
            self.ends[index] = max(
                self.ends[index], row.last_stable_offset if self.committed else row.high_watermark
            )
            if not self.committed and data and topic_exists(session, self.topic):
                self._open[index] = {
                    producer.producer_id: producer.start_offset
                    for producer in producers(session, [(self.topic, index)])
                    if producer.is_open
                }
        # No transaction is open below the current last stable offset.
        limit = 2**63 - 1 if self.committed else self._stable[index]
        batches = batches_with_state(data, aborted, limit, self._open.get(index, {}))
        return self._matching_rows(index, batches, row)

    def _matching_rows(
        self, index: int, batches: Iterator[tuple[BatchHeader, Iterator[LogRecord], str]], row: Any
    ) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        began, end = self.at[index], self.ends[index]
        position = began
        for header, records, state in batches:
            for record in records:
                if record.offset < began or record.offset >= end:
                    continue
                if self.matched >= self.limit or self.scanned >= BUDGET_RECORDS:
                    self.at[index] = record.offset
                    return rows
                self.scanned += 1
                if self.committed and state not in VISIBLE:
                    self.hidden[state] = self.hidden.get(state, 0) + 1
                elif state == CONTROL:
                    if self.wanted == TextFilter():
                        self.matched += 1
                        rows.append(row_of(index, header, record, state))
                elif self.wanted.matches(record):
                    self.matched += 1
                    rows.append(row_of(index, header, record, state))
            position = max(position, header.next_offset)
        if position == began and began < end:
            # Compaction may have removed every batch up to the end: advance, or the search hangs.
            position = min(end, max(began + 1, row.last_stable_offset))
        self.at[index] = min(position, end) if not self.follow else position
        return rows


def _partitions(params: Params, existing: list[int]) -> list[int]:
    text = params.get("partition", "")
    if not text:
        return sorted(existing)
    indexes = sorted({int(part) for part in text.split(",")})
    for index in indexes:
        if index not in existing:
            raise ValueError(f"there is no partition {index}")
    return indexes


def _moment_ms(text: str) -> int:
    """Parse a time of the request: ISO 8601, by default in UTC, or relative such as -10m."""
    match = _AGO.fullmatch(text)
    if match:
        now_ms = time.time_ns() // 1_000_000
        return max(0, now_ms - int(match[1]) * _SECONDS[match[2]] * 1000)
    at = dt.datetime.fromisoformat(text)
    at = at if at.tzinfo is not None else at.replace(tzinfo=dt.UTC)
    return max(0, int(at.timestamp() * 1000))


def record_view(session: ClusterSession, params: Params) -> dict[str, Any]:
    """Return one record with its key and value. Raises :class:`NoSuchRecordError`, and ApiError."""
    topic, index = required(params, "topic"), number(params, "partition", -1, 0)
    offset = number(params, "offset", -1, 0)
    place = (topic, index)
    session.topics([topic])
    stable = session.offsets([place], LATEST, committed=True)[place]
    row = session.fetch(topic, index, offset, committed=offset < stable, max_bytes=1)
    aborted = [
        (aborted.first_offset, aborted.producer_id) for aborted in row.aborted_transactions or ()
    ]
    open_from = {
        producer.producer_id: producer.start_offset
        for producer in producers(session, [place])
        if producer.is_open
    }
    for header, records, state in batches_with_state(
        row.records or b"", aborted, stable, open_from
    ):
        for record in records:
            if record.offset == offset:
                return {"topic": topic, **row_of(index, header, record, state, RECORD_BYTES)}
    raise NoSuchRecordError(f"{topic}:{index} has no record at offset {offset}")
