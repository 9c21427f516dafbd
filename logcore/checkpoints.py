"""The small text files around a log: checkpoints, identities, the clean-shutdown mark.

All but ``meta.properties`` are Kafka's formats to the byte. Every writer replaces its file
atomically (temporary file, fsync, rename, fsync of the directory). A file that does not parse
raises :class:`CheckpointError`; its reader decides what that costs.

Source: ``CheckpointFile``, ``OffsetCheckpointFile``, ``LeaderEpochCheckpointFile``,
``PartitionMetadataFile``, ``MetaProperties``, ``CleanShutdownFileHandler``.
"""

from __future__ import annotations

import base64
import binascii
import json
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from logcore.fs import FileSystem, replace_file

RECOVERY_POINT_CHECKPOINT: Final = "recovery-point-offset-checkpoint"
LOG_START_CHECKPOINT: Final = "log-start-offset-checkpoint"
HIGH_WATERMARK_CHECKPOINT: Final = "replication-offset-checkpoint"
CLEANER_CHECKPOINT: Final = "cleaner-offset-checkpoint"
LEADER_EPOCH_CHECKPOINT: Final = "leader-epoch-checkpoint"
PARTITION_METADATA: Final = "partition.metadata"
META_PROPERTIES: Final = "meta.properties"
CLEAN_SHUTDOWN: Final = ".kafka_cleanshutdown"
LOCK: Final = ".lock"

_VERSION: Final = "0"


class CheckpointError(Exception):
    """A checkpoint file is there and does not parse."""


@dataclass(frozen=True, slots=True)
class MetaProperties:
    """Who owns a data directory. ``directory_id`` is a random id of the directory itself."""

    cluster_id: str
    node_id: int
    directory_id: uuid.UUID


def uuid_to_text(value: uuid.UUID) -> str:
    """Kafka's way to write an id: URL-safe base64 of its 16 bytes, unpadded, 22 characters."""
    return base64.urlsafe_b64encode(value.bytes).rstrip(b"=").decode()


def uuid_from_text(text: str) -> uuid.UUID:
    """Read what :func:`uuid_to_text` writes; CheckpointError for anything else."""
    try:
        raw = base64.b64decode(text + "==", altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise CheckpointError(f"{text!r} is no id") from error
    if len(raw) != 16:
        raise CheckpointError(f"{text!r} is no id of 16 bytes")
    return uuid.UUID(bytes=raw)


def _write_lines(fs: FileSystem, directory: str, name: str, lines: list[str]) -> None:
    text = "\n".join((_VERSION, str(len(lines)), *lines, ""))
    replace_file(fs, directory, name, text.encode())


def _read_lines(fs: FileSystem, directory: str, name: str, fields: int) -> list[list[str]] | None:
    raw = fs.read_file(f"{directory}/{name}")
    if not raw:
        # Kafka makes the file before it has anything to write in it.
        return None
    try:
        lines = raw.decode().splitlines()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{name} is not text") from error
    if len(lines) < 2 or lines[0] != _VERSION or not lines[1].isdecimal():
        raise CheckpointError(f"{name} begins with neither version nor count")
    rows = [line.split() for line in lines[2:]]
    if len(rows) != int(lines[1]) or any(len(row) != fields for row in rows):
        raise CheckpointError(f"{name} does not hold the {lines[1]} entries it announces")
    return rows


def _number(text: str, name: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise CheckpointError(f"{name} holds {text!r} where a number is expected") from error


def write_offsets(
    fs: FileSystem, directory: str, name: str, offsets: Mapping[tuple[str, int], int]
) -> None:
    """Write one of the four offset checkpoints of a data directory: (topic, index) to offset."""
    lines = [f"{topic} {index} {offset}" for (topic, index), offset in offsets.items()]
    _write_lines(fs, directory, name, lines)


def read_offsets(fs: FileSystem, directory: str, name: str) -> dict[tuple[str, int], int]:
    """Read an offset checkpoint; empty when there is none. CheckpointError if it is corrupt.

    Kafka starts without the values then: recovery from the beginning, log start at the first
    segment.
    """
    rows = _read_lines(fs, directory, name, 3) or []
    return {(row[0], _number(row[1], name)): _number(row[2], name) for row in rows}


def write_epochs(fs: FileSystem, directory: str, entries: Iterable[tuple[int, int]]) -> None:
    """Write a partition's ``leader-epoch-checkpoint`` from (epoch, start offset) pairs."""
    lines = [f"{epoch} {start}" for epoch, start in entries]
    _write_lines(fs, directory, LEADER_EPOCH_CHECKPOINT, lines)


def read_epochs(fs: FileSystem, directory: str) -> list[tuple[int, int]] | None:
    """Read (epoch, start offset) pairs; None when there is no file. CheckpointError if corrupt."""
    rows = _read_lines(fs, directory, LEADER_EPOCH_CHECKPOINT, 2)
    if rows is None:
        return None
    name = LEADER_EPOCH_CHECKPOINT
    return [(_number(row[0], name), _number(row[1], name)) for row in rows]


def write_partition_metadata(
    fs: FileSystem, directory: str, topic_id: uuid.UUID, *, sync: bool = True
) -> None:
    """Write ``partition.metadata``, which has no newline at its end.

    Without ``sync`` power loss may take it, or leave an empty one, until somebody syncs it.
    """
    text = f"version: {_VERSION}\ntopic_id: {uuid_to_text(topic_id)}"
    replace_file(fs, directory, PARTITION_METADATA, text.encode(), sync=sync)


def read_partition_metadata(fs: FileSystem, directory: str) -> uuid.UUID | None:
    """Read the topic id of a partition directory; None when the file is not there.

    Raises CheckpointError for other content, an all-zero id included.
    """
    raw = fs.read_file(f"{directory}/{PARTITION_METADATA}")
    if raw is None:
        return None
    lines = raw.decode(errors="replace").splitlines()
    if len(lines) != 2 or lines[0] != f"version: {_VERSION}":
        raise CheckpointError(f"{PARTITION_METADATA} is malformed")
    field, _, value = lines[1].partition(": ")
    topic_id = uuid_from_text(value)
    if field != "topic_id" or topic_id.int == 0:
        raise CheckpointError(f"{PARTITION_METADATA} holds no topic id")
    return topic_id


def write_meta_properties(fs: FileSystem, directory: str, meta: MetaProperties) -> None:
    """Write ``meta.properties``, version 1."""
    text = (
        f"cluster.id={meta.cluster_id}\n"
        f"directory.id={uuid_to_text(meta.directory_id)}\n"
        f"node.id={meta.node_id}\n"
        "version=1\n"
    )
    replace_file(fs, directory, META_PROPERTIES, text.encode())


def read_meta_properties(fs: FileSystem, directory: str) -> MetaProperties | None:
    """Read ``meta.properties``; None when it is not there. CheckpointError if it is corrupt."""
    raw = fs.read_file(f"{directory}/{META_PROPERTIES}")
    if raw is None:
        return None
    values: dict[str, str] = {}
    for line in raw.decode(errors="replace").splitlines():
        if line.strip() and not line.lstrip().startswith(("#", "!")):
            key, _, value = line.partition("=")
            values[key.strip()] = value.strip()
    if values.get("version") != "1":
        raise CheckpointError(f"{META_PROPERTIES} is not of version 1")
    try:
        return MetaProperties(
            values["cluster.id"],
            _number(values["node.id"], META_PROPERTIES),
            uuid_from_text(values["directory.id"]),
        )
    except KeyError as error:
        raise CheckpointError(f"{META_PROPERTIES} has no {error.args[0]}") from error


def write_clean_shutdown(fs: FileSystem, directory: str, broker_epoch: int = -1) -> None:
    """Leave the mark that every log of the directory was closed; the last step of a shutdown."""
    text = json.dumps({"version": 0, "brokerEpoch": broker_epoch}, separators=(",", ":"))
    replace_file(fs, directory, CLEAN_SHUTDOWN, text.encode())


def take_clean_shutdown(fs: FileSystem, directory: str) -> bool:
    """Whether the last shutdown was clean. Removes the mark, durably, before any log is loaded."""
    path = f"{directory}/{CLEAN_SHUTDOWN}"
    if fs.read_file(path) is None:
        return False
    fs.remove(path)
    fs.sync_directory(directory)
    return True
