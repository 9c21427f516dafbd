"""A memory budget for the frames of all connections together, independently of sockets.

Before a connection reads the rest of a frame that is larger than its basic buffer, it must take the
frame's whole size from the budget. A connection without a grant stops reading and waits for its
turn, so that the rest of the frame stays in the kernel's and the client's memory. A grant suffices
for the whole frame, so incomplete frames cannot block each other forever.

Source: ``queued.max.request.bytes`` and Kafka's ``SimpleMemoryPool``. Kafka's pool grants memory
for a whole request as long as any memory is left, so it may exceed the limit by almost one request.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol


class BudgetHolder(Protocol):
    """The part of a connection that the budget uses."""

    def release_idle(self) -> bool:
        """Free the memory if no frame is in it; return whether it was freed."""

    def granted(self) -> None:
        """Called when the holder gets the memory for which it has waited."""


class RequestBudget:
    """Grants memory to holders, first come, first served; no limit if ``max_bytes`` ≤ 0."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0
        """The sum of all grants."""
        self._held: dict[BudgetHolder, int] = {}
        self._waiting: OrderedDict[BudgetHolder, int] = OrderedDict()

    @property
    def contended(self) -> bool:
        """Whether any holder waits."""
        return bool(self._waiting)

    @property
    def waiting(self) -> int:
        """The number of waiting holders."""
        return len(self._waiting)

    def try_allocate(self, holder: BudgetHolder, size: int) -> bool:
        """Grant ``holder`` at least ``size`` bytes, or return False and call ``granted`` later."""
        if self._held.get(holder, 0) >= size:
            return True
        if not self._waiting and self._has_room():
            self._grant(holder, size)
            return True
        self._waiting[holder] = size
        return False

    def release(self, holder: BudgetHolder) -> None:
        """Release the grant of ``holder``, or drop its request; serve the waiting holders."""
        self._waiting.pop(holder, None)
        self.held_bytes -= self._held.pop(holder, 0)
        while self._waiting and self._has_room():
            first, size = self._waiting.popitem(last=False)
            self._grant(first, size)
            first.granted()

    def _grant(self, holder: BudgetHolder, size: int) -> None:
        self.held_bytes += size - self._held.get(holder, 0)
        self._held[holder] = size

    def _has_room(self) -> bool:
        if self.max_bytes <= 0 or self.held_bytes < self.max_bytes:
            return True
        # Idle connections keep a buffer for their next frame. The waiting holders need that memory.
        for holder in list(self._held):
            if holder.release_idle():
                self.held_bytes -= self._held.pop(holder)
        return self.held_bytes < self.max_bytes
