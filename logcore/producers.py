"""The producer state of a partition: sequences, epochs, open transactions, the last stable offset.

Checks run before a batch is written and change nothing; ``apply_*`` runs afterwards and never
fails, so a failed write leaves the state unchanged. Replay of the log at load uses the same
``apply_*``.

The state as of an offset is kept in ``<offset>.snapshot`` beside the segments, with a CRC: it is a
cache that shortens replay. A snapshot stores only the last batch of a producer. The other four of
its last five batches, against which retries are compared, return only if the replay reads them.

Source: ``ProducerStateManager``, ``ProducerStateEntry``, ``ProducerAppendInfo``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Final, NamedTuple

from sortedcontainers import SortedDict

from fencepost.logcore.batch import (
    BatchHeader,
    Buffer,
    ControlType,
    iter_records,
    parse_control,
    parse_header,
    verify_crc,
)
from fencepost.logcore.config import MAX_INT64
from fencepost.logcore.errors import (
    CorruptRecordError,
    InvalidProducerEpochError,
    InvalidTxnStateError,
    OutOfOrderSequenceError,
    TooManyProducersError,
    TransactionCoordinatorFencedError,
)
from fencepost.logcore.fs import FileSystem, write_file
from fencepost.logcore.index import AbortedTxn
from fencepost.logcore.log import SNAPSHOT_SUFFIX
from fencepost.logcore.producer_limit import ProducerLimit
from fencepost.logcore.producer_snapshot import (
    MAX_SEQUENCE,
    NO_EPOCH,
    NO_SEQUENCE,
    SNAPSHOT_ENTRY,
    CachedBatch,
    CorruptSnapshotError,
    ProducerEntry,
    decode_snapshot,
    encode_snapshot,
)
from fencepost.logcore.record_retention import LastRecord
from fencepost.logcore.refused import RefusedSequences
from fencepost.logcore.segment import file_stem

MAX_EPOCH: Final = 0x7FFF

BATCHES_TO_RETAIN: Final = 5
"""Clients keep at most five requests in flight, so a retry is at most five batches old."""

PRODUCER_ID_EXPIRATION_MS: Final = 86_400_000
"""``producer.id.expiration.ms``: how long an idle producer is remembered."""

EXPIRED_AT_ONCE: Final = 10_000


class ProducerState(NamedTuple):
    """A producer as DescribeProducers returns it; −1 stands for none."""

    producer_id: int
    producer_epoch: int
    last_sequence: int
    last_timestamp: int
    coordinator_epoch: int
    current_txn_first_offset: int


class CompletedTxn(NamedTuple):
    """A transaction with data in this log, ended by the marker at ``last_offset``."""

    producer_id: int
    first_offset: int
    last_offset: int
    commit: bool


class ProducerStateManager:
    """All producers of one partition.

    ``map_end_offset`` is the offset up to which the state reflects the log. Many partitions may
    share a ``limit``; without one the partition creates its own.
    """

    def __init__(
        self,
        fs: FileSystem,
        directory: str,
        expiration_ms: int = PRODUCER_ID_EXPIRATION_MS,
        limit: ProducerLimit | None = None,
    ) -> None:
        self._fs = fs
        self._directory = directory
        self._expiration_ms = expiration_ms
        self._limit = limit or ProducerLimit()
        self._producers: dict[int, ProducerEntry] = {}
        self._refused = RefusedSequences()
        self._guards: dict[int, object] = {}
        # First offset → producer id of transactions without marker.
        self._open: SortedDict[int, int] = SortedDict()
        # First offset → marker offset of transactions whose marker is not below the high watermark.
        self._unreplicated: SortedDict[int, int] = SortedDict()
        self.first_unstable_offset: int | None = None
        self.map_end_offset = 0
        self.snapshot_offsets: set[int] = set()
        """Offsets of the snapshot files on disk."""
        self._last_snapshot_offset = 0

    # --- queries ---

    def get(self, producer_id: int) -> ProducerEntry | None:
        """Return the state of a producer, None if it is unknown or expired."""
        return self._producers.get(producer_id)

    def view(self) -> Iterator[ProducerState]:
        """Yield the current producers, as DescribeProducers returns them."""
        for entry in list(self._producers.values()):
            yield ProducerState(
                entry.producer_id,
                entry.epoch,
                entry.last_sequence,
                entry.last_timestamp,
                entry.coordinator_epoch,
                -1 if entry.current_txn_first_offset is None else entry.current_txn_first_offset,
            )

    def open_transactions(self) -> list[tuple[int, int]]:
        """Return (first offset, producer id) of transactions without a marker, oldest first."""
        return list(self._open.items())

    def last_records(self) -> Callable[[], dict[int, LastRecord]]:
        """Copy the last record of each producer; compaction retains that record's batch.

        Copying is quick, decoding is not: the returned function decodes the copy, on any thread.
        """
        packed = b"".join([entry.packed for entry in self._producers.values()])
        return lambda: {
            fields[0]: LastRecord(fields[3], fields[1])
            for fields in SNAPSHOT_ENTRY.iter_unpack(packed)
        }

    def has_open_transaction(self, producer_id: int, epoch: int | None = None) -> bool:
        """Return whether the producer has a transaction open here (under ``epoch``, if given)."""
        entry = self._producers.get(producer_id)
        return (
            entry is not None
            and epoch in {None, entry.epoch}
            and entry.current_txn_first_offset is not None
        )

    def guard(self, producer_id: int) -> object:
        """Return an object that stays the same until the producer's transaction in this log ends.

        A caller that asks another broker to verify the transaction compares the object before and
        after (Kafka: ``VerificationGuard``).
        """
        return self._guards.setdefault(producer_id, object())

    def last_stable_offset(self, high_watermark: int) -> int:
        """Return the first offset that a ``read_committed`` reader must not see."""
        unstable = self.first_unstable_offset
        return high_watermark if unstable is None else min(unstable, high_watermark)

    # --- checks; they change no state of the log ---

    def note_refused(self, header: BatchHeader) -> None:
        """Remember that a client's batch was refused, if its producer is unknown."""
        if header.producer_id >= 0 and header.producer_id not in self._producers:
            self._refused.note(header.producer_id, header.producer_epoch, header.base_sequence)

    def note_refused_bytes(self, data: Buffer) -> None:
        """Remember a refused batch that was not parsed yet; ignore one with a wrong CRC."""
        with suppress(CorruptRecordError):
            header = parse_header(data)
            verify_crc(data, 0, header)
            self.note_refused(header)

    def find_duplicate(self, header: BatchHeader) -> CachedBatch | None:
        """Return the batch, among the producer's last five, that this batch repeats."""
        entry = self._producers.get(header.producer_id)
        if entry is None or entry.epoch != header.producer_epoch:
            return None
        first, last = header.base_sequence, header.last_sequence
        for cached in entry.batches:
            if cached.first_sequence == first and cached.last_sequence == last:
                return cached
        return None

    def check_epoch(self, producer_id: int, epoch: int) -> None:
        """Raise InvalidProducerEpochError if the producer has written under a newer epoch."""
        entry = self._producers.get(producer_id)
        if entry is not None and epoch < entry.epoch:
            raise InvalidProducerEpochError(
                f"producer {producer_id} has epoch {entry.epoch}, the batch {epoch}"
            )

    def check_batch(self, header: BatchHeader, *, verified: bool, transaction_version: int) -> None:
        """Check a client's data batch that has a producer id and is no duplicate.

        ``verified``: the transaction coordinator has this partition in the producer's transaction.
        Raises InvalidTxnStateError, InvalidProducerEpochError, OutOfOrderSequenceError,
        TooManyProducersError.
        """
        entry = self._producers.get(header.producer_id)
        epoch = header.producer_epoch
        transactional = header.is_transactional
        # This check comes first: a producer whose transaction has timed out must get
        # InvalidProducerEpochError, from which it can recover, and not the fatal
        # InvalidTxnStateError (KAFKA-19690).
        self.check_epoch(header.producer_id, epoch)
        if (
            transactional
            and not verified
            and not self.has_open_transaction(header.producer_id, epoch)
        ):
            raise InvalidTxnStateError(
                f"producer {header.producer_id} begins a transaction that was not verified"
            )
        if entry is None:
            lowest = self._refused.lowest(header.producer_id, epoch)
            if lowest is not None and header.base_sequence > lowest:
                raise OutOfOrderSequenceError(
                    f"producer {header.producer_id} sends sequence {header.base_sequence},"
                    f" but {lowest} must come first"
                )
            if transactional and transaction_version >= 2 and header.base_sequence:
                raise OutOfOrderSequenceError(
                    f"sequence {header.base_sequence}, but the transaction of producer"
                    f" {header.producer_id} must begin with 0"
                )
            if not self._limit.has_room:
                raise TooManyProducersError(
                    f"each of the {self._limit.maximum} producers in memory has an open"
                    f" transaction; producer {header.producer_id} must wait until one ends"
                    " (max.producer.ids)"
                )
            return
        self._check_sequence(entry, epoch, header.base_sequence)
        if entry.current_txn_first_offset is not None and not transactional:
            raise InvalidTxnStateError(
                f"producer {header.producer_id} has an open transaction, but the batch is"
                " not part of it"
            )

    def _check_sequence(self, entry: ProducerEntry, epoch: int, sequence: int) -> None:
        last = entry.last_sequence if epoch == entry.epoch else NO_SEQUENCE
        expected = 0 if last == MAX_SEQUENCE else last + 1
        if sequence != expected:
            raise OutOfOrderSequenceError(
                f"producer {entry.producer_id} sends sequence {sequence} in epoch {epoch};"
                f" expected is {expected}"
            )

    def check_marker(
        self, producer_id: int, epoch: int, coordinator_epoch: int, transaction_version: int
    ) -> None:
        """Check an end marker. Unknown producers are accepted.

        Raises TransactionCoordinatorFencedError, InvalidProducerEpochError.
        """
        entry = self._producers.get(producer_id)
        if entry is None:
            return
        if coordinator_epoch < entry.coordinator_epoch:
            raise TransactionCoordinatorFencedError(
                f"coordinator epoch {coordinator_epoch} is older than {entry.coordinator_epoch}"
            )
        if epoch > entry.epoch:
            return
        if epoch == entry.epoch and (
            transaction_version < 2 or entry.current_txn_first_offset is None or epoch == MAX_EPOCH
        ):
            return
        raise InvalidProducerEpochError(
            f"a marker of epoch {epoch} for producer {producer_id} of epoch {entry.epoch}"
        )

    # --- applying what the log contains ---

    def apply_batch(self, header: BatchHeader, base_offset: int) -> None:
        """Apply a producer's data batch at ``base_offset``."""
        producer_id = header.producer_id
        entry = self._producers.get(producer_id) or self._add(ProducerEntry(producer_id))
        if entry.epoch != header.producer_epoch:
            entry.move_to(header.producer_epoch)
        batches = entry.batches
        if len(batches) == BATCHES_TO_RETAIN:
            del batches[0]
        timestamp = header.max_timestamp
        batches.append(
            CachedBatch(
                header.base_sequence,
                header.last_sequence,
                base_offset,
                base_offset + header.last_offset_delta,
                timestamp,
            )
        )
        entry.last_timestamp = timestamp
        if entry.current_txn_first_offset is None and header.is_transactional:
            entry.current_txn_first_offset = base_offset
            self._open[base_offset] = producer_id
            self._update_first_unstable()
        entry.pack()
        self._limit.touch(entry, self._producers)

    def _add(self, entry: ProducerEntry) -> ProducerEntry:
        self._limit.add(entry, self._producers)
        self._refused.forget(entry.producer_id)
        return entry

    def apply_marker(
        self,
        producer_id: int,
        epoch: int,
        coordinator_epoch: int,
        offset: int,
        timestamp: int,
        *,
        commit: bool,
    ) -> CompletedTxn | None:
        """Apply an end marker; return None if the producer had no open transaction here."""
        entry = self._producers.get(producer_id) or self._add(ProducerEntry(producer_id))
        if self._guards:
            self._guards.pop(producer_id, None)
        entry.move_to(epoch)
        entry.coordinator_epoch = coordinator_epoch
        entry.last_timestamp = timestamp
        first_offset = entry.current_txn_first_offset
        entry.current_txn_first_offset = None
        entry.pack()
        self._limit.touch(entry, self._producers)
        if first_offset is None:
            return None
        self._open.pop(first_offset, None)
        self._unreplicated[first_offset] = offset
        self._update_first_unstable()
        return CompletedTxn(producer_id, first_offset, offset, commit)

    def would_abort(self, producer_id: int, marker_offset: int) -> AbortedTxn | None:
        """Build the index entry for an abort marker that will be at ``marker_offset``."""
        entry = self._producers.get(producer_id)
        if entry is None or entry.current_txn_first_offset is None:
            return None
        first_offset = entry.current_txn_first_offset
        offsets = (offset for offset in self._open if offset != first_offset)
        oldest = next(offsets, marker_offset + 1)
        return AbortedTxn(producer_id, first_offset, marker_offset, oldest)

    def aborted_txn(self, completed: CompletedTxn) -> AbortedTxn:
        """Build the index entry of an aborted transaction, with the LSO after its marker."""
        oldest = self._open.keys()[0] if self._open else completed.last_offset + 1
        return AbortedTxn(
            completed.producer_id, completed.first_offset, completed.last_offset, oldest
        )

    def apply_follower_batch(self, header: BatchHeader, data: Buffer, pos: int) -> str:
        """Apply a producer's batch that the leader has accepted; return a warning or "".

        No batch is refused: a lower epoch is the leader's responsibility (KAFKA-9144).
        """
        entry = self._producers.get(header.producer_id)
        epoch, coordinator_epoch = (NO_EPOCH, NO_EPOCH)
        if entry is not None:
            epoch, coordinator_epoch = entry.epoch, entry.coordinator_epoch
        self.replay(header, memoryview(data)[pos : pos + header.size])
        if header.producer_epoch < epoch:
            return (
                f"producer {header.producer_id} has epoch {epoch},"
                f" the batch at offset {header.base_offset} {header.producer_epoch}"
            )
        now = coordinator_epoch if entry is None else entry.coordinator_epoch
        if now < coordinator_epoch:
            return (
                f"coordinator epoch {now} of the marker at offset {header.base_offset} is older"
                f" than {coordinator_epoch}"
            )
        return ""

    def unreplicated_below(self, offset: int) -> dict[int, int]:
        """Return first offset → marker offset of ended transactions that the LSO still waits for.

        Only transactions whose marker lies below ``offset`` are included.
        """
        return {first: last for first, last in self._unreplicated.items() if last < offset}

    def hold_unreplicated(self, transactions: Mapping[int, int]) -> None:
        """Have the LSO wait for these transactions too, because snapshots do not record them."""
        self._unreplicated.update(transactions)
        self._update_first_unstable()

    def uncommitted(self, high_watermark: int) -> list[tuple[int, int, int]]:
        """Return id, epoch and first sequence of producers with only uncommitted batches.

        Only cached batches count. None of them was acknowledged with acks=all, so the client
        retries them in order.
        """
        return [
            (producer.producer_id, producer.epoch, producer.batches[0].first_sequence)
            for producer in self._producers.values()
            if producer.batches and producer.batches[0].last_offset >= high_watermark
        ]

    def require_sequence(self, uncommitted: Iterable[tuple[int, int, int]]) -> None:
        """Require producers that a truncation has removed to begin with the same sequence again.

        Otherwise a late copy of the second batch would be accepted as the first one, and the first
        would then be refused forever.
        """
        for producer_id, epoch, sequence in uncommitted:
            if producer_id not in self._producers:
                self._refused.note(producer_id, epoch, sequence)

    def replay(self, header: BatchHeader, batch: memoryview) -> CompletedTxn | None:
        """Apply a data or control batch that was read back from the log."""
        self.map_end_offset = header.next_offset
        if not header.has_producer:
            return None
        if not header.is_control:
            self.apply_batch(header, header.base_offset)
            return None
        # Compaction may have emptied the marker's batch.
        for record in islice(iter_records(batch, 0, header), 1):
            control = parse_control(record)
            if control.type in {ControlType.ABORT, ControlType.COMMIT}:
                return self.apply_marker(
                    header.producer_id,
                    header.producer_epoch,
                    control.coordinator_epoch,
                    header.base_offset,
                    record.timestamp_ms,
                    commit=control.type is ControlType.COMMIT,
                )
        return None

    def high_watermark_moved(self, high_watermark: int) -> None:
        """Drop transactions whose marker is now below the high watermark."""
        if not self._unreplicated:
            return
        done = [first for first, last in self._unreplicated.items() if last < high_watermark]
        for first in done:
            del self._unreplicated[first]
        self._update_first_unstable()

    def _update_first_unstable(self) -> None:
        first = self._open.keys()[0] if self._open else None
        if self._unreplicated:
            unreplicated = self._unreplicated.keys()[0]
            first = unreplicated if first is None else min(first, unreplicated)
        self.first_unstable_offset = first

    # --- expiry, truncation ---

    def expire(self, now_ms: int, expiration_ms: int) -> int:
        """Drop up to EXPIRED_AT_ONCE idle producers without open transaction; return how many."""
        self._expiration_ms = expiration_ms
        expired = [key for key, state in self._producers.items() if self._is_expired(state, now_ms)]
        for producer_id in expired[:EXPIRED_AT_ONCE]:
            self._limit.remove(self._producers.pop(producer_id))
        return min(len(expired), EXPIRED_AT_ONCE)

    def _is_expired(self, entry: ProducerEntry, now_ms: int) -> bool:
        return (
            entry.current_txn_first_offset is None
            and now_ms - entry.last_timestamp >= self._expiration_ms
        )

    def clear(self, offset: int) -> None:
        """Drop all producers; the state then begins at ``offset``."""
        self.release()
        self._guards.clear()
        self._open.clear()
        self._unreplicated.clear()
        self.first_unstable_offset = None
        self.map_end_offset = offset
        self._last_snapshot_offset = offset

    def release(self, most: int = MAX_INT64) -> bool:
        """Drop up to ``most`` producers of a closed partition; return whether none is left."""
        while self._producers and most > 0:
            self._limit.remove(self._producers.popitem()[1])
            most -= 1
        return not self._producers

    # --- snapshots ---

    def take_snapshot(self) -> None:
        """Write the state as of ``map_end_offset``, unless its snapshot exists already."""
        offset = self.map_end_offset
        if offset <= self._last_snapshot_offset:
            return
        data = encode_snapshot(self._producers.values())
        write_file(self._fs, self._snapshot_path(offset), data, sync=False)
        self.snapshot_offsets.add(offset)
        self._last_snapshot_offset = offset

    def snapshots_in(self, low: int, high: int) -> list[str]:
        """Return the paths of the snapshots in [low, high], oldest first."""
        return [
            self._snapshot_path(offset)
            for offset in sorted(self.snapshot_offsets)
            if low <= offset <= high
        ]

    def load_snapshot(self, limit: int, start: int, now_ms: int) -> int:
        """Load the newest good snapshot in [start, limit]; return the offset to replay from.

        A snapshot that does not parse is removed. Without any, the state is empty as of ``start``.
        Open transactions in a snapshot as of ``start`` itself are ignored. If data of such a
        transaction remains, the replay opens the transaction. If none remains, compaction may have
        removed the marker as well, and the transaction would stay open forever.
        """
        for offset in sorted(self.snapshot_offsets, reverse=True):
            if not start <= offset <= limit:
                continue
            try:
                raw = self._fs.read_file(self._snapshot_path(offset))
                entries = decode_snapshot(raw or b"")
            except CorruptSnapshotError:
                self.remove_snapshot(offset)
                continue
            self.clear(offset)
            entries.sort(key=_idle_since)
            for entry in entries:
                if self._is_expired(entry, now_ms):
                    continue
                self._add(entry)
                if offset <= start:
                    entry.current_txn_first_offset = None
                entry.pack()
                self._limit.touch(entry, self._producers)
                if entry.current_txn_first_offset is not None:
                    self._open[entry.current_txn_first_offset] = entry.producer_id
            self._update_first_unstable()
            return offset
        self.clear(start)
        self._last_snapshot_offset = 0
        return start

    def remove_snapshots_above(self, offset: int) -> None:
        """Remove the snapshots above ``offset``, which describe offsets that are gone."""
        for snapshot in [snapshot for snapshot in self.snapshot_offsets if snapshot > offset]:
            self.remove_snapshot(snapshot)
        self._last_snapshot_offset = min(self._last_snapshot_offset, offset)

    def remove_stray_snapshots(self, segment_bases: set[int]) -> None:
        """Remove snapshots without a segment; keep the newest if it is above the last segment."""
        newest = max(self.snapshot_offsets, default=-1)
        for snapshot in self.snapshot_offsets - segment_bases:
            if snapshot != newest or snapshot < max(segment_bases, default=-1):
                self.remove_snapshot(snapshot)

    def remove_snapshot(self, offset: int) -> None:
        """Remove one snapshot file."""
        self._fs.remove(self._snapshot_path(offset))
        self.snapshot_offsets.discard(offset)

    def _snapshot_path(self, offset: int) -> str:
        return f"{self._directory}/{file_stem(offset)}{SNAPSHOT_SUFFIX}"


def _idle_since(entry: ProducerEntry) -> int:
    return entry.last_timestamp
