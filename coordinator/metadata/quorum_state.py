"""A file that keeps others from a metadata log that is not theirs.

Apache Kafka keeps in ``quorum-state``, beside its metadata log, how it has voted, reads it before
it writes anything, and ends where it can not. It takes the lock of the directory later than that,
so that without this file it would write to the log of a running broker. Releases of Fencepost that
do not know our log's form take it for a directory of Apache Kafka's, and leave it alone as well.

Source: ``FileQuorumStateStore``.
"""

from __future__ import annotations

import json
from typing import Final

from fencepost.logcore.checkpoints import QUORUM_STATE
from fencepost.logcore.fs import FileSystem, replace_file

_OURS: Final = {
    "data_version": 30_000,
    "fencepost": "This metadata log has one writer and no quorum. Apache Kafka must not open it.",
}
"""A version that no release of Apache Kafka can read."""


def keep_others_out(fs: FileSystem, directory: str) -> None:
    """See to it that the directory of a metadata log says whose it is. Raises OSError."""
    if fs.read_file(f"{directory}/{QUORUM_STATE}") is None:
        replace_file(fs, directory, QUORUM_STATE, json.dumps(_OURS).encode() + b"\n")


def is_of_apache_kafka(fs: FileSystem, directory: str) -> bool:
    """Whether Apache Kafka has run on the directory of a metadata log. Raises OSError."""
    content = fs.read_file(f"{directory}/{QUORUM_STATE}")
    return content is not None and b'"fencepost"' not in content
