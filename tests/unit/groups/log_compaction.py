"""A model of the logs that Kafka's cleaner may leave, for the log entries of the drivers.

The cleaner may remove:

* a record that a later record of the same key supersedes, unless the later one was aborted;
* a record of an aborted transaction, and a marker whose transaction has no record left;
* an expired tombstone without an older record of its key.

The cleaner removes nothing at or above the first offset of an open transaction.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from tests.unit.groups.group_driver import Entry


def _fates(log: Sequence[Entry]) -> dict[int, bool | None]:
    """Map offsets of transactional records to committed (True), aborted (False) or open (None)."""
    open_offsets: dict[int, list[int]] = {}
    fates: dict[int, bool | None] = {}
    for entry in log:
        if entry.marker is not None:
            for offset in open_offsets.pop(entry.marker.producer_id, []):
                fates[offset] = entry.marker.commit
        elif entry.stamp is not None:
            open_offsets.setdefault(entry.stamp.producer_id, []).append(entry.offset)
            fates[entry.offset] = None
    return fates


def cleanable_end(log: Sequence[Entry]) -> int:
    """Return the first offset of an open transaction, or the log's end."""
    pending = [offset for offset, fate in _fates(log).items() if fate is None]
    return min(pending, default=len(log))


def removable(log: Sequence[Entry], end: int) -> set[int]:
    """Return offsets below ``end`` of superseded or aborted records, without markers."""
    fates = _fates(log)
    newest: dict[bytes, int] = {}
    gone: set[int] = set()
    for entry in log[:end]:
        if entry.record is None:
            continue
        if fates.get(entry.offset, True) is False:
            gone.add(entry.offset)
            continue
        if entry.record.key in newest:
            gone.add(newest[entry.record.key])
        newest[entry.record.key] = entry.offset
    return gone


def _empty_markers(log: Sequence[Entry], gone: set[int], end: int) -> set[int]:
    """Return offsets of markers below ``end`` whose transactions lost all their records."""
    left: dict[int, int] = {}
    markers: set[int] = set()
    for entry in log[:end]:
        if entry.marker is not None:
            if not left.pop(entry.marker.producer_id, 0):
                markers.add(entry.offset)
        elif entry.stamp is not None and entry.offset not in gone:
            left[entry.stamp.producer_id] = left.get(entry.stamp.producer_id, 0) + 1
    return markers


def _old_tombstones(log: Sequence[Entry], gone: set[int], end: int) -> set[int]:
    """Return offsets of tombstones below ``end`` without an older record of their key."""
    present: set[bytes] = set()
    found: set[int] = set()
    for entry in log[:end]:
        if entry.record is None or entry.offset in gone:
            continue
        if entry.record.value is None and entry.record.key not in present:
            found.add(entry.offset)
        else:
            present.add(entry.record.key)
    return found


def compacted(log: Sequence[Entry], end: int) -> Iterator[list[Entry]]:
    """Yield the log cleaned up to ``end``, with and without old tombstones and empty markers."""
    end = min(end, cleanable_end(log))
    gone = removable(log, end)
    markers = _empty_markers(log, gone, end)
    tombstones = _old_tombstones(log, gone, end)
    for extra in (set(), markers, tombstones, markers | tombstones):
        dropped = gone | extra
        yield [entry for entry in log if entry.offset not in dropped]


def every_variant(log: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Yield the log cleaned up to each offset."""
    for end in range(len(log) + 1):
        yield from compacted(log, end)


def partly_compacted(log: Sequence[Entry], rng: random.Random) -> list[Entry]:
    """Return the log without some random removable records, as after partial cleaning."""
    gone = removable(log, cleanable_end(log))
    dropped = {offset for offset in gone if rng.random() < 0.5}
    return [entry for entry in log if entry.offset not in dropped]
