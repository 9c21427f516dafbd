"""The batches that a partition refused, or cut off, from producers it does not know.

A producer that is unknown may begin with any sequence: its earlier batches may have been deleted,
or its state forgotten. But where its first batch has just been refused, for want of room or because
its transaction could not be verified, or was cut off before anybody had been told of it, the ones
behind it must not overtake it: the first would then be out of order at each repetition, for good.

Source: ``VerificationStateEntry`` (KIP-890), which knows of refused verifications alone.
"""

from __future__ import annotations

from typing import Final

MAX_REFUSED_PRODUCERS: Final = 1_000
"""Unknown producers of one partition whose refused batches are remembered, about 150 bytes each;
beyond it those refused first are forgotten, and may begin anywhere again."""


class RefusedSequences:
    """The lowest sequence that was refused of each unknown producer, under its latest epoch."""

    def __init__(self) -> None:
        self._lowest: dict[int, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._lowest)

    def note(self, producer_id: int, epoch: int, sequence: int) -> None:
        """Remember a refused batch by its first sequence."""
        known = self._lowest.get(producer_id)
        if known is None or epoch > known[0]:
            if known is None and len(self._lowest) >= MAX_REFUSED_PRODUCERS:
                del self._lowest[next(iter(self._lowest))]
            self._lowest[producer_id] = epoch, sequence
        elif epoch == known[0] and sequence < known[1]:
            self._lowest[producer_id] = epoch, sequence

    def lowest(self, producer_id: int, epoch: int) -> int | None:
        """The sequence that has to come first; None where any may."""
        known = self._lowest.get(producer_id)
        return known[1] if known is not None and known[0] == epoch else None

    def forget(self, producer_id: int) -> None:
        """The producer is known now."""
        self._lowest.pop(producer_id, None)
