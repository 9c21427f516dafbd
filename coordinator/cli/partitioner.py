"""The partition of a record with a key: the partitioner of Kafka's Java client.

Source: ``org.apache.kafka.common.utils.Utils.murmur2`` and ``BuiltInPartitioner``.
"""

from __future__ import annotations

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
