"""A file system over another one that is only read: changes stay in memory.

A broker can be started on it to see what a start would do to a directory that must not change.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Sequence
from dataclasses import field
from typing import Final

from fencepost.logcore.clock import Clock
from fencepost.logcore.fs import FileSystem
from fencepost.logcore.system import ReadableBuffer
from fencepost.logcore.values import dataclass

PAGE_BYTES: Final = 4096
"""The size of a page of written data; unwritten pages take no memory."""


@dataclass(slots=True, eq=False)
class _File:
    """The bytes of ``source`` below ``limit`` and zeros above it, overlaid by the written pages."""

    source: str = ""
    """The path of the file in the base file system; empty if the base has no such file."""
    limit: int = 0
    size: int = 0
    pages: dict[int, bytearray] = field(default_factory=dict)
    handle: int | None = None
    """The base's handle, while the file has users."""
    users: int = 0


class _Folder:
    """A directory that does not exist under this name in the base file system."""


class _Map:
    def __init__(self, overlay: OverlayFileSystem, file: _File) -> None:
        self._overlay = overlay
        self._file = file

    def __getitem__(self, key: slice) -> bytes:
        return self._overlay.read_from(self._file, key.stop - key.start, key.start)

    def __setitem__(self, key: slice, value: bytes) -> None:
        self._overlay.write_to(self._file, value, key.start)

    def flush(self) -> None:
        """Do nothing: memory needs no sync."""

    def close(self) -> None:
        self._overlay.release(self._file)


class OverlayFileSystem:
    """A ``FileSystem``. Only one thread at a time may use the files of a directory.

    ``base`` is never changed. A lock is taken in the base, if the file exists there. The
    modification time of a changed file is always the current time.
    """

    def __init__(self, base: FileSystem, clock: Clock) -> None:
        self._base = base
        self._clock = clock
        self._names: dict[str, dict[str, _File | _Folder | None]] = {}
        """Known names per directory: None for a removed file."""
        self._handles: dict[int, _File] = {}
        self._numbers = itertools.count(1)

    # --- bytes ---

    def read_from(self, file: _File, count: int, position: int) -> bytes:
        """Read up to ``count`` bytes at ``position``, as ``read`` does."""
        count = max(0, min(count, file.size - position))
        below = max(0, min(count, file.limit - position))
        data = self._base.read(self._base_handle(file), below, position) if below else b""
        if not file.pages:
            return data + bytes(count - len(data))
        mixed = bytearray(data) + bytes(count - len(data))
        end = position + count
        for number in range(position // PAGE_BYTES, -(-end // PAGE_BYTES)):
            page = file.pages.get(number)
            if page is not None:
                start = number * PAGE_BYTES
                low, high = max(start, position), min(start + PAGE_BYTES, end)
                mixed[low - position : high - position] = page[low - start : high - start]
        return bytes(mixed)

    def write_to(self, file: _File, data: ReadableBuffer, position: int) -> None:
        """Write all of ``data``."""
        view = memoryview(data).cast("B")
        end = position + len(view)
        for number in range(position // PAGE_BYTES, -(-end // PAGE_BYTES)):
            start = number * PAGE_BYTES
            if number not in file.pages:
                page = bytearray(PAGE_BYTES)
                before = self.read_from(file, PAGE_BYTES, start)
                page[: len(before)] = before
                file.pages[number] = page
            low, high = max(start, position), min(start + PAGE_BYTES, end)
            file.pages[number][low - start : high - start] = view[low - position : high - position]
        file.size = max(file.size, end)

    def _base_handle(self, file: _File) -> int:
        if file.handle is None:
            file.handle = self._base.open_for_reading(file.source)
        return file.handle

    def release(self, file: _File) -> None:
        """Drop one user of the file; close the base's handle with the last one."""
        file.users -= 1
        if not file.users and file.handle is not None:
            self._base.close(file.handle)
            file.handle = None

    # --- names ---

    def _locate(self, path: str) -> tuple[dict[str, _File | _Folder | None], str]:
        directory, _, name = path.rpartition("/")
        return self._names.setdefault(directory, {}), name

    def _find(self, path: str) -> _File | None:
        names, name = self._locate(path)
        if name in names:
            entry = names[name]
            return entry if isinstance(entry, _File) else None
        if self._base.is_directory(path):
            return None
        try:
            handle = self._base.open_for_reading(path)
        except FileNotFoundError:
            return None
        size = self._base.size(handle)
        self._base.close(handle)
        names[name] = file = _File(path, size, size)
        return file

    # --- FileSystem ---

    def open(self, path: str, *, create: bool = False) -> int:
        file = self._find(path)
        if file is None:
            names, name = self._locate(path)
            if not create or not self.is_directory(path.rpartition("/")[0]):
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
            names[name] = file = _File()
        return self._opened(file)

    def _opened(self, file: _File) -> int:
        file.users += 1
        handle = next(self._numbers)
        self._handles[handle] = file
        return handle

    def open_long_lived(self, path: str, *, create: bool = False) -> int:
        return self.open(path, create=create)

    def open_for_reading(self, path: str) -> int:
        return self.open(path)

    def close(self, handle: int) -> None:
        self.release(self._handles.pop(handle))

    def size(self, handle: int) -> int:
        return self._handles[handle].size

    def read(self, handle: int, count: int, position: int) -> bytes:
        return self.read_from(self._handles[handle], count, position)

    def send(self, handle: int, count: int, position: int, target: int) -> int:  # noqa: ARG002
        raise OSError(errno.ENOTSUP, "what was changed stands in no file")

    def write(self, handle: int, buffers: Sequence[ReadableBuffer], position: int) -> int:
        data = b"".join(buffers)
        self.write_to(self._handles[handle], data, position)
        return len(data)

    def truncate(self, handle: int, size: int) -> None:
        file = self._handles[handle]
        if size < file.size:
            whole, rest = divmod(size, PAGE_BYTES)
            for number in [page for page in file.pages if page >= whole + bool(rest)]:
                del file.pages[number]
            if rest and whole in file.pages:
                file.pages[whole][rest:] = bytes(PAGE_BYTES - rest)
            file.limit = min(file.limit, size)
        file.size = size

    def allocate(self, handle: int, position: int, count: int) -> None:
        """Extend the file as ``posix_fallocate`` does; memory is never full."""
        file = self._handles[handle]
        file.size = max(file.size, position + count)

    def data_from(self, handle: int, position: int) -> int:
        file = self._handles[handle]
        if file.pages or file.limit < file.size or not file.size:
            return min(position, file.size)
        return min(self._base.data_from(self._base_handle(file), position), file.size)

    def sync(self, handle: int) -> None:
        """Do nothing: memory needs no sync."""

    def map(self, handle: int, size: int) -> _Map:
        del size
        file = self._handles[handle]
        file.users += 1
        return _Map(self, file)

    def rename(self, source: str, target: str) -> None:
        file = self._find(source)
        if file is None:
            inside = self.list_directory(source)
            if inside is None:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", source)
            self.make_directory(target)
            for name in inside:
                self.rename(f"{source}/{name}", f"{target}/{name}")
        for path, entry in ((target, file or _Folder()), (source, None)):
            names, name = self._locate(path)
            names[name] = entry

    def remove(self, path: str) -> None:
        names, name = self._locate(path)
        names[name] = None

    def remove_tree(self, path: str) -> None:
        for name in self.list_directory(path) or ():
            inside = f"{path}/{name}"
            (self.remove_tree if self.is_directory(inside) else self.remove)(inside)
        self.remove(path)

    def make_directory(self, path: str) -> None:
        if path and not self.is_directory(path):
            self.make_directory(path.rpartition("/")[0])
            names, name = self._locate(path)
            names[name] = _Folder()

    def make_private(self, path: str) -> None:
        """Do nothing: no other process sees this memory."""

    def sync_directory(self, path: str) -> None:
        """Do nothing: memory needs no sync."""

    def list_directory(self, path: str) -> list[str] | None:
        if not self.is_directory(path):
            return None
        changed = self._names.get(path, {})
        names = set(self._base.list_directory(path) or ()) - changed.keys()
        return [*names, *(name for name, found in changed.items() if found is not None)]

    def is_directory(self, path: str) -> bool:
        names, name = self._locate(path)
        if name in names:
            return isinstance(names[name], _Folder)
        return self._base.is_directory(path)

    def read_file(self, path: str) -> bytes | None:
        try:
            handle = self.open(path)
        except FileNotFoundError:
            return None
        try:
            return self.read(handle, self.size(handle), 0)
        finally:
            self.close(handle)

    def modified_ms(self, path: str) -> int:
        file = self._find(path)
        if file is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        if file.source and not file.pages and file.limit == file.size:
            return self._base.modified_ms(file.source)
        return self._clock.now_ms()

    def lock(self, path: str) -> int:
        file = self._find(path)
        if file is None or not file.source:
            return self.open(path, create=True)
        return self._opened(_File(path, file.limit, file.size, handle=self._base.lock(path)))
