"""The file of a segment: bytes are appended, read in place, and truncated at the end.

This module does not know batches. A pinned handle stays open for its readers and for syncs, even if
the segment is closed meanwhile.

Source: ``FileRecords``.
"""

from __future__ import annotations

import errno
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from fencepost.logcore.fs import NO_ROOM, FileSystem, is_blank, sync_handle
from fencepost.logcore.system import ReadableBuffer

_TAIL_BYTES: Final = 12
"""The number of bytes at the end of a file that are checked for zeros: an offset and a length."""


class LogFile:
    """An open file. With ``fresh`` it is created, and preallocated. Methods may raise OSError."""

    def __init__(
        self, fs: FileSystem, path: str, *, fresh: bool = False, preallocate_bytes: int = 0
    ) -> None:
        self._fs = fs
        self.path = path
        self._handle = fs.open_long_lived(path, create=fresh)
        self._pins = 0
        self._closing = False
        self.size = fs.size(self._handle)
        """The size of the batches in bytes. A preallocated file is longer."""
        self._preallocated = fresh and 0 < preallocate_bytes > self.size
        if self._preallocated:
            try:
                fs.truncate(self._handle, preallocate_bytes)
            except OSError as error:
                fs.close(self._handle)
                raise self._named(error) from error

    def append(self, buffers: Sequence[ReadableBuffer], size: int) -> int:
        """Write ``size`` bytes with one system call; return their position.

        If the disk is full (``NO_ROOM``) the file is unchanged. After any other error the end of
        the file is unknown; the caller must stop.
        """
        position = self.size
        try:
            written = self._fs.write(self._handle, buffers, position)
        except OSError as error:
            raise self._undo_write(error) from error
        if written != size:
            raise self._undo_write(OSError(errno.ENOSPC, "short write"))
        self.size = position + size
        return position

    def _undo_write(self, error: OSError) -> OSError:
        """Truncate the remains of a write to a full disk; return the error to raise."""
        if error.errno in NO_ROOM:
            try:
                self._fs.truncate(self._handle, self.size)
            except OSError as second:
                return OSError(errno.EIO, f"a torn write cannot be truncated: {second}", self.path)
        return self._named(error)

    def _named(self, error: OSError) -> OSError:
        """Return the error with the file's name, which calls on a handle do not include."""
        return OSError(error.errno, error.strerror, self.path)

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes from ``start`` to ``stop``, fewer at the end of the file."""
        return self._fs.read(self._handle, stop - start, start)

    def send(self, start: int, stop: int, target: int) -> int:
        """Send some of the bytes from ``start`` to ``stop``; see ``FileSystem.send``."""
        return self._fs.send(self._handle, stop - start, start, target)

    @property
    def ends_in_zeros(self) -> bool:
        """Whether the file ends in zeros: it was preallocated, or its last record ends in zeros."""
        tail = self.read(max(0, self.size - _TAIL_BYTES), self.size)
        return bool(tail) and not tail.strip(b"\0")

    def is_blank_from(self, position: int) -> bool:
        """Return whether only zeros follow: the tail of a preallocated file after a kill."""
        return is_blank(self._fs, self._handle, position)

    def sync(self) -> None:
        """Make the bytes survive power loss. Any thread may call this on a pinned file."""
        sync_handle(self._fs, self._handle, self.path)

    def cut(self, size: int) -> None:
        """Truncate the file to ``size`` bytes."""
        self._fs.truncate(self._handle, size)
        self._preallocated = False
        self.size = size

    def trim(self) -> None:
        """Free the preallocated and unused end of the file."""
        if self._preallocated:
            self.cut(self.size)

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """Keep the handle open within the context."""
        self.pin()
        try:
            yield
        finally:
            self.unpin()

    def pin(self) -> None:
        """Keep the handle open until :meth:`unpin`, even if the segment is closed."""
        self._pins += 1

    def unpin(self) -> None:
        """Undo one :meth:`pin`."""
        self._pins -= 1
        if self._closing and not self._pins:
            self._fs.close(self._handle)

    def close(self) -> None:
        """Close the handle, or have the last :meth:`unpin` close it."""
        self._closing = True
        if not self._pins:
            self._fs.close(self._handle)

    def retire(self) -> None:
        """Close the handle once no reader holds this object."""
        weakref.finalize(self, self._fs.close, self._handle).atexit = False
