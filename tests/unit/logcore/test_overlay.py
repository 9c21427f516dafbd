"""The overlay behaves like the operating system and leaves the lower directory unchanged."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from fencepost.logcore.fs import FileSystem, OsFileSystem
from fencepost.logcore.overlay import PAGE_BYTES, OverlayFileSystem
from tests.support.clock import ManualClock
from tests.support.quick import seeds

NAMES = ("a", "b", "c", "new")
DIRECTORIES = ("one", "two", "made", "made/below")


def build(root: Path, draw: random.Random) -> Path:
    for directory in ("one", "two"):
        (root / directory).mkdir(parents=True)
        for name in NAMES[:3]:
            (root / directory / name).write_bytes(draw.randbytes(draw.randrange(3 * PAGE_BYTES)))
    return root


def tree(fs: FileSystem, directory: str) -> dict[str, object]:
    """Return all names below a directory, with the contents of files."""
    found: dict[str, object] = {}
    for name in fs.list_directory(directory) or ():
        path = f"{directory}/{name}"
        found[name] = tree(fs, path) if fs.is_directory(path) else fs.read_file(path)
    return found


class Pair:
    """Two file systems that get the same calls and must return equal results."""

    def __init__(self, *sides: tuple[FileSystem, Path]) -> None:
        self._sides = sides
        self._open: list[list[int]] = []

    def _outcome(self, side: int, method: str, arguments: tuple[object, ...]) -> object:
        fs, root = self._sides[side]
        given = [
            f"{root}/{argument}"
            if isinstance(argument, str)
            else argument[side]
            if isinstance(argument, list)
            else argument
            for argument in arguments
        ]
        try:
            found = getattr(fs, method)(*given, **({"create": True} if method == "open" else {}))
        except OSError as error:
            return type(error)
        return sorted(found) if method == "list_directory" and found is not None else found

    def call(self, method: str, *arguments: object) -> list[object]:
        outcomes = [self._outcome(side, method, arguments) for side in (0, 1)]
        if method == "open" and all(isinstance(outcome, int) for outcome in outcomes):
            return outcomes
        assert outcomes[0] == outcomes[1], (method, arguments)
        return outcomes

    def step(self, draw: random.Random) -> None:
        path = f"{draw.choice(DIRECTORIES)}/{draw.choice(NAMES)}"
        directory = draw.choice(DIRECTORIES)
        position = draw.randrange(4 * PAGE_BYTES)
        kind = draw.randrange(12)
        handle = draw.choice(self._open) if self._open else None
        if kind < 2 or (handle is None and kind < 8):
            opened = self.call("open", path)
            if isinstance(opened[0], int):
                self._open.append([int(str(descriptor)) for descriptor in opened])
        elif kind < 8 and handle is not None:
            if kind < 4:
                data = draw.randbytes(draw.randrange(1, 2 * PAGE_BYTES))
                self.call("write", handle, (data[:7], data[7:]), position)
            elif kind < 6:
                self.call("truncate", handle, position)
            elif kind < 7:
                self.call("allocate", handle, position, draw.randrange(1, PAGE_BYTES))
            else:
                self.call("close", handle)
                self._open.remove(handle)
        elif kind < 9:
            target = f"{draw.choice(('one', 'two'))}/{draw.choice(NAMES)}"
            if target != path:
                self.call("rename", path, target)
        elif kind < 10:
            self.call("remove", path)
        else:
            self.call(draw.choice(("make_directory", "list_directory", "is_directory")), directory)
        for handles in self._open:
            self.call("size", handles)
            self.call("read", handles, draw.randrange(1, 3 * PAGE_BYTES), position)

    def close(self) -> None:
        for handle in self._open:
            self.call("close", handle)


@pytest.mark.parametrize("seed", seeds(40))
def test_overlay_behaves_like_the_operating_system(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    below = build(tmp_path / "below", draw)
    shutil.copytree(below, tmp_path / "real")
    system = OsFileSystem()
    before = tree(system, str(below))
    overlay = OverlayFileSystem(system, ManualClock(5))
    pair = Pair((system, tmp_path / "real"), (overlay, below))
    for _ in range(150):
        pair.step(draw)
    assert tree(overlay, str(below)) == tree(system, str(tmp_path / "real"))
    # Directories are renamed and removed together with their contents.
    pair.call("rename", "one", "other")
    pair.call("list_directory", "one")
    pair.call("make_directory", "one")
    pair.call("remove_tree", "two")
    pair.close()
    assert tree(overlay, str(below)) == tree(system, str(tmp_path / "real"))
    assert tree(system, str(below)) == before


def test_overlay_map_outlives_its_handle_and_locks_are_real(tmp_path: Path) -> None:
    system = OsFileSystem()
    (tmp_path / "index").write_bytes(bytes(range(200)))
    (tmp_path / "lock").touch()
    overlay = OverlayFileSystem(system, ManualClock(5))
    handle = overlay.open(f"{tmp_path}/index")
    mapped = overlay.map(handle, 200)
    overlay.close(handle)
    assert overlay.modified_ms(f"{tmp_path}/index") == system.modified_ms(f"{tmp_path}/index")
    mapped[10:12] = b"xy"
    assert overlay.modified_ms(f"{tmp_path}/index") == 5
    assert mapped[8:14] == b"\x08\x09xy\x0c\x0d"
    mapped.close()
    assert (overlay.read_file(f"{tmp_path}/index") or b"")[10:12] == b"xy"
    assert (tmp_path / "index").read_bytes() == bytes(range(200))
    held = overlay.lock(f"{tmp_path}/lock")
    with pytest.raises(BlockingIOError):
        system.lock(f"{tmp_path}/lock")
    overlay.close(held)
    system.close(system.lock(f"{tmp_path}/lock"))
