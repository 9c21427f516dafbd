"""Records of a topic: a search that tells how far it is, and one record as a whole.

Under read_uncommitted everything in the log is shown and named for what it is: aborted records,
records of open transactions, the markers between them. Whether a record was aborted the broker
tells only to readers of committed records, so up to the last stable offset those are asked for, and
what they would not see is kept.
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
from fencepost.console.sessions import knows
from fencepost.coordinator.cli.queries.open_transactions import producers
from fencepost.coordinator.cli.queries.reader import headers
from fencepost.coordinator.cli.queries.session import Session
from fencepost.coordinator.wire.client.requests import EARLIEST, LATEST
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
"""What a record is. *Undecided* is one behind the last stable offset whose marker was not seen."""

VISIBLE = frozenset({PLAIN, COMMITTED})
"""What a reader of committed records gets."""

FOLLOW_WAIT_MS = 1_000
"""How long a broker may hold the answer to a search that waits for new records."""

_AGO = re.compile(r"-(\d+)([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


class NoSuchRecordError(Exception):
    """Nothing is at this offset."""


def bytes_shown(data: bytes | None, limit: int = SHOWN_BYTES) -> dict[str, Any] | None:
    """Bytes as JSON has them: text where they are UTF-8, else base64; None stays None."""
    if data is None:
        return None
    cut = data[:limit]
    shown: dict[str, Any] = {"size": len(data), "cut": len(data) > limit}
    try:
        # A character that the limit has cut in two is no reason to call it binary.
        text = codecs.getincrementaldecoder("utf-8")().decode(cut, final=len(cut) == len(data))
    except UnicodeDecodeError:
        return {**shown, "base64": base64.b64encode(cut).decode()}
    return {**shown, "text": text}


def row_of(
    index: int, header: BatchHeader, record: LogRecord, state: str, limit: int = SHOWN_BYTES
) -> dict[str, Any]:
    """One record as JSON has it."""
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
        found = parse_control(record)
        row |= {"key": None, "value": None, "control": found.type.name}
        row["coordinator_epoch"] = found.coordinator_epoch
    return row


def judged(
    data: bytes, aborted: list[tuple[int, int]], stable: int, open_from: Mapping[int, int]
) -> Iterator[tuple[BatchHeader, Iterator[LogRecord], str]]:
    """Yield the batches of a Fetch with what each is; their records are inflated when taken.

    ``aborted`` holds (first offset, producer id) up to ``stable``; ``open_from`` says where the
    open transaction of a producer begins.
    """
    found = list(headers(data))
    dead: set[int] = set()
    waiting = sorted(aborted)
    for number_, (at, header) in enumerate(found):
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
            state = _end(header.producer_id, data, found[number_ + 1 :])
        yield header, iter_records(data, at, header), state


def _marker(data: bytes, at: int, header: BatchHeader) -> ControlType:
    """Return the kind of a control batch, UNKNOWN where compaction has left no record in it."""
    marker = first_control(data, at, header)
    return ControlType.UNKNOWN if marker is None else marker.type


def _end(producer_id: int, data: bytes, later: Iterable[tuple[int, BatchHeader]]) -> str:
    """Tell how the next marker of a producer ends its transaction."""
    for at, header in later:
        if header.is_control and header.producer_id == producer_id:
            kind = _marker(data, at, header)
            return {ControlType.ABORT: ABORTED, ControlType.COMMIT: COMMITTED}.get(kind, UNDECIDED)
    return UNDECIDED


@dataclass(frozen=True, slots=True)
class Filter:
    """What a record must contain, without regard to case; nothing wants all."""

    key: bytes = b""
    value: bytes = b""
    header: bytes = b""

    @classmethod
    def of(cls, params: Params) -> Filter:
        """Read it from a request."""
        return cls(*(params.get(name, "").casefold().encode() for name in cls.__slots__))

    def matches(self, record: LogRecord) -> bool:
        """Whether a record has it all."""
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


def _within(wanted: bytes, data: bytes | None) -> bool:
    if not wanted:
        return True
    if data is None:
        return False
    return wanted in data.decode("utf-8", "replace").casefold().encode()


@dataclass(slots=True)
class Search:
    """A search under way. Each :meth:`step` fetches once; who stops calling has stopped it."""

    topic: str
    committed: bool
    wanted: Filter
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
        """Read it from a request. ValueError for what makes no sense."""
        isolation = params.get("isolation", "read_committed")
        if isolation not in {"read_committed", "read_uncommitted"}:
            raise ValueError(f"isolation={isolation!r} is no isolation level")
        return cls(
            topic=required(params, "topic"),
            committed=isolation == "read_committed",
            wanted=Filter.of(params),
            limit=number(params, "limit", 100, 1, MAX_ROWS),
            follow=is_on(params, "follow"),
        )

    def begin(self, session: Session, params: Params) -> dict[str, Any]:
        """Find out where it begins and ends."""
        (topic,) = session.topics([self.topic])
        wanted = _partitions(params, list(topic.partitions))
        places = [(self.topic, index) for index in wanted]
        first = session.offsets(places, EARLIEST)
        end = session.offsets(places, LATEST)
        stable = session.offsets(places, LATEST, committed=True)
        self._stable = {index: stable[self.topic, index] for index in wanted}
        self.held_back = sum(end[place] - stable[place] for place in places)
        last = stable if self.committed else end
        self.ends = {index: last[self.topic, index] for index in wanted}
        starts = self._starts(
            session, params, {index: first[self.topic, index] for index in wanted}
        )
        self.at = {index: min(starts[index], self.ends[index]) for index in wanted}
        self.total = self.remaining
        if not self.committed:
            for row in producers(session, places):
                if row.is_open:
                    self._open.setdefault(row.partition, {})[row.producer_id] = row.start_offset
        return {"partitions": wanted, "total": self.total, "held_back": self.held_back}

    def _starts(
        self, session: Session, params: Params, first: Mapping[int, int]
    ) -> Mapping[int, int]:
        """Where each partition begins: ``resume``, or ``from`` of the request."""
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
            # The newest of each partition: nobody can tell across them without reading.
            each = max(1, min(self.limit, MAX_ROWS // max(1, len(first))))
            self.limit = each * len(first)
            return {i: max(first[i], end - each) for i, end in self.ends.items()}
        if begin.isdigit():
            return {index: max(first[index], int(begin)) for index in first}
        places = [(self.topic, index) for index in first]
        found = session.offsets(places, _moment_ms(begin), committed=self.committed)
        return {
            i: found[self.topic, i] if found[self.topic, i] >= 0 else self.ends[i] for i in first
        }

    @property
    def remaining(self) -> int:
        """Offsets that are not looked at yet."""
        return sum(max(0, end - self.at[index]) for index, end in self.ends.items())

    @property
    def over(self) -> str | None:
        """Why nothing is left to do; None while something is."""
        if self.matched >= self.limit:
            return "limit"
        if self.scanned >= BUDGET_RECORDS or self.fetched_bytes >= BUDGET_BYTES:
            return "budget"
        return "end" if not self.remaining and not self.follow else None

    def progress(self) -> dict[str, Any]:
        """How far it is."""
        return {
            "scanned": self.scanned,
            "matched": self.matched,
            "remaining": self.remaining,
            "total": self.total,
            "bytes": self.fetched_bytes,
            "hidden": dict(self.hidden),
            "resume": ",".join(f"{index}:{offset}" for index, offset in self.at.items()),
        }

    def step(self, session: Session) -> list[dict[str, Any]]:
        """Fetch once from the next partition that has something, and return what matches."""
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
            # Which were aborted is told only to those that may not see them.
            committed=self.committed or at < stable,
            max_wait_ms=FOLLOW_WAIT_MS // len(pending) if self.follow and not self.remaining else 0,
            max_bytes=STEP_BYTES,
        )
        data = row.records or b""
        self.fetched_bytes += len(data)
        aborted = [(one.first_offset, one.producer_id) for one in row.aborted_transactions or ()]
        if self.follow:
            self._stable[index] = max(stable, row.last_stable_offset)
            self.ends[index] = max(
                self.ends[index], row.last_stable_offset if self.committed else row.high_watermark
            )
            if not self.committed and data and knows(session, self.topic):
                self._open[index] = {
                    one.producer_id: one.start_offset
                    for one in producers(session, [(self.topic, index)])
                    if one.is_open
                }
        # Below the stable offset of now there is no open transaction any more.
        limit = 2**63 - 1 if self.committed else self._stable[index]
        found = judged(data, aborted, limit, self._open.get(index, {}))
        return self._kept(index, found, row)

    def _kept(
        self, index: int, found: Iterator[tuple[BatchHeader, Iterator[LogRecord], str]], row: Any
    ) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        began, end = self.at[index], self.ends[index]
        position = began
        for header, records, state in found:
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
                    if self.wanted == Filter():
                        self.matched += 1
                        rows.append(row_of(index, header, record, state))
                elif self.wanted.matches(record):
                    self.matched += 1
                    rows.append(row_of(index, header, record, state))
            position = max(position, header.next_offset)
        if position == began and began < end:
            # Compaction may leave nothing up to the end; what is no batch never moves on.
            position = min(end, max(began + 1, row.last_stable_offset))
        self.at[index] = min(position, end) if not self.follow else position
        return rows


def _partitions(params: Params, known: list[int]) -> list[int]:
    text = params.get("partition", "")
    if not text:
        return sorted(known)
    wanted = sorted({int(part) for part in text.split(",")})
    for index in wanted:
        if index not in known:
            raise ValueError(f"there is no partition {index}")
    return wanted


def _moment_ms(text: str) -> int:
    """A time of the request: ISO 8601, UTC without a zone, or so long ago as -10m."""
    match = _AGO.fullmatch(text)
    if match:
        now_ms = time.time_ns() // 1_000_000
        return max(0, now_ms - int(match[1]) * _SECONDS[match[2]] * 1000)
    at = dt.datetime.fromisoformat(text)
    at = at if at.tzinfo is not None else at.replace(tzinfo=dt.UTC)
    return max(0, int(at.timestamp() * 1000))


def record_view(session: Session, params: Params) -> dict[str, Any]:
    """One record with its whole key and value. Raises :class:`NoSuchRecordError`, and ApiError."""
    topic, index = required(params, "topic"), number(params, "partition", -1, 0)
    offset = number(params, "offset", -1, 0)
    place = (topic, index)
    session.topics([topic])
    stable = session.offsets([place], LATEST, committed=True)[place]
    row = session.fetch(topic, index, offset, committed=offset < stable, max_bytes=1)
    aborted = [(one.first_offset, one.producer_id) for one in row.aborted_transactions or ()]
    open_from = {
        one.producer_id: one.start_offset for one in producers(session, [place]) if one.is_open
    }
    for header, records, state in judged(row.records or b"", aborted, stable, open_from):
        for record in records:
            if record.offset == offset:
                return {"topic": topic, **row_of(index, header, record, state, RECORD_BYTES)}
    raise NoSuchRecordError(f"{topic}:{index} has no record at offset {offset}")
