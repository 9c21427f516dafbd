"""The records of a batch, decompressed piece by piece: a window that moves over their bytes.

A batch of a megabyte may decompress to DEFAULT_MAX_OUTPUT_BYTES and hold two million records.
Therefore no reader decompresses or walks a whole batch in one step: it takes chunks of records,
lets other tasks run between two chunks, and stops when it has found its result.

Source: ``DefaultRecordBatch.compressedIterator`` and ``StreamRecordIterator``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar, cast

from fencepost.logcore.errors import InvalidRecordError
from fencepost.logcore.varint import ONE_BYTE, read_varint

Buffer = bytes | bytearray | memoryview
T = TypeVar("T")

CHUNK_RECORDS: Final = 1_000
"""The number of records that are read in one step, in about a millisecond."""

LENGTH_BYTES: Final = 5
"""The maximum number of bytes that a record's length takes."""

START_BYTES: Final = 21
"""The maximum number of bytes before a record's key length: length, attributes, timestamp, offset
delta."""

_EVERYWHERE: Final = 1 << 62


class RecordWindow:
    """Encoded records that are decompressed and not read yet.

    Readers move ``pos`` from record to record, also beyond the end of ``data``: the skipped bytes
    are decompressed and dropped. With ``max_record_bytes``, a larger record raises
    InvalidRecordError before its bytes are collected.
    """

    __slots__ = (
        *("_max_record_bytes", "_missing", "_parts", "_pieces"),
        *("data", "delta", "inflated", "is_last", "pos"),
    )

    def __init__(self, pieces: Iterator[bytes], max_record_bytes: int | None = None) -> None:
        self._pieces = pieces
        self._max_record_bytes = max_record_bytes
        self._parts: list[bytes] = []
        self._missing = 0
        self.data = b""
        self.pos = 0
        self.inflated = 0
        """The number of bytes of the records that were decompressed so far."""
        self.is_last = False
        """Whether ``data`` includes the end of the records."""
        self.delta = -1
        """Offset delta of the last record that was read."""

    @classmethod
    def over(cls, data: Buffer, pos: int) -> RecordWindow:
        """Return a window over uncompressed records, which are read in place.

        Slices of the records have the type of ``data``.
        """
        window = cls(iter(()))
        window.data, window.pos, window.is_last = cast("bytes", data), pos, True
        window.inflated = len(data) - pos
        return window

    def edge(self, size: int) -> int:
        """Return the position from which a field of up to ``size`` bytes may be incomplete."""
        return _EVERYWHERE if self.is_last else len(self.data) - size + 1

    def require(self, size: int, end: int) -> None:
        """Request all bytes of a record of ``size`` bytes, whose ``end`` lies after ``data``."""
        self._check_size(size)
        if size < 0 or self.is_last:
            raise InvalidRecordError(f"a record of {size} bytes extends beyond its batch")
        self._missing = end - len(self.data)

    def _check_size(self, size: int) -> None:
        """Raise InvalidRecordError if a record's ``size``, without its length field, is too large.

        Source: ``DefaultRecord.readFrom``.
        """
        if self._max_record_bytes is not None and size > self._max_record_bytes:
            raise InvalidRecordError(
                f"Invalid record size: {size} exceeds the configured maximum record size of"
                f" {self._max_record_bytes}."
            )

    def _check_sizes(self, data: bytes, pos: int, count: int) -> None:
        """Check the sizes of ``count`` records that were read from ``data`` at ``pos``.

        Few topics have a bound, so the readers' inner loops do not check it.
        """
        for _ in range(count):
            size = ONE_BYTE[data[pos]]
            pos += 1
            if size is None:
                size, pos = read_varint(data, pos - 1)
            self._check_size(size)
            pos += size

    def advance(self) -> bool:
        """Decompress one more piece; return False while requested or skipped bytes are missing.

        Bytes that were read are dropped.
        """
        piece = next(self._pieces, None)
        self.inflated += len(piece or b"")
        beyond = self.pos - len(self.data)
        if beyond > 0:
            if piece is None:
                raise InvalidRecordError("the records end inside a field")
            self.data, self.pos = piece[beyond:], max(0, beyond - len(piece))
            return bool(self.data)
        if piece is not None:
            self._parts.append(piece)
            self._missing -= len(piece)
            if self._missing > 0:
                return False
        else:
            self.is_last = True
        self.data = b"".join((self.data[self.pos :], *self._parts))
        self.pos = self._missing = 0
        self._parts = []
        return True

    def chunks(
        self, count: int, read: Callable[[RecordWindow, int], Sequence[T]]
    ) -> Iterator[Sequence[T]]:
        """Read ``count`` records in chunks, some of them empty; the batch must hold no others.

        ``read(window, most)`` reads the records that the window holds, but not more than ``most``.
        Raises InvalidRecordError for records that contradict their lengths, and errors of ``read``.
        """
        if count < 0:
            raise InvalidRecordError(f"a batch of {count} records")
        try:
            while count:
                data, pos = self.data, self.pos
                chunk = read(self, min(count, CHUNK_RECORDS))
                if self._max_record_bytes is not None:
                    self._check_sizes(data, pos, len(chunk))
                count -= len(chunk)
                yield chunk
                if not chunk:
                    while not self.advance():
                        yield chunk
        except IndexError:
            raise InvalidRecordError("the records end inside a field") from None
        rest = len(self.data) - self.pos
        for piece in self._pieces:
            rest += len(piece)
            yield ()
        if rest < 0:
            raise InvalidRecordError("the records end inside a field")
        if rest:
            raise InvalidRecordError(f"{rest} bytes follow the last record of the batch")
