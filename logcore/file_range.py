"""Records that a reader was promised and that are still in their file.

A fetch need not be in memory as a whole, where a client that does not read would keep it: its
length and its first byte are known, and what lies below the high watermark does not change. So it
is read as the socket takes it, in pieces that stay in the processor's cache.
"""

from __future__ import annotations

import errno
from typing import Final

from fencepost.logcore.log_file import LogFile

MIN_RANGE_BYTES: Final = 4_096
"""What is shorter is read at once: as an object of its own it would take hardly less memory."""


class FileRange:
    """The bytes of a segment's file from ``start`` to ``end``, to be taken once, front to back.

    Its length is what is left of it. The file stays open for it, renamed or removed as it may be,
    until the range is garbage. Belongs to the thread of its partition.
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
        """Read the next ``count`` bytes and leave them there; OSError as :meth:`take`."""
        start, data = self._start, self.take(count)
        self._start = start
        return data

    def take(self, count: int) -> bytes:
        """Read the next ``count`` bytes, or all that is left.

        OSError where the file can't be read, or has become shorter: it was cut under the reader.
        """
        stop = min(self._start + count, self._end)
        data = self._file.read(self._start, stop)
        if len(data) != stop - self._start:
            raise self._too_short()
        self._start = stop
        return data

    def send(self, count: int, target: int) -> int:
        """Have the kernel send up to ``count`` bytes to the socket ``target``; how many it took.

        OSError as ``FileSystem.send``, and as :meth:`take`.
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
