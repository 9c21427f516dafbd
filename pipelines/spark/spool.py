"""Files through which tasks hand encoded batches to a driver on the same machine.

Sent through Spark as commit messages, bytes are copied and pickled several times on their way.
Where task and driver share a file system they leave them in a folder instead. Whether they do is
not assumed: the driver leaves a mark there that tasks look for.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

from pipelines.spark.columns import Piece

_MARK = "mark"


@dataclass(frozen=True, slots=True)
class Spool:
    """A folder in the machine's temporary folder, and the content of the mark in it."""

    folder: str
    mark: str

    @classmethod
    def of(cls, subject: str | None) -> Self:
        """The spool of a query, named by its checkpoint, or of a write."""
        name = hashlib.sha256(f"{os.getuid()} {subject}".encode()).hexdigest()[:16]
        return cls(str(Path(tempfile.gettempdir()) / f"fencepost-spool-{name}"), name)

    def prepare(self) -> bool:
        """Make the folder; what a crashed attempt left there is of no use to anybody.

        False if it can't be ours alone: its files are pickled, so nobody else may write there.
        """
        folder = Path(self.folder)
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            if not self._is_private():
                return False
            for file in folder.glob("*.pieces"):
                file.unlink(missing_ok=True)
            (folder / _MARK).write_text(self.mark, encoding="utf-8")
        except OSError:
            return False
        return True

    def _is_private(self) -> bool:
        told = Path(self.folder).lstat()
        return (
            stat.S_ISDIR(told.st_mode)
            and told.st_uid == os.getuid()
            and not stat.S_IMODE(told.st_mode) & 0o077
        )

    def is_shared(self) -> bool:
        """Whether this process sees what the driver has made."""
        try:
            found = (Path(self.folder) / _MARK).read_text(encoding="utf-8")
            return self._is_private() and found == self.mark
        except OSError:
            return False

    def write(self, pieces: Iterable[Piece]) -> tuple[str, int]:
        """Leave pieces in a file of their own; returns its name and the number of records."""
        name = f"{uuid.uuid4().hex}.pieces"
        rows = 0
        with (Path(self.folder) / name).open("wb") as file:
            for piece in pieces:
                pickle.dump((piece._replace(payload=None), len(piece.payload)), file)
                file.write(piece.payload)
                rows += piece.records
        return name, rows

    def read(self, name: str) -> Iterator[Piece]:
        """The pieces of a file, in the order in which they were written."""
        with (Path(self.folder) / name).open("rb") as file:
            while (piece := _next(file)) is not None:
                yield piece

    def remove(self, names: Iterable[str]) -> None:
        """Forget files that are committed or never will be."""
        for name in names:
            (Path(self.folder) / name).unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove the folder and all that is in it."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _next(file: BinaryIO) -> Piece | None:
    try:
        piece, size = pickle.load(file)  # noqa: S301 - our own file, readable by its user alone
    except EOFError:
        return None
    found: Piece = piece._replace(payload=file.read(size))
    return found
