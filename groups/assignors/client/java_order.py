"""The iteration order of Java's hash tables.

Kafka's assignors keep members and topics in ``HashMap``, and break ties by the map's iteration
order. A leader in Python iterates in the same order, to choose the same assignment as a leader in
Java. The order is not random: the slot is a function of the key's hash and of the table's size, and
within a slot the insertion order applies.

Not implemented: Java turns a slot of more than eight keys into a tree (``TREEIFY_THRESHOLD``). Only
crafted or very unlucky keys fill a slot that far; the assignment then differs from Java's, but is
valid too.

Source: ``java.util.HashMap`` and ``String.hashCode``, whose specifications fix both formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import lru_cache
from typing import Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)

_INITIAL_SLOTS: Final = 16
_WORD: Final = 0xFFFF_FFFF


def utf16(text: str) -> bytes:
    """Return a sort key that orders as ``String.compareTo`` does: by UTF-16 units."""
    return text.encode("utf-16-be", "surrogatepass")


@lru_cache(maxsize=4096)
def string_hash(text: str) -> int:
    """Return ``String.hashCode()`` as an unsigned 32-bit number."""
    units = utf16(text)
    value = 0
    for position in range(0, len(units), 2):
        value = (31 * value + (units[position] << 8 | units[position + 1])) & _WORD
    return value


def partition_hash(partition: tuple[str, int]) -> int:
    """Return ``TopicPartition.hashCode()`` as an unsigned 32-bit number."""
    topic, index = partition
    return (31 * (31 + index) + string_hash(topic)) & _WORD


def _slot(hashed: int, slots: int) -> int:
    return (hashed ^ hashed >> 16) & slots - 1


def table_order(keys: Iterable[str]) -> list[str]:
    """Return ``keys`` in the order of a ``HashMap`` into which they were put one by one."""
    unique = list(dict.fromkeys(keys))
    return _by_slot(unique, _slots_for(len(unique)))


def computed_order(keys: Iterable[str]) -> list[str]:
    """Return the order of keys that were inserted by ``computeIfAbsent``.

    ``computeIfAbsent`` puts a key in front of the other keys in the slot, and grows the table one
    key later than ``put`` does.
    """
    unique = list(dict.fromkeys(keys))
    return _by_slot(unique[::-1], _slots_for(len(unique) - 1))


def _slots_for(count: int) -> int:
    slots = _INITIAL_SLOTS
    while count * 4 > slots * 3:
        slots *= 2
    return slots


def _by_slot(keys: list[str], slots: int) -> list[str]:
    return sorted(keys, key=lambda key: _slot(string_hash(key), slots))


class TableSet(Generic[K]):
    """A ``HashSet`` that knows its first element in iteration order. Its table never shrinks."""

    def __init__(self, hash_of: Callable[[K], int]) -> None:
        self._hash_of = hash_of
        self._keys: dict[K, None] = {}
        self._slots = _INITIAL_SLOTS

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: K) -> None:
        """Add ``key``."""
        self._keys.setdefault(key)
        if len(self._keys) * 4 > self._slots * 3:
            self._slots *= 2

    def remove(self, key: K) -> None:
        """Remove ``key``; KeyError if it is missing."""
        del self._keys[key]

    def first(self) -> K:
        """Return the first element in iteration order; ValueError if the set is empty."""
        return min(self._keys, key=lambda key: _slot(self._hash_of(key), self._slots))
