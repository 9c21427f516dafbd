"""Files by which tasks pass encoded batches to a driver on the same machine.

Spark would copy and pickle the bytes several times if they were commit messages. If task and driver
share a file system, the tasks leave the bytes in a folder instead. A task recognises the shared
folder by a mark that the driver has written there.
"""

from __future__ import annotations

import hashlib
import pickle
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

from fencepost.logcore.system import user_id
from fencepost.pipelines.spark.columns import Piece
from fencepost.pipelines.spark.errors import SparkPipelineError

_MARK = "mark"


@dataclass(frozen=True, slots=True)
class Spool:
    """A folder in the machine's temporary folder, and the content of the mark in it."""

    folder: str
    mark: str

    @classmethod
    def new(cls, subject: str | None) -> Self | None:
        """Create a folder for one batch of a query, or for one write; None if others can access it.

        Its files are pickled, so no other user may write there. Folders of earlier attempts at
        ``subject`` are removed, as they are useless now. Without a subject there is no folder.
        """
        if subject is None:
            return None
        sweep(subject)
        # The mark is unique: a folder in another machine's temporary folder must not match.
        mark = uuid.uuid4().hex
        made = cls(f"{_stem(subject)}-{mark}", mark)
        try:
            Path(made.folder).mkdir(mode=0o700)
            (Path(made.folder) / _MARK).write_text(mark, encoding="utf-8")
        except OSError:
            return None
        return made if _is_private(Path(made.folder)) else None

    def is_shared(self) -> bool:
        """Return whether this process sees the driver's folder."""
        try:
            content = (Path(self.folder) / _MARK).read_text(encoding="utf-8")
            return _is_private(Path(self.folder)) and content == self.mark
        except OSError:
            return False

    def write(self, pieces: Iterable[Piece]) -> str:
        """Write pieces to a new file, and return its path."""
        path = Path(self.folder) / f"{uuid.uuid4().hex}.pieces"
        with path.open("wb") as file:
            for piece in pieces:
                pickle.dump((piece._replace(payload=None), len(piece.payload)), file)
                file.write(piece.payload)
        return str(path)


def read(path: str) -> Iterator[Piece]:
    """Yield the pieces in a file, in the order in which they were written."""
    if not _is_private(Path(path).parent):
        raise SparkPipelineError(f"others can write to {Path(path).parent}")
    with Path(path).open("rb") as file:
        while (piece := _next(file)) is not None:
            yield piece


def sweep(subject: str | None) -> None:
    """Remove every folder that was created for ``subject``."""
    for folder in folders(subject):
        shutil.rmtree(folder, ignore_errors=True)


def folders(subject: str | None) -> list[Path]:
    """Return the existing folders that were created for ``subject`` by this user."""
    if subject is None:
        return []
    stem = Path(_stem(subject))
    return [found for found in stem.parent.glob(f"{stem.name}-*") if _is_private(found)]


def _stem(subject: str) -> str:
    name = hashlib.sha256(f"{user_id()} {subject}".encode()).hexdigest()[:16]
    return str(Path(tempfile.gettempdir()) / f"fencepost-spool-{name}")


def _is_private(folder: Path) -> bool:
    status = folder.lstat()
    return (
        stat.S_ISDIR(status.st_mode)
        and status.st_uid == user_id()
        and not stat.S_IMODE(status.st_mode) & 0o077
    )


def _next(file: BinaryIO) -> Piece | None:
    try:
        piece, size = pickle.load(file)  # noqa: S301 - our own file, readable by its user alone
    except EOFError:
        return None
    whole: Piece = piece._replace(payload=file.read(size))
    return whole
