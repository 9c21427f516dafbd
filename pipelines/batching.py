"""Limits the size of a transaction, in records, bytes and time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")

RECORD_OVERHEAD_BYTES = 70
"""The assumed size of a record without its key and value: roughly its framing and headers."""


class Sized(Protocol):
    """A record whose key and value are bytes."""

    @property
    def key(self) -> bytes | None:
        """The key."""

    @property
    def value(self) -> bytes | None:
        """The value."""


def record_bytes(record: Sized) -> int:
    """Return the approximate size of a record."""
    return len(record.key or b"") + len(record.value or b"") + RECORD_OVERHEAD_BYTES


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a transaction; the one that is reached first closes it.

    A record larger than ``max_bytes`` gets a transaction of its own. ``max_ms`` counts from the
    first waiting record; with 0 a transaction takes only records that are available at once.
    """

    max_records: int = 5_000
    max_bytes: int = 16 * 1024 * 1024
    max_ms: int = 200

    def __post_init__(self) -> None:
        if self.max_records < 1 or self.max_bytes < 1 or self.max_ms < 0:
            raise ValueError(f"the limits must allow one record per transaction: {self}")


class Batcher(Generic[T]):
    """Collects items until a limit is reached. Reads no clock: ``now_ms`` is an argument."""

    def __init__(self, limits: Limits, size: Callable[[T], int]) -> None:
        self._limits = limits
        self._size = size
        self._waiting: deque[tuple[T, int]] = deque()
        self._bytes = 0
        self._since_ms = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def room(self) -> int:
        """The number of records that may be requested; at least one."""
        return max(1, self._limits.max_records - len(self._waiting))

    def add(self, items: Iterable[T], now_ms: float) -> None:
        """Add items in order."""
        if not self._waiting:
            self._since_ms = now_ms
        for item in items:
            size = self._size(item)
            self._waiting.append((item, size))
            self._bytes += size

    def left_ms(self, now_ms: float) -> float:
        """Return how long to wait for more items."""
        return max(0.0, self._since_ms + self._limits.max_ms - now_ms)

    def is_full(self, now_ms: float) -> bool:
        """Return whether the waiting items should become a transaction now."""
        return bool(self._waiting) and (
            len(self._waiting) >= self._limits.max_records
            or self._bytes >= self._limits.max_bytes
            or self.left_ms(now_ms) <= 0
        )

    def take(self, now_ms: float) -> list[T]:
        """Remove and return the items of one transaction; the others wait for the next one."""
        taken: list[T] = []
        total = 0
        while self._waiting and len(taken) < self._limits.max_records:
            item, size = self._waiting[0]
            if taken and total + size > self._limits.max_bytes:
                break
            self._waiting.popleft()
            taken.append(item)
            total += size
        self._bytes -= total
        self._since_ms = now_ms
        return taken

    def clear(self) -> None:
        """Drop all items, which will be read again."""
        self._waiting.clear()
        self._bytes = 0
