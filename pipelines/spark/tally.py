"""A batch's contents in two numbers: its rows, and a checksum that is independent of their order.

Spark may run a batch again with its rows in other tasks and in another order; the same rows have
the same numbers. All rows of an Arrow batch are processed together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from fencepost.pipelines.spark.columns import encode_headers
from fencepost.pipelines.spark.partitioner import binary_parts

_FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)
_HALF = np.uint64(32)
_CHUNK_WORDS = 1 << 19
"""The number of 8-byte words that are processed together, unless one row has more. It bounds the
index arrays."""


class RowTally:
    """Counts rows. ``checksum`` stays 0 without ``is_exact``."""

    def __init__(self, *, is_exact: bool) -> None:
        self.rows = 0
        self.checksum = 0
        self._is_exact = is_exact

    def add(self, columns: Mapping[str, Any], count: int) -> None:
        """Count rows given as the sink's columns in Arrow."""
        self.rows += count
        if not self._is_exact or not count:
            return
        hashes = np.zeros(count, np.uint64)
        # Sorted, because the query may have another order.
        for name in sorted(columns):
            hashes ^= _hash(_binary(name, columns[name]))
            _mix(hashes)
        self.checksum = (self.checksum + int(hashes.sum())) % (1 << 64)


def _binary(name: str, column: Any) -> Any:
    if name == "headers":
        encoded = encode_headers(column)
        return pa.array([b"\0"] * len(column), pa.binary()) if encoded is None else encoded
    if column.type in (pa.binary(), pa.string()):
        return column.cast(pa.binary())
    return column.cast(pa.int64()).cast(pa.string()).cast(pa.binary())


def _mix(numbers: Any) -> None:
    numbers *= _FIRST
    numbers ^= numbers >> _HALF


def _hash(column: Any) -> Any:
    """Return a hash of each value of a binary Arrow array, uint64[n]; null has its own hash."""
    offsets, data, valid = binary_parts(column)
    starts, lengths = offsets[:-1], np.diff(offsets)
    hashes = lengths.astype(np.uint64) * _SECOND + _FIRST
    whole = lengths >> 3
    if whole.any():
        _add_words(hashes, data, starts, whole)
    for at in range(7):
        rows = np.flatnonzero((lengths & 7) > at)
        byte = data[starts[rows] + 8 * whole[rows] + at].astype(np.uint64)
        hashes[rows] ^= byte + np.uint64(at + 1)
        hashes[rows] *= _SECOND
    hashes[~valid] = 0
    _mix(hashes)
    return hashes


def _add_words(hashes: Any, data: Any, starts: Any, words: Any) -> None:
    """Add the whole 8-byte words of each row to its hash, each combined with its position."""
    at_any_byte = np.ndarray((len(data) - 7,), "<u8", data, strides=(1,))
    rows = np.flatnonzero(words)
    counts = words[rows]
    behind = np.cumsum(counts)
    at = 0
    while at < len(rows):
        before = int(behind[at - 1]) if at else 0
        end = max(at + 1, int(np.searchsorted(behind, before + _CHUNK_WORDS, side="right")))
        sizes = counts[at:end]
        first = behind[at:end] - sizes - before
        position = np.arange(int(sizes.sum())) - np.repeat(first, sizes)
        loaded = at_any_byte[np.repeat(starts[rows[at:end]], sizes) + 8 * position]
        loaded ^= position.astype(np.uint64) * _SECOND
        _mix(loaded)
        hashes[rows[at:end]] += np.add.reduceat(loaded, first)
        at = end
