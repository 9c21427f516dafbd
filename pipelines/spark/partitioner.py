"""The partitioner of Kafka's Java client, for whole Arrow columns at once.

Source: ``org.apache.kafka.common.utils.Utils.murmur2`` and ``BuiltInPartitioner``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

_MULTIPLIER = np.uint32(0x5BD1E995)
_SEED = 0x9747B28C
_CHUNK_BYTES = 1 << 24
"""Keys of one length are hashed in groups of this many bytes, which bounds the index arrays."""


def binary_parts(column: Any) -> tuple[Any, Any, Any]:
    """Return (offsets int64[n + 1], data uint8, valid bool[n]) of a binary Arrow array."""
    count = len(column)
    _, offsets_buffer, data_buffer = column.buffers()
    offsets = np.frombuffer(offsets_buffer, dtype=np.int32, count=column.offset + count + 1)
    data = (
        np.frombuffer(data_buffer, dtype=np.uint8)
        if data_buffer is not None
        else np.empty(0, np.uint8)
    )
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    return offsets[column.offset :].astype(np.int64), data, valid


def murmur2(column: Any) -> Any:
    """Return Kafka's murmur2 of each value of a binary Arrow array, as uint32[n]; 0 for null."""
    offsets, data, valid = binary_parts(column)
    starts = offsets[:-1]
    lengths = np.diff(offsets)
    hashes = np.zeros(len(column), np.uint32)
    for length in np.unique(lengths[valid]):
        rows = np.flatnonzero(valid & (lengths == length))
        step = max(1, _CHUNK_BYTES // max(int(length), 1))
        for at in range(0, len(rows), step):
            part = rows[at : at + step]
            hashes[part] = _hash_rows(data, starts[part], int(length))
    return hashes


def _hash_rows(data: Any, starts: Any, length: int) -> Any:
    """Hash ``len(starts)`` keys of one length."""
    state = np.full(len(starts), (_SEED ^ length) & 0xFFFFFFFF, np.uint32)
    whole = length & ~3
    with np.errstate(over="ignore"):
        for at in range(0, whole, 4):
            word = data[starts + at].astype(np.uint32)
            for byte in (1, 2, 3):
                word |= data[starts + at + byte].astype(np.uint32) << np.uint32(8 * byte)
            word *= _MULTIPLIER
            word ^= word >> np.uint32(24)
            word *= _MULTIPLIER
            state *= _MULTIPLIER
            state ^= word
        if length & 3:
            for byte in range(length & 3):
                state ^= data[starts + whole + byte].astype(np.uint32) << np.uint32(8 * byte)
            state *= _MULTIPLIER
        state ^= state >> np.uint32(13)
        state *= _MULTIPLIER
        state ^= state >> np.uint32(15)
    return state


def partitions_of(keys: Any, count: int, unkeyed: int) -> Any:
    """Return each key's partition of ``count``, int32[n]; null → ``unkeyed``.

    ``keys`` is a binary or string Arrow array.
    """
    column = keys.cast(pa.binary())
    partitions = ((murmur2(column) & np.uint32(0x7FFFFFFF)) % np.uint32(count)).astype(np.int32)
    if column.null_count:
        partitions[column.is_null().to_numpy(zero_copy_only=False)] = unkeyed
    return partitions
