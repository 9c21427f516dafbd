"""The file ``quorum-state``, which keeps other programs from using a metadata log.

Apache Kafka stores its votes in ``quorum-state`` beside its metadata log. It reads the file before
it writes anything, and exits if the file is unreadable. It locks the directory only later, so
without this file Apache Kafka would write to the log of a running broker. Early releases of
Fencepost cannot read this log either. They refuse every directory with a ``quorum-state``, because
for them the file means that the directory belongs to Apache Kafka.

The file also says whether the log is authoritative. After ``fencepost cluster promote`` the
controllers begin with a copy of the log. Once the broker has joined them, its own log is out of
date.

Source: ``FileQuorumStateStore``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from fencepost.coordinator.metadata.snapshots import SnapshotId
from fencepost.logcore.checkpoints import QUORUM_STATE
from fencepost.logcore.fs import FileSystem, replace_file

_OURS: Final = {
    "data_version": 30_000,
    "fencepost": "This metadata log has one writer and no quorum. Apache Kafka must not open it.",
}
"""A data version that no release of Apache Kafka can read."""

_NAME: Final = b'"fencepost"'
_PROMOTED: Final = "promoted"
_MEMBER: Final = "member"


def write_if_missing(fs: FileSystem, directory: str) -> None:
    """Write the file if the directory has none. Raises OSError."""
    if fs.read_file(f"{directory}/{QUORUM_STATE}") is None:
        mark_standalone(fs, directory)


def mark_standalone(fs: FileSystem, directory: str) -> None:
    """Overwrite the file to declare this log authoritative. Raises OSError."""
    _write(fs, directory, {})


def note_promotion(fs: FileSystem, directory: str, snapshot: SnapshotId) -> None:
    """Record that the whole log was given to controllers as this snapshot. Raises OSError."""
    _write(fs, directory, {_PROMOTED: [*snapshot]})


def promoted_as(fs: FileSystem, directory: str) -> SnapshotId | None:
    """Return the snapshot given to the controllers; None if the broker has run since."""
    promotion = _read(fs, directory).get(_PROMOTED)
    return SnapshotId(*promotion) if isinstance(promotion, list) and len(promotion) == 2 else None


def note_membership(fs: FileSystem, directory: str) -> None:
    """Record that this log is out of date: the broker has joined controllers. Raises OSError."""
    _write(fs, directory, {_MEMBER: True})


def is_of_member(fs: FileSystem, directory: str) -> bool:
    """Return whether the log's broker has joined controllers on other nodes."""
    return _MEMBER in _read(fs, directory)


def is_of_fencepost(fs: FileSystem, directory: str) -> bool:
    """Return whether the directory holds a metadata log of Fencepost."""
    return bool(_read(fs, directory))


def _write(fs: FileSystem, directory: str, more: Mapping[str, Any]) -> None:
    replace_file(fs, directory, QUORUM_STATE, json.dumps({**_OURS, **more}).encode() + b"\n")


def _read(fs: FileSystem, directory: str) -> dict[str, Any]:
    """Return the contents of the file; empty if it is missing or not Fencepost's."""
    content = fs.read_file(f"{directory}/{QUORUM_STATE}")
    if content is None or _NAME not in content:
        return {}
    try:
        fields = json.loads(content)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def is_of_apache_kafka(fs: FileSystem, directory: str) -> bool:
    """Return whether Apache Kafka has used a metadata log's directory. Raises OSError."""
    content = fs.read_file(f"{directory}/{QUORUM_STATE}")
    return content is not None and _NAME not in content
