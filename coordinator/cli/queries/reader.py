"""The records of a topic, as a reader of either isolation level sees them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator
from typing import Any

import click

from fencepost.coordinator.cli.queries.session import Session
from fencepost.coordinator.wire.client.requests import EARLIEST, LATEST
from fencepost.logcore.batch import (
    HEADER_SIZE,
    BatchHeader,
    ControlType,
    LogRecord,
    decode_records,
    parse_control,
    parse_header,
)

MAX_WAIT_MS = 500
"""How long a broker may wait with its answer for something new, over all partitions."""


class Reader:
    """Fetches partition by partition, and leaves out what a read_committed reader may not see."""

    def __init__(self, session: Session, topic: str, *, committed: bool) -> None:
        self._session = session
        self._topic = topic
        self._committed = committed
        self._positions: dict[int, int] = {}
        self._ends: dict[int, int] = {}

    def seek(self, wanted: tuple[int, ...], begin: str) -> None:
        """Find the first and the last offset to read of each partition."""
        indexes = list(self._session.topics([self._topic])[0].partitions)
        unknown = sorted(set(wanted) - set(indexes))
        if unknown:
            raise click.ClickException(f"{self._topic} has no partition {unknown[0]}")
        partitions = [(self._topic, index) for index in wanted or indexes]
        ends = self._session.offsets(partitions, LATEST, committed=self._committed)
        self._ends = {index: offset for (_, index), offset in ends.items()}
        if begin.isdigit():
            self._positions = {index: int(begin) for _, index in partitions}
            return
        named = {"earliest": EARLIEST, "latest": LATEST}
        at = named.get(begin)
        if at is None:
            try:
                moment = dt.datetime.fromisoformat(begin)
            except ValueError as error:
                raise click.BadParameter(str(error), param_hint="--from") from error
            at = int(moment.timestamp() * 1000)
        found = self._session.offsets(partitions, at, committed=self._committed)
        self._positions = {
            index: offset if offset >= 0 else self._ends[index]
            for (_, index), offset in found.items()
        }

    def records(self, *, follow: bool) -> Iterator[tuple[int, LogRecord]]:
        """Each record with its partition; without ``follow`` up to the end found by ``seek``."""
        while True:
            pending = [
                index
                for index, position in self._positions.items()
                if follow or position < self._ends[index]
            ]
            if not pending:
                return
            for index in pending:
                end = None if follow else self._ends[index]
                for record in self._fetch(index, MAX_WAIT_MS // len(pending)):
                    if end is None or record.offset < end:
                        yield index, record

    def _fetch(self, index: int, wait_ms: int) -> list[LogRecord]:
        position = self._positions[index]
        row = self._session.fetch(
            self._topic, index, position, committed=self._committed, max_wait_ms=wait_ms
        )
        records, self._positions[index] = visible(row.records or b"", position, aborted_of(row))
        return records


def aborted_of(row: Any) -> list[tuple[int, int]]:
    """The (first offset, producer id) of each aborted transaction that a Fetch answer names."""
    return [(entry.first_offset, entry.producer_id) for entry in row.aborted_transactions or ()]


def visible(
    data: bytes, position: int, aborted: list[tuple[int, int]]
) -> tuple[list[LogRecord], int]:
    """The records of ``data`` that a reader at ``position`` may see, and where he goes on.

    ``aborted`` is that of :func:`readable`.
    """
    seen = [
        record
        for at, header in readable(data, aborted)
        for record in decode_records(data, at, header)
        if record.offset >= position
    ]
    return seen, max([position, *(header.next_offset for _, header in headers(data))])


def readable(
    data: bytes, aborted: Iterable[tuple[int, int]] = ()
) -> Iterator[tuple[int, BatchHeader]]:
    """The batches of a Fetch answer that hold records for a reader, each with where it begins.

    ``aborted`` holds (first offset, producer id) of aborted transactions: from its first offset to
    its abort marker a producer's transactional batches are left out.
    """
    dead: set[int] = set()
    waiting = sorted(aborted)
    for at, header in headers(data):
        while waiting and waiting[0][0] <= header.last_offset:
            dead.add(waiting.pop(0)[1])
        if header.is_control:
            (marker, *_) = decode_records(data, at, header)
            if parse_control(marker).type == ControlType.ABORT:
                dead.discard(header.producer_id)
        elif not (header.is_transactional and header.producer_id in dead):
            yield at, header


def headers(data: bytes) -> Iterator[tuple[int, BatchHeader]]:
    """The batches of a Fetch answer and where each begins; at its end, half a batch may stand."""
    at = 0
    while at + HEADER_SIZE <= len(data):
        header = parse_header(data, at)
        if at + header.size > len(data):
            return
        yield at, header
        at += header.size


def batches(data: bytes) -> Iterator[tuple[BatchHeader, list[LogRecord]]]:
    """The batches of a Fetch answer with their records."""
    for at, header in headers(data):
        yield header, decode_records(data, at, header)
