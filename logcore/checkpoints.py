"""The small text files around a log: checkpoints, ids, the clean-shutdown file.

All but ``meta.properties`` are Kafka's formats to the byte. Every writer replaces its file
atomically (temporary file, fsync, rename, fsync of the directory). A file that does not parse
raises :class:`CheckpointError`; the reader decides on the consequences.

Kafka's formats carry no checksum, and an offset with a flipped bit is still a valid offset: it
could empty a log, restore deleted records, or make the cleaner skip a range with a tombstone.
Therefore the broker keeps a copy beside each checkpoint that a start relies on, with the CRCs of
both files, and ``meta.properties`` has its CRC in a comment. Kafka ignores the copies and the
comment; files without them are read without a check.

Source: ``CheckpointFile``, ``OffsetCheckpointFile``, ``LeaderEpochCheckpointFile``,
``PartitionMetadataFile``, ``MetaProperties``, ``CleanShutdownFileHandler``.
"""

from __future__ import annotations

import base64
import binascii
import re
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from crc32c import crc32c

from fencepost.logcore.bounds import MAX_LEADER_EPOCH, MAX_OFFSET, MAX_PARTITION
from fencepost.logcore.fs import TEMPORARY_SUFFIX, FileSystem, replace_file, write_file
from fencepost.logcore.values import dataclass

RECOVERY_POINT_CHECKPOINT: Final = "recovery-point-offset-checkpoint"
LOG_START_CHECKPOINT: Final = "log-start-offset-checkpoint"
HIGH_WATERMARK_CHECKPOINT: Final = "replication-offset-checkpoint"
CLEANER_CHECKPOINT: Final = "cleaner-offset-checkpoint"
LEADER_EPOCH_CHECKPOINT: Final = "leader-epoch-checkpoint"
PARTITION_METADATA: Final = "partition.metadata"
QUORUM_STATE: Final = "quorum-state"
"""A file beside the metadata log. It has the vote of a Kafka node or, in a directory of this
broker, text that keeps Kafka from starting on the directory."""
META_PROPERTIES: Final = "meta.properties"
CLEAN_SHUTDOWN: Final = ".kafka_cleanshutdown"
_BROKER_EPOCH: Final = re.compile(rb'"brokerEpoch":\s*(-?\d{1,18})\b')
LOCK: Final = ".lock"

COPY_SUFFIX: Final = ".copy"
COPIED_CHECKPOINTS: Final = (RECOVERY_POINT_CHECKPOINT, LOG_START_CHECKPOINT, CLEANER_CHECKPOINT)
"""The checkpoints that decide on truncation, visibility or cleaning. A start needs no others."""

_VERSION: Final = "0"
_SUMS: Final = re.compile(rb"crc32c ([0-9a-f]{8}) before ([0-9a-f]{8}) all ([0-9a-f]{8})\n")
"""The last line of a copy. It has the CRC-32C of the copied text, of the previous checkpoint file,
and of the whole copy up to this number. The copy is renamed into place before the checkpoint. After
a kill in between, the checkpoint is still the previous one, which its CRC shows to be valid."""

MAX_NODE_ID: Final = (1 << 31) - 1

_NUMBER: Final = re.compile(r"[+-]?[0-9]{1,20}", re.ASCII)

_META_SUM: Final = "#crc32c="


class CheckpointError(Exception):
    """A checkpoint file exists and does not parse."""


@dataclass(frozen=True, slots=True)
class MetaProperties:
    """The owner of a data directory. ``directory_id`` is a random id of the directory itself."""

    cluster_id: str
    node_id: int
    directory_id: uuid.UUID


def uuid_to_text(value: uuid.UUID) -> str:
    """Return an id in Kafka's text form: URL-safe base64 of 16 bytes, unpadded, 22 characters."""
    return base64.urlsafe_b64encode(value.bytes).rstrip(b"=").decode()


def uuid_from_text(text: str) -> uuid.UUID:
    """Parse the text form of :func:`uuid_to_text`; CheckpointError for anything else."""
    try:
        raw = base64.b64decode(text + "==", altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise CheckpointError(f"{text!r} is not an id") from error
    if len(raw) != 16:
        raise CheckpointError(f"{text!r} is not an id of 16 bytes")
    return uuid.UUID(bytes=raw)


def _text_of(lines: list[str]) -> bytes:
    return "\n".join((_VERSION, str(len(lines)), *lines, "")).encode()


def _parse_lines(raw: bytes | None, name: str, fields: int) -> list[list[str]] | None:
    if not raw:
        # Kafka creates the file before it has content.
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


def _number(text: str, name: str, most: int) -> int:
    # Check the format before int(text), whose time grows with the square of the length.
    if not _NUMBER.fullmatch(text):
        raise CheckpointError(f"{name} holds {text[:40]!r} where a number is expected")
    value = int(text)
    if not 0 <= value <= most:
        raise CheckpointError(f"{name} holds {value}, which is not from 0 to {most}")
    return value


def write_offsets(
    fs: FileSystem,
    directory: str,
    name: str,
    offsets: Mapping[tuple[str, int], int],
    *,
    copied: bool = False,
) -> None:
    """Write one of the four offset checkpoints of a data directory.

    ``offsets`` maps (topic, index) to an offset. With ``copied``, each of COPIED_CHECKPOINTS gets a
    copy. ``copied`` must be False in a directory of Apache Kafka, which would leave the copy
    outdated; an existing copy is then removed.
    """
    lines = [f"{topic} {index} {offset}" for (topic, index), offset in offsets.items()]
    text = _text_of(lines)
    path = f"{directory}/{name}{COPY_SUFFIX}"
    if name in COPIED_CHECKPOINTS and not copied:
        fs.remove(path)
    elif name in COPIED_CHECKPOINTS:
        before = fs.read_file(f"{directory}/{name}") or b""
        head = text + b"crc32c %08x before %08x " % (crc32c(text), crc32c(before))
        # The directory sync below covers both names. Power loss before that sync may undo either
        # rename.
        write_file(fs, path + TEMPORARY_SUFFIX, head + b"all %08x\n" % crc32c(head), sync=True)
        fs.rename(path + TEMPORARY_SUFFIX, path)
    replace_file(fs, directory, name, text)


def read_offsets(
    fs: FileSystem,
    directory: str,
    name: str,
    *,
    on_damage: Callable[[CheckpointError], None] | None = None,
) -> dict[tuple[str, int], int]:
    """Read an offset checkpoint; empty if the file is missing. CheckpointError if it is corrupt.

    If the file is corrupt and its copy intact, the copy is read and ``on_damage`` called. If the
    file was removed, a start proceeds without the values, as in Kafka: a log is recovered from its
    beginning, and its log start is the first segment's base offset.
    """
    raw = fs.read_file(f"{directory}/{name}")
    copy = None if raw is None else _copy_of(fs, directory, name)
    if raw is not None and copy is not None:
        text, sums = copy
        if raw != text and (not raw or crc32c(raw) not in sums):
            if on_damage is not None:
                on_damage(CheckpointError(f"{name} is not what was written; its copy is taken"))
            raw = text
    return _parse_offsets(raw, name)


def _parse_offsets(raw: bytes | None, name: str) -> dict[tuple[str, int], int]:
    rows = _parse_lines(raw, name, 3) or []
    return {
        (row[0], _number(row[1], name, MAX_PARTITION)): _number(row[2], name, MAX_OFFSET)
        for row in rows
    }


def read_copy(fs: FileSystem, directory: str, name: str) -> dict[tuple[str, int], int]:
    """Read the copy of the offset checkpoint ``name``. CheckpointError if it is unusable."""
    copy = _copy_of(fs, directory, name)
    if copy is None:
        raise CheckpointError(f"{name}{COPY_SUFFIX} does not match its checksum")
    return _parse_offsets(copy[0], name)


def has_copy(fs: FileSystem, directory: str, name: str) -> bool:
    """Return whether the checkpoint has a copy, valid or not."""
    return fs.read_file(f"{directory}/{name}{COPY_SUFFIX}") is not None


def _copy_of(fs: FileSystem, directory: str, name: str) -> tuple[bytes, tuple[int, int]] | None:
    """Return the text of a checkpoint's copy, and the valid CRCs of the file; None if unusable."""
    if name not in COPIED_CHECKPOINTS:
        return None
    raw = fs.read_file(f"{directory}/{name}{COPY_SUFFIX}") or b""
    end = raw.rfind(b"crc32c ")
    match = _SUMS.fullmatch(raw, max(end, 0))
    if match is None or crc32c(raw[: match.start(3) - len(b"all ")]) != int(match[3], 16):
        return None
    return raw[:end], (int(match[1], 16), int(match[2], 16))


def write_epochs(fs: FileSystem, directory: str, entries: Iterable[tuple[int, int]]) -> None:
    """Write a partition's ``leader-epoch-checkpoint`` from (epoch, start offset) pairs."""
    lines = [f"{epoch} {start}" for epoch, start in entries]
    replace_file(fs, directory, LEADER_EPOCH_CHECKPOINT, _text_of(lines))


def read_epochs(fs: FileSystem, directory: str) -> list[tuple[int, int]] | None:
    """Read (epoch, start offset) pairs; None when there is no file. CheckpointError if corrupt."""
    name = LEADER_EPOCH_CHECKPOINT
    rows = _parse_lines(fs.read_file(f"{directory}/{name}"), name, 2)
    if rows is None:
        return None
    return [
        (_number(row[0], name, MAX_LEADER_EPOCH), _number(row[1], name, MAX_OFFSET)) for row in rows
    ]


def write_partition_metadata(
    fs: FileSystem, directory: str, topic_id: uuid.UUID, *, sync: bool = True
) -> None:
    """Write ``partition.metadata``, which has no newline at its end.

    After a call without ``sync``, power loss may remove or empty the file until another call syncs
    it.
    """
    text = f"version: {_VERSION}\ntopic_id: {uuid_to_text(topic_id)}"
    replace_file(fs, directory, PARTITION_METADATA, text.encode(), sync=sync)


def read_partition_metadata(fs: FileSystem, directory: str) -> uuid.UUID | None:
    """Read the topic id of a partition directory; None when the file does not exist.

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
    text = f"{_META_SUM}{crc32c(text.encode()):08x}\n{text}"
    replace_file(fs, directory, META_PROPERTIES, text.encode())


def read_meta_properties(fs: FileSystem, directory: str) -> MetaProperties | None:
    """Read ``meta.properties``; None when it does not exist. CheckpointError if it is corrupt."""
    raw = fs.read_file(f"{directory}/{META_PROPERTIES}")
    if raw is None:
        return None
    values: dict[str, str] = {}
    first, _, rest = raw.partition(b"\n")
    lines = raw.decode(errors="replace").splitlines()
    if first.startswith(_META_SUM.encode()) and first != b"%s%08x" % (
        _META_SUM.encode(),
        crc32c(rest),
    ):
        raise CheckpointError(f"{META_PROPERTIES} does not match its checksum")
    for line in lines:
        if line.strip() and not line.lstrip().startswith(("#", "!")):
            key, _, value = line.partition("=")
            values[key.strip()] = value.strip()
    if values.get("version") != "1":
        raise CheckpointError(f"{META_PROPERTIES} is not of version 1")
    try:
        return MetaProperties(
            values["cluster.id"],
            _number(values["node.id"], META_PROPERTIES, MAX_NODE_ID),
            uuid_from_text(values["directory.id"]),
        )
    except KeyError as error:
        raise CheckpointError(f"{META_PROPERTIES} has no {error.args[0]}") from error


def write_clean_shutdown(fs: FileSystem, directory: str, broker_epoch: int = -1) -> None:
    """Write the clean-shutdown file, as the last step of a shutdown that has closed all logs.

    ``broker_epoch`` is the epoch of the broker's last registration; -1 outside of a cluster.
    """
    mark = b'{"version":0,"brokerEpoch":%d}' % broker_epoch
    replace_file(fs, directory, CLEAN_SHUTDOWN, mark)


def clean_shutdown_epoch(fs: FileSystem, directory: str) -> int:
    """Return the broker epoch in the clean-shutdown file; -1 if it is missing or damaged.

    Source: ``CleanShutdownFileHandler``.
    """
    match = _BROKER_EPOCH.search(fs.read_file(f"{directory}/{CLEAN_SHUTDOWN}") or b"")
    return -1 if match is None else int(match[1])


def take_clean_shutdown(fs: FileSystem, directory: str) -> bool:
    """Remove the clean-shutdown file, durably, before any log loads; return whether it existed."""
    path = f"{directory}/{CLEAN_SHUTDOWN}"
    if fs.read_file(path) is None:
        return False
    fs.remove(path)
    fs.sync_directory(directory)
    return True
