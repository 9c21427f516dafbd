"""The three indexes of a segment, in Kafka's file formats.

Offset and time index are sparse and sorted; they are memory-mapped. With its first entry, an index
of the active segment is extended to its full size, as a sparse file. On roll and close it is
trimmed to its entries, so after a kill its tail reads as zeros. No index has a checksum.

Offset and time index are only caches. Before the first use of an index, its last entry is compared
with the log (``segment.py``). Entries that power loss has turned to zeros only make a search begin
earlier, and recovery rebuilds the indexes of every segment that it scans. Both indexes are synced
once, when their segment is sealed: nothing would rebuild zeroed entries later, and in a large
segment a search that begins earlier takes long.

The transaction index is synced with its segment, because recovery rebuilds it only in segments that
it scans.

Source: ``AbstractIndex``, ``OffsetIndex``, ``TimeIndex``, ``TransactionIndex``, ``AbortedTxn``.
"""

from __future__ import annotations

import errno
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from fencepost.logcore.fs import FileMap, FileSystem, opened, replace_file, sync_path

WARM_BYTES: Final = 8192
"""A search begins with this many bytes at the index's end, because most readers are near the log
end."""

ALLOCATION_BYTES: Final = 4096
"""Disk blocks are reserved a page ahead: a store into a map without room on disk raises SIGBUS,
which kills the process."""

MAX_RELATIVE_OFFSET: Final = 0x7FFFFFFF

_OFFSET_ENTRY: Final = struct.Struct(">ii")
_TIME_ENTRY: Final = struct.Struct(">qi")
_ABORTED_TXN: Final = struct.Struct(">hqqqq")
_ABORTED_TXN_VERSION: Final = 0


MAX_LOOKED_INTO: Final = 32
"""How many indexes of one log may stay mapped for look-ups. A mapping holds a file descriptor, and
a reader that starts at the beginning of a log of ten thousand segments uses all their indexes."""


class CorruptIndexError(Exception):
    """An index file contradicts its format; the segment must be recovered."""


class MappedIndexes:
    """The indexes of one log that are mapped for look-ups, at most ``limit``, oldest first.

    The two indexes that are mapped for writing are not counted.
    """

    def __init__(self, limit: int = MAX_LOOKED_INTO) -> None:
        self._limit = limit
        self._mapped: dict[MappedIndex, None] = {}

    def __len__(self) -> int:
        return len(self._mapped)

    def add(self, index: MappedIndex) -> None:
        """Count a newly mapped index; unmap the oldest ones above the limit."""
        while len(self._mapped) >= self._limit:
            next(iter(self._mapped)).abandon()
        self._mapped[index] = None

    def discard(self, index: MappedIndex) -> None:
        """Stop counting an index that was unmapped, or is mapped for writing now."""
        self._mapped.pop(index, None)


class MappedIndex:
    """Base class of the offset index and the time index: entries of one size in a memory map.

    The map is opened at first use. An entry pairs an offset with another number. Offsets are stored
    relative to the base offset; no entry has a lower offset than the entry before it.
    """

    ENTRY_SIZE: int

    def __init__(
        self,
        fs: FileSystem,
        path: str,
        base_offset: int,
        max_bytes: int,
        mapped_indexes: MappedIndexes | None = None,
    ) -> None:
        self._fs = fs
        self._mapped_indexes = MappedIndexes() if mapped_indexes is None else mapped_indexes
        self.path = path
        self.base_offset = base_offset
        self.last_offset = base_offset
        """The last entry's offset; the base if there is none. Valid once ``entries`` was read."""
        self.max_entries = max(max_bytes // self.ENTRY_SIZE, 2)
        self._map: FileMap | None = None
        self._entries: int | None = None
        self._stretched = False
        self._is_long = False
        """Whether the file may be longer than its entries."""
        self._allocated = 0

    @property
    def entries(self) -> int:
        """The number of entries; the first call opens the file."""
        if self._entries is None:
            self._load()
        return self._entries or 0

    def _load(self) -> None:
        with opened(self._fs, self._fs.open(self.path, create=True)) as handle:
            count = self._fs.size(handle) // self.ENTRY_SIZE
            if count:
                self._mapped_indexes.add(self)
                self._map = self._fs.map(handle, count * self.ENTRY_SIZE)
        self._entries = bisect_left(range(count), True, key=self._is_blank)
        self._read_last()

    def _map_full_size(self) -> None:
        """Map the file at its full size, so that entries can be stored."""
        entries = self.entries
        self._unmap()
        # If this fails, the next use begins with the file's current content.
        self._entries = None
        with opened(self._fs, self._fs.open(self.path, create=True)) as handle:
            size = self.max_entries * self.ENTRY_SIZE
            self._is_long = True
            self._fs.truncate(handle, size)
            self._map = self._fs.map(handle, size)
        self._entries = entries
        self._stretched = True
        self._allocated = 0

    def reserve(self, count: int = 1) -> None:
        """Make room for ``count`` more entries, so that storing them cannot fail.

        The file may have room for fewer: then the index is full, and further entries are dropped.
        """
        if not self._stretched:
            self._map_full_size()
        start = self.entries * self.ENTRY_SIZE
        end = min(start + count * self.ENTRY_SIZE, self.max_entries * self.ENTRY_SIZE)
        if self._allocated < end > start:
            self._allocate(start, end)

    def _following(self, offset: int, lowest: int) -> int:
        """Return the relative offset that a new entry for ``offset`` holds.

        Raises CorruptIndexError if the format cannot hold the offset, or if the index has entries
        and the offset is below ``lowest``.
        """
        relative = offset - self.base_offset
        if not 0 <= relative <= MAX_RELATIVE_OFFSET or (self._entries and offset < lowest):
            raise CorruptIndexError(f"offset {offset} does not follow in {self.path}")
        return relative

    def _store(self, entry: bytes) -> None:
        self.reserve()
        if self._map is None:
            raise CorruptIndexError(f"{self.path} is not mapped")
        entries = self.entries
        start = entries * self.ENTRY_SIZE
        self._map[start : start + self.ENTRY_SIZE] = entry
        self._entries = entries + 1

    def _allocate(self, start: int, end: int) -> None:
        limit = self.max_entries * self.ENTRY_SIZE
        upto = min(limit, (end + ALLOCATION_BYTES - 1) // ALLOCATION_BYTES * ALLOCATION_BYTES)
        with opened(self._fs, self._fs.open(self.path)) as handle:
            self._fs.allocate(handle, start, upto - start)
        self._allocated = upto

    def _raw(self, slot: int) -> bytes:
        if self._map is None:
            raise CorruptIndexError(f"{self.path} has no entry {slot}")
        start = slot * self.ENTRY_SIZE
        return self._map[start : start + self.ENTRY_SIZE]

    def _slots_not_above(self, target: int, key: Callable[[int], int]) -> int:
        """Return the number of leading entries whose key is at most ``target``."""
        high = self.entries
        low = 0
        warm = high - WARM_BYTES // self.ENTRY_SIZE
        if warm > 0:
            if key(warm) <= target:
                low = warm
            else:
                high = warm
        return bisect_right(range(high), target, low, high, key=key)

    def truncate_to(self, offset: int) -> None:
        """Remove the entries for ``offset`` and above."""
        self._truncate_to_entries(
            self._slots_not_above(offset - self.base_offset - 1, self._relative)
        )

    def _relative(self, slot: int) -> int:
        raise NotImplementedError

    def _is_blank(self, slot: int) -> bool:
        raise NotImplementedError

    def _read_last(self) -> None:
        raise NotImplementedError

    def _truncate_to_entries(self, entries: int) -> None:
        """Drop all but the first ``entries``."""
        if entries < self.entries:
            self._entries = entries
            self.trim()
        self._read_last()

    def trim(self) -> None:
        """Truncate the file to its entries: on roll, on close, and after entries were removed.

        If the file cannot be opened, nothing changes, and the next call trims the file.
        """
        entries = self.entries
        with opened(self._fs, self._fs.open(self.path, create=True)) as handle:
            self._unmap()
            # If the mapping fails, the next use begins with the file's current content.
            self._entries = None
            self._fs.truncate(handle, entries * self.ENTRY_SIZE)
            self._is_long = False
            if entries:
                self._map = self._fs.map(handle, entries * self.ENTRY_SIZE)
        self._entries = entries

    def reset(self) -> None:
        """Drop every entry and create the file if it is missing; the first step of recovery."""
        self._entries = 0
        self.trim()
        self._read_last()

    def close(self) -> None:
        """Trim the file if it was stretched, and end the mapping."""
        if self._is_long:
            self.trim()
        self._unmap()
        self._entries = None

    def abandon(self) -> None:
        """End the mapping without trimming the file."""
        self._unmap()
        self._entries = None

    def retire(self) -> None:
        """Count as empty from now on, even if another file takes the name."""
        self._unmap()
        self._is_long = False
        self._entries = 0
        self._read_last()

    def _unmap(self) -> None:
        self._mapped_indexes.discard(self)
        if self._map is not None:
            self._map.close()
            self._map = None
        self._stretched = False


class OffsetIndex(MappedIndex):
    """Last offset of a batch → position in the file where that batch begins."""

    ENTRY_SIZE = _OFFSET_ENTRY.size

    last_position = 0
    """The position in the last entry; 0 if there is none."""

    @property
    def is_full(self) -> bool:
        """Whether no further entry fits."""
        return self._entries is not None and self._entries >= self.max_entries

    def append(self, offset: int, position: int) -> None:
        """Add an entry; offsets must grow strictly. Does nothing when the index is full."""
        if self.entries >= self.max_entries:
            return
        relative = self._following(offset, self.last_offset + 1)
        self._store(_OFFSET_ENTRY.pack(relative, position))
        self.last_offset = offset
        self.last_position = position

    def lookup(self, offset: int) -> tuple[int, int]:
        """Return the largest entry (offset, position) not above ``offset``; (base, 0) if none."""
        return self._entry(self._slots_not_above(offset - self.base_offset, self._relative))

    def lookup_position(self, position: int) -> tuple[int, int]:
        """Return the entry with the largest position not above ``position``; (base, 0) if none."""
        return self._entry(self._slots_not_above(position, self._position))

    def _entry(self, slots: int) -> tuple[int, int]:
        if slots == 0:
            return self.base_offset, 0
        relative, position = _OFFSET_ENTRY.unpack(self._raw(slots - 1))
        return self.base_offset + relative, position

    def _relative(self, slot: int) -> int:
        return int.from_bytes(self._raw(slot)[:4], "big", signed=True)

    def _position(self, slot: int) -> int:
        return int.from_bytes(self._raw(slot)[4:], "big", signed=True)

    def _is_blank(self, slot: int) -> bool:
        # No entry is ever made for the first batch of a file.
        return self._position(slot) == 0

    def _read_last(self) -> None:
        self.last_offset, self.last_position = self._entry(self.entries)


class TimeIndex(MappedIndex):
    """Largest timestamp so far → last offset of the batch that holds it."""

    ENTRY_SIZE = _TIME_ENTRY.size

    last_timestamp = -1
    """The timestamp in the last entry; -1 if there is none."""

    @property
    def is_full(self) -> bool:
        """Whether only the slot reserved for the final entry is left."""
        return self._entries is not None and self._entries >= self.max_entries - 1

    def maybe_append(self, timestamp_ms: int, offset: int) -> None:
        """Add an entry if the timestamp is above the last one's (``TimeIndex.maybeAppend``)."""
        entries = self.entries
        if timestamp_ms <= self.last_timestamp or entries >= self.max_entries:
            return
        relative = self._following(offset, self.last_offset)
        self._store(_TIME_ENTRY.pack(timestamp_ms, relative))
        self.last_timestamp = timestamp_ms
        self.last_offset = offset

    def lookup(self, timestamp_ms: int) -> tuple[int, int]:
        """Return the largest entry (timestamp, offset) not above the target; (−1, base) if none."""
        return self._entry(self._slots_not_above(timestamp_ms, self._timestamp))

    def _entry(self, slots: int) -> tuple[int, int]:
        if slots == 0:
            return -1, self.base_offset
        timestamp, relative = _TIME_ENTRY.unpack(self._raw(slots - 1))
        return timestamp, self.base_offset + relative

    def _timestamp(self, slot: int) -> int:
        return int.from_bytes(self._raw(slot)[:8], "big", signed=True)

    def _relative(self, slot: int) -> int:
        return int.from_bytes(self._raw(slot)[8:], "big", signed=True)

    def _is_blank(self, slot: int) -> bool:
        return not any(self._raw(slot))

    def _read_last(self) -> None:
        self.last_timestamp, self.last_offset = self._entry(self.entries)


class AbortedTxn(NamedTuple):
    """An aborted transaction: the offsets of its first batch and marker, and the LSO after it."""

    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int


class TransactionIndex:
    """The aborted transactions whose markers lie in a segment; no file while there are none."""

    def __init__(self, fs: FileSystem, path: str, *, exists: bool) -> None:
        self._fs = fs
        self.path = path
        self._entries: list[AbortedTxn] | None = None if exists else []
        self.is_synced = True
        """Whether no entry was added since the last sync."""

    @property
    def entries(self) -> list[AbortedTxn]:
        """All entries, marker offsets ascending; CorruptIndexError if the file is malformed."""
        if self._entries is None:
            raw = self._fs.read_file(self.path) or b""
            if len(raw) % _ABORTED_TXN.size:
                raise CorruptIndexError(f"{self.path} ends inside an entry")
            entries = []
            for version, *fields in _ABORTED_TXN.iter_unpack(raw):
                if version != _ABORTED_TXN_VERSION:
                    raise CorruptIndexError(f"{self.path} holds an entry of version {version}")
                entries.append(AbortedTxn(*fields))
            self._entries = entries
        return self._entries

    def check(self, base_offset: int) -> None:
        """Raise CorruptIndexError if an entry lies below the segment."""
        if any(entry.last_offset < base_offset for entry in self.entries):
            raise CorruptIndexError(f"{self.path} holds an entry below its segment")

    @contextmanager
    def adding(self, aborted: AbortedTxn) -> Iterator[None]:
        """Add a transaction if the body of the ``with`` statement succeeds.

        Markers must come in the order of their offsets. The file stays open meanwhile, so that the
        entry of a refused marker can be removed even if no further file may be opened.
        """
        entries = self.entries
        if entries and aborted.last_offset <= entries[-1].last_offset:
            raise CorruptIndexError(f"marker {aborted.last_offset} does not follow in {self.path}")
        entry = _ABORTED_TXN.pack(_ABORTED_TXN_VERSION, *aborted)
        size = len(entries) * len(entry)
        handle = self._fs.open(self.path, create=True)
        done = False
        try:
            if self._fs.write(handle, (entry,), size) != len(entry):
                raise OSError(errno.ENOSPC, "short write", self.path)
            yield
            done = True
        finally:
            try:
                if not done:
                    self._fs.truncate(handle, size)
            finally:
                self._fs.close(handle)
        entries.append(aborted)
        self.is_synced = False

    def append(self, aborted: AbortedTxn) -> None:
        """Add a transaction unconditionally."""
        with self.adding(aborted):
            pass

    def collect(self, fetch_offset: int, upper_bound: int, into: list[tuple[int, int]]) -> bool:
        """Add (producer id, first offset) of the transactions aborted in [fetch, upper bound).

        Return True when later segments cannot add to the list.
        """
        entries = self.entries
        start = bisect_left(entries, fetch_offset, key=_last_offset)
        # Entries are also sorted by their last stable offset, which never falls.
        last = bisect_left(entries, upper_bound, start, key=_last_stable_offset)
        into += [
            (entry.producer_id, entry.first_offset)
            for entry in entries[start : last + 1]
            if entry.first_offset < upper_bound
        ]
        return last < len(entries)

    def truncate_to(self, offset: int) -> None:
        """Remove the transactions whose marker lies at ``offset`` or above."""
        count = bisect_left(self.entries, offset, key=_last_offset)
        if count < len(self.entries):
            with opened(self._fs, self._fs.open(self.path, create=True)) as handle:
                self._fs.truncate(handle, count * _ABORTED_TXN.size)
            del self.entries[count:]

    @property
    def is_on_disk(self) -> bool:
        """Whether the file exists; a new file needs its directory synced as well."""
        return self._entries is None or bool(self._entries)

    def rebuild(self, entries: list[AbortedTxn]) -> None:
        """Replace the entries, and the whole file if its content differs.

        The file is replaced atomically, because entries lost from a segment below the recovery
        point would never be recovered.
        """
        try:
            if self.entries == entries:
                # The process that wrote the file may have been killed before the sync.
                self.is_synced = not entries
                return
        except CorruptIndexError:
            pass
        if entries:
            packed = [_ABORTED_TXN.pack(_ABORTED_TXN_VERSION, *entry) for entry in entries]
            directory, _, name = self.path.rpartition("/")
            replace_file(self._fs, directory, name, b"".join(packed))
        else:
            self._fs.remove(self.path)
        self._entries = entries
        self.is_synced = True

    def sync(self) -> None:
        """Make the added entries survive power loss."""
        if not self.is_synced:
            sync_path(self._fs, self.path)
            self.is_synced = True


def _last_offset(entry: AbortedTxn) -> int:
    return entry.last_offset


def _last_stable_offset(entry: AbortedTxn) -> int:
    return entry.last_stable_offset


def offset_entries(raw: bytes, base_offset: int) -> tuple[list[tuple[int, int]], str]:
    """Return (offset, position) of each entry of an offset index file, and an error or "".

    The zeros at the end of the active segment's file are not entries.
    """
    entries, leftover = _entries(_OFFSET_ENTRY, raw)
    return [(base_offset + relative, position) for relative, position in entries], leftover


def time_entries(raw: bytes, base_offset: int) -> tuple[list[tuple[int, int]], str]:
    """Return (timestamp, offset) of each entry of a time index file, and an error or ""."""
    entries, leftover = _entries(_TIME_ENTRY, raw)
    return [(timestamp, base_offset + relative) for timestamp, relative in entries], leftover


def _entries(entry: struct.Struct, raw: bytes) -> tuple[list[tuple[int, int]], str]:
    count, rest = divmod(len(raw), entry.size)
    entries: list[tuple[int, int]] = list(entry.iter_unpack(raw[: count * entry.size]))
    while entries and entries[-1] == (0, 0):
        entries.pop()
    return entries, f"{rest} bytes follow the last entry" if rest else ""
