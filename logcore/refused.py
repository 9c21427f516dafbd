"""Batches from unknown producers that were refused, or truncated before they were committed.

An unknown producer may begin with any sequence: its earlier batches may have been deleted, or its
state evicted. Its first batch may also have been refused (no room, or an unverified transaction) or
truncated before it was acknowledged. Then no later batch may be appended before it: every retry of
the first batch would be out of order.

Source: ``VerificationStateEntry`` (KIP-890), which only tracks refused verifications.
"""

from __future__ import annotations

from typing import Final

MAX_REFUSED_PRODUCERS: Final = 1_000
"""The maximum number of unknown producers of a partition whose refused batches are remembered, with
about 150 bytes each. Above it the oldest entries are dropped, and their producers may begin with
any sequence."""


class RefusedSequences:
    """The lowest refused sequence of each unknown producer, under its latest epoch."""

    def __init__(self) -> None:
        self._lowest: dict[int, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._lowest)

    def note(self, producer_id: int, epoch: int, sequence: int) -> None:
        """Remember a refused batch by its first sequence."""
        lowest = self._lowest.get(producer_id)
        if lowest is None or epoch > lowest[0]:
            if lowest is None and len(self._lowest) >= MAX_REFUSED_PRODUCERS:
                del self._lowest[next(iter(self._lowest))]
            self._lowest[producer_id] = epoch, sequence
        elif epoch == lowest[0] and sequence < lowest[1]:
            self._lowest[producer_id] = epoch, sequence

    def lowest(self, producer_id: int, epoch: int) -> int | None:
        """Return the sequence that must come first; None if any sequence may."""
        batch = self._lowest.get(producer_id)
        return batch[1] if batch is not None and batch[0] == epoch else None

    def forget(self, producer_id: int) -> None:
        """Drop the entry of a producer that has become known."""
        self._lowest.pop(producer_id, None)
