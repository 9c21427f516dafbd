"""What a sink reads of its query's checkpoint: Spark has written it before any ``write()`` runs.

``metadata`` holds the query's id, ``offsets/<N>`` the offsets that batch N ends at: a line
``v1``, a line of Spark's own metadata, then a line per source; in format ``v2`` with the source's
name and a colon before it. Source: ``OffsetSeqLog``. A path without a scheme is on
Hadoop's default file system, which nobody tells Python. What is found under it on this machine
counts only where query and batch are those that run.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlparse

from fencepost.pipelines.spark.errors import ProgressError
from fencepost.pipelines.spark.offsets import Offsets

_HEAD_LINES = 2


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """The last entry of the offset log, which is the batch that is about to run."""

    query_id: str
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


def read_checkpoint(location: str | None) -> PlannedBatch | None:
    """What Spark has planned under ``checkpointLocation``; None where that can't be seen.

    Raises :class:`ProgressError` for a checkpoint in a form nobody knows here.
    """
    folder = local_folder(location)
    if folder is None:
        return None
    try:
        query_id = str(json.loads((folder / "metadata").read_text(encoding="utf-8"))["id"])
        log = folder / "offsets"
        batch_id = max(int(file.name) for file in log.iterdir() if file.name.isdecimal())
        lines = (log / str(batch_id)).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError, KeyError, TypeError):
        # Spark writes both before it asks for a writer: it has done so elsewhere.
        return None
    if not lines or lines[0] not in {"v1", "v2"}:
        raise ProgressError(
            f"{log / str(batch_id)} begins with {lines[:1]}; only the formats v1 and v2 of Spark's"
            " offset log are known here"
        )
    sources = lines[_HEAD_LINES:]
    if lines[0] == "v2":  # of a map, in no order
        sources = [line.partition(":")[2] for line in sorted(sources)]
    return PlannedBatch(query_id, batch_id, tuple(sources))


def local_folder(location: str | None) -> Path | None:
    """The folder that ``checkpointLocation`` can mean on this machine."""
    if not location:
        return None
    parts = urlparse(location)
    if parts.scheme not in {"", "file"}:
        return None
    return Path(unquote(parts.path) if parts.scheme else location).absolute()
