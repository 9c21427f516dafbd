"""Records of a fetch response that are still in their file.

A response in memory would stay there until its client reads it. The records need not be
in memory: their length is known, and records below the high watermark do not change. So they are
read when the socket can take them, in pieces that fit the processor's cache.
"""

from __future__ import annotations

import errno
from typing import Final

from fencepost.logcore.log_file import LogFile

MIN_RANGE_BYTES: Final = 4_096
"""The size, in bytes, below which a result is read at once: a range object would take hardly less
memory."""


class FileRange:
    """The bytes of a segment's file from ``start`` to ``end``, read once, front to back.

    The length of the range is the number of unread bytes. The range keeps the file open, even if
    the file is renamed or removed, until the range is garbage-collected. Only the partition's
    thread may use it.
    """

    __slots__ = ("_end", "_file", "_start")

    def __init__(self, file: LogFile, start: int, end: int) -> None:
        self._file = file
        self._start = start
        self._end = end
        file.pin()

    def __len__(self) -> int:
        return self._end - self._start

    def peek(self, count: int) -> bytes:
        """Return the next ``count`` bytes without consuming them; OSError as :meth:`read`."""
        start, data = self._start, self.read(count)
        self._start = start
        return data

    def at(self, position: int, count: int) -> bytes:
        """Return up to ``count`` unread bytes, from ``position`` on; OSError as :meth:`read`."""
        start = self._start + position
        stop = min(start + count, self._end)
        data = self._file.read(start, stop)
        if len(data) != stop - start:
            raise self._too_short()
        return data

    def part(self, begin: int, end: int) -> FileRange:
        """Return the unread bytes from position ``begin`` to ``end`` as a range of its own."""
        return FileRange(self._file, self._start + begin, self._start + end)

    def read(self, count: int) -> bytes:
        """Return the next ``count`` bytes, or all remaining ones.

        Raises OSError if the file cannot be read, or was truncated below the end of the range.
        """
        stop = min(self._start + count, self._end)
        data = self._file.read(self._start, stop)
        if len(data) != stop - self._start:
            raise self._too_short()
        self._start = stop
        return data

    def send(self, count: int, target: int) -> int:
        """Have the kernel send up to ``count`` bytes to the socket ``target``; return how many.

        Raises OSError as ``FileSystem.send``, and as :meth:`read`.
        """
        sent = self._file.send(self._start, min(self._start + count, self._end), target)
        if not sent:
            raise self._too_short()
        self._start += sent
        return sent

    def _too_short(self) -> OSError:
        return OSError(errno.EIO, "the file is shorter than it was", self._file.path)

    def __del__(self) -> None:
        self._file.unpin()
