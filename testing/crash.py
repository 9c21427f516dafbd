"""Files that stay as a SIGKILL leaves them, in a process that continues."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fencepost.logcore.fs import FileMap, OsFileSystem, ReadableBuffer


class MortalFiles(OsFileSystem):
    """The operating system's files until :meth:`die`; after that nothing changes them.

    Every later operation succeeds without an effect, so that a broker can be shut down while its
    directory stays as after a SIGKILL: it has everything that was written, as the page cache
    outlives a process, but neither checkpoints nor the clean-shutdown marker of an orderly stop.
    Without ``forces`` nothing is flushed to disk, which only matters in a power loss.
    """

    def __init__(self, *, forces: bool = True) -> None:
        self.is_dead = False
        self._forces = forces

    def die(self) -> None:
        """Ignore all changes from now on."""
        self.is_dead = True

    def open(self, path: str, *, create: bool = False) -> int:
        """Open for reading and writing; after the death, a missing file is opened as empty."""
        if self.is_dead and not Path(path).exists():
            path = os.devnull
        return super().open(path, create=create)

    def write(self, handle: int, buffers: Sequence[ReadableBuffer], position: int) -> int:
        """Write, or discard the bytes after the death."""
        if self.is_dead:
            return sum(map(len, buffers))
        return super().write(handle, buffers, position)

    def truncate(self, handle: int, size: int) -> None:
        """Set the size."""
        if not self.is_dead:
            super().truncate(handle, size)

    def allocate(self, handle: int, position: int, count: int) -> None:
        """Reserve blocks."""
        if not self.is_dead:
            super().allocate(handle, position, count)

    def sync(self, handle: int) -> None:
        """Force to disk."""
        if self._forces and not self.is_dead:
            super().sync(handle)

    def map(self, handle: int, size: int) -> FileMap:
        """Map a file."""
        # A dead file was not extended, so it has no bytes to map at the new size.
        return _MortalMap(self, bytearray(size) if self.is_dead else super().map(handle, size))

    def rename(self, source: str, target: str) -> None:
        """Rename."""
        if not self.is_dead:
            super().rename(source, target)

    def remove(self, path: str) -> None:
        """Remove a file."""
        if not self.is_dead:
            super().remove(path)

    def remove_tree(self, path: str) -> None:
        """Remove a directory."""
        if not self.is_dead:
            super().remove_tree(path)

    def make_directory(self, path: str) -> None:
        """Create a directory."""
        if not self.is_dead:
            super().make_directory(path)

    def sync_directory(self, path: str) -> None:
        """Force names to disk."""
        if self._forces and not self.is_dead:
            super().sync_directory(path)


class _MortalMap:
    """A memory map of one of these files."""

    def __init__(self, files: MortalFiles, content: FileMap | bytearray) -> None:
        self._files, self._content = files, content

    def __getitem__(self, key: slice, /) -> bytes:
        return bytes(self._content[key])

    def __setitem__(self, key: slice, value: bytes, /) -> None:
        if not self._files.is_dead:
            self._content[key] = value

    def flush(self) -> None:
        if not isinstance(self._content, bytearray):
            self._content.flush()

    def close(self) -> None:
        if not isinstance(self._content, bytearray):
            self._content.close()
