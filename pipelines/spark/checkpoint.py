"""What a sink reads of its query's checkpoint: Spark has written it before any ``write()`` runs.

``metadata`` holds the query's id, ``offsets/<N>`` the offsets that batch N ends at: a line
``v1``, a line of Spark's own metadata, then a line per source.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlparse

from pipelines.spark.broker import Offsets
from pipelines.spark.errors import ProgressError

_HEAD_LINES = 2


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """One entry of the offset log."""

    batch_id: int
    sources: tuple[str, ...]
    """A line per source, as the source wrote it."""

    @property
    def digest(self) -> str:
        """Names the input of the batch: the same batch planned anew over other data differs."""
        return hashlib.sha256("\n".join(self.sources).encode()).hexdigest()[:16]

    def offsets(self) -> Offsets:
        """The end offsets of those sources that read a Kafka-like broker."""
        found: Offsets = {}
        for line in self.sources:
            try:
                told = json.loads(line)
            except ValueError:
                continue
            for topic, rows in told.items() if isinstance(told, dict) else ():
                if not isinstance(rows, dict):
                    continue
                for index, offset in rows.items():
                    if index.isdecimal() and isinstance(offset, int):
                        found[topic, int(index)] = offset
        return found


class Checkpoint:
    """A checkpoint folder on a file system of this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def query_id(self) -> str:
        """The id that the query keeps over restarts. Raises :class:`ProgressError`."""
        path = self._folder / "metadata"
        try:
            found = json.loads(path.read_text(encoding="utf-8"))["id"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ProgressError(f"{path} does not tell the query's id: {error}") from error
        return str(found)

    def planned(self, batch_id: int | None = None) -> PlannedBatch:
        """That entry of the offset log, or the last one, which is the batch that is about to run.

        Raises :class:`ProgressError` when it is not there or is in a form nobody knows here.
        """
        log = self._folder / "offsets"
        try:
            if batch_id is None:
                batch_id = max(int(file.name) for file in log.iterdir() if file.name.isdecimal())
            lines = (log / str(batch_id)).read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise ProgressError(f"{log} does not tell which batch is to run: {error}") from error
        if not lines or lines[0] != "v1":
            raise ProgressError(
                f"{log / str(batch_id)} begins with {lines[:1]}; only the format v1 of Spark's"
                " offset log is known here"
            )
        return PlannedBatch(batch_id, tuple(lines[_HEAD_LINES:]))


def local_checkpoint(location: str | None) -> Checkpoint | None:
    """The checkpoint at Spark's ``checkpointLocation``; None unless it is a local path."""
    if not location:
        return None
    parts = urlparse(location)
    if parts.scheme not in {"", "file"}:
        return None
    return Checkpoint(Path(unquote(parts.path) if parts.scheme else location))
