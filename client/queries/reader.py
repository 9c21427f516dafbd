"""The records of a topic, as a consumer of either isolation level receives them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import click

from fencepost.client.queries.session import ClusterSession
from fencepost.client.queries.where import BEGINNING, END, OffsetPosition
from fencepost.client.requests import EARLIEST, LATEST, Partition
from fencepost.logcore.batch import (
    HEADER_SIZE,
    BatchHeader,
    ControlType,
    LogRecord,
    decode_records,
    first_control,
    parse_header,
    record_chunks,
)

MAX_WAIT_MS = 500
"""Total time that brokers may wait for new records in one round of fetches, in milliseconds."""


class Reader:
    """Fetches partition by partition, and filters the records of aborted transactions."""

    def __init__(self, session: ClusterSession, topic: str, *, committed: bool) -> None:
        self._session = session
        self._topic = topic
        self._committed = committed
        self._positions: dict[int, int] = {}
        self._ends: dict[int, int | None] = {}
        self._floors: dict[int, int] = {}
        self._bounds: dict[int, tuple[int, int]] = {}
        self.notes: list[str] = []
        """A sentence for each requested offset that the partition does not have."""
        self.is_early = False
        """Whether no partition has a record at or after the time that ``seek`` was given."""
        self.has_more = False
        """Whether the last Fetch returned more records than :meth:`rounds` has yielded so far."""
        self.pins: dict[int, int] = {}
        """Partition → its last stable offset, if the last Fetch reported one below the high
        watermark."""

    @property
    def places(self) -> list[Partition]:
        """The partitions that are read."""
        return [(self._topic, index) for index in self._positions]

    def seek(
        self,
        selected: Collection[int] = (),
        begin: OffsetPosition = BEGINNING,
        until: OffsetPosition = END,
        *,
        follow: bool = False,
    ) -> None:
        """Find the first and the last offset to read in each partition, or in those ``selected``.

        Without ``follow`` reading stops at the present end at the latest. Raises
        click.ClickException for an unknown partition.
        """
        indexes = list(self._session.topics([self._topic])[0].partitions)
        unknown = sorted({*selected, *begin.offsets, *until.offsets} - set(indexes))
        if unknown:
            raise click.ClickException(f"{self._topic} has no partition {unknown[0]}")
        selected = selected or indexes
        first, last = self._offsets(selected, EARLIEST), self._offsets(selected, LATEST)
        self._bounds = {index: (first[index], last[index]) for index in selected}
        self._ends = self._stop_offsets(until, last, follow=follow)
        times = self._offsets(selected, begin.time) if begin.time is not None else first
        # An offset of -1 stands for a partition without a record at or after that time.
        self.is_early = begin.time is not None and begin.time >= 0 and max(times.values()) < 0
        for index in selected:
            at = begin.offset_of(index)
            if begin.last is not None:
                stop = self._ends[index]
                end = last[index] if stop is None else min(stop, last[index])
                self._set_position(index, self._tail(index, begin.last, first[index], end))
            elif at is not None:
                self.move(index, at)
            else:
                self._set_position(index, times[index] if times[index] >= 0 else last[index])

    def move(self, index: int, at: int) -> None:
        """Continue a partition at offset ``at``; a note says if the partition does not have it."""
        first, last = self._bounds[index]
        if at < first:
            self._add_note(index, f"begins at {first}; records at {at} have been deleted")
        elif at > last:
            self._add_note(index, f"ends at {last}; there is no record at {at} yet")
        self._set_position(index, at)

    def _set_position(self, index: int, at: int) -> None:
        first, last = self._bounds[index]
        # Brokers refuse to fetch beyond the end; records below the floor are filtered out.
        self._floors[index] = at
        self._positions[index] = min(max(at, first), last)

    @property
    def positions(self) -> dict[int, int]:
        """Partition → the next offset to read."""
        return dict(self._positions)

    def _stop_offsets(
        self, until: OffsetPosition, last: Mapping[int, int], *, follow: bool
    ) -> dict[int, int | None]:
        """Return partition → the offset at which to stop; None if there is none."""
        if until is END:
            return dict.fromkeys(last) if follow else {**last}
        if until.last is not None or (follow and until.time is not None):
            raise click.BadParameter(
                "with --follow, --until takes offsets only"
                if follow
                else "--until takes no count of last records",
                param_hint="--until",
            )
        times = self._offsets(list(last), until.time) if until.time is not None else {}
        stops: dict[int, int | None] = {}
        for index, end in last.items():
            stop = until.offset_of(index)
            if stop is None:
                stop = times.get(index, -1)
                stops[index] = min(stop, end) if stop >= 0 else end
                continue
            if stop > end and not follow:
                self._add_note(index, f"ends at {end}, before {stop}")
            stops[index] = stop if follow else min(stop, end)
        return stops

    def _tail(self, index: int, count: int, first: int, end: int) -> int:
        """Return the offset of the ``count``-th visible record from the end; offsets have gaps."""
        offsets_read: list[int] = []
        low, step = end, max(count, 1)
        while len(offsets_read) < count and low > first:
            start = max(first, low - step)
            position, offsets = start, []
            while position < low:
                for records, behind in self._read(index, position, 0):
                    offsets += [record.offset for record in records if record.offset < low]
                    position = behind
                    if position >= low:
                        break
            offsets_read = offsets + offsets_read
            low, step = start, 2 * step
        return (offsets_read[-count] if len(offsets_read) >= count else first) if count else end

    def _add_note(self, index: int, what: str) -> None:
        self.notes.append(f"{self._topic}:{index} {what}")

    def _offsets(self, indexes: Collection[int], at: int) -> dict[int, int]:
        places = [(self._topic, index) for index in indexes]
        offsets = self._session.offsets(places, at, committed=self._committed)
        return {index: offset for (_, index), offset in offsets.items()}

    def records(self) -> Iterator[tuple[int, LogRecord]]:
        """Yield each record with its partition."""
        for index, records in self.rounds():
            for record in records:
                yield index, record

    def rounds(self) -> Iterator[tuple[int, list[LogRecord]]]:
        """Yield the records of one partition after the other; an empty list for an empty fetch."""
        while True:
            pending = [
                index
                for index, position in self._positions.items()
                if (end := self._ends[index]) is None or position < end
            ]
            if not pending:
                return
            for index in pending:
                yield from ((index, shown) for shown in self._round(index, len(pending)))

    def _round(self, index: int, pending: int) -> Iterator[list[LogRecord]]:
        """Yield the records of one Fetch in chunks, or a single empty list if it has none."""
        end, floor, position = self._ends[index], self._floors[index], self._positions[index]
        last: list[LogRecord] = []
        for records, behind in self._read(index, position, MAX_WAIT_MS // pending):
            shown = [
                record
                for record in records
                if floor <= record.offset and (end is None or record.offset < end)
            ]
            if shown and last:
                self._positions[index], self.has_more = position, True
                yield last
            last, position = shown or last, behind if end is None else min(behind, end)
            if position == end:
                break
        self._positions[index], self.has_more = position, False
        yield last

    def _read(
        self, index: int, position: int, wait_ms: int
    ) -> Iterator[tuple[list[LogRecord], int]]:
        row = self._session.fetch(
            self._topic, index, position, committed=self._committed, max_wait_ms=wait_ms
        )
        if self._committed and 0 <= row.last_stable_offset < row.high_watermark:
            self.pins[index] = row.last_stable_offset
        else:
            self.pins.pop(index, None)
        return visible_chunks(row.records or b"", position, aborted_of(row))


def aborted_of(row: Any) -> list[tuple[int, int]]:
    """Return (first offset, producer id) of each aborted transaction in a Fetch response."""
    return [(entry.first_offset, entry.producer_id) for entry in row.aborted_transactions or ()]


def visible(
    data: bytes, position: int, aborted: list[tuple[int, int]]
) -> tuple[list[LogRecord], int]:
    """Return all records that :func:`visible_chunks` yields, and the next offset."""
    visible_records: list[LogRecord] = []
    for records, behind in visible_chunks(data, position, aborted):
        visible_records += records
        position = behind
    return visible_records, position


def visible_chunks(
    data: bytes, position: int, aborted: list[tuple[int, int]]
) -> Iterator[tuple[list[LogRecord], int]]:
    """Yield the records of ``data`` visible to a consumer at ``position``, with the next offset.

    The records are yielded in chunks, because a compressed batch of some kilobytes may hold more
    records than fit in memory. The last chunk is empty. ``aborted`` is as in :func:`readable`.
    """
    for at, header in readable(data, aborted):
        for chunk in record_chunks(data, at, header):
            seen = [record for record in chunk if record.offset >= position]
            if seen:
                yield seen, seen[-1].offset + 1
    yield [], max([position, *(header.next_offset for _, header in headers(data))])


def readable(
    data: bytes, aborted: Iterable[tuple[int, int]] = ()
) -> Iterator[tuple[int, BatchHeader]]:
    """Yield the batches whose records a consumer receives, each with its position in ``data``.

    ``aborted`` holds (first offset, producer id) of aborted transactions: from its first offset to
    its abort marker a producer's transactional batches are skipped.
    """
    dead: set[int] = set()
    waiting = sorted(aborted)
    for at, header in headers(data):
        while waiting and waiting[0][0] <= header.last_offset:
            dead.add(waiting.pop(0)[1])
        if header.is_control:
            # Compaction may have removed the marker's record, leaving an empty batch.
            marker = first_control(data, at, header)
            if marker is not None and marker.type == ControlType.ABORT:
                dead.discard(header.producer_id)
        elif not (header.is_transactional and header.producer_id in dead):
            yield at, header


def headers(data: bytes) -> Iterator[tuple[int, BatchHeader]]:
    """Yield the complete batches of a Fetch response with their positions."""
    at = 0
    while at + HEADER_SIZE <= len(data):
        header = parse_header(data, at)
        if at + header.size > len(data):
            return
        yield at, header
        at += header.size


def batches(data: bytes) -> Iterator[tuple[BatchHeader, list[LogRecord]]]:
    """Yield the batches of a Fetch response with their records."""
    for at, header in headers(data):
        yield header, decode_records(data, at, header)
