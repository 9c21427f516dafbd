"""Files of interrupted operations in a partition's directory, which are removed or completed.

Source: ``LogLoader.removeTempFilesAndCollectSwapFiles`` and the steps after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fencepost.logcore.batch import HEADER_SIZE, parse_header
from fencepost.logcore.fs import TEMPORARY_SUFFIX, FileSystem, opened
from fencepost.logcore.log import CLEANED_SUFFIX, DELETED_SUFFIX, SNAPSHOT_SUFFIX, SWAP_SUFFIX
from fencepost.logcore.segment import LOG_SUFFIX, SEGMENT_SUFFIXES

OFFSET_DIGITS: Final = 20

REMOVED_SUFFIXES: Final = (DELETED_SUFFIX, CLEANED_SUFFIX, TEMPORARY_SUFFIX)
"""The suffixes of files that a start removes without reading them."""

_UNFINISHED: Final = (*REMOVED_SUFFIXES, SWAP_SUFFIX)


def finish_interrupted(
    fs: FileSystem,
    directory: str,
    names: list[str],
    remove_later: Callable[[str], None] | None = None,
) -> list[str]:
    """Remove leftover files, install a finished compaction's files; return the remaining names.

    ``remove_later``, if given, is called with the path of each file that may be removed later.

    As in Kafka, a ``.swap`` file at or above the offset of a ``.cleaned`` file belongs to a
    compaction that had not finished all its files; any other ``.swap`` replaces the segments it
    covers. The ``.cleaned`` files are removed last: if this start is interrupted too, the next one
    needs them to distinguish the ``.swap`` files. Raises OSError.
    """
    if not any(name.endswith(_UNFINISHED) for name in names):
        return names
    cleaned = [offset_of(name) for name in names if name.endswith(CLEANED_SUFFIX)]
    oldest_cleaned = min((offset for offset in cleaned if offset is not None), default=None)
    swaps: list[str] = []
    abandoned = False
    for name in names:
        offset = offset_of(name)
        if name.endswith(DELETED_SUFFIX):
            (remove_later or fs.remove)(f"{directory}/{name}")
        elif name.endswith(TEMPORARY_SUFFIX):
            fs.remove(f"{directory}/{name}")
        elif name.endswith(SWAP_SUFFIX) and offset is not None:
            if oldest_cleaned is not None and offset >= oldest_cleaned:
                fs.remove(f"{directory}/{name}")
                abandoned = True
            else:
                swaps.append(name)
    if abandoned:
        fs.sync_directory(directory)
    for name in names:
        if name.endswith(CLEANED_SUFFIX):
            fs.remove(f"{directory}/{name}")
    if swaps:
        _swap_in(fs, directory, names, swaps)
        fs.sync_directory(directory)
    return fs.list_directory(directory) or []


def _swap_in(fs: FileSystem, directory: str, names: list[str], swaps: list[str]) -> None:
    """Replace the segments that the ``.swap`` files cover.

    Log files are renamed before their indexes: if this start is interrupted, the next one must not
    take the new indexes for old ones.
    """
    logs = [name for name in swaps if name.endswith(LOG_SUFFIX + SWAP_SUFFIX)]
    if logs:
        bases = {offset_of(name) or 0 for name in logs}
        low, high = min(bases), max(_end_of(fs, directory, name) for name in logs)
        for name in names:
            offset = offset_of(name)
            if offset is None or not low <= offset < max(high, low + 1):
                continue
            # The snapshot at the beginning of a new segment stays valid.
            if name.endswith(SEGMENT_SUFFIXES) or (
                name.endswith(SNAPSHOT_SUFFIX) and offset not in bases
            ):
                fs.remove(f"{directory}/{name}")
        fs.sync_directory(directory)
    for name in logs + sorted(set(swaps) - set(logs)):
        path = f"{directory}/{name}"
        fs.rename(path, path.removesuffix(SWAP_SUFFIX))


def _end_of(fs: FileSystem, directory: str, name: str) -> int:
    """Return the offset after the last batch of a ``.swap`` log, its base if it is empty."""
    end = offset_of(name) or 0
    with opened(fs, fs.open(f"{directory}/{name}")) as handle:
        position, size = 0, fs.size(handle)
        while position < size:
            header = parse_header(fs.read(handle, HEADER_SIZE, position))
            end = header.next_offset
            position += header.size
    return end


def offset_of(name: str) -> int | None:
    """Return the offset in the name of a segment's file, None for any other file."""
    digits = name[:OFFSET_DIGITS]
    if len(digits) == OFFSET_DIGITS and digits.isdecimal() and name[OFFSET_DIGITS:][:1] == ".":
        return int(digits)
    return None
