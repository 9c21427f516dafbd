"""A reader of every kind of file in a data directory: plain rows for people and tools.

The ``kind`` of a row, a dict, is one of ``batch``, ``record``, ``offset-index``,
``time-index``, ``txn-index``, ``producer``, ``checkpoint``, ``epoch``, ``identity``, or ``problem``
with the reason in ``problem``. Bytes are not converted to text. Unreadable data ends the rows of
a file with a problem; only OSError is raised while the rows are read. No file is changed.

With ``verify``, more is checked: CRCs and records of a log, whether index entries match the batches
they point to (the log must be in the same directory), the order of entries, and checksums. The
caller provides a :data:`Decoder` for the records of the coordinators.

Source: ``DumpLogSegments``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Final

from fencepost.logcore.batch import (
    HEADER_SIZE,
    MAGIC,
    BatchHeader,
    ControlType,
    LogRecord,
    iter_records,
    parse_control,
    parse_header,
    verify_crc,
)
from fencepost.logcore.bounds import check_offsets
from fencepost.logcore.checkpoints import (
    CLEANER_CHECKPOINT,
    COPY_SUFFIX,
    HIGH_WATERMARK_CHECKPOINT,
    LEADER_EPOCH_CHECKPOINT,
    LOG_START_CHECKPOINT,
    META_PROPERTIES,
    PARTITION_METADATA,
    QUORUM_STATE,
    RECOVERY_POINT_CHECKPOINT,
    CheckpointError,
    read_copy,
    read_epochs,
    read_meta_properties,
    read_offsets,
    read_partition_metadata,
    uuid_to_text,
)
from fencepost.logcore.errors import LogError
from fencepost.logcore.fs import FileSystem, is_blank, opened
from fencepost.logcore.index import (
    AbortedTxn,
    CorruptIndexError,
    TransactionIndex,
    offset_entries,
    time_entries,
)
from fencepost.logcore.legacy import (
    as_batch_header,
    decode_message,
    magic_at,
    parse_message,
    verify_message_crc,
)
from fencepost.logcore.log import CLEANED_SUFFIX, DELETED_SUFFIX, SNAPSHOT_SUFFIX, SWAP_SUFFIX
from fencepost.logcore.machine import DomainError
from fencepost.logcore.producer_snapshot import CorruptSnapshotError, decode_snapshot
from fencepost.logcore.segment import (
    INDEX_SUFFIX,
    LOG_SUFFIX,
    SCAN_BYTES,
    TIME_INDEX_SUFFIX,
    TXN_INDEX_SUFFIX,
    file_stem,
)
from fencepost.logcore.strays import without_stray_suffix

Row = dict[str, object]

Decoder = Callable[[LogRecord], Mapping[str, object] | None]
"""Decodes a record, or returns None; may raise a DomainError for a malformed record."""

OFFSET_CHECKPOINTS: Final = (
    RECOVERY_POINT_CHECKPOINT,
    LOG_START_CHECKPOINT,
    HIGH_WATERMARK_CHECKPOINT,
    CLEANER_CHECKPOINT,
)
SNAPSHOT_OF_METADATA_SUFFIX: Final = ".checkpoint"
"""Suffix of a snapshot of ``__cluster_metadata-0``: a file of batches, like a log."""

_INTERIM_SUFFIXES: Final = (CLEANED_SUFFIX, SWAP_SUFFIX, DELETED_SUFFIX)
_OFFSET_DIGITS: Final = len(file_stem(0))


def dump_file(
    fs: FileSystem,
    directory: str,
    name: str,
    *,
    verify: bool = False,
    records: bool = False,
    decoder: Decoder | None = None,
) -> Iterator[Row]:
    """Yield the rows of one file, with ``records`` also a row for each record of a log.

    Raises OSError, and ValueError if the name matches no known kind of file.
    """
    plain = without_stray_suffix(name)
    for suffix in _INTERIM_SUFFIXES:
        plain = plain.removesuffix(suffix)
    if name.endswith(SNAPSHOT_OF_METADATA_SUFFIX):
        plain = SNAPSHOT_OF_METADATA_SUFFIX  # its offsets begin at 0, not at the one in its name
    dump = _Dump(fs, directory, name, plain, verify=verify, records=records, decoder=decoder)
    if name.removesuffix(COPY_SUFFIX) in OFFSET_CHECKPOINTS:
        return dump.offsets()
    small = {
        LEADER_EPOCH_CHECKPOINT: dump.epochs,
        PARTITION_METADATA: dump.partition,
        META_PROPERTIES: dump.meta,
        QUORUM_STATE: dump.quorum,
    }
    if name in small:
        return small[name]()
    by_suffix = {
        LOG_SUFFIX: dump.log,
        INDEX_SUFFIX: dump.offset_index,
        TIME_INDEX_SUFFIX: dump.time_index,
        TXN_INDEX_SUFFIX: dump.txn_index,
        SNAPSHOT_SUFFIX: dump.snapshot,
    }
    if plain == SNAPSHOT_OF_METADATA_SUFFIX:
        return dump.log()
    suffix = plain[_OFFSET_DIGITS:]
    if plain[:_OFFSET_DIGITS].isdecimal() and suffix in by_suffix:
        return by_suffix[suffix]()
    raise ValueError(f"{name} is not a log file")


def is_problem(row: Mapping[str, object]) -> bool:
    """Return whether a row reports a problem."""
    return row["kind"] == "problem"


def _problem(text: object, **position: object) -> Row:
    return {"kind": "problem", "problem": str(text), **position}


class _Dump:
    def __init__(
        self,
        fs: FileSystem,
        directory: str,
        name: str,
        plain: str,
        *,
        verify: bool,
        records: bool,
        decoder: Decoder | None,
    ) -> None:
        self._fs = fs
        self._directory = directory
        self._name = name
        self._interim_suffix = name[len(plain) :]
        self._stem = plain[:_OFFSET_DIGITS]
        self._base = int(self._stem) if self._stem.isdecimal() else 0
        self._verify = verify
        self._records = records
        self._decoder = decoder

    # --- logs ---

    def log(self) -> Iterator[Row]:
        expected = self._base
        for position, header, batch in read_batches(
            self._fs, f"{self._directory}/{self._name}", payload=self._must_read
        ):
            if isinstance(header, str):
                yield _problem(header, position=position)
                return
            yield _batch_row(position, header)
            if self._verify and header.base_offset < expected:
                yield _problem(
                    f"offset {header.base_offset} where {expected} is next", position=position
                )
            expected = header.next_offset
            if self._must_read:
                yield from self._contents(position, header, batch)

    @property
    def _must_read(self) -> bool:
        return self._verify or self._records

    def _contents(self, position: int, header: BatchHeader, batch: bytes) -> Iterator[Row]:
        try:
            check_offsets(header)
            records: Iterable[LogRecord]
            if header.magic < MAGIC:
                message = parse_message(batch)
                verify_message_crc(batch, 0, message)
                records = decode_message(batch, 0, message)
            else:
                verify_crc(batch, 0, header)
                records = iter_records(batch, 0, header)
            for record in records:
                # Without a decoder, ordinary records are not interpreted.
                if self._records or self._decoder is not None or header.is_control:
                    row = self._record_row(header, record)
                if self._records:
                    yield row
        except DomainError as error:
            yield _problem(error, position=position)

    def _record_row(self, header: BatchHeader, record: LogRecord) -> Row:
        row: Row = {"kind": "record", **record._asdict(), "headers": list(record.headers)}
        if header.is_control:
            control = parse_control(record)
            row["control"] = control.type.name
            row["coordinator_epoch"] = control.coordinator_epoch
        is_marker = row.get("control") in {ControlType.ABORT.name, ControlType.COMMIT.name}
        if self._decoder is not None and not is_marker:
            decoded = self._decoder(record)
            if decoded is not None:
                row["decoded"] = dict(decoded)
        return row

    def _log_headers(self) -> Iterator[tuple[int, BatchHeader]]:
        """Yield the headers of the log that belongs to this index, as far as it is readable."""
        name = self._stem + LOG_SUFFIX + self._interim_suffix
        try:
            for position, header, _ in read_batches(
                self._fs, f"{self._directory}/{name}", payload=False
            ):
                if isinstance(header, str):
                    return
                yield position, header
        except FileNotFoundError:
            return

    # --- indexes ---

    def offset_index(self) -> Iterator[Row]:
        entries, leftover = offset_entries(self._read(), self._base)
        for offset, position in entries:
            yield {"kind": "offset-index", "offset": offset, "position": position}
        if leftover:
            yield _problem(leftover)
        if not self._verify:
            return
        for (before, _), (offset, _) in pairwise(entries):
            if offset <= before:
                yield _problem(f"offset {offset} follows {before}", offset=offset)
        indexed = {position: offset for offset, position in entries}
        for position, header in self._log_headers():
            offset = indexed.pop(position, header.last_offset)
            if offset != header.last_offset:
                yield _problem(
                    f"the batch at position {position} ends with offset {header.last_offset}",
                    offset=offset,
                )
        for position, offset in indexed.items():
            yield _problem(f"no batch begins at position {position}", offset=offset)

    def time_index(self) -> Iterator[Row]:
        entries, leftover = time_entries(self._read(), self._base)
        for timestamp, offset in entries:
            yield {"kind": "time-index", "timestamp_ms": timestamp, "offset": offset}
        if leftover:
            yield _problem(leftover)
        if not self._verify:
            return
        for (before, first), (timestamp, offset) in pairwise(entries):
            if timestamp <= before:
                yield _problem(f"timestamp {timestamp} follows {before}", offset=offset)
            if offset < first:
                yield _problem(f"offset {offset} follows {first}", offset=offset)
        yield from self._check_times(entries)

    def _check_times(self, entries: list[tuple[int, int]]) -> Iterator[Row]:
        """Check that each entry has the largest timestamp so far and its batch's last offset."""
        waiting = list(reversed(entries))
        largest = -1
        for _, header in self._log_headers():
            largest = max(largest, header.max_timestamp)
            while waiting and waiting[-1][1] <= header.last_offset:
                timestamp, offset = waiting.pop()
                if timestamp != largest or timestamp != header.max_timestamp:
                    yield _problem(
                        f"timestamp {timestamp} where the batch has {header.max_timestamp}"
                        f" and the largest so far is {largest}",
                        offset=offset,
                    )
        for _, offset in reversed(waiting):
            yield _problem(f"offset {offset} is behind the log", offset=offset)

    def txn_index(self) -> Iterator[Row]:
        path = f"{self._directory}/{self._name}"
        try:
            entries = TransactionIndex(self._fs, path, exists=True).entries
        except CorruptIndexError as error:
            yield _problem(error)
            return
        for entry in entries:
            yield {"kind": "txn-index", **entry._asdict()}
        if not self._verify:
            return
        for before, entry in pairwise(entries):
            if entry.last_offset <= before.last_offset:
                yield _problem(
                    f"marker {entry.last_offset} follows {before.last_offset}",
                    offset=entry.last_offset,
                )
        yield from self._check_markers(entries)

    def _check_markers(self, entries: list[AbortedTxn]) -> Iterator[Row]:
        markers = {
            header.base_offset: header.producer_id
            for _, header in self._log_headers()
            if header.is_control
        }
        for entry in entries:
            if not self._base <= entry.last_offset or entry.first_offset > entry.last_offset:
                yield _problem("the entry's offsets are not its segment's", **entry._asdict())
            elif markers.get(entry.last_offset) != entry.producer_id:
                yield _problem(
                    f"no marker of producer {entry.producer_id} at offset {entry.last_offset}",
                    offset=entry.last_offset,
                )

    # --- small files ---

    def snapshot(self) -> Iterator[Row]:
        try:
            entries = decode_snapshot(self._read())
        except CorruptSnapshotError as error:
            yield _problem(error)
            return
        for entry in entries:
            first_offset = entry.current_txn_first_offset
            yield {
                "kind": "producer",
                "producer_id": entry.producer_id,
                "producer_epoch": entry.epoch,
                "last_sequence": entry.last_sequence,
                "last_offset": entry.last_offset,
                "last_timestamp_ms": entry.last_timestamp,
                "coordinator_epoch": entry.coordinator_epoch,
                "current_txn_first_offset": -1 if first_offset is None else first_offset,
            }
            if self._verify and max(entry.last_offset, first_offset or 0) >= self._base:
                yield _problem(
                    f"producer {entry.producer_id} is known from behind the snapshot's offset"
                )

    def offsets(self) -> Iterator[Row]:
        damage: list[CheckpointError] = []
        fs, directory, name = self._fs, self._directory, self._name
        try:
            if name.endswith(COPY_SUFFIX):
                checkpoint = read_copy(fs, directory, name.removesuffix(COPY_SUFFIX))
            else:
                checkpoint = read_offsets(fs, directory, name, on_damage=damage.append)
        except CheckpointError as error:
            yield _problem(error)
            return
        yield from map(_problem, damage)
        for (topic, index), offset in checkpoint.items():
            yield {"kind": "checkpoint", "topic": topic, "partition": index, "offset": offset}

    def epochs(self) -> Iterator[Row]:
        try:
            entries = read_epochs(self._fs, self._directory) or []
        except CheckpointError as error:
            yield _problem(error)
            return
        for epoch, start in entries:
            yield {"kind": "epoch", "epoch": epoch, "start_offset": start}
        if self._verify:
            for before, after in pairwise(entries):
                if after[0] <= before[0] or after[1] <= before[1]:
                    yield _problem(f"epoch {after} follows {before}")

    def partition(self) -> Iterator[Row]:
        try:
            topic_id = read_partition_metadata(self._fs, self._directory)
        except CheckpointError as error:
            yield _problem(error)
            return
        if topic_id is not None:
            yield {"kind": "identity", "topic_id": uuid_to_text(topic_id)}

    def meta(self) -> Iterator[Row]:
        try:
            meta = read_meta_properties(self._fs, self._directory)
        except CheckpointError as error:
            yield _problem(error)
            return
        if meta is not None:
            yield {
                "kind": "identity",
                "cluster_id": meta.cluster_id,
                "node_id": meta.node_id,
                "directory_id": uuid_to_text(meta.directory_id),
            }

    def quorum(self) -> Iterator[Row]:
        try:
            state = json.loads(self._read())
        except ValueError as error:
            yield _problem(error)
        else:
            yield {"kind": "identity", "quorum": state}

    def _read(self) -> bytes:
        raw = self._fs.read_file(f"{self._directory}/{self._name}")
        if raw is None:
            raise FileNotFoundError(f"{self._directory}/{self._name}")
        return raw


def read_batches(
    fs: FileSystem, path: str, *, payload: bool
) -> Iterator[tuple[int, BatchHeader | str, bytes]]:
    """Yield position, header and, if asked for, bytes of each batch of a log file.

    Data that is not a whole batch comes last, with the reason in place of the header. Messages of
    an older format have the headers of :func:`fencepost.logcore.legacy.as_batch_header`. Reads are
    bounded by SCAN_BYTES, or the largest batch. Raises OSError.
    """
    with opened(fs, fs.open_for_reading(path)) as handle:
        size = fs.size(handle)
        position, start, chunk = 0, 0, b""
        while position < size:
            if position - start + HEADER_SIZE > len(chunk):
                start, chunk = position, fs.read(handle, SCAN_BYTES, position)
            try:
                header = _header_at(chunk, position - start)
            except LogError as error:
                remainder = f"{error}; {size - position} bytes are left"
                if is_blank(fs, handle, position):
                    remainder += ", all zeros: preallocated and not trimmed, or lost with the power"
                yield position, remainder, b""
                return
            if header.size > size - position:
                yield (
                    position,
                    (
                        f"a torn batch of {header.size} bytes at offset {header.base_offset},"
                        f" {size - position} are there"
                    ),
                    b"",
                )
                return
            batch = b""
            if payload:
                if position - start + header.size > len(chunk):
                    count = max(header.size, SCAN_BYTES)
                    start, chunk = position, fs.read(handle, count, position)
                batch = chunk[position - start : position - start + header.size]
            yield position, header, batch
            position += header.size


def _header_at(chunk: bytes, pos: int) -> BatchHeader:
    if magic_at(chunk, pos) < MAGIC:
        return as_batch_header(parse_message(chunk, pos))
    return parse_header(chunk, pos)


def _batch_row(position: int, header: BatchHeader) -> Row:
    row: Row = {
        "kind": "batch",
        "position": position,
        "size": header.size,
        "magic": header.magic,
        "base_offset": header.base_offset,
        "last_offset": header.last_offset,
        "records": header.record_count,
        "codec": header.attributes & 0x07,
        "timestamp_type": "LogAppendTime" if header.is_log_append_time else "CreateTime",
        "max_timestamp_ms": header.max_timestamp,
        "leader_epoch": header.leader_epoch,
        "producer_id": header.producer_id,
        "producer_epoch": header.producer_epoch,
        "base_sequence": header.base_sequence,
        "last_sequence": header.last_sequence,
        "transactional": header.is_transactional,
        "control": header.is_control,
        "crc": header.crc,
    }
    if header.has_delete_horizon:
        row["delete_horizon_ms"] = header.delete_horizon_ms
    return row
