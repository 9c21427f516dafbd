"""A file that keeps others from a metadata log that is not theirs.

Apache Kafka keeps in ``quorum-state``, beside its metadata log, how it has voted, reads it before
it writes anything, and ends where it can not. It takes the lock of the directory later than that,
so that without this file it would write to the log of a running broker. Releases of Fencepost that
do not know our log's form take it for a directory of Apache Kafka's, and leave it alone as well.

It also says whether the log is still the truth: after ``fencepost cluster promote`` it is a copy of
what the controllers begin with, and once the broker has joined them it is the past.

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
"""A version that no release of Apache Kafka can read."""

_NAME: Final = b'"fencepost"'
_PROMOTED: Final = "promoted"
_MEMBER: Final = "member"


def keep_others_out(fs: FileSystem, directory: str) -> None:
    """See to it that the directory of a metadata log says whose it is. Raises OSError."""
    if fs.read_file(f"{directory}/{QUORUM_STATE}") is None:
        stand_alone(fs, directory)


def stand_alone(fs: FileSystem, directory: str) -> None:
    """Say that this log is the truth, whatever was said before. Raises OSError."""
    _write(fs, directory, {})


def note_promotion(fs: FileSystem, directory: str, snapshot: SnapshotId) -> None:
    """Say that controllers were given all that the log holds, as this snapshot. Raises OSError."""
    _write(fs, directory, {_PROMOTED: [*snapshot]})


def promoted_as(fs: FileSystem, directory: str) -> SnapshotId | None:
    """The snapshot that controllers were given, if the broker has not gone on since."""
    found = _read(fs, directory).get(_PROMOTED)
    return SnapshotId(*found) if isinstance(found, list) and len(found) == 2 else None


def note_membership(fs: FileSystem, directory: str) -> None:
    """Say that the broker has joined its controllers: the log counts no more. Raises OSError."""
    _write(fs, directory, {_MEMBER: True})


def is_of_member(fs: FileSystem, directory: str) -> bool:
    """Whether the log is that of a broker which has joined controllers elsewhere."""
    return _MEMBER in _read(fs, directory)


def is_ours(fs: FileSystem, directory: str) -> bool:
    """Whether a metadata log of Fencepost's is in the directory."""
    return bool(_read(fs, directory))


def _write(fs: FileSystem, directory: str, more: Mapping[str, Any]) -> None:
    replace_file(fs, directory, QUORUM_STATE, json.dumps({**_OURS, **more}).encode() + b"\n")


def _read(fs: FileSystem, directory: str) -> dict[str, Any]:
    """What is said here; nothing if the file is another's, or not there."""
    content = fs.read_file(f"{directory}/{QUORUM_STATE}")
    if content is None or _NAME not in content:
        return {}
    try:
        found = json.loads(content)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def is_of_apache_kafka(fs: FileSystem, directory: str) -> bool:
    """Whether Apache Kafka has run on the directory of a metadata log. Raises OSError."""
    content = fs.read_file(f"{directory}/{QUORUM_STATE}")
    return content is not None and _NAME not in content
