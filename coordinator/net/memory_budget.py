"""How much memory the frames of all connections together may take, without knowing a socket.

A frame larger than what every connection may hold anyway must take its whole size from the budget
before more of it is read; a connection that gets nothing stops reading and waits its turn, so that
the rest of the frame stays in the kernel and, behind it, with the client. What was granted suffices
for the frame to arrive whole: half-arrived frames cannot block each other for ever.

Source: ``queued.max.request.bytes`` and Kafka's ``SimpleMemoryPool``, which grants a request as
long as anything is left, so that the budget may be exceeded by less than one request.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol


class Holder(Protocol):
    """A connection, as the budget sees it."""

    def release_idle(self) -> bool:
        """Free the memory if no frame is in it; whether that was so."""

    def granted(self) -> None:
        """The holder now owns the bytes that it waited for."""


class RequestBudget:
    """Bytes granted to holders; first come, first served. ``max_bytes`` ≤ 0 sets no bound."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0
        """The sum of what is granted."""
        self._held: dict[Holder, int] = {}
        self._waiting: OrderedDict[Holder, int] = OrderedDict()

    @property
    def contended(self) -> bool:
        """Whether somebody waits."""
        return bool(self._waiting)

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def take(self, holder: Holder, size: int) -> bool:
        """Have ``holder`` own at least ``size`` bytes; if not now, it is told when it does."""
        if self._held.get(holder, 0) >= size:
            return True
        if not self._waiting and self._has_room():
            self._grant(holder, size)
            return True
        self._waiting[holder] = size
        return False

    def give(self, holder: Holder) -> None:
        """Take back what ``holder`` owns or waits for, and serve those who wait."""
        self._waiting.pop(holder, None)
        self.held_bytes -= self._held.pop(holder, 0)
        while self._waiting and self._has_room():
            first, size = self._waiting.popitem(last=False)
            self._grant(first, size)
            first.granted()

    def _grant(self, holder: Holder, size: int) -> None:
        self.held_bytes += size - self._held.get(holder, 0)
        self._held[holder] = size

    def _has_room(self) -> bool:
        if self.max_bytes <= 0 or self.held_bytes < self.max_bytes:
            return True
        # Connections keep a buffer of some size for their next frame; others need that memory now.
        for holder in list(self._held):
            if holder.release_idle():
                self.held_bytes -= self._held.pop(holder)
        return self.held_bytes < self.max_bytes
