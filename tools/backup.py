"""Backups of a data directory: a copy of all files and a manifest with their sizes and digests.

The files of a stopped broker do not change. A running broker is suspended (SIGSTOP) while the
backup opens its files and notes their sizes; it continues while they are copied. Below these sizes
a log never changes, so the copy is what ``kill -9`` would have left at that instant, for all
partitions together. A file that the broker replaces later is still read through its descriptor.

Only a complete backup has :data:`MANIFEST`; an interrupted one has :data:`PARTIAL`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

from fencepost.logcore.checkpoints import (
    LOCK,
    META_PROPERTIES,
    read_meta_properties,
)
from fencepost.logcore.fs import OsFileSystem, is_blank, opened
from fencepost.logcore.segment import INDEX_SUFFIX, LOG_SUFFIX, TIME_INDEX_SUFFIX
from fencepost.logcore.system import descriptor_limit, raise_descriptor_limit
from fencepost.logcore.values import dataclass

MANIFEST: Final = "manifest.jsonl"
PARTIAL: Final = "manifest.partial"
DATA: Final = "data"
RESTORING: Final = ".restoring"
"""The suffix of the directory to which a restore copies; it is renamed once it is complete."""

INDEX_SUFFIXES: Final = (INDEX_SUFFIX, TIME_INDEX_SUFFIX)
CHUNK_BYTES: Final = 1 << 20
MAX_LINE_BYTES: Final = 1 << 16
BLANK_TAIL: Final = 4096
"""A log that ends with this many zero bytes is taken for a preallocated one."""

# Windows has no such signals; there, as on macOS, the process of a broker is not found.
SUSPEND: Final[int] = getattr(signal, "SIGSTOP", 0)
RESUME: Final[int] = getattr(signal, "SIGCONT", 0)

# Resumes the broker if the backup is killed or takes too long.
_GUARD: Final = """
import os, select, signal, sys
sys.stdout.write("ready\\n")
sys.stdout.flush()
select.select([0], [], [], float(sys.argv[2]))
os.kill(int(sys.argv[1]), signal.SIGCONT)
"""


class BackupError(Exception):
    """The backup cannot be made, verified or restored; the message says why."""


@dataclass(frozen=True, slots=True)
class BackupSummary:
    """A complete backup: the number and size of its files, and how it was made."""

    directory: str
    cluster_id: str
    node_id: int
    running: bool
    """Whether the broker was running."""
    created_ms: int
    files: int
    size_bytes: int
    pause_ms: float | None
    """How long the running broker was suspended."""


@dataclass(frozen=True, slots=True)
class _Source:
    """A file to copy, which is already open if the broker is running."""

    path: Path
    name: str
    """Relative to the data directory, with ``/``."""
    size: int
    mode: int
    handle: int | None = None


# --- create ---


def create(data_dir: Path, target: Path, *, max_pause_s: float = 2.0) -> BackupSummary:
    """Copy a data directory to ``target``, which must be new, empty, or an interrupted backup.

    A running broker is suspended for at most ``max_pause_s``. Raises BackupError, and OSError.
    """
    data_dir, target = data_dir.absolute(), target.absolute()
    fs = OsFileSystem()
    meta = read_meta_properties(fs, str(data_dir)) if data_dir.is_dir() else None
    if meta is None:
        raise BackupError(f"{data_dir} is not a data directory: it has no {META_PROPERTIES}")
    if target.resolve().is_relative_to(data_dir.resolve()):
        raise BackupError(f"{target} is inside the data directory")
    with ExitStack() as open_files:
        _claim(target, open_files)
        pause_ms = None
        try:
            held = fs.lock(str(data_dir / LOCK))
            open_files.callback(fs.close, held)
            sources = _files_of(data_dir)
        except BlockingIOError:
            opened, pause_ms = _opened_while_suspended(data_dir, max_pause_s, open_files)
            sources = iter(opened)
        head = {
            "backup": 1,
            "cluster_id": meta.cluster_id,
            "node_id": meta.node_id,
            "running": pause_ms is not None,
            "created_ms": time.time_ns() // 1_000_000,
            "pause_ms": pause_ms,
        }
        files = size = 0
        with (target / PARTIAL).open("w", encoding="utf-8") as manifest:
            manifest.write(json.dumps(head) + "\n")
            for source in sources:
                row = _copied(source, target / DATA / source.name)
                manifest.write(json.dumps(row) + "\n")
                files, size = files + 1, size + int(str(row["size"]))
            manifest.write(json.dumps({"files": files, "bytes": size}) + "\n")
            manifest.flush()
            os.fsync(manifest.fileno())
        _sync_directories(target)
        (target / PARTIAL).rename(target / MANIFEST)
        fs.sync_directory(str(target))
    return _summary(target, head, files, size)


def _claim(target: Path, open_files: ExitStack) -> None:
    """Claim ``target`` for this backup, and remove the files of an interrupted one."""
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    names = {path.name for path in target.iterdir()}
    if MANIFEST in names:
        raise BackupError(f"{target} has a backup already: choose another directory")
    if names and not (PARTIAL in names and names <= {PARTIAL, DATA}):
        raise BackupError(f"{target} is not empty")
    fs = OsFileSystem()
    try:
        open_files.callback(fs.close, fs.lock(str(target / PARTIAL)))
    except BlockingIOError:
        raise BackupError(f"another process writes a backup to {target}") from None
    fs.remove_tree(str(target / DATA))
    (target / DATA).mkdir(mode=0o700)


def _files_of(data_dir: Path, *, with_active_indexes: bool = True) -> Iterator[_Source]:
    """Yield all files of a directory but its lock file, in order.

    The index files of an active segment change in place, and recovery after an unclean shutdown
    rebuilds them.
    """
    for folder, folders, names in os.walk(data_dir):
        folders.sort()
        active = max((name for name in names if name.endswith(LOG_SUFFIX)), default="")
        stem = active.removesuffix(LOG_SUFFIX)
        left_out = set() if with_active_indexes else {stem + suffix for suffix in INDEX_SUFFIXES}
        for name in sorted(set(names) - left_out):
            path = Path(folder, name)
            if path == data_dir / LOCK:
                continue
            with suppress(FileNotFoundError):  # a thread of the broker may have removed it
                status = path.stat()
                relative = path.relative_to(data_dir).as_posix()
                yield _Source(path, relative, status.st_size, status.st_mode & 0o777)


def _opened_while_suspended(
    data_dir: Path, max_pause_s: float, open_files: ExitStack
) -> tuple[list[_Source], float]:
    """Suspend the broker, and open the files as they are; return them and the pause in ms."""
    pid = _broker_of(data_dir)
    raise_descriptor_limit()
    command = [sys.executable, "-c", _GUARD, str(pid), str(max_pause_s)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as guard:  # noqa: S603 - our own program
        if guard.stdin is None or guard.stdout is None or not guard.stdout.readline():
            raise BackupError("the process that resumes the broker did not start")
        began = time.monotonic()
        try:
            os.kill(pid, SUSPEND)
            _wait_until_suspended(pid, began + max_pause_s)
            sources = _files_of(data_dir, with_active_indexes=False)
            opened = [_opened(source, open_files) for source in sources]
            is_suspended = guard.poll() is None
        finally:
            os.kill(pid, RESUME)
            pause_s = time.monotonic() - began
            guard.stdin.close()
    if not is_suspended or pause_s > max_pause_s:
        raise BackupError(
            f"opening the files took longer than {max_pause_s:g} s, for which the broker may be"
            " suspended: stop it, or allow a longer pause"
        )
    return opened, round(pause_s * 1000, 1)


def _opened(source: _Source, open_files: ExitStack) -> _Source:
    fs = OsFileSystem()
    try:
        handle = fs.open_for_reading(str(source.path))
    except OSError as error:
        raise BackupError(
            f"{source.path} cannot be opened, of {descriptor_limit()} at most: {error}"
        ) from error
    open_files.callback(fs.close, handle)
    is_log = source.name.endswith(LOG_SUFFIX) and source.size > 0
    if is_log and is_blank(fs, handle, max(0, source.size - BLANK_TAIL)):
        raise BackupError(
            f"{source.name} ends with zeros, as a preallocated log does, whose end is not known"
            " while the broker runs: stop the broker"
        )
    return _Source(source.path, source.name, source.size, source.mode, handle)


def _broker_of(data_dir: Path) -> int:
    """Return the process that has the directory's lock file open. Raises BackupError."""
    lock_status = (data_dir / LOCK).stat()
    pids = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # the process has ended, or is another user's
            link_status = link.stat()
            if (link_status.st_dev, link_status.st_ino) == (lock_status.st_dev, lock_status.st_ino):
                pids.add(int(link.parts[2]))
    if len(pids) == 1 and os.getpid() not in pids:
        return pids.pop()
    raise BackupError(
        f"{data_dir} is in use by a running broker whose process is not seen here: stop it first,"
        " or run this as root or as the broker's user"
    )


def _wait_until_suspended(pid: int, end: float) -> None:
    """Wait until no thread of a process runs."""
    while True:
        states = [
            path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
            for path in Path(f"/proc/{pid}/task").glob("*/stat")
        ]
        if states and all(state in "TtZX" for state in states):
            return
        if time.monotonic() > end:
            raise BackupError(f"process {pid} cannot be suspended")
        time.sleep(0.001)


def _copied(source: _Source, target: Path) -> dict[str, object]:
    """Copy a file up to its size, and return its line of the manifest."""
    fs = OsFileSystem()
    with ExitStack() as open_files:
        handle = source.handle
        if handle is None:
            handle = fs.open_for_reading(str(source.path))
            open_files.callback(fs.close, handle)
        size = source.size
        if source.name.endswith(INDEX_SUFFIXES):
            # A running broker may have trimmed the index of a sealed segment meanwhile.
            size = min(size, fs.size(handle))
        digest = _copy(handle, size, target, source.mode, source.name)
    return {"name": source.name, "size": size, "mode": source.mode, "sha256": digest}


def _copy(handle: int, size: int, target: Path, mode: int, name: str) -> str:
    """Copy ``size`` bytes to a new file; return their digest. Zeros become holes."""
    fs, digest = OsFileSystem(), hashlib.sha256()
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    target.touch(mode=0o600, exist_ok=False)
    with target.open("r+b") as file:
        position = 0
        while position < size:
            data = fs.read(handle, min(CHUNK_BYTES, size - position), position)
            if not data:
                raise BackupError(f"{name} ends at {position}, it had {size} bytes")
            digest.update(data)
            if data.count(0) < len(data):
                file.seek(position)
                file.write(data)
            position += len(data)
        file.truncate(size)
        file.flush()
        target.chmod(mode)
        os.fsync(file.fileno())
    return digest.hexdigest()


def _sync_directories(root: Path) -> None:
    fs = OsFileSystem()
    for folder, _, _ in os.walk(root):
        fs.sync_directory(folder)


# --- verify ---


def read_summary(backup: Path) -> BackupSummary:
    """Return the summary in a manifest. Raises BackupError if the backup is not complete."""
    head, *others = _rows(backup)
    try:
        last = others[-1]
        return _summary(backup.absolute(), head, int(last["files"]), int(last["bytes"]))
    except (IndexError, KeyError):
        raise BackupError(f"{backup / MANIFEST} is damaged: its first line is missing") from None


def differences(backup: Path) -> Iterator[str]:
    """Yield how the files differ from the manifest: missing, changed or additional ones.

    Raises BackupError if the backup is not complete, and OSError.
    """
    listed = set()
    for row in _rows(backup):
        if "name" not in row:
            continue
        listed.add(str(row["name"]))
        path = backup / DATA / str(row["name"])
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            yield f"{path}: missing"
            continue
        if size != row["size"]:
            yield f"{path}: {size} bytes instead of {row['size']}"
        elif _digest(path) != row["sha256"]:
            yield f"{path}: its content has changed"
    for source in _files_of(backup / DATA):
        if source.name not in listed:
            yield f"{source.path}: not in the manifest"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _rows(backup: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a manifest: the head, the files, and the last row with their number."""
    path = backup / MANIFEST
    if not path.is_file():
        if (backup / PARTIAL).exists():
            raise BackupError(f"{backup} is incomplete: its `backup create` was interrupted")
        raise BackupError(f"{backup} has no {MANIFEST}: it is not a backup")
    last: dict[str, Any] = {}
    with path.open(encoding="utf-8") as file:
        while line := file.readline(MAX_LINE_BYTES):
            try:
                last = json.loads(line)
                name = str(last.get("name", ""))
            except (ValueError, AttributeError):
                raise BackupError(f"{path} is damaged: a line is not JSON") from None
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise BackupError(f"{path} names a file outside of the backup: {name}")
            yield last
    if not isinstance(last.get("files"), int):
        raise BackupError(f"{path} is damaged: its end is missing")


def _summary(backup: Path, head: dict[str, Any], files: int, size: int) -> BackupSummary:
    return BackupSummary(
        str(backup),
        str(head["cluster_id"]),
        int(head["node_id"]),
        bool(head["running"]),
        int(head["created_ms"]),
        files,
        size,
        head["pause_ms"],
    )


# --- restore ---


def restore(backup: Path, data_dir: Path) -> BackupSummary:
    """Copy a backup to ``data_dir``, which must be missing or empty, and compare the digests.

    The directory appears when it is complete. Raises BackupError, and OSError.
    """
    summary, data_dir = read_summary(backup), data_dir.absolute()
    if data_dir.exists() and (not data_dir.is_dir() or any(data_dir.iterdir())):
        raise BackupError(f"{data_dir} is not empty: a restore replaces no data")
    fs, staged = OsFileSystem(), data_dir.with_name(data_dir.name + RESTORING)
    if staged.exists():
        shutil.rmtree(staged)
    staged.mkdir(mode=0o700, parents=True)
    for row in _rows(backup):
        if "name" not in row:
            continue
        path = backup / DATA / str(row["name"])
        with opened(fs, fs.open_for_reading(str(path))) as handle:
            target, mode = staged / str(row["name"]), int(row["mode"])
            found = _copy(handle, int(row["size"]), target, mode, str(path))
        if found != row["sha256"]:
            raise BackupError(f"{path} has changed since the backup was made")
    _sync_directories(staged)
    staged.rename(data_dir)
    fs.sync_directory(str(data_dir.parent))
    return summary


def is_left_out(path: str) -> bool:
    """Return whether a file is one that a backup of a running broker leaves out."""
    name = Path(path)
    logs = (path.stem for path in name.parent.glob(f"*{LOG_SUFFIX}"))
    is_index = name.suffix in INDEX_SUFFIXES and name.stem == max(logs, default="")
    return is_index and not name.exists()
