"""A deliberately simple second implementation of a log, with all batches in a list.

Every query scans the whole list. There is no index, no snapshot, no recovery. The caller passes the
segments and their sizes, because records alone do not determine the segments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

Sizes = Mapping[int, int]
"""Sizes of segments in bytes, by base offset."""


class Item(NamedTuple):
    """One record."""

    offset: int
    time_ms: int
    key: bytes | None
    value: bytes | None


@dataclass(frozen=True)
class Chunk:
    """One batch. ``commit`` is None for data, else the marker's type."""

    first: int
    last: int
    max_time_ms: int
    items: tuple[Item, ...]
    producer: int = -1
    transactional: bool = False
    commit: bool | None = None
    horizon_ms: int | None = None


@dataclass
class DumbLog:
    """A log: its batches, start offset and end offset."""

    chunks: list[Chunk] = field(default_factory=list)
    start: int = 0
    end: int = 0
    last_data: dict[int, int] = field(default_factory=dict)
    """Offset of each producer's last record; −1 for a producer that has only markers."""
    open: dict[int, int] = field(default_factory=dict)
    """First offset of each producer's open transaction."""
    hidden: set[int] = field(default_factory=set)
    """Offsets of records in aborted transactions."""

    # --- writing ---

    def data(self, items: list[Item], *, producer: int = -1, transactional: bool = False) -> None:
        times = max(item.time_ms for item in items)
        chunk = Chunk(
            self.end, items[-1].offset, times, tuple(items), producer, transactional=transactional
        )
        self.chunks.append(chunk)
        self.end = chunk.last + 1
        if producer >= 0:
            self.last_data[producer] = chunk.last
        if transactional:
            self.open.setdefault(producer, chunk.first)

    def marker(self, producer: int, time_ms: int, *, commit: bool) -> None:
        first = self.open.pop(producer, None)
        if first is not None and not commit:
            self.hidden |= {
                item.offset
                for chunk in self.chunks
                if chunk.producer == producer and chunk.transactional and chunk.first >= first
                for item in chunk.items
            }
        item = Item(self.end, time_ms, None, None)
        self.chunks.append(Chunk(self.end, self.end, time_ms, (item,), producer, True, commit))
        self.last_data.setdefault(producer, -1)
        self.end += 1

    # --- reading ---

    @property
    def stable(self) -> int:
        return max(min([self.end, *self.open.values()]), self.start)

    def records(self) -> Iterator[Item]:
        """Yield all records, including the records in markers."""
        for chunk in self.chunks:
            yield from (item for item in chunk.items if item.offset >= self.start)

    def visible(self, offset: int) -> list[tuple[int, bytes | None, bytes | None]]:
        """Return offset, key and value of the records that a read_committed consumer gets."""
        return [
            (item.offset, item.key, item.value)
            for chunk in self.chunks
            if chunk.commit is None
            for item in chunk.items
            if offset <= item.offset < self.stable and item.offset not in self.hidden
        ]

    def by_time(self, time_ms: int, limit: int) -> tuple[int, int] | None:
        for item in self.records():
            if item.time_ms >= time_ms:
                return (item.offset, item.time_ms) if item.offset < limit else None
        return None

    def latest(self) -> tuple[int, int] | None:
        """Return offset and timestamp of the first record with the largest timestamp."""
        largest = max((item.time_ms for item in self.records()), default=-1)
        return self.by_time(largest, self.end) if largest >= 0 else None

    def replay(self, base: int) -> None:
        """Forget batches of open transactions below ``base``, at which the log starts now."""
        for producer, first in list(self.open.items()):
            if first < base:
                left = (
                    chunk.first
                    for chunk in self.chunks
                    if chunk.producer == producer
                    and chunk.transactional
                    and chunk.commit is None
                    and chunk.first >= base
                )
                self.open.pop(producer)
                if (begins := next(left, None)) is not None:
                    self.open[producer] = begins

    def cut(self, end: int, last_data: dict[int, int], open_txns: dict[int, int]) -> None:
        """Truncate the log; the caller passes the producer state, which depends on files.

        Transactions whose marker is truncated are open again.
        """
        self.chunks = [chunk for chunk in self.chunks if chunk.first < end]
        self.end, self.last_data, self.open = end, last_data, open_txns
        self.hidden -= {
            item.offset
            for chunk in self.chunks
            for item in chunk.items
            if chunk.transactional and chunk.first >= open_txns.get(chunk.producer, end)
        }
        self.hidden = {offset for offset in self.hidden if offset < end}

    # --- retention ---

    def delete_before(self, offset: int) -> None:
        self.start = max(self.start, offset)

    def retain(self, sizes: Sizes, now_ms: int, *, max_bytes: int, max_ms: int) -> int:
        """Drop segments according to retention, the oldest first; return their number."""
        bases = sorted(sizes)
        ends = [*bases[1:], self.end]
        gone = 0
        while gone < len(bases) and sizes[bases[gone]]:
            following = ends[gone]
            is_last = gone == len(bases) - 1
            held = sum(sizes[base] for base in bases[gone:])
            youngest = max(chunk.max_time_ms for chunk in self.chunks if chunk.last < following)
            if not (
                (following <= self.start and not is_last)
                or (max_bytes >= 0 and held - sizes[bases[gone]] >= max_bytes)
                or (max_ms >= 0 and now_ms - youngest > max_ms)
            ):
                break
            self.chunks = [chunk for chunk in self.chunks if chunk.first >= following]
            self.start = max(self.start, following)
            gone += 1
        return gone

    # --- compaction ---

    def begin_round(self, dirty: int, mapped: int, now_ms: int, retention_ms: int) -> DumbRound:
        """Begin a round with the keys of offsets from ``dirty`` to below ``mapped``."""
        newest = {
            item.key: item.offset
            for chunk in self.chunks
            if chunk.commit is None
            for item in chunk.items
            if dirty <= item.offset < mapped and item.offset not in self.hidden
        }
        return DumbRound(newest, mapped, now_ms, retention_ms, dict(self.last_data))

    def compact(self, cleaning_round: DumbRound, end: int) -> None:
        """Clean the segments below ``end`` that the round has not cleaned yet."""
        before, self.chunks = self.chunks, []
        for chunk in before:
            if cleaning_round.cleaned <= chunk.first < end:
                done = chunk.commit is not None and not _has_data(
                    cleaning_round.seen, chunk.producer
                )
                cleaning_round.seen.append(chunk)
                self.chunks += self._cleaned(cleaning_round, chunk, done=done)
            else:
                self.chunks.append(chunk)
        cleaning_round.cleaned = max(cleaning_round.cleaned, end)

    def _cleaned(self, cleaning_round: DumbRound, chunk: Chunk, *, done: bool) -> list[Chunk]:
        expired = chunk.horizon_ms is not None and chunk.horizon_ms <= cleaning_round.now_ms
        if chunk.commit is not None:
            items = () if done and expired else chunk.items
        else:
            items = tuple(
                item
                for item in chunk.items
                if item.offset not in self.hidden
                and (
                    item.offset >= cleaning_round.mapped
                    or (
                        item.offset >= cleaning_round.newest.get(item.key, -1)
                        and not (item.value is None and expired)
                    )
                )
            )
        return _left_of(chunk, items, done, cleaning_round.now_ms + cleaning_round.retention_ms)


@dataclass
class DumbRound:
    """A round of compaction: the newest offset of each key, and its progress."""

    newest: Mapping[bytes | None, int]
    mapped: int
    now_ms: int
    retention_ms: int
    last_data: Mapping[int, int]
    """The last data offset of each producer at the beginning of the round."""
    seen: list[Chunk] = field(default_factory=list)
    """Cleaned batches as they were before cleaning; retention may have dropped some of them."""
    cleaned: int = 0

    def keeps_empty(self, chunk: Chunk) -> bool:
        """Return whether the producer state requires that the batch is kept, even if empty."""
        last = self.last_data.get(chunk.producer, -2)
        return last == chunk.last or (last == -1 and chunk.commit is not None)


def _has_data(before: list[Chunk], producer: int) -> bool:
    """Return whether the producer's transaction has a data batch before its marker."""
    for chunk in reversed(before):
        if chunk.producer == producer and chunk.transactional:
            return chunk.commit is None
    return False


def _left_of(chunk: Chunk, items: tuple[Item, ...], done: bool, horizon_ms: int) -> list[Chunk]:
    """Return the batch with its remaining records; an empty data batch loses its delete horizon."""
    tombstones = chunk.commit is None and any(item.value is None for item in items)
    if items and chunk.horizon_ms is None and (done or tombstones):
        chunk = replace(chunk, horizon_ms=horizon_ms)
    if not items:
        horizon = chunk.horizon_ms if chunk.commit is not None else None
        return [replace(chunk, items=(), horizon_ms=horizon)]
    return [replace(chunk, items=items, max_time_ms=max(item.time_ms for item in items))]
