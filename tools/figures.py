"""Bounds for the numbers in a log that is imported.

Apache Kafka appends batches without such bounds. After a batch with producer id 2⁶³ − 1, for
example, a broker that allocates higher ids would have none left.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from fencepost.coordinator.metadata.names import CONSUMER_OFFSETS, TRANSACTION_STATE
from fencepost.coordinator.storage.storage import Storage
from fencepost.logcore.batch import MAGIC, BatchHeader, iter_records, verify_crc
from fencepost.logcore.bounds import (
    MAX_GROUP_EPOCH,
    MAX_LEADER_EPOCH,
    MAX_OFFSET,
    MAX_PRODUCER_EPOCH,
    MAX_PRODUCER_ID,
    BoundError,
    bounded,
)
from fencepost.logcore.dump import read_batches
from fencepost.logcore.errors import CorruptRecordError
from fencepost.logcore.fs import FileSystem
from fencepost.logcore.leftovers import offset_of
from fencepost.logcore.legacy import parse_message, verify_message_crc
from fencepost.logcore.machine import Record
from fencepost.logcore.segment import LOG_SUFFIX

ID_GAP = 1_000_000
"""The number of producer ids to skip: some of them may be allocated, but not in a log yet."""

_NONE = -1
"""The value for a missing producer id, epoch or sequence."""


def check_files(fs: FileSystem, directory: Path) -> None:
    """Check the names of a partition's files, and the headers of its batches. Raises BoundError."""
    for name in sorted(fs.list_directory(str(directory)) or ()):
        base = offset_of(name)
        if base is not None:
            bounded(f"{name}: the offset", base, 0, MAX_OFFSET)
        if not name.endswith(LOG_SUFFIX):
            continue
        for _, header, data in read_batches(fs, f"{directory}/{name}", payload=True):
            if isinstance(header, str):
                break
            try:
                check_header(header)
            except BoundError:
                # Corruption is left to the recovery of the copy, which reports it.
                with suppress(CorruptRecordError):
                    if header.magic < MAGIC:
                        verify_message_crc(data, 0, parse_message(data))
                    else:
                        verify_crc(data, 0, header)
                    raise
                break


def check_header(header: BatchHeader) -> None:
    """Check the numbers of a batch. Raises BoundError."""
    at = f"of the batch at offset {header.base_offset}"
    bounded("the offset", header.base_offset, 0, MAX_OFFSET)
    bounded(f"the last offset {at}", header.last_offset, header.base_offset, MAX_OFFSET)
    bounded(f"the leader epoch {at}", header.leader_epoch, _NONE, MAX_LEADER_EPOCH)
    bounded(f"the producer id {at}", header.producer_id, _NONE, MAX_PRODUCER_ID)
    lowest = 0 if header.has_producer else _NONE
    bounded(f"the producer epoch {at}", header.producer_epoch, lowest, MAX_PRODUCER_EPOCH)
    bounded(f"the sequence {at}", header.base_sequence, _NONE, (1 << 31) - 1)
    # Compaction leaves fewer records than offsets.
    bounded(f"the number of records {at}", header.record_count, 0, header.last_offset_delta + 1)


class ProducerIdPlan(NamedTuple):
    """The producer id that the allocation continues from, and the figures that lead to it."""

    before: int
    """The next producer id before the change."""
    highest_in_logs: int
    beyond_bound: int
    """Number of batches with ids above the bound of an import."""
    following: int
    """The next producer id after the change."""


def plan_producer_ids(storage: Storage) -> ProducerIdPlan:
    """Scan all logs for producer ids, and plan to continue :data:`ID_GAP` above the highest."""
    highest, beyond = _NONE, 0
    for topic in storage.metadata.image.topics.values():
        for index in range(len(topic.partitions)):
            partition = storage.logs.find(topic.name, index)
            for header, batch in () if partition is None else partition.reader.read_all():
                ids = [header.producer_id]
                if topic.name == TRANSACTION_STATE and not header.is_control:
                    ids += _ids_of_transactions(header, batch)
                beyond += any(producer_id > MAX_PRODUCER_ID for producer_id in ids)
                highest = max(
                    highest,
                    *(producer_id for producer_id in ids if producer_id <= MAX_PRODUCER_ID),
                    _NONE,
                )
    return ProducerIdPlan(
        storage.metadata.image.next_producer_id, highest, beyond, highest + 1 + ID_GAP
    )


def _ids_of_transactions(header: BatchHeader, batch: memoryview) -> Iterator[int]:
    from fencepost.txn.records import decode  # noqa: PLC0415 - commands on other topics need no decoder

    for record in iter_records(batch, 0, header):
        decoded = decode(Record(record.key or b"", record.value))
        if decoded is not None and decoded.txn is not None:
            txn = decoded.txn
            yield from (txn.producer_id, txn.previous_producer_id, txn.next_producer_id)


def check_state(topic: str, header: BatchHeader, batch: memoryview) -> int:
    """Check the records of a coordinator's topic; return the highest producer id in them.

    Raises BoundError, CorruptRecordError, InvalidRecordError.
    """
    if topic not in (TRANSACTION_STATE, CONSUMER_OFFSETS) or header.is_control:
        return _NONE
    highest = _NONE
    for decoded in iter_records(batch, 0, header):
        record = Record(decoded.key or b"", decoded.value)
        at = f"of the record at offset {decoded.offset}"
        if topic == TRANSACTION_STATE:
            highest = max(highest, _check_transaction(record, at))
        else:
            _check_group(record, at)
    return highest


def _check_transaction(record: Record, at: str) -> int:
    from fencepost.txn.records import decode  # noqa: PLC0415 - commands on other topics need no decoder

    decoded = decode(record)
    if decoded is None or decoded.txn is None:
        return _NONE
    txn = decoded.txn
    ids = (txn.producer_id, txn.previous_producer_id, txn.next_producer_id)
    for producer_id in ids:
        bounded(f"the producer id {at}", producer_id, _NONE, MAX_PRODUCER_ID)
    for epoch in (txn.producer_epoch, txn.next_producer_epoch):
        bounded(f"the producer epoch {at}", epoch, _NONE, MAX_PRODUCER_EPOCH)
    return max(ids)


def _check_group(record: Record, at: str) -> None:
    from fencepost.groups.records import decode  # noqa: PLC0415 - commands on other topics need no decoder

    decoded = decode(record)
    if decoded is None or decoded[1] is None:
        return
    for name in _GROUP_FIGURES:
        value = getattr(decoded[1], name, None)
        if isinstance(value, int):
            # −1 and −2 stand for members that have left.
            bounded(f"the {name.replace('_', ' ')} {at}", value, -2, MAX_GROUP_EPOCH)


_GROUP_FIGURES = (
    "generation_id",
    "epoch",
    "member_epoch",
    "previous_member_epoch",
)
