"""Copies of the data that a recovery removes from a log, under names that no broker reads.

``<offset>.log.<n>-stray`` holds the bytes of a log file from that offset on: a whole segment, or
the removed end of one. ``n`` counts the recoveries that removed something. The files are deleted
with the topic; before that, only an operator removes them.

Kafka uses the suffix for directories without a topic (``UnifiedLog.StrayDirSuffix``), and ignores
files of such a name.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable
from typing import Final

from fencepost.logcore.fs import NO_ROOM, FileSystem
from fencepost.logcore.log import Log
from fencepost.logcore.segment import LOG_SUFFIX, SCAN_BYTES, Segment, file_stem

STRAY_SUFFIX: Final = "-stray"

_NAME: Final = re.compile(
    rf"(?P<offset>[0-9]{{20}}){re.escape(LOG_SUFFIX)}\.(?P<number>[0-9]+){STRAY_SUFFIX}"
)


def is_stray(name: str) -> bool:
    """Return whether a file in a partition's directory holds data that was removed from its log."""
    return _NAME.fullmatch(name) is not None


def without_stray_suffix(name: str) -> str:
    """Return the name of a log file with the same content; other names unchanged."""
    match = _NAME.fullmatch(name)
    return name if match is None else match["offset"] + LOG_SUFFIX


class TruncatedData:
    """The files in which one recovery keeps the data that it removes from ``log``."""

    def __init__(self, fs: FileSystem, log: Log, names: Iterable[str]) -> None:
        """``names`` are the names in the directory."""
        self._fs = fs
        self._log = log
        matches = filter(None, map(_NAME.fullmatch, names))
        self._number = 1 + max((int(match["number"]) for match in matches), default=0)
        self.kept: list[str] = []
        """Names of the created files."""

    def set_aside(self, segment: Segment) -> None:
        """Rename a whole segment, durably: it must leave the log before an earlier one does."""
        name = self._name(segment.base_offset)
        self._log.set_aside(segment, f"{self._log.directory}/{name}")
        self.kept.append(name)

    def copy_end(self, segment: Segment, position: int, offset: int, *, is_wanted: bool) -> None:
        """Copy the end of a segment, from ``position`` on; ``offset`` goes into the copy's name.

        If the disk is full, skip the copy, or raise OSError if it ``is_wanted``.
        """
        name = self._name(offset)
        path = f"{self._log.directory}/{name}"
        handle = self._fs.open(path, create=True)
        try:
            self._copy(segment, position, handle, path)
        except OSError as error:
            self._fs.remove(path)
            if is_wanted or error.errno not in NO_ROOM:
                raise
            return
        finally:
            self._fs.close(handle)
        self._fs.sync_directory(self._log.directory)
        self.kept.append(name)

    def _copy(self, segment: Segment, position: int, handle: int, path: str) -> None:
        start = position
        while position < segment.size:
            data = segment.file.read(position, min(position + SCAN_BYTES, segment.size))
            if self._fs.write(handle, (data,), position - start) != len(data):
                raise OSError(errno.ENOSPC, "short write", path)
            position += len(data)
        self._fs.sync(handle)

    def _name(self, offset: int) -> str:
        return f"{file_stem(offset)}{LOG_SUFFIX}.{self._number}{STRAY_SUFFIX}"
