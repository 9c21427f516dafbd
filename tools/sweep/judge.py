"""Reads all records after a crash and reports inconsistencies.

The outcome of a transaction is visible in two ways: in the control batches of the log (read
uncommitted), and in the records that the broker returns to a read_committed reader. The two must
agree. Only the pipeline knows which records of several partitions belong together. It may say so in
a header: records with the same label form one unit of work, which must be visible as a whole and
once, or not at all.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import field
from typing import TYPE_CHECKING

from fencepost.client.queries.blame import blame
from fencepost.client.queries.open_transactions import UNFINISHED
from fencepost.client.queries.reader import batches, visible
from fencepost.client.queries.session import ClusterSession, check
from fencepost.client.requests import EARLIEST, LATEST, Partition
from fencepost.logcore.batch import (
    BatchHeader,
    ControlType,
    LogRecord,
    parse_control,
)
from fencepost.logcore.values import dataclass

if TYPE_CHECKING:
    from collections.abc import Iterable

SETTLE_POLL_S = 0.02
MOST_COMPLAINTS = 20
"""The maximum number of complaints about one crash point; the first ones are enough."""


@dataclass(frozen=True, slots=True)
class Labels:
    """Names of the headers that assign a record to a unit of work."""

    unit: str
    """The header whose value identifies a unit."""
    size: str
    """The header with the number of records of the unit, in decimal digits; it may be missing."""


@dataclass(slots=True)
class Attempt:
    """The records that one transaction wrote to one partition."""

    place: Partition
    producer: tuple[int, int]
    """Id and epoch; (-1, …) outside transactions."""
    records: list[LogRecord] = field(default_factory=list)
    committed: bool | None = None
    """Whether its control batch commits it; None without a control batch."""


def judge(session: ClusterSession, labels: Labels, settle_s: float) -> list[str]:
    """Return complaints about the state of the cluster; an empty list if there are none.

    Waits at most ``settle_s`` seconds for open transactions to end.
    """
    topics = session.topics()
    places = [(topic.name, index) for topic in topics for index in sorted(topic.partitions)]
    internal = {topic.name for topic in topics if topic.is_internal}
    complaints = _unsettled(session, places, settle_s)
    attempts: list[Attempt] = []
    for place in places:
        if place[0] in internal:
            continue
        partition_attempts = list(_attempts(session, place))
        complaints += _hidden_or_shown(session, place, partition_attempts)
        attempts += partition_attempts
    complaints += torn_units(attempts, labels)
    return complaints[:MOST_COMPLAINTS]


def _unsettled(session: ClusterSession, places: list[Partition], settle_s: float) -> list[str]:
    """Wait until no transaction is open, and complain about those that stay open."""
    deadline = time.monotonic() + settle_s
    while True:
        stable = session.offsets(places, LATEST, committed=True)
        ends = session.offsets(places, LATEST)
        pinned = [place for place in places if stable[place] < ends[place]]
        unfinished = _unfinished(session)
        if not pinned and not unfinished:
            return []
        if time.monotonic() > deadline:
            break
        time.sleep(SETTLE_POLL_S)
    complaints = []
    for row in blame(session, pinned):
        who = row.transaction.transactional_id if row.transaction is not None else "nobody"
        why = f", hanging: {row.hanging}" if row.hanging else ""
        complaints.append(
            f"{row.topic}:{row.partition} is stable up to {row.stable} of {row.end}:"
            f" held by {who}{why}"
        )
    return complaints + [f"transaction {name} is still {state}" for name, state in unfinished]


def _unfinished(session: ClusterSession) -> list[tuple[str, str]]:
    unfinished = []
    for answer in session.call_all_brokers("ListTransactions", state_filters=sorted(UNFINISHED)):
        check(answer.error_code, "ListTransactions")
        unfinished += [
            (row.transactional_id, row.transaction_state) for row in answer.transaction_states
        ]
    return unfinished


def _batches(
    session: ClusterSession, place: Partition
) -> Iterator[tuple[BatchHeader, list[LogRecord]]]:
    """Yield every batch of a partition, including control batches."""
    offset = session.offsets([place], EARLIEST)[place]
    end = session.offsets([place], LATEST)[place]
    while offset < end:
        before = offset
        for header, records in batches(
            session.fetch(*place, offset, committed=False).records or b""
        ):
            yield header, records
            offset = header.last_offset + 1
        if offset == before:
            return


def _attempts(session: ClusterSession, place: Partition) -> Iterator[Attempt]:
    """Yield an Attempt for each transaction in a partition, and one for all other records."""
    plain = Attempt(place, (-1, -1), committed=True)
    open_by_id: dict[int, Attempt] = {}
    for header, records in _batches(session, place):
        if header.is_control:
            kind = parse_control(records[0]).type
            ended = open_by_id.pop(header.producer_id, None)
            if ended is not None and kind in {ControlType.COMMIT, ControlType.ABORT}:
                ended.committed = kind is ControlType.COMMIT
                yield ended
        elif header.is_transactional:
            producer = header.producer_id, header.producer_epoch
            attempt = open_by_id.setdefault(header.producer_id, Attempt(place, producer))
            attempt.records += records
        else:
            plain.records += records
    yield plain
    yield from open_by_id.values()


def _hidden_or_shown(
    session: ClusterSession, place: Partition, attempts: list[Attempt]
) -> list[str]:
    """Compare a read_committed reader's records with the control batches of the log."""
    due = {
        record.offset: record.value
        for attempt in attempts
        if attempt.committed
        for record in attempt.records
    }
    shown: dict[int, bytes | None] = {}
    offset = session.offsets([place], EARLIEST)[place]
    end = session.offsets([place], LATEST, committed=True)[place]
    while offset < end:
        row = session.fetch(*place, offset, committed=True)
        aborted = sorted(
            (aborted.first_offset, aborted.producer_id)
            for aborted in row.aborted_transactions or ()
        )
        records, following = visible(row.records or b"", offset, aborted)
        shown.update((record.offset, record.value) for record in records)
        if following == offset:
            break
        offset = following
    name = f"{place[0]}:{place[1]}"
    complaints = []
    for at in sorted(due.keys() | shown.keys()):
        if at not in shown:
            complaints.append(f"{name}@{at} is committed and not shown")
        elif at not in due:
            complaints.append(f"{name}@{at} is shown and not committed")
        elif due[at] != shown[at]:
            complaints.append(f"{name}@{at} is shown with another value")
    return complaints


def torn_units(attempts: Iterable[Attempt], labels: Labels) -> list[str]:
    """Return complaints about units of work that are incomplete, or committed twice."""
    units: dict[bytes, list[tuple[Attempt, LogRecord]]] = defaultdict(list)
    sizes: dict[bytes, int] = {}
    for attempt in attempts:
        for record in attempt.records:
            headers = dict(record.headers)
            unit = headers.get(labels.unit)
            if unit is None:
                continue
            units[unit].append((attempt, record))
            size = headers.get(labels.size)
            if size is not None and size.isdigit():
                sizes[unit] = int(size)
    complaints = []
    for unit, records in units.items():
        name = unit.decode("utf-8", "backslashreplace")
        there = [(attempt, record) for attempt, record in records if attempt.committed]
        if not there:
            continue
        if _came_twice([attempt for attempt, _ in there]):
            complaints.append(f"unit {name} was committed twice")
            continue
        shown = Counter(_content(*pair) for pair in there)
        hidden = Counter(_content(*pair) for pair in records if not pair[0].committed)
        gone = len(hidden.keys() - shown.keys())
        if gone:
            complaints.append(f"unit {name} is torn: {gone} of its records are not committed")
        elif unit in sizes and len(there) != sizes[unit]:
            complaints.append(f"unit {name} is torn: {len(there)} of {sizes[unit]} records")
    return complaints


def _content(attempt: Attempt, record: LogRecord) -> tuple[str, bytes | None, bytes | None]:
    """Return topic, key and value, which a retry repeats; the partition of a retry may differ."""
    return attempt.place[0], record.key, record.value


def _came_twice(attempts: list[Attempt]) -> bool:
    """Return whether the committed records are from more than one transaction.

    Two attempts in one partition are two transactions; in different partitions they are two if
    their producer ids or epochs differ.
    """
    distinct = {id(attempt): attempt for attempt in attempts if attempt.producer[0] >= 0}
    per_place = Counter(attempt.place for attempt in distinct.values())
    producers = {attempt.producer for attempt in distinct.values()}
    return len(producers) > 1 or any(count > 1 for count in per_place.values())
