"""Kafka's primitive types as encoded in records of the coordinators' internal topics.

There are two encodings: the plain one (two-byte string lengths, four-byte counts) and the flexible
one of KIP-482 (unsigned varints of length + 1, tagged fields). A reader never reads past its bytes;
data that does not fit raises :class:`fencepost.logcore.errors.CorruptRecordError`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from fencepost.logcore.errors import CorruptRecordError
from fencepost.logcore.machine import InvariantViolation

MAX_STRING_BYTES: Final = 32_767
"""The maximum size of a string in bytes of UTF-8. In the plain encoding, its length is a signed
int16, and Kafka's readers enforce the same limit in the flexible encoding."""

_INT8, _INT16 = struct.Struct(">b"), struct.Struct(">h")
_INT32, _INT64 = struct.Struct(">i"), struct.Struct(">q")
_ONE_BYTE: Final = 0x80
"""Varints below this value take one byte."""


class FieldReader:
    """Reads one key or value from its start; ``flexible`` may be set once the version is known.

    Loading a shard spends most of its time here, so the methods call each other rarely.
    """

    __slots__ = ("_data", "_end", "_pos", "flexible")

    def __init__(self, data: bytes, *, flexible: bool = False) -> None:
        self._data = data
        self._end = len(data)
        self._pos = 0
        self.flexible = flexible

    @property
    def remaining(self) -> int:
        """The number of unread bytes."""
        return self._end - self._pos

    def _too_short(self, size: int) -> CorruptRecordError:
        return CorruptRecordError(f"field of {size} bytes where {self.remaining} are left")

    def _number(self, kind: struct.Struct) -> int:
        pos = self._pos
        try:
            number: int = kind.unpack_from(self._data, pos)[0]
        except struct.error as error:
            raise self._too_short(kind.size) from error
        self._pos = pos + kind.size
        return number

    def raw(self, count: int) -> bytes:
        """Read ``count`` bytes."""
        pos = self._pos
        end = pos + count
        if count < 0 or end > self._end:
            raise self._too_short(count)
        self._pos = end
        return self._data[pos:end]

    def passes(self, data: bytes) -> bool:
        """Return whether ``data`` comes next; if so, skip it."""
        if not self._data.startswith(data, self._pos):
            return False
        self._pos += len(data)
        return True

    def end(self) -> None:
        """Raise CorruptRecordError if unread bytes remain."""
        if self._pos != self._end:
            raise CorruptRecordError(f"{self.remaining} surplus bytes")

    def int8(self) -> int:
        """Read a signed 8-bit integer."""
        return self._number(_INT8)

    def int16(self) -> int:
        """Read a signed 16-bit integer."""
        return self._number(_INT16)

    def int32(self) -> int:
        """Read a signed 32-bit integer."""
        return self._number(_INT32)

    def int64(self) -> int:
        """Read a signed 64-bit integer."""
        return self._number(_INT64)

    def int32s(self, count: int) -> tuple[int, ...]:
        """Read ``count`` signed 32-bit integers."""
        return struct.unpack(f">{count}i", self.raw(4 * count))

    def uvarint(self) -> int:
        """Read an unsigned varint of at most 32 bits."""
        data, pos = self._data, self._pos
        if pos < self._end and data[pos] < _ONE_BYTE:
            self._pos = pos + 1
            return data[pos]
        value = 0
        for shift in range(0, 35, 7):
            byte = self.raw(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < _ONE_BYTE:
                if value >> 32:
                    break
                return value
        raise CorruptRecordError("a varint is longer than 32 bits")

    def nullable_string(self) -> str | None:
        """Read a string; a length of -1 is None."""
        size = self.uvarint() - 1 if self.flexible else self._number(_INT16)
        if size == -1:
            return None
        pos = self._pos
        end = pos + size
        if size < 0 or end > self._end:
            raise self._too_short(size)
        self._pos = end
        try:
            return self._data[pos:end].decode()
        except UnicodeDecodeError as error:
            raise CorruptRecordError("a string is not UTF-8") from error

    def string(self) -> str:
        """Read a string that may not be None."""
        value = self.nullable_string()
        if value is None:
            raise CorruptRecordError("a string is null that may not be")
        return value

    def bytes_(self) -> bytes:
        """Read a blob that may not be None."""
        return self.raw(self.uvarint() - 1 if self.flexible else self.int32())

    def count(self) -> int:
        """Read an array's length; each element takes a byte, so the unread bytes bound it."""
        count = self.uvarint() - 1 if self.flexible else self.int32()
        if not 0 <= count <= self.remaining:
            raise CorruptRecordError(f"array of {count} elements in {self.remaining} bytes")
        return count

    def nullable_count(self) -> int | None:
        """Read the length of an array that may be None."""
        start = self._pos
        length = self.uvarint() - 1 if self.flexible else self.int32()
        if length == -1:
            return None
        self._pos = start
        return self.count()

    def tags(self) -> dict[int, bytes]:
        """Read the tagged fields that end a flexible structure; none in a plain one."""
        if not self.flexible:
            return {}
        pos = self._pos
        if pos < self._end and not self._data[pos]:
            self._pos = pos + 1
            return {}
        fields: dict[int, bytes] = {}
        count = self.uvarint()
        if count > self.remaining:
            raise CorruptRecordError(f"{count} tagged fields in {self.remaining} bytes")
        for _ in range(count):
            tag = self.uvarint()
            fields[tag] = self.raw(self.uvarint())
        return fields


class FieldWriter:
    """Builds a key or a value or, with ``version`` None, a structure inside of one."""

    def __init__(self, version: int | None, *, flexible: bool = False) -> None:
        self._out = bytearray() if version is None else bytearray(_INT16.pack(version))
        self._flexible = flexible

    def raw(self, data: bytes) -> None:
        """Write bytes unchanged."""
        self._out += data

    def int8(self, value: int) -> None:
        """Write a signed 8-bit integer."""
        self._out += _INT8.pack(value)

    def int32(self, value: int) -> None:
        """Write a signed 32-bit integer."""
        self._out += _INT32.pack(value)

    def int32s(self, values: Sequence[int]) -> None:
        """Write signed 32-bit integers, without their count."""
        self._out += struct.pack(f">{len(values)}i", *values)

    def int64(self, value: int) -> None:
        """Write a signed 64-bit integer."""
        self._out += _INT64.pack(value)

    def uvarint(self, value: int) -> None:
        """Write an unsigned varint."""
        while value > 0x7F:
            self._out.append(value & 0x7F | 0x80)
            value >>= 7
        self._out.append(value)

    def string(self, value: str | None) -> None:
        """Write a string or None. Callers have checked the limit: exceeding it is a bug.

        The flexible form allows longer strings, but no reader of Kafka accepts them.
        """
        encoded = b"" if value is None else value.encode()
        size = -1 if value is None else len(encoded)
        if size > MAX_STRING_BYTES:
            raise InvariantViolation(f"a string of {size} bytes in a record")
        if self._flexible:
            self.uvarint(size + 1)
        else:
            self._out += _INT16.pack(size)
        self._out += encoded

    def bytes_(self, value: bytes) -> None:
        """Write a blob."""
        if self._flexible:
            self.uvarint(len(value) + 1)
        else:
            self.int32(len(value))
        self._out += value

    def count(self, length: int) -> None:
        """Write an array's length."""
        if self._flexible:
            self.uvarint(length + 1)
        else:
            self.int32(length)

    def tags(self, fields: dict[int, bytes]) -> None:
        """Write the tagged fields that end a flexible structure, in ascending order."""
        self.uvarint(len(fields))
        for tag in sorted(fields):
            self.uvarint(tag)
            self.uvarint(len(fields[tag]))
            self._out += fields[tag]

    def done(self) -> bytes:
        """Return the written bytes."""
        return bytes(self._out)
