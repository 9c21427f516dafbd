"""The secret from which this server derives the credentials that stand in for unknown SCRAM users.

It is generated at its first use and kept in a file beside the logs: no record of Apache Kafka has a
field for it, and no other broker needs it.
"""

from __future__ import annotations

import os
from typing import Final

from fencepost.logcore.fs import TEMPORARY_SUFFIX, FileSystem, write_file

SECRET_FILE: Final = "fencepost.secret"  # noqa: S105 - the name of a file
_SECRET_BYTES: Final = 32


def server_secret(fs: FileSystem, directory: str) -> bytes:
    """Return the server's secret from its data directory; create the secret at the first call."""
    secret = fs.read_file(f"{directory}/{SECRET_FILE}")
    return write_secret(fs, directory, os.urandom(_SECRET_BYTES)) if secret is None else secret


def write_secret(fs: FileSystem, directory: str, secret: bytes) -> bytes:
    """Write the secret to a file that only its owner can read, and return it."""
    path = f"{directory}/{SECRET_FILE}"
    write_file(fs, path + TEMPORARY_SUFFIX, b"", sync=False)
    fs.make_private(path + TEMPORARY_SUFFIX)
    write_file(fs, path + TEMPORARY_SUFFIX, secret, sync=True)
    fs.rename(path + TEMPORARY_SUFFIX, path)
    fs.sync_directory(directory)
    return secret
