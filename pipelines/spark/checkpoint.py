"""Reads a query's checkpoint for the sink: Spark has written it before any ``write()`` runs.

``metadata`` holds the query's id. ``offsets/<N>`` holds the end offsets of batch N: a line ``v1``,
a line of Spark's own metadata, then a line per source. In format ``v2`` a source's line begins with
its name and a colon. Source: ``OffsetSeqLog``. A path without a scheme is on Hadoop's default file
system, which Python does not know. If this machine has a checkpoint under the path, it is used only
if it belongs to the running query and batch.
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
    """The last entry of the offset log: the batch that is about to run."""

    query_id: str
    batch_id: int
    sources: tuple[str, ...]
    """A line per source, as the source wrote it."""

    @property
    def digest(self) -> str:
        """A hash of the source offsets, which differs between two batches with the same number."""
        return hashlib.sha256("\n".join(self.sources).encode()).hexdigest()[:16]

    def offsets(self) -> Offsets:
        """Return the end offsets of the sources that read Kafka topics."""
        merged: Offsets = {}
        for line in self.sources:
            try:
                offsets = json.loads(line)
            except ValueError:
                continue
            for topic, rows in offsets.items() if isinstance(offsets, dict) else ():
                if not isinstance(rows, dict):
                    continue
                for index, offset in rows.items():
                    if index.isdecimal() and isinstance(offset, int):
                        merged[topic, int(index)] = offset
        return merged


def read_checkpoint(location: str | None) -> PlannedBatch | None:
    """Return the batch planned under ``checkpointLocation``; None if it is not readable here.

    Raises :class:`ProgressError` for an unknown checkpoint format.
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
        # Spark writes both files before it requests a writer, so the checkpoint is elsewhere.
        return None
    if not lines or lines[0] not in {"v1", "v2"}:
        raise ProgressError(
            f"{log / str(batch_id)} begins with {lines[:1]}; only the formats v1 and v2 of Spark's"
            " offset log are known here"
        )
    sources = lines[_HEAD_LINES:]
    if lines[0] == "v2":  # lines of a map, in no order
        sources = [line.partition(":")[2] for line in sorted(sources)]
    return PlannedBatch(query_id, batch_id, tuple(sources))


def local_folder(location: str | None) -> Path | None:
    """Return the folder of ``checkpointLocation`` if it can be on this machine."""
    if not location:
        return None
    parts = urlparse(location)
    if parts.scheme not in {"", "file"}:
        return None
    return Path(unquote(parts.path) if parts.scheme else location).absolute()
