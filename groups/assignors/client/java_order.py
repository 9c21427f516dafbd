"""The order in which Java's hash tables tell what they hold.

Kafka's assignors keep members and topics in ``HashMap`` and give, where a choice is free, to whom
the table tells first. A leader in Python that is to choose what a leader in Java would choose has
to walk in that order. It is not random: the slot is a function of the key's hash and of the table's
size, and within a slot the order is that of insertion.

Not followed: a slot of more than eight keys grows a tree (``TREEIFY_THRESHOLD``), which takes
crafted or very unlucky keys; the choice is then free in another way, and no less valid.

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
    """Return ``keys`` as a ``HashMap`` tells them that they were put into one after another."""
    unique = list(dict.fromkeys(keys))
    return _by_slot(unique, _slots_for(len(unique)))


def computed_order(keys: Iterable[str]) -> list[str]:
    """Return the same for keys that came in by ``computeIfAbsent``.

    It puts a key in front of those in its slot, and lets the table grow one key later.
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
    """A ``HashSet`` that can say which element it would tell first. It grows, and never shrinks."""

    def __init__(self, hash_of: Callable[[K], int]) -> None:
        self._hash_of = hash_of
        self._keys: dict[K, None] = {}
        self._slots = _INITIAL_SLOTS

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: K) -> None:
        """Put ``key`` in."""
        self._keys.setdefault(key)
        if len(self._keys) * 4 > self._slots * 3:
            self._slots *= 2

    def remove(self, key: K) -> None:
        """Take ``key`` out; KeyError if it is not in."""
        del self._keys[key]

    def first(self) -> K:
        """Return what iteration begins with; ValueError if there is nothing."""
        return min(self._keys, key=lambda key: _slot(self._hash_of(key), self._slots))
