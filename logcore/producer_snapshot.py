"""One producer of a partition, in memory and in Kafka's snapshot file, version 1.

Source: ``ProducerStateEntry``, ``ProducerStateManager.writeSnapshot``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final, NamedTuple

from crc32c import crc32c

NO_EPOCH: Final = -1
NO_SEQUENCE: Final = -1
MAX_SEQUENCE: Final = 0x7FFFFFFF

_SNAPSHOT_HEADER: Final = struct.Struct(">hIi")
SNAPSHOT_ENTRY: Final = struct.Struct(">qhiqiqiq")
_SNAPSHOT_VERSION: Final = 1
_CRC_START: Final = 6


class CorruptSnapshotError(Exception):
    """A producer snapshot does not parse, or its CRC is wrong."""


class CachedBatch(NamedTuple):
    """One batch of the window that recognises retries."""

    first_sequence: int
    last_sequence: int
    first_offset: int
    last_offset: int
    timestamp: int


class ProducerEntry:
    """The state of one producer id."""

    __slots__ = (
        "batches",
        "coordinator_epoch",
        "current_txn_first_offset",
        "epoch",
        "last_timestamp",
        "packed",
        "producer_id",
    )

    def __init__(self, producer_id: int, epoch: int = NO_EPOCH) -> None:
        self.producer_id = producer_id
        self.epoch = epoch
        self.packed = b""
        """The encoded snapshot entry, kept current so that a roll need not encode every entry."""
        self.batches: list[CachedBatch] = []
        self.coordinator_epoch = -1
        self.last_timestamp = -1
        self.current_txn_first_offset: int | None = None

    @property
    def last_sequence(self) -> int:
        """Sequence of the last record, −1 if this epoch has none yet."""
        return self.batches[-1].last_sequence if self.batches else NO_SEQUENCE

    @property
    def last_offset(self) -> int:
        """The offset of the window's last record; −1 if the window is empty."""
        return self.batches[-1].last_offset if self.batches else -1

    def pack(self) -> None:
        """Update :attr:`packed`, after every change."""
        last = self.batches[-1] if self.batches else None
        first_offset = self.current_txn_first_offset
        self.packed = SNAPSHOT_ENTRY.pack(
            self.producer_id,
            self.epoch,
            last.last_sequence if last else NO_SEQUENCE,
            last.last_offset if last else -1,
            last.last_offset - last.first_offset if last else 0,
            self.last_timestamp,
            self.coordinator_epoch,
            -1 if first_offset is None else first_offset,
        )

    def move_to(self, epoch: int) -> None:
        """Set the epoch; a new one begins an empty window."""
        if epoch != self.epoch:
            self.epoch = epoch
            self.batches.clear()


def encode_snapshot(entries: Iterable[ProducerEntry]) -> bytes:
    """Encode producers as Kafka's snapshot file, version 1."""
    parts = [entry.packed for entry in entries]
    body = struct.pack(">i", len(parts)) + b"".join(parts)
    return struct.pack(">hI", _SNAPSHOT_VERSION, crc32c(body)) + body


def decode_snapshot(raw: bytes) -> list[ProducerEntry]:
    """Decode a snapshot file; CorruptSnapshotError if it is not whole."""
    if len(raw) < _SNAPSHOT_HEADER.size:
        raise CorruptSnapshotError("a producer snapshot is too short")
    version, crc, count = _SNAPSHOT_HEADER.unpack_from(raw)
    if version != _SNAPSHOT_VERSION or crc != crc32c(memoryview(raw)[_CRC_START:]):
        raise CorruptSnapshotError("a producer snapshot's version or CRC is wrong")
    if len(raw) != _SNAPSHOT_HEADER.size + count * SNAPSHOT_ENTRY.size:
        raise CorruptSnapshotError(f"a producer snapshot does not hold {count} entries")
    entries = []
    for fields in SNAPSHOT_ENTRY.iter_unpack(memoryview(raw)[_SNAPSHOT_HEADER.size :]):
        producer_id, epoch, last_sequence, last_offset, delta, timestamp, coordinator, txn = fields
        entry = ProducerEntry(producer_id, epoch)
        entry.last_timestamp = timestamp
        entry.coordinator_epoch = coordinator
        entry.current_txn_first_offset = None if txn < 0 else txn
        if last_offset >= 0:
            first_sequence = (last_sequence - delta) & MAX_SEQUENCE
            if last_sequence == NO_SEQUENCE:
                first_sequence = NO_SEQUENCE
            entry.batches.append(
                CachedBatch(
                    first_sequence, last_sequence, last_offset - delta, last_offset, timestamp
                )
            )
        entries.append(entry)
    return entries
