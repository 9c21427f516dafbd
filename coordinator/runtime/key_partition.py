"""Which partition of an internal topic a group or a transactional id lives on.

Clients and other brokers compute nothing here, but files must be exchangeable with Apache Kafka:
a group has to be found on the partition where Kafka would have put it.

Source: ``Utils.abs(key.hashCode()) % partitions`` in ``GroupCoordinatorService.partitionFor`` and
``TransactionStateManager.partitionFor``.
"""

from __future__ import annotations

import struct
from functools import lru_cache

HASH_CACHE_ENTRIES = 8_192
"""Keys whose hash is remembered; every request names its group or transactional id, and the same
few come back all the time. At most 8 MiB with the longest keys that the groups' limits allow."""

_WORD = 0xFFFF_FFFF
_MIN_INT = 0x8000_0000


@lru_cache(maxsize=HASH_CACHE_ENTRIES)
def java_string_hash(text: str) -> int:
    """Java's ``String.hashCode`` as an unsigned 32-bit number.

    It runs over UTF-16 units, so a character outside the basic plane counts as two; lone surrogates
    are units like any other.
    """
    encoded = text.encode("utf-16-be", "surrogatepass")
    value = 0
    for unit in struct.unpack(f">{len(encoded) // 2}H", encoded):
        value = (31 * value + unit) & _WORD
    return value


def partition_for(key: str, partitions: int) -> int:
    """The partition (from 0 on) that ``key`` belongs to.

    Java has no absolute value of -2³¹; Kafka takes 0 for it.
    """
    value = java_string_hash(key)
    if value == _MIN_INT:
        return 0
    if value > _MIN_INT:
        value = _WORD + 1 - value
    return value % partitions
