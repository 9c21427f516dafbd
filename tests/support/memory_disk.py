"""An in-memory disk that records all operations, and every state that a power loss could leave.

The recording assumes only three properties of a file system:

* Data that a sync of a file has covered is durable. If the file was written afterwards, a power
  loss leaves each sector of 512 bytes with any contents that it has had since the sync,
  independently of other sectors, and the file with any length that it has had since the sync.
* Names that a sync of a directory has covered are durable. Any subset of the later creations,
  renames and removals may be durable. A journal would keep their order, but not every file system
  has one.
* A rename is atomic.

Source: Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014 (ALICE).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from fencepost.logcore.fs import ReadableBuffer

V = TypeVar("V")

SECTOR_BYTES = 512

Skip = Callable[[str, str], bool]
"""A planted fault: ``skip(kind, path)`` returns whether this ``sync`` or ``sync_directory`` is
omitted."""


class DataStep(NamedTuple):
    """A write of bytes at a position of a file; without bytes, a change of its length."""

    inode: int
    position: int
    data: bytes | None


class SyncStep(NamedTuple):
    """A sync of a file, after which its contents are durable."""

    inode: int


class NameStep(NamedTuple):
    """A change of a directory: the file loses the name ``old``, and gets the name ``new``."""

    directory: str
    inode: int
    old: str | None
    new: str | None


class MoveStep(NamedTuple):
    """A rename of a directory with its contents, which is durable immediately.

    A power loss never restores the old name here, because a journal keeps the order.
    """

    source: str
    target: str


class SyncNamesStep(NamedTuple):
    """A sync of a directory, after which its changes are durable."""

    directory: str


Step = DataStep | SyncStep | NameStep | MoveStep | SyncNamesStep


def _apply(content: bytearray, step: DataStep) -> None:
    position, data = step.position, step.data
    if data is None:
        del content[position:]
        content.extend(bytes(position - len(content)))
        return
    if len(content) < position:
        content.extend(bytes(position - len(content)))
    content[position : position + len(data)] = data


def _rename(names: dict[str, int], step: NameStep) -> None:
    if step.old is not None and names.get(step.old) == step.inode:
        del names[step.old]
    if step.new is not None:
        names[step.new] = step.inode


def _tree(names: dict[str, V], path: str) -> list[str]:
    """Return the paths of a directory and of its subdirectories."""
    return [name for name in names if name == path or name.startswith(f"{path}/")]


def _move(names: dict[str, V], step: MoveStep) -> None:
    """Change the paths of a directory and of its subdirectories."""
    for path in _tree(names, step.source):
        names[step.target + path[len(step.source) :]] = names.pop(path)


def split(path: str) -> tuple[str, str]:
    directory, _, name = path.rpartition("/")
    return directory, name


class MemoryMap:
    """A mapped file."""

    def __init__(self, disk: MemoryDisk, inode: int, size: int) -> None:
        self._disk = disk
        self._inode = inode
        self._size = size

    def __getitem__(self, key: slice) -> bytes:
        return bytes(self._disk.contents[self._inode][key.start : min(key.stop, self._size)])

    def __setitem__(self, key: slice, value: bytes) -> None:
        self._disk.change(DataStep(self._inode, key.start, bytes(value)))

    def flush(self) -> None:
        self._disk.steps.append(SyncStep(self._inode))

    def close(self) -> None:
        """Do nothing: a map in memory holds no resource."""


class MemoryDisk:
    """A :class:`fencepost.logcore.fs.FileSystem` whose root ``/`` always exists."""

    def __init__(self, skip: Skip | None = None) -> None:
        self.contents: dict[int, bytearray] = {}
        self.names: dict[str, dict[str, int]] = {"": {}}
        """Path of a directory → names and inodes of its files."""
        self.steps: list[Step] = []
        self._skip = skip
        self._handles: dict[int, tuple[int, str]] = {}
        self._next = 1

    # --- recording ---

    def change(self, step: DataStep) -> None:
        self.steps.append(step)
        _apply(self.contents[step.inode], step)

    def _name(self, step: NameStep) -> None:
        self.steps.append(step)
        _rename(self.names[step.directory], step)

    # --- files ---

    def open(self, path: str, *, create: bool = False) -> int:
        directory, name = split(path)
        inode = self.names.get(directory, {}).get(name)
        if inode is None:
            if not create or directory not in self.names:
                raise FileNotFoundError(2, "no such file", path)
            inode = self._next = self._next + 1
            self.contents[inode] = bytearray()
            self._name(NameStep(directory, inode, None, name))
        handle = self._next = self._next + 1
        self._handles[handle] = inode, path
        return handle

    def open_long_lived(self, path: str, *, create: bool = False) -> int:
        return self.open(path, create=create)

    def open_for_reading(self, path: str) -> int:
        return self.open(path)

    def close(self, handle: int) -> None:
        del self._handles[handle]

    def size(self, handle: int) -> int:
        return len(self.contents[self._handles[handle][0]])

    def read(self, handle: int, count: int, position: int) -> bytes:
        return bytes(self.contents[self._handles[handle][0]][position : position + count])

    def write(self, handle: int, buffers: Sequence[ReadableBuffer], position: int) -> int:
        data = b"".join(buffers)
        self.change(DataStep(self._handles[handle][0], position, data))
        return len(data)

    def truncate(self, handle: int, size: int) -> None:
        self.change(DataStep(self._handles[handle][0], size, None))

    def allocate(self, handle: int, position: int, count: int) -> None:
        """Do nothing: the caller has set the length before."""

    def data_from(self, handle: int, position: int) -> int:
        return position

    def sync(self, handle: int) -> None:
        inode, path = self._handles[handle]
        if self._skip is None or not self._skip("sync", path):
            self.steps.append(SyncStep(inode))

    def map(self, handle: int, size: int) -> MemoryMap:
        return MemoryMap(self, self._handles[handle][0], size)

    # --- names ---

    def rename(self, source: str, target: str) -> None:
        (directory, old), (into, new) = split(source), split(target)
        if into != directory:
            raise NotImplementedError("a rename into another directory")
        inode = self.names.get(directory, {}).get(old)
        if inode is None:
            raise FileNotFoundError(2, "no such file", source)
        if source in self.names:
            step = MoveStep(source, target)
            self.steps.append(step)
            _rename(self.names[directory], NameStep(directory, inode, old, new))
            _move(self.names, step)
        else:
            self._name(NameStep(directory, inode, old, new))

    def remove(self, path: str) -> None:
        directory, name = split(path)
        inode = self.names.get(directory, {}).get(name)
        if inode is not None:
            self._name(NameStep(directory, inode, name, None))

    def remove_tree(self, path: str) -> None:
        self.remove(path)
        for child in _tree(self.names, path):
            del self.names[child]

    def make_directory(self, path: str) -> None:
        parent, name = split(path)
        if path in self.names:
            return
        self.make_directory(parent)
        self.names[path] = {}
        # A directory is a file without contents: it exists if its name does.
        inode = self._next = self._next + 1
        self.contents[inode] = bytearray()
        self._name(NameStep(parent, inode, None, name))

    def make_private(self, path: str) -> None:
        """Do nothing: no other process can access the memory."""

    def sync_directory(self, path: str) -> None:
        if path not in self.names:
            raise FileNotFoundError(2, "no such directory", path)
        if self._skip is None or not self._skip("sync_directory", path):
            self.steps.append(SyncNamesStep(path))

    def list_directory(self, path: str) -> list[str] | None:
        names = self.names.get(path)
        return None if names is None else sorted(names)

    def is_directory(self, path: str) -> bool:
        return path in self.names

    def read_file(self, path: str) -> bytes | None:
        directory, name = split(path)
        inode = self.names.get(directory, {}).get(name)
        return None if inode is None else bytes(self.contents[inode])

    def modified_ms(self, path: str) -> int:
        del path
        return 0

    def lock(self, path: str) -> int:
        return self.open(path, create=True)

    # --- states ---

    def after_kill(self) -> MemoryDisk:
        """Return the disk after a ``kill -9``, with all contents and a new recording."""
        disk = MemoryDisk()
        disk.contents = {inode: bytearray(data) for inode, data in self.contents.items()}
        disk.names = {path: dict(names) for path, names in self.names.items()}
        disk._next = self._next
        return disk

    def base(self) -> PowerLoss:
        """Return a walk over steps that begins with the present contents and names as durable."""
        return PowerLoss(
            {inode: bytes(data) for inode, data in self.contents.items()},
            {path: dict(names) for path, names in self.names.items()},
        )


@dataclass
class PowerLoss:
    """Walks over recorded steps; :meth:`state` returns one possible disk after a power loss."""

    contents: dict[int, bytes]
    names: dict[str, dict[str, int]]
    _data: dict[int, list[DataStep]] = field(default_factory=dict)
    _names: dict[str, list[NameStep]] = field(default_factory=dict)

    def walk(self, steps: Sequence[Step]) -> Iterator[int]:
        """Apply the steps one by one, and yield the number of applied steps, from 0 on."""
        yield 0
        for count, step in enumerate(steps, 1):
            self._do(step)
            yield count

    def _do(self, step: Step) -> None:
        if isinstance(step, DataStep):
            self._data.setdefault(step.inode, []).append(step)
        elif isinstance(step, NameStep):
            self._names.setdefault(step.directory, []).append(step)
        elif isinstance(step, MoveStep):
            (directory, old), (_, new) = split(step.source), split(step.target)
            self._do(SyncNamesStep(directory))
            durable = self.names[directory]
            _rename(durable, NameStep(directory, durable[old], old, new))
            _move(self.names, step)
            _move(self._names, step)
        elif isinstance(step, SyncStep):
            content = bytearray(self.contents.get(step.inode, b""))
            for write in self._data.pop(step.inode, ()):
                _apply(content, write)
            self.contents[step.inode] = bytes(content)
        else:
            names = self.names.setdefault(step.directory, {})
            for rename in self._names.pop(step.directory, ()):
                _rename(names, rename)

    def killed(self) -> MemoryDisk:
        """Return the disk after a ``kill -9`` at this step."""
        return self.state(random.Random(0), "everything")

    def state(self, choice: random.Random, style: str | None = None) -> MemoryDisk:
        """Return a disk after a power loss, with a random choice of the unsynced changes."""
        disk = MemoryDisk()
        if style is None:
            style = choice.choice(("nothing", "everything", "mixed", "mixed", "mixed"))
        disk.contents = {inode: bytearray(data) for inode, data in self.contents.items()}
        for inode, steps in self._data.items():
            durable = self.contents.get(inode, b"")
            disk.contents[inode] = _some_data(durable, steps, choice, style)
        for path in dict.fromkeys((*self.names, *self._names)):
            names = disk.names[path] = dict(self.names.get(path, {}))
            for step in _some_names(self._names.get(path, []), choice, style):
                _rename(names, step)
        # A directory whose name is lost loses all its contents.
        for path in sorted(disk.names):
            parent, name = split(path)
            if path and name not in disk.names.get(parent, {}):
                del disk.names[path]
        for names in disk.names.values():
            for inode in names.values():
                disk.contents.setdefault(inode, bytearray())
        # A new inode's number must be above all earlier numbers: also above numbers of files that
        # never had data, and after several power losses.
        disk._next = max((1 << 20, *disk.contents)) + (1 << 20)
        return disk


def _some_names(steps: list[NameStep], choice: random.Random, style: str) -> list[NameStep]:
    if style == "nothing" or not steps:
        return []
    if style == "everything":
        return steps
    if choice.random() < 0.5:
        return steps[: choice.randrange(len(steps) + 1)]
    likely = choice.random()
    return [step for step in steps if choice.random() < likely]


def _some_data(
    durable: bytes, steps: list[DataStep], choice: random.Random, style: str
) -> bytearray:
    content = bytearray(durable)
    if style == "nothing":
        return content
    if style == "mixed":
        kind = choice.random()
        if kind < 0.35:
            steps = steps[: choice.randrange(len(steps) + 1)]
        elif kind < 0.9:
            return _some_sectors(durable, steps, choice)
    for step in steps:
        _apply(content, step)
    return content


def _some_sectors(durable: bytes, steps: list[DataStep], choice: random.Random) -> bytearray:
    """Return a file after a power loss: each sector is from a random moment since the sync."""
    versions = [durable]
    content = bytearray(durable)
    for step in steps:
        _apply(content, step)
        versions.append(bytes(content))
    size = len(versions[-1] if choice.random() < 0.7 else choice.choice(versions))
    result = bytearray(size)
    likely = choice.choice((0.2, 0.5, 0.9))
    for start in range(0, size, SECTOR_BYTES):
        newest = choice.random() < likely
        version = versions[-1] if newest else choice.choice(versions)
        sector = version[start : min(start + SECTOR_BYTES, size)]
        result[start : start + len(sector)] = sector
    return result
