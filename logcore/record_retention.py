"""The rules of compaction: the decisions of Kafka's cleaner over batches, without files or threads.

A round has two passes. The first (:func:`map_offsets`) reads the dirty part of a log and notes the
last offset of every key. The second (:class:`RecordFilter`) reads everything up to the mapped end
and writes the retained records. Both see batches in offset order and follow the transactions in
them.

The caller leaves out the active segment and everything at or after the last stable offset, so no
round ever includes an open transaction.

Memory: :class:`OffsetMap` holds a 16-byte digest and an offset per distinct key, and stops at its
budget; then the round cleans only the mapped part. A slot of Kafka's ``SkimpyOffsetMap`` takes 24
bytes, an entry of a Python dict about :data:`BYTES_PER_KEY`. So the same budget maps fewer keys in
one round, and a large log takes more rounds, with the same outcome. As in Kafka, equal digests
count as equal keys.

Source: ``Cleaner``, ``CleanedTransactionMetadata``, ``SkimpyOffsetMap``,
``MemoryRecords.filterTo``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from heapq import heapify, heappop
from itertools import chain
from typing import Any, Final, NamedTuple

from fencepost.logcore.batch import (
    BatchHeader,
    Buffer,
    ControlType,
    encode_batch,
    first_control,
    record_window,
    with_fewer_records,
    wrap_int64,
)
from fencepost.logcore.config import MAX_INT64
from fencepost.logcore.record_spans import Span, joined, span_chunks
from fencepost.logcore.record_window import RecordWindow

BYTES_PER_KEY: Final = 184
"""Heap of one entry, digest and offset included: 111 to 141 bytes at rest and 171 while the dict
grows (CPython 3.11, up to 1.5 million keys), and some slack."""

DIGEST_BYTES: Final = 16

Batch = tuple[BatchHeader, Buffer]
"""A batch's header and its bytes, from the first byte of the header on."""


class AbortedTransaction(NamedTuple):
    """An aborted transaction of the transaction index; offsets of its first record and marker."""

    producer_id: int
    first_offset: int
    last_offset: int


class LastRecord(NamedTuple):
    """The last data offset of a producer's current epoch, −1 without data; and that epoch."""

    last_data_offset: int
    producer_epoch: int


class OffsetMap:
    """The last offset of each key of the dirty part, within a memory budget in bytes."""

    def __init__(self, budget_bytes: int) -> None:
        if budget_bytes < BYTES_PER_KEY:
            raise ValueError(f"a budget of {budget_bytes} bytes holds no key")
        self._capacity = budget_bytes // BYTES_PER_KEY
        self._offsets: dict[bytes, int] = {}
        self.latest_offset = -1
        """The last offset that was mapped; records after it are retained."""

    def __len__(self) -> int:
        return len(self._offsets)

    def put(self, key: bytes, offset: int) -> bool:
        """Note ``key`` at ``offset``; False if the map is full and the key is new."""
        # A key shorter than a digest stands for itself: no digest equals it.
        digest = key if len(key) < DIGEST_BYTES else _digest(key)
        if len(self._offsets) >= self._capacity and digest not in self._offsets:
            return False
        self._offsets[digest] = offset
        return True

    def get(self, key: bytes) -> int:
        """Return the last offset of ``key``, −1 if it was not mapped."""
        return self._offsets.get(key if len(key) < DIGEST_BYTES else _digest(key), -1)


def _digest(key: bytes) -> bytes:
    return blake2b(key, digest_size=DIGEST_BYTES).digest()


class Transactions:
    """Follows a log's transactions in offset order, given the list of the aborted ones."""

    def __init__(self, aborted: Iterable[AbortedTransaction]) -> None:
        self._waiting = [(entry.first_offset, entry) for entry in set(aborted)]
        heapify(self._waiting)
        self._open_aborted: dict[int, AbortedTransaction] = {}
        self._open_committed: set[int] = set()
        self.retained_aborts: dict[AbortedTransaction, None] = {}
        """Aborted transactions whose data was seen: their index entries are retained."""

    def copy(self) -> Transactions:
        """Return a copy of the current state, to return to later."""
        copied = Transactions(())
        copied._waiting = self._waiting.copy()
        copied._open_aborted = self._open_aborted.copy()
        copied._open_committed = self._open_committed.copy()
        copied.retained_aborts = self.retained_aborts.copy()
        return copied

    def _begin_up_to(self, offset: int) -> None:
        while self._waiting and self._waiting[0][0] <= offset:
            entry = heappop(self._waiting)[1]
            self._open_aborted[entry.producer_id] = entry

    def data(self, header: BatchHeader) -> bool:
        """Process a data batch; return True if it belongs to an aborted transaction."""
        self._begin_up_to(header.last_offset)
        if not header.is_transactional:
            return False
        entry = self._open_aborted.get(header.producer_id)
        if entry is None:
            self._open_committed.add(header.producer_id)
            return False
        self.retained_aborts[entry] = None
        return True

    def marker(self, header: BatchHeader, buf: Buffer) -> bool:
        """Process a control batch; return True if no data of its transaction preceded it.

        Such a marker is no longer needed. Control batches that end no transaction always stay.
        """
        self._begin_up_to(header.last_offset)
        control = first_control(buf, 0, header)
        if control is None:
            return True
        kind = control.type
        if kind is ControlType.ABORT:
            entry = self._open_aborted.pop(header.producer_id, None)
            # Any remaining data of the transaction was noted when it was read.
            return entry is None or entry not in self.retained_aborts
        if kind is ControlType.COMMIT:
            if header.producer_id in self._open_committed:
                self._open_committed.discard(header.producer_id)
                return False
            return True
        return False


def map_offsets(
    batches: Iterable[Batch],
    transactions: Transactions,
    offsets: OffsetMap,
    *,
    start: int,
    max_output_bytes: int,
    max_record_bytes: int | None = None,
) -> None:
    """Fill ``offsets`` from the dirty ``batches`` until they end or the map is full.

    Afterwards ``offsets.latest_offset`` is the last mapped offset. Data of aborted transactions and
    records without a key are skipped.
    """
    for header, buf in batches:
        if header.is_control:
            transactions.marker(header, buf)
        elif not transactions.data(header):
            first = header.base_offset
            window = record_window(buf, 0, header, max_output_bytes, max_record_bytes)
            for delta, _, key, *_ in chain.from_iterable(span_chunks(header, window)):
                if key is None or first + delta < start:
                    continue
                if not offsets.put(key, first + delta):
                    return
                offsets.latest_offset = first + delta
        offsets.latest_offset = max(offsets.latest_offset, header.last_offset)


@dataclass
class CleanerStats:
    """Counts of the bytes, records and batches that a round read and retained."""

    bytes_read: int = 0
    bytes_kept: int = 0
    records_read: int = 0
    records_kept: int = 0
    batches_dropped: int = 0


Choose = Callable[[Sequence[Span]], Sequence[Span]]
"""Selects the records of a chunk to retain."""


def _retain_all(spans: Sequence[Span]) -> Sequence[Span]:
    return spans


def _retain_none(_spans: Sequence[Span]) -> Sequence[Span]:
    return ()


@dataclass
class _RetainedBatch:
    """The retained part of a batch. Times are milliseconds since the epoch."""

    count: int = 0
    first_ms: int = 0
    latest_ms: int = 0
    has_tombstones: bool = False


@dataclass
class RecordFilter:
    """The second pass. ``now_ms`` and ``delete_retention_ms`` decide on tombstones and markers.

    ``last_records`` maps the id of every known producer to its last record: the batch with the
    producer's last sequence is retained even without records. The last batch that is read
    for an output segment is retained too: before that batch, the caller sets ``last_offset`` to the
    batch's last offset. For all other batches ``last_offset`` is −1.
    """

    offsets: OffsetMap
    transactions: Transactions
    last_records: Mapping[int, LastRecord]
    last_offset: int
    now_ms: int
    delete_retention_ms: int
    max_output_bytes: int
    max_record_bytes: int | None = None
    figures: CleanerStats = field(default_factory=CleanerStats)

    def run(self, batches: Iterable[Batch]) -> Iterator[Buffer]:
        """Yield every retained batch, unchanged if it loses nothing."""
        for header, buf in batches:
            self.figures.bytes_read += header.size
            self.figures.records_read += header.record_count
            retained = self._filter(header, buf)
            if retained is None:
                self.figures.batches_dropped += 1
                continue
            self.figures.bytes_kept += len(retained)
            yield retained

    def _filter(self, header: BatchHeader, buf: Buffer) -> Buffer | None:
        """Return the retained form of a batch: itself, a smaller one, or None."""
        done_marker = aborted = False
        if header.is_control:
            done_marker = self.transactions.marker(header, buf)
        else:
            aborted = self.transactions.data(header)
        horizon = header.delete_horizon_ms
        expired = horizon is not None and horizon <= self.now_ms
        if aborted or (done_marker and expired):
            choose: Choose = _retain_none
        elif header.is_control:
            choose = _retain_all
        else:
            choose = partial(self._retained, header.base_offset, expired=expired)
        retained = self._tally(header, buf, choose)
        self.figures.records_kept += retained.count
        if not retained.count:
            if not self._retains_empty(header):
                return None
            # A marker without its record would be useless to a producer-state rebuild.
            return buf if header.is_control else _emptied(header)
        tombstones = not header.is_control and retained.has_tombstones
        if horizon is None and (tombstones or done_marker):
            horizon = min(self.now_ms + self.delete_retention_ms, MAX_INT64)
        elif retained.count == header.record_count:
            return buf
        return self._rebuilt(header, buf, choose, retained, horizon)

    def _window(self, header: BatchHeader, buf: Buffer) -> RecordWindow:
        return record_window(buf, 0, header, self.max_output_bytes, self.max_record_bytes)

    def _tally(self, header: BatchHeader, buf: Buffer, choose: Choose) -> _RetainedBatch:
        """Determine the retained part of a batch, chunk by chunk."""
        retained = _RetainedBatch()
        first = header.base_timestamp
        for spans in span_chunks(header, self._window(header, buf)):
            chosen = choose(spans)
            if chosen:
                times = [wrap_int64(first + time) for _, time, *_ in chosen]
                if header.is_log_append_time:
                    times = [header.max_timestamp]
                if not retained.count:
                    retained.first_ms = retained.latest_ms = times[0]
                retained.count += len(chosen)
                retained.latest_ms = max(retained.latest_ms, *times)
                retained.has_tombstones |= not all(has_value for _, _, _, has_value, *_ in chosen)
        return retained

    def _rebuilt(
        self,
        header: BatchHeader,
        buf: Buffer,
        choose: Choose,
        retained: _RetainedBatch,
        horizon_ms: int | None,
    ) -> bytes:
        """Return the batch with only the chosen records.

        The header gets the count and the largest timestamp of these records. The base timestamp
        becomes the first record's timestamp or the delete horizon. All other fields stay. The batch
        is read a second time, so that only one chunk of it is decompressed at a time.
        """
        window = self._window(header, buf)
        chunks = span_chunks(header, window)
        before_ms = header.base_timestamp
        if horizon_ms is None:
            header = header._replace(base_timestamp=retained.first_ms)
        else:
            header = header.with_horizon(horizon_ms)
        header = header._replace(max_timestamp=retained.latest_ms, record_count=retained.count)
        later_ms, time = header.base_timestamp - before_ms, None
        if header.is_log_append_time:  # each record's timestamp becomes the broker's
            time = wrap_int64(retained.latest_ms - header.base_timestamp)
        payload = (
            joined(window.data, chosen, later_ms, time) for chosen in map(choose, chunks) if chosen
        )
        return with_fewer_records(header, payload)

    def _retained(self, first: int, spans: Sequence[Span], *, expired: bool) -> Sequence[Span]:
        """Return the last record of each key, unless it is an expired tombstone.

        Records after the last mapped offset are all retained.
        """
        offsets = self.offsets
        behind = offsets.latest_offset - first
        return [
            span
            for span in spans
            if span[0] > behind
            or (
                (key := span[2]) is not None
                and first + span[0] >= offsets.get(key)
                and (span[3] or not expired)
            )
        ]

    def _retains_empty(self, header: BatchHeader) -> bool:
        """Return whether to retain the batch without records, for its offset or producer state."""
        if header.last_offset == self.last_offset:
            return True
        last = self.last_records.get(header.producer_id) if header.has_producer else None
        if last is None:
            return False
        if last.last_data_offset >= 0:
            return last.last_data_offset == header.last_offset
        return header.is_control and last.producer_epoch == header.producer_epoch


def _emptied(header: BatchHeader) -> bytes:
    """Return the batch without records: an uncompressed header, with its largest timestamp."""
    return encode_batch((), **_unchanged(header), max_timestamp_ms=header.max_timestamp)


def _unchanged(header: BatchHeader) -> dict[str, Any]:
    """Return the header fields that do not depend on the retained records."""
    return {
        "base_offset": header.base_offset,
        "last_offset_delta": header.last_offset_delta,
        "leader_epoch": header.leader_epoch,
        "producer_id": header.producer_id,
        "producer_epoch": header.producer_epoch,
        "base_sequence": header.base_sequence,
        "transactional": header.is_transactional,
        "control": header.is_control,
        "log_append_time": header.is_log_append_time,
    }
