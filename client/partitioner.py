"""The partitions of records to write, chosen as by the partitioner of Kafka's Java client.

Source: ``org.apache.kafka.common.utils.Utils.murmur2`` and ``BuiltInPartitioner``.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

Headers = tuple[tuple[str, bytes | None], ...]

_MASK = 0xFFFFFFFF
_MULTIPLIER = 0x5BD1E995
_SEED = 0x9747B28C


def murmur2(data: bytes) -> int:
    """Return Kafka's 32-bit murmur2 hash of ``data``, as a signed integer."""
    length = len(data)
    state = (_SEED ^ length) & _MASK
    tail = length & ~3
    for at in range(0, tail, 4):
        word = int.from_bytes(data[at : at + 4], "little") * _MULTIPLIER & _MASK
        word = (word ^ (word >> 24)) * _MULTIPLIER & _MASK
        state = (state * _MULTIPLIER & _MASK) ^ word
    if length & 3:
        state = (state ^ int.from_bytes(data[tail:], "little")) * _MULTIPLIER & _MASK
    state = (state ^ (state >> 13)) * _MULTIPLIER & _MASK
    state ^= state >> 15
    return state - (1 << 32) if state & 0x80000000 else state


def partition_for(key: bytes, partitions: int) -> int:
    """Return the partition of a record with ``key`` in a topic of ``partitions`` partitions."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions


class Line(NamedTuple):
    """A record to write, and the number of its input line."""

    number: int
    key: bytes | None
    value: bytes | None
    headers: Headers = ()
    partition: int | None = None
    timestamp_ms: int | None = None


def placed(
    lines: Sequence[Line], partition: int | None, indexes: Sequence[int]
) -> dict[int, list[Line]]:
    """Group lines by partition: ``partition`` if given, or else the line's own partition.

    A line without a partition is assigned as by Kafka's default partitioner: by its key or, without
    a key, to a random partition, which is the same for all lines without a key.
    """
    by_partition: dict[int, list[Line]] = defaultdict(list)
    sticky = random.choice(indexes)  # noqa: S311 - it spreads load, and keeps no secret
    for line in lines:
        target = partition if partition is not None else line.partition
        if target is None:
            target = sticky if line.key is None else partition_for(line.key, len(indexes))
        by_partition[target].append(line)
    return by_partition
