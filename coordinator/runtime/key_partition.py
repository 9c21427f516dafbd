"""The partition of an internal topic for a group or a transactional id.

All brokers of a cluster must compute the same partition. It must be the one that
Kafka computes, since a data directory may come from Kafka. Clients never compute it.

Source: ``Utils.abs(key.hashCode()) % partitions`` in ``GroupCoordinatorService.partitionFor`` and
``TransactionStateManager.partitionFor``.
"""

from __future__ import annotations

import struct
from functools import lru_cache

HASH_CACHE_ENTRIES = 8_192
"""The number of cached hashes: every request contains its group or transactional id, and the same
few recur."""

MAX_CACHED_CHARACTERS = 256
"""Longer keys are hashed each time, which bounds the cache's memory to about 8 MiB. A client may
send keys of 32,767 bytes."""

_WORD = 0xFFFF_FFFF
_MIN_INT = 0x8000_0000


def java_string_hash(text: str) -> int:
    """Return Java's ``String.hashCode`` as an unsigned 32-bit number.

    The hash is computed over UTF-16 code units: a character outside the Basic Multilingual
    Plane is two units, and a lone surrogate is one.
    """
    return _cached_hash(text) if len(text) <= MAX_CACHED_CHARACTERS else _hash(text)


def _hash(text: str) -> int:
    encoded = text.encode("utf-16-be", "surrogatepass")
    value = 0
    for unit in struct.unpack(f">{len(encoded) // 2}H", encoded):
        value = (31 * value + unit) & _WORD
    return value


_cached_hash = lru_cache(maxsize=HASH_CACHE_ENTRIES)(_hash)


def partition_for(key: str, partitions: int) -> int:
    """Return the partition (from 0) that ``key`` belongs to.

    −2³¹ has no absolute value in Java; Kafka uses 0 for it.
    """
    value = java_string_hash(key)
    if value == _MIN_INT:
        return 0
    if value > _MIN_INT:
        value = _WORD + 1 - value
    return value % partitions
