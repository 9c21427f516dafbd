"""One segment: an append-only log file and its three indexes.

A segment knows batches, positions and timestamps; its caller assigns offsets, and applies the rules
for producers and readers. Reads return whole batches: the offset index and a walk over batch
headers locate the ends of a range, and only then are its bytes read, once.

The indexes are not trusted: before its first use an index is checked against the log, and rebuilt
if it does not match.

A file that was begun before an upgrade may hold messages of format v0 and v1. They are located and
indexed by their own headers, and returned as v2 batches; the file keeps them until compaction.

Source: ``LogSegment``, ``FileRecords``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final

from fencepost.logcore.batch import (
    HEADER_SIZE,
    LOG_OVERHEAD,
    MAGIC,
    BatchHeader,
    iter_headers,
    parse_header,
)
from fencepost.logcore.config import LogConfig
from fencepost.logcore.errors import CorruptRecordError
from fencepost.logcore.file_range import FileRange
from fencepost.logcore.fs import FileSystem
from fencepost.logcore.index import (
    MAX_RELATIVE_OFFSET,
    MappedIndexes,
    OffsetIndex,
    TimeIndex,
    TransactionIndex,
)
from fencepost.logcore.legacy import (
    MAGIC_POS,
    MIN_MESSAGE_SIZE,
    RUN_BYTES,
    as_batch_header,
    leading_messages,
    magic_at,
    parse_message,
    to_v2,
)
from fencepost.logcore.log_file import LogFile
from fencepost.logcore.system import ReadableBuffer

LOG_SUFFIX: Final = ".log"
INDEX_SUFFIX: Final = ".index"
TIME_INDEX_SUFFIX: Final = ".timeindex"
TXN_INDEX_SUFFIX: Final = ".txnindex"
SEGMENT_SUFFIXES: Final = (LOG_SUFFIX, INDEX_SUFFIX, TIME_INDEX_SUFFIX, TXN_INDEX_SUFFIX)

NO_TIMESTAMP: Final = -1

SCAN_BYTES: Final = 1 << 20
"""Read-ahead of a scan over a whole range."""

_WALK_BYTES: Final = 8192
"""Read-ahead of a walk over headers; twice the default distance of index entries."""

_MAX_HINTS: Final = 64
"""The maximum number of remembered positions, each of an offset that a reader will return to."""

_NONE: Final = -1, 0
"""In place of the newest batch, if there is none."""

_PEEK: Final = struct.Struct(">qi4xb6xi")
"""Base offset, length, magic and last offset delta of a batch."""


def file_stem(base_offset: int) -> str:
    """Return Kafka's name of a segment: its base offset in 20 digits."""
    return f"{base_offset:020d}"


class Segment:
    """An open segment. It holds one file handle; the indexes are mapped when first needed.

    ``fresh`` creates the log file, ``preallocate_bytes`` long; the first append creates the index
    files, so that a partition without records is one file. ``created_ms`` is when this process
    opened the segment.
    ``suffix`` follows the names of all files, for a segment that is not part of the log yet.
    ``mapped_indexes`` bounds the mappings of the whole log. All methods may raise OSError.
    """

    def __init__(
        self,
        fs: FileSystem,
        directory: str,
        base_offset: int,
        config: LogConfig,
        *,
        created_ms: int,
        has_txn_index: bool = False,
        fresh: bool = False,
        preallocate_bytes: int = 0,
        suffix: str = "",
        mapped_indexes: MappedIndexes | None = None,
    ) -> None:
        stem = f"{directory}/{file_stem(base_offset)}"
        self._fs = fs
        self.base_offset = base_offset
        self.stem = stem
        self.created_ms = created_ms
        index_max_bytes = config.segment_index_bytes
        self.offset_index = OffsetIndex(
            fs, stem + INDEX_SUFFIX + suffix, base_offset, index_max_bytes, mapped_indexes
        )
        self.time_index = TimeIndex(
            fs, stem + TIME_INDEX_SUFFIX + suffix, base_offset, index_max_bytes, mapped_indexes
        )
        self.txn_index = TransactionIndex(
            fs, stem + TXN_INDEX_SUFFIX + suffix, exists=has_txn_index
        )
        self._index_interval_bytes = config.index_interval_bytes
        self.file = LogFile(
            fs, stem + LOG_SUFFIX + suffix, fresh=fresh, preallocate_bytes=preallocate_bytes
        )
        self._bytes_since_index_entry = 0
        self._hints: dict[int, int] = {}
        self._newest: tuple[int, int] = _NONE
        """Base offset and position of the last appended batch, which waiting readers read next."""
        self._index_checked = False
        self._first_batch_timestamp: int | None = None
        self._first_magic: int | None = None
        self._max_timestamp: int | None = NO_TIMESTAMP if self.size == 0 else None
        self._max_timestamp_offset = base_offset

    @property
    def path(self) -> str:
        """Path of the log file."""
        return self.file.path

    @property
    def size(self) -> int:
        """The size of the batches in bytes."""
        return self.file.size

    # --- writing ---

    def append(
        self,
        buffers: Sequence[ReadableBuffer],
        size: int,
        base_offset: int,
        last_offset: int,
        max_timestamp: int,
    ) -> None:
        """Write one batch of ``size`` bytes, then index it; see :meth:`LogFile.append`."""
        if not self._index_checked or self._max_timestamp is None:
            self._ensure_index_checked()
        if self._bytes_since_index_entry > self._index_interval_bytes:
            self.offset_index.reserve()
            self.time_index.reserve()
        position = self.file.append(buffers, size)
        self._newest = base_offset, position
        self.index_batch(last_offset, max_timestamp, position, size)

    def append_run(self, data: ReadableBuffer, headers: Sequence[BatchHeader]) -> None:
        """Write the batches in ``data`` with one call, then index each."""
        if not self._index_checked or self._max_timestamp is None:
            self._ensure_index_checked()
        size = len(data)
        # Two entries are always more than the interval apart.
        entries = (self._bytes_since_index_entry + size) // (self._index_interval_bytes + 1)
        if entries:
            self.offset_index.reserve(entries)
            self.time_index.reserve(entries)
        position = self.file.append((data,), size)
        for header in headers:
            self.index_batch(header.last_offset, header.max_timestamp, position, header.size)
            position += header.size

    def _ensure_index_checked(self) -> None:
        with suppress(CorruptRecordError):  # damage is no reason to refuse appends
            self._load_max_timestamp()

    def index_batch(self, last_offset: int, max_timestamp: int, position: int, size: int) -> None:
        """Update indexes and timestamps for a batch in the file; recovery calls this as well."""
        if position == 0:
            self._first_batch_timestamp = max_timestamp
        if self._max_timestamp is None or max_timestamp > self._max_timestamp:
            self._max_timestamp = max_timestamp
            self._max_timestamp_offset = last_offset
        if self._bytes_since_index_entry > self._index_interval_bytes:
            self.offset_index.append(last_offset, position)
            self._append_time_entry()
            self._bytes_since_index_entry = 0
        self._bytes_since_index_entry += size

    def index_next(self) -> None:
        """Have the next batch indexed, because no walk gets past the damage before it."""
        self._bytes_since_index_entry = self._index_interval_bytes + 1

    def _append_time_entry(self) -> None:
        if self._max_timestamp is not None and self._max_timestamp > NO_TIMESTAMP:
            self.time_index.maybe_append(self._max_timestamp, self._max_timestamp_offset)

    def seal(self) -> None:
        """Write the final time entry, trim the indexes and the log: on roll and close."""
        if self._max_timestamp is not None and self.size:
            self._append_time_entry()
        self.offset_index.close()
        self.time_index.close()
        self.file.trim()

    @property
    def index_paths(self) -> tuple[str, str]:
        """Paths of offset and time index."""
        return self.offset_index.path, self.time_index.path

    def close(self) -> None:
        """Release all resources; the files do not change."""
        self.offset_index.abandon()
        self.time_index.abandon()
        self.file.close()

    def retire(self) -> None:
        """Give up the file names to the segment that replaces this one.

        Current readers continue without the indexes; the handle is closed when the last of them
        releases it.
        """
        # Read the entries now: the name may soon belong to another file.
        _ = self.txn_index.entries
        self.offset_index.retire()
        self.time_index.retire()
        self._index_checked = True
        self.file.retire()

    def truncate_to(self, offset: int) -> None:
        """Remove the batch that holds ``offset`` and all later ones."""
        position = self.locate(offset)
        if position is None:
            return
        self._max_timestamp = None
        self.offset_index.truncate_to(offset)
        self.time_index.truncate_to(offset)
        self.txn_index.truncate_to(offset)
        self.cut(position)

    def cut(self, size: int) -> None:
        """Truncate the log file to ``size`` bytes, a batch boundary, and drop cached state."""
        self.file.cut(size)
        self._hints.clear()
        self._newest = _NONE
        self._bytes_since_index_entry = 0
        if size == 0:
            self._first_batch_timestamp = self._first_magic = None
            self._max_timestamp = NO_TIMESTAMP
            self._max_timestamp_offset = self.base_offset

    def reset_indexes(self) -> None:
        """Drop all entries of offset and time index; :meth:`index_batch` rebuilds them."""
        self.offset_index.reset()
        self.time_index.reset()
        self._bytes_since_index_entry = 0
        self._max_timestamp = NO_TIMESTAMP
        self._max_timestamp_offset = self.base_offset
        self._index_checked = True
        self._hints.clear()

    # --- conditions for a roll ---

    def can_hold(self, last_offset: int) -> bool:
        """Return whether the offset fits the indexes' 31 bits."""
        return last_offset - self.base_offset <= MAX_RELATIVE_OFFSET

    @property
    def indexes_full(self) -> bool:
        """Whether another entry might not fit."""
        return self.offset_index.is_full or self.time_index.is_full

    def age_ms(self, batch_max_timestamp: int, now_ms: int) -> int:
        """Return the time from the first batch's timestamp to the new one's, or since the open."""
        try:
            first = self.first_batch_timestamp
        except CorruptRecordError:
            first = None
        if first is not None and first > NO_TIMESTAMP:
            return batch_max_timestamp - first
        return now_ms - self.created_ms

    @property
    def first_batch_timestamp(self) -> int | None:
        """The largest timestamp of the first batch; None while there is no batch."""
        if self._first_batch_timestamp is None and self.size:
            self._first_batch_timestamp = self.header_at(0).max_timestamp
        return self._first_batch_timestamp

    # --- timestamps ---

    @property
    def max_timestamp(self) -> int:
        """The largest timestamp in the segment, −1 if it has none."""
        if self._max_timestamp is None:
            self._load_max_timestamp()
        return NO_TIMESTAMP if self._max_timestamp is None else self._max_timestamp

    @property
    def largest_timestamp_ms(self) -> int:
        """The largest timestamp or, without any, the file's modification time: for retention."""
        timestamp = NO_TIMESTAMP
        with suppress(CorruptRecordError):  # damage must not keep a segment forever
            timestamp = self.max_timestamp
        return timestamp if timestamp >= 0 else self._fs.modified_ms(self.path)

    def _load_max_timestamp(self) -> None:
        if not self._index_checked:
            self._check_index()
        if self._max_timestamp is not None:
            return
        timestamp, offset = self.time_index.last_timestamp, self.time_index.last_offset
        # The time index has no entries for the last batches of the file.
        position = 0 if timestamp < 0 else (self.locate(offset) or 0)
        for _, header, _ in self.batches(position, with_payload=False):
            if header.max_timestamp > timestamp:
                timestamp, offset = header.max_timestamp, header.last_offset
        self._max_timestamp, self._max_timestamp_offset = timestamp, offset

    # --- reading ---

    def locate(self, offset: int) -> int | None:
        """Return the position of the first batch that ends at or after ``offset``, None if none.

        Raises CorruptRecordError if the file holds something other than batches.
        """
        if offset == self._newest[0]:
            return self._newest[1]
        if self.size == 0:
            return None
        position = self._hints.get(offset)
        if position is not None:
            return position if position < self.size else None
        if not self._index_checked:
            self._check_index()
        _, position = self.offset_index.lookup(offset)
        for start, _, _, last_offset in self._walk(position):
            if last_offset >= offset:
                self.hint(offset, start)
                return start
        return None

    def hint(self, offset: int, position: int) -> None:
        """Remember the position at which a read of ``offset`` begins."""
        if len(self._hints) >= _MAX_HINTS:
            self._hints.clear()
        self._hints[offset] = position

    def boundary(self, start: int, max_bytes: int, limit: int) -> tuple[int, int | None]:
        """Return the end of the whole batches from ``start`` that fit ``max_bytes``.

        ``start`` and ``limit`` are batch boundaries; the end is at most ``limit``. The result is
        the position of the end, and the base offset of the batch there: None at ``limit``.
        """
        if not self._index_checked:
            self._check_index()
        target = start + max_bytes
        if target >= limit:
            return limit, None
        position = start
        if max_bytes > _WALK_BYTES:
            position = max(start, self.offset_index.lookup_position(target)[1])
        for batch_start, base_offset, size, _ in self._walk(position):
            if batch_start + size > target:
                return batch_start, base_offset
        return limit, None

    def header_at(self, position: int) -> BatchHeader:
        """Read the header of the batch at ``position``, or build one for a v0 or v1 message.

        Raises CorruptRecordError if there is none.
        """
        raw = self.file.read(position, position + HEADER_SIZE)
        return (
            parse_header(raw) if magic_at(raw, 0) >= MAGIC else as_batch_header(parse_message(raw))
        )

    def batch_size(self, position: int) -> int:
        """Return the size of the batch at ``position``."""
        return next(self._walk(position))[2]

    def read_batches(self, start: int, end: int, min_range_bytes: int) -> bytes | FileRange:
        """Read the batches between two boundaries; older formats are converted.

        A result of ``min_range_bytes`` or more is a range of the file instead of bytes.
        Raises CorruptRecordError or InvalidRecordError if they cannot be read or converted.
        """
        if end - start >= min_range_bytes and self.is_v2_from(start):
            return FileRange(self.file, start, end)
        raw = self.file.read(start, end)
        if len(raw) > MAGIC_POS and raw[MAGIC_POS] < MAGIC:
            return to_v2(raw)
        return raw

    def is_v2_from(self, position: int) -> bool:
        """Return whether all batches at and after ``position`` are v2; v0 and v1 precede v2."""
        if self._first_magic is None:
            self._first_magic = self._magic(0)
        return self._first_magic >= MAGIC or self._magic(position) >= MAGIC

    def _magic(self, position: int) -> int:
        return magic_at(self.file.read(position, position + MAGIC_POS + 1), 0)

    def next_offset(self) -> int:
        """Return the offset after the last batch; the base offset if there is none."""
        if self.size == 0:
            return self.base_offset
        if not self._index_checked:
            self._check_index()
        return self._last_offset() + 1

    def end_before(self, offset: int) -> int:
        """Return the offset after the last batch that ends below ``offset``; the base if none."""
        end = self.base_offset
        if self.size:
            if not self._index_checked:
                self._check_index()
            for _, _, _, last_offset in self._walk(self.offset_index.lookup(offset - 1)[1]):
                if last_offset >= offset:
                    break
                end = last_offset + 1
        return end

    def batches(
        self, position: int = 0, *, with_payload: bool = True
    ) -> Iterator[tuple[int, BatchHeader, memoryview]]:
        """Yield position, header and bytes of each batch from ``position`` on.

        Without ``with_payload`` the bytes may end anywhere after the header. CRCs are not checked.
        Messages of an older format are yielded as v2 batches of several messages, each at the
        position of its first message; without payload, each message is yielded with the header of
        :func:`fencepost.logcore.legacy.as_batch_header`. Raises CorruptRecordError if the rest of
        the file is not a whole batch.
        """
        chunk = memoryview(b"")
        start = position
        while position < self.size:
            offset_in_chunk = position - start
            if offset_in_chunk + HEADER_SIZE > len(chunk):
                chunk, start, offset_in_chunk = self._chunk(position, SCAN_BYTES), position, 0
            if magic_at(chunk, offset_in_chunk) < MAGIC:
                if with_payload:
                    raw = self._old_messages(position)
                    converted = memoryview(to_v2(raw))
                    for at, header in iter_headers(converted):
                        yield position, header, converted[at : at + header.size]
                    position += len(raw)
                    continue
                header = as_batch_header(parse_message(chunk, offset_in_chunk))
            else:
                header = parse_header(chunk, offset_in_chunk)
            size = header.size
            if size > self.size - position:
                raise CorruptRecordError(f"{self.stem}: a torn batch at position {position}")
            if with_payload and offset_in_chunk + size > len(chunk):
                chunk = self._chunk(position, max(size, SCAN_BYTES))
                start, offset_in_chunk = position, 0
            yield position, header, chunk[offset_in_chunk : offset_in_chunk + size]
            position += size

    def _old_messages(self, position: int) -> memoryview:
        """Read v0 and v1 messages at ``position``: up to RUN_BYTES, or one that is larger."""
        chunk = self._chunk(position, RUN_BYTES)
        count = leading_messages(chunk)
        if count:
            return chunk[:count]
        size = parse_message(chunk).size
        if size > self.size - position:
            raise CorruptRecordError(f"{self.stem}: a torn message at position {position}")
        return self._chunk(position, size)

    def _chunk(self, position: int, count: int) -> memoryview:
        return memoryview(self.file.read(position, position + count))

    def _walk(self, position: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (position, base offset, size, last offset) of each batch from ``position`` on.

        For a message of format v0 or v1, base and last offset are both the offset in its header,
        which in a wrapper message is the offset of the last inner message.
        """
        end = self.size
        chunk, start = b"", position
        while position < end:
            offset_in_chunk = position - start
            if offset_in_chunk + HEADER_SIZE > len(chunk):
                chunk = self.file.read(position, min(position + _WALK_BYTES, end))
                start, offset_in_chunk = position, 0
                if len(chunk) < HEADER_SIZE:
                    # A message of an older format may be shorter; a torn batch fails below.
                    chunk = chunk.ljust(HEADER_SIZE, b"\x00")
            base_offset, length, magic, delta = _PEEK.unpack_from(chunk, offset_in_chunk)
            size, smallest = length + LOG_OVERHEAD, HEADER_SIZE
            if magic < MAGIC:
                delta, smallest = 0, MIN_MESSAGE_SIZE
            if size < smallest or position + size > end:
                raise CorruptRecordError(f"{self.stem}: no batch at position {position}")
            yield position, base_offset, size, base_offset + delta
            position += size

    def _check_index(self) -> None:
        """Check that the last index entry points to its batch; rebuild both indexes if not."""
        self._index_checked = True
        if self.size == 0:
            self.offset_index.reset()
            self.time_index.reset()
        elif not self._index_fits():
            try:
                self._rebuild_index()
            except BaseException:
                # A half-built index is unusable: the next search rebuilds it.
                self._index_checked = False
                self._max_timestamp = None
                raise

    def _index_fits(self) -> bool:
        index = self.offset_index
        if index.entries == 0:
            return self.size <= self._index_interval_bytes
        if index.last_position >= self.size:
            return False
        try:
            _, _, _, last_offset = next(self._walk(index.last_position))
            return (
                last_offset == index.last_offset
                and self.time_index.last_offset <= self._last_offset()
            )
        except CorruptRecordError:
            return False

    def _last_offset(self) -> int:
        result = self.base_offset
        for _, _, _, last_offset in self._walk(self.offset_index.last_position):
            result = last_offset
        return result

    def _rebuild_index(self) -> None:
        self.reset_indexes()
        last_offset = self.base_offset - 1
        for position, header, _ in self.batches(with_payload=False):
            # Skip a batch whose offset is out of order: no CRC covers it, and readers report it.
            if last_offset < header.last_offset <= self.base_offset + MAX_RELATIVE_OFFSET:
                last_offset = header.last_offset
                self.index_batch(last_offset, header.max_timestamp, position, header.size)
        self._append_time_entry()
        self.offset_index.trim()
        self.time_index.trim()
